#include "diloco/core/part_core.h"

#include <algorithm>
#include <deque>
#include <stdexcept>

#include <fmt/format.h>

#include "diloco/core/liveness.h"
#include "diloco/core/outbox.h"
#include "diloco/core/reassembly.h"

namespace diloco {
namespace {

constexpr std::size_t kStagedKept = 2;  // the newest copies, beside those the leader says may still be merged
constexpr std::uint64_t kAnchorTag = 1ull << 63;

// A copy of anchor - local, as the leader has one of the same step.
struct Copy {
  std::uint64_t step = 0;     // steps made when it was staged
  std::uint64_t c_steps = 0;  // of them not merged before
  Version base;
  BufferPtr bytes;
};

struct Arrived {
  Version version;
  BufferPtr bytes;
};

struct PartFragment {
  Version adopted;
  std::uint64_t from_steps = 0;
  std::deque<Copy> copies;  // oldest first
  std::optional<Copy> staging;
  std::vector<BufferPtr> pool;
  std::optional<Pull> pull;  // of a copy that is not made yet
  std::optional<Arrived> ready, pending;  // pending: reported to the other ranks
  bool adopting = false, anchor_wanted = false, anchor_sending = false;
};

}  // namespace

struct PartCore::Impl {
  explicit Impl(PartOptions given) : options(std::move(given)), layout(options.layout) { check_layout(layout); }

  std::vector<LearnerAction> handle(const PartEvent& event, TimePoint time) {
    now = time;
    std::visit([this](const auto& e) { on(e); }, event);
    on_time();
    return std::exchange(actions, {});
  }
  void log(LogLevel level, std::string text) { actions.push_back(Log{level, std::move(text)}); }

  // ---- the connection ----

  enum class State { kDown, kConnecting, kUp };

  void on(const ChannelUp&) {
    if (state != State::kConnecting) return;
    state = State::kUp;
    failures = 0;
    liveness.start(now, settings.heartbeat_interval_s, settings.heartbeat_timeout_s);
    uplink.reset(0);
    downlink.reset();
    downlink_credit.reset(settings.credit_window_bytes, settings.credit_window_bytes);
    for (auto& fragment : fragments) {
      fragment.pull.reset();
      fragment.anchor_wanted = fragment.anchor_sending = false;
    }
    send(MessageType::kLane, encode(Lane{options.held}), 0, settings.credit_window_bytes, 0, lane_token);
    lane_token = 0;  // bound: what is lost from now on ends the session, and the leader's next one has another token
  }
  void on(const ChannelDown& down) { lose(down.why); }

  void lose(const std::string& why) {
    if (state == State::kDown) return;
    state = State::kDown;
    actions.push_back(DropChannel{Channel::kBulk});
    if (closing) return;
    retry_at = now + back_off_s(failures++, options.random());
    log(LogLevel::kWarning, fmt::format("part {}: no connection to the syncer ({}); it is made again with the leader's",
                                        options.part, why));
  }

  void on_time() {
    if (closing) {
      // The syncer closes the connection when the leader has said goodbye; leaving before that would end the session for
      // what the other ranks still send.
      if (closed || (state == State::kUp && now < *closing)) return;
      closed = true;
      actions.push_back(Closed{});
      return;
    }
    if (options.replica) return;
    if (state == State::kDown && lane_token != 0 && now >= retry_at) {
      state = State::kConnecting;
      actions.push_back(ConnectChannel{Channel::kBulk});
    } else if (state == State::kUp && liveness.silent(now)) {
      lose(fmt::format("silent for {:.1f} s", settings.heartbeat_timeout_s));
    } else if (state == State::kUp && liveness.must_speak(now)) {
      liveness.said(now);
      send(MessageType::kHeartbeat, {});
    }
  }

  TimePoint next_deadline() const {
    constexpr TimePoint kNever = 1e300;
    if (closed || options.replica) return kNever;
    if (closing) return *closing;
    if (state == State::kUp) return liveness.deadline();
    return state == State::kDown && lane_token != 0 ? retry_at : kNever;
  }

  Header header_template() const {
    Header header;
    header.session = session;
    header.incarnation = incarnation;
    header.part = static_cast<std::uint16_t>(options.part);
    header.parts = static_cast<std::uint16_t>(options.parts);
    return header;
  }

  void send(MessageType type, std::string body, FragmentId fragment = 0, std::uint64_t offset = 0, std::uint64_t total = 0,
            std::uint64_t transfer = 0) {
    OutFrame frame;
    frame.header = header_template();
    frame.header.type = type;
    frame.header.fragment = fragment;
    frame.header.offset = offset;
    frame.header.total = total;
    frame.header.transfer = transfer;
    frame.body = std::move(body);
    actions.push_back(SendOn{Channel::kBulk, std::move(frame)});
  }

  void on(const ChannelFrame& frame) {
    if (state != State::kUp) return;
    liveness.heard(now);
    const Header& header = frame.header;
    if (header.type == MessageType::kRehello || header.type == MessageType::kGoodbye) return lose("the session is over");
    if (header.session != session) return;
    std::string why;
    const auto bad = [&](const std::string& text) {
      lose(fmt::format("the syncer sent a bad {}: {}", message_name(header.type), text));
    };
    switch (header.type) {
      case MessageType::kHeartbeat: break;
      case MessageType::kCredit:
        uplink.grant(header.offset);
        pump();
        break;
      case MessageType::kPull:
        if (const auto pull = decode_pull(frame.payload, &why); !pull) bad(why);
        else if (pull->fragment >= fragments.size()) bad("no such fragment");
        else on_pull(header, *pull);
        break;
      case MessageType::kBegin:
        if (const auto begin = decode_begin(frame.payload, &why); !begin) bad(why);
        else if (begin->fragment >= fragments.size() || begin->kind != PayloadKind::kImage) bad("not an image of the plan");
        else on_begin(header, *begin);
        break;
      case MessageType::kChunk:
        downlink_credit.receive(frame.payload.size());
        on_transfer(downlink.chunk(header, frame.payload));
        break;
      default: bad("not a message for a part");
    }
  }

  // ---- uploads ----

  void on_pull(const Header& header, const Pull& pull) {
    uplink.grant(header.offset);
    PartFragment& fragment = fragments[pull.fragment];
    if (pull.kind == PayloadKind::kAnchor) {
      fragment.anchor_wanted = true;
      fragment.pull = pull;
      // What has been reported complete is adopted by the plan under way, if at all; then it is known which anchor this is.
      if (!fragment.pending && !fragment.adopting) send_anchor(pull.fragment);
      return pump();
    }
    fragment.pull = pull;
    answer(pull.fragment);
  }

  void answer(FragmentId p) {
    PartFragment& fragment = fragments[p];
    if (!fragment.pull || fragment.anchor_wanted || state != State::kUp) return;
    const auto copy = std::find_if(fragment.copies.begin(), fragment.copies.end(),
                                   [&](const Copy& c) { return c.step == fragment.pull->step; });
    if (copy == fragment.copies.end()) {
      // The leader was there first; in lockstep this rank may still stage at the same step.
      if (fragment.pull->step >= made || fragment.staging) return;
      fragment.pull.reset();
      return send(MessageType::kMiss, {}, p);
    }
    Begin begin;
    begin.kind = PayloadKind::kContribution;
    begin.fragment = p;
    begin.round = fragment.pull->round;
    begin.base = copy->base;
    begin.step = copy->step;
    begin.c_steps = copy->c_steps;
    begin.clock = fragment.pull->clock;
    Transfer transfer;
    transfer.fragment = p;
    transfer.kind = PayloadKind::kContribution;
    transfer.version = copy->base;
    transfer.begin = std::make_shared<const std::string>(encode(begin));
    transfer.image = {copy->bytes, 0, {}};
    transfer.total = payload(p, PayloadKind::kContribution).bytes;
    fragment.pull.reset();
    uplink.push(std::move(transfer));
    pump();
  }

  void send_anchor(FragmentId p) {
    PartFragment& fragment = fragments[p];
    fragment.anchor_wanted = false;
    const Pull pull = *std::exchange(fragment.pull, std::nullopt);
    if (pull.base != fragment.adopted) return send(MessageType::kMiss, {}, p);
    fragment.anchor_sending = true;
    Begin begin;
    begin.kind = PayloadKind::kAnchor;
    begin.fragment = p;
    begin.base = fragment.adopted;
    begin.clock = pull.clock;
    Transfer transfer;
    transfer.fragment = p;
    transfer.kind = PayloadKind::kAnchor;
    transfer.version = fragment.adopted;
    transfer.begin = std::make_shared<const std::string>(encode(begin));
    transfer.total = payload(p, PayloadKind::kAnchor).bytes;
    transfer.read = [this, p](std::uint64_t offset, std::span<std::byte> out) { options.read_anchor(p, offset, out); };
    transfer.tag = kAnchorTag | p;
    uplink.push(std::move(transfer));
  }

  void pump() {
    if (state != State::kUp) return;
    auto batch = uplink.take(header_template(), settings.chunk_bytes);
    for (auto& frame : batch.frames) actions.push_back(SendOn{Channel::kBulk, std::move(frame)});
    for (const auto& [tag, end] : batch.finished) {
      if (tag & kAnchorTag) fragments[static_cast<FragmentId>(tag)].anchor_sending = false;
    }
  }

  // ---- images ----

  void on_begin(const Header& header, const Begin& begin) {
    const PartFragment& fragment = fragments[begin.fragment];
    const auto known = [&](const std::optional<Arrived>& image) { return image && image->version >= begin.base; };
    const bool news = begin.base > fragment.adopted && !known(fragment.ready) && !known(fragment.pending);
    on_transfer(downlink.begin(header, begin, payload(begin.fragment, PayloadKind::kImage).bytes, news));
  }

  void on_transfer(Reassembly::Outcome outcome) {
    if (!outcome.error.empty()) return lose("the syncer broke the protocol: " + outcome.error);
    const auto credit = outcome.complete ? std::optional(downlink_credit.grant_now()) : downlink_credit.announce();
    if (credit) send(MessageType::kCredit, {}, 0, *credit, downlink_credit.received());
    if (!outcome.complete || !outcome.bytes) return;
    fragments[outcome.complete->fragment].ready = Arrived{outcome.complete->base, std::move(outcome.bytes)};
  }

  void on(const ReplicaImage& image) {
    PartFragment& fragment = fragments.at(image.fragment);
    if (image.version <= fragment.adopted) return;
    fragment.ready = Arrived{image.version, image.bytes};
  }

  // ---- boundaries ----

  void on(const PartWelcome& event) {
    std::string why;
    const auto bytes = std::as_bytes(std::span(event.body));
    const auto welcome = decode_welcome(bytes, &why);
    if (!welcome) throw std::logic_error("the leader's WELCOME cannot be read: " + why);
    Settings theirs;
    for (const auto& [name, value] : welcome->settings) theirs.set(name, value);
    settings = theirs;
    if (plan) return;
    plan = welcome->plan;
    layout = welcome->layout;
    const Part held = in_order_of(layout, options.layout, options.held);
    fragments.resize(plan->size());
    payloads = payload_layouts(held.empty() ? layout : layout_of_part(layout, held), *plan, settings);
  }

  void on(const PartPlanned& event) {
    if (event.step) ++made;
    planned = event.plan;
    const IslandOrders& orders = planned->orders;
    incarnation = orders.incarnation;
    if (orders.session != session) {
      session = orders.session;
      lane_token = orders.lane_token;
      if (state != State::kDown) actions.push_back(DropChannel{Channel::kBulk});
      state = State::kDown;
      retry_at = now;
      failures = 0;
    }
    for (FragmentId p = 0; p < orders.fragments.size(); ++p) {
      PartFragment& fragment = fragments[p];
      const FragmentOrder& order = orders.fragments[p];
      for (std::size_t i = 0; i + kStagedKept < fragment.copies.size();) {
        const std::uint64_t step = fragment.copies[i].step;
        if (std::find(order.kept.begin(), order.kept.end(), step) == order.kept.end()) {
          fragment.copies.erase(fragment.copies.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
          ++i;
        }
      }
      if (!order.stage) continue;
      fragment.staging = Copy{made, made - fragment.from_steps, fragment.adopted, buffer(fragment, p)};
      actions.push_back(Stage{p, fragment.staging->bytes});
    }
  }

  BufferPtr buffer(PartFragment& fragment, FragmentId p) {
    for (const auto& idle : fragment.pool) {
      if (idle.use_count() == 1) return idle;
    }
    return fragment.pool.emplace_back(Buffer::make(payload(p, PayloadKind::kContribution).bytes));
  }

  void on(const StagesDone&) {
    const auto plan_now = std::exchange(planned, nullptr);
    for (FragmentId p = 0; p < fragments.size(); ++p) {
      PartFragment& fragment = fragments[p];
      if (fragment.staging) fragment.copies.push_back(*std::exchange(fragment.staging, std::nullopt));
      answer(p);
      if (plan_now && p < plan_now->orders.fragments.size() && plan_now->go(p)) adopt(p, plan_now->orders.fragments[p]);
    }
  }

  void adopt(FragmentId p, const FragmentOrder& order) {
    PartFragment& fragment = fragments[p];
    AdoptFragment action;
    action.fragment = p;
    action.version = order.adopt;
    action.formula = order.formula;
    action.blend_alpha = static_cast<float>(settings.blend_alpha);
    action.reset_inner_state = order.reset_inner_state;
    if (!order.back) {
      if (!fragment.pending || fragment.pending->version != order.adopt) {
        throw std::logic_error(fmt::format("part {}: the plan adopts version {} of fragment {}, which is not here",
                                           options.part, to_string(order.adopt), p));
      }
      action.image = fragment.pending->bytes;
      fragment.pending.reset();
      fragment.adopted = order.adopt;
    }
    if (order.sent_step != 0) {
      const auto copy = std::find_if(fragment.copies.begin(), fragment.copies.end(),
                                     [&](const Copy& c) { return c.step == order.sent_step; });
      if (copy == fragment.copies.end()) {
        throw std::logic_error(fmt::format("part {}: version {} of fragment {} contains the copy of step {}, which is no "
                                           "longer here", options.part, to_string(order.adopt), p, order.sent_step));
      }
      if (order.formula == AdoptFormula::kRebase) action.sent = copy->bytes;
      fragment.from_steps = order.sent_step;
    }
    if (order.dropped) fragment.from_steps = made;
    fragment.adopting = true;
    actions.push_back(std::move(action));
  }

  void on(const AdoptsDone&) {
    for (FragmentId p = 0; p < fragments.size(); ++p) {
      PartFragment& fragment = fragments[p];
      fragment.adopting = false;
      if (fragment.anchor_wanted && state == State::kUp) send_anchor(p);
    }
    pump();
  }

  void on(const Tick&) {}
  void on(const CloseEvent& event) {
    if (!closing) closing = now + event.flush_s;
  }

  IslandReport report() {
    IslandReport out;
    for (auto& fragment : fragments) {
      if (fragment.ready && (!fragment.pending || fragment.ready->version > fragment.pending->version)) {
        fragment.pending = *std::exchange(fragment.ready, std::nullopt);
      }
      const bool here = fragment.pending && !fragment.anchor_sending && !fragment.anchor_wanted;
      out.ready.push_back(here ? fragment.pending->version : Version{});
      if (options.replica) out.arrived.emplace_back(std::nullopt);
      else out.arrived.emplace_back(fragment.pending ? fragment.pending->version : Version{});
    }
    return out;
  }

  const PayloadLayout& payload(FragmentId p, PayloadKind kind) const {
    return payloads.at(p)[static_cast<std::size_t>(kind)];
  }

  PartOptions options;
  TimePoint now = 0.0;
  std::vector<LearnerAction> actions;

  State state = State::kDown;
  SessionId session = 0;
  std::uint64_t lane_token = 0;  // to bind with; 0: nothing to bind
  Incarnation incarnation = 0;
  TimePoint retry_at = 0.0;
  unsigned failures = 0;
  Liveness liveness;
  Outbox uplink;
  Reassembly downlink;
  ReceiverCredit downlink_credit;

  std::optional<Plan> plan;
  Layout layout;
  Settings settings;
  PayloadLayouts payloads;
  std::vector<PartFragment> fragments;
  std::shared_ptr<const IslandPlan> planned;
  std::uint64_t made = 0;  // steps
  std::optional<TimePoint> closing;
  bool closed = false;
};

PartCore::PartCore(PartOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
PartCore::~PartCore() = default;
std::vector<LearnerAction> PartCore::handle(const PartEvent& event, TimePoint now) { return impl_->handle(event, now); }
TimePoint PartCore::next_deadline() const { return impl_->next_deadline(); }
bool PartCore::connected() const { return impl_->options.replica || impl_->state == Impl::State::kUp; }
const Plan* PartCore::plan() const { return impl_->plan ? &*impl_->plan : nullptr; }
const Layout& PartCore::layout() const { return impl_->layout; }
const Settings& PartCore::settings() const { return impl_->settings; }
const PayloadLayout& PartCore::payload(FragmentId p, PayloadKind kind) const { return impl_->payload(p, kind); }
IslandReport PartCore::report() { return impl_->report(); }
ConstBufferPtr PartCore::arrived(FragmentId p, const Version& version) const {
  const auto& pending = impl_->fragments.at(p).pending;
  return pending && pending->version == version ? pending->bytes : nullptr;
}
std::uint64_t PartCore::staged_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& fragment : impl_->fragments) {
    for (const auto& buffer : fragment.pool) bytes += buffer->size();
  }
  return bytes;
}
std::uint64_t PartCore::steps() const { return impl_->made; }

}  // namespace diloco
