// Connections and frames: greeting, pulls, uploads, arriving images. Runs on the I/O thread's events.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "diloco/core/learner_impl.h"

namespace diloco {

constexpr Seconds kFirstRetryS = 0.1;
constexpr Seconds kLastRetryS = 2.0;  // below the time a recovering syncer gathers holders
constexpr std::uint64_t kAnchorTag = 1ull << 63;  // | fragment: tag of an anchor's transfer
constexpr std::size_t kGoneImagesKept = 2;  // fully sent: the one the syncer holds and the one that may replace it

Header LearnerCore::Impl::header_template() const {
  Header header;
  header.session = session;
  header.epoch = epoch;
  header.incarnation = options.incarnation;
  return header;
}

void LearnerCore::Impl::send(Channel channel, MessageType type, std::string body, std::uint64_t offset,
                             std::uint64_t total, std::uint64_t transfer) {
  OutFrame frame;
  frame.header = header_template();
  frame.header.type = type;
  frame.header.offset = offset;
  frame.header.total = total;
  frame.header.transfer = transfer;
  frame.body = std::move(body);
  actions.push_back(SendOn{channel, std::move(frame)});
}

void LearnerCore::Impl::on_channel_up(Channel channel) {
  if (channel == Channel::kControl && link == Link::kConnecting) {
    link = Link::kGreeting;
    say_hello();
  } else if (channel == Channel::kBulk && link == Link::kLaning) {
    send(Channel::kBulk, MessageType::kLane, {}, 0, 0, lane_token);
    link = Link::kUp;
    failures = 0;
    if (told_away) log(LogLevel::kWarning, fmt::format("the syncer at {} is back", options.endpoint_text));
    if (ever_joined) ++reconnects;
    told_away = false;
    ever_joined = true;
    liveness.start(now, settings.heartbeat_interval_s, settings.heartbeat_timeout_s);
    if (steps > 0) report();
  }
}

void LearnerCore::Impl::say_hello() {
  Hello hello;
  hello.learner_id = options.learner_id;
  hello.run_id = options.run_id;
  hello.host = options.host;
  hello.pid = options.pid;
  hello.software = options.software;
  hello.highest_epoch = epoch;
  hello.layout = options.layout;
  hello.settings = options.insisted_settings;
  hello.tokens = tokens;
  hello.steps = steps;
  hello.clock = clock;
  hello.downlink_credit = settings.credit_window_bytes;
  for (const auto& fragment : fragments) {
    hello.adopted.push_back(fragment.adopted);
    hello.merged_to.push_back(fragment.merged_to);
    epoch = std::max(epoch, fragment.adopted.epoch);
  }
  downlink_credit.reset(settings.credit_window_bytes, settings.credit_window_bytes);
  downlink.reset();
  session = 0;
  send(Channel::kControl, MessageType::kHello, encode(hello));
}

// The connection is over; train on and come back. What was under way is forgotten, what was staged stays.
void LearnerCore::Impl::lose(const std::string& why, bool at_once) {
  if (link == Link::kDown || rejected || closed) return;
  const bool was_up = link == Link::kUp;
  link = Link::kDown;
  session = 0;
  if (was_up) away_since = now;
  actions.push_back(DropChannel{Channel::kControl});
  actions.push_back(DropChannel{Channel::kBulk});
  uplink.reset(0);
  downlink.reset();
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    LearnerFragment& fragment = fragments[p];
    fragment.pull.reset();
    fragment.anchor_wanted = fragment.anchor_sending = false;
    // Images not adopted yet belong to a session that is over; the next one sends its own.
    if (!fragment.adopting) fragment.ready.reset();
    // Parts of uploads under way never complete; what has left completely may still be merged.
    std::erase_if(fragment.sent, [](const SentImage& image) { return !image.gone; });
  }
  const Seconds back_off = std::min(kLastRetryS, kFirstRetryS * std::pow(2.0, std::min(failures, 10u)));
  const double jitter = static_cast<double>(options.random() % 1024) / 1024.0;
  retry_at = at_once && failures == 0 ? now : now + back_off * (0.5 + 0.5 * jitter);
  ++failures;
  if (!told_away) {
    told_away = true;
    log(LogLevel::kWarning, fmt::format("no syncer at {} ({}); training goes on locally and it is tried again by itself",
                                        options.endpoint_text, why));
  }
}

void LearnerCore::Impl::on_frame(const ChannelFrame& frame) {
  if (closed || rejected || link == Link::kDown || link == Link::kConnecting) return;
  const Header& header = frame.header;
  liveness.heard(now);
  std::string why;
  const auto broken = [&](const std::string& text) {
    log(LogLevel::kWarning, fmt::format("the syncer sent a bad {}: {}", message_name(header.type), text));
    lose("protocol violation", false);
  };
  if (header.type == MessageType::kReject) {
    const auto reject = decode_reject(frame.payload, &why);
    rejected = reject ? *reject : Reject{"malformed", "the syncer refused this learner without a readable reason"};
    holding = false;
    actions.push_back(DropChannel{Channel::kControl});
    actions.push_back(DropChannel{Channel::kBulk});
    actions.push_back(Rejected{*rejected});
    return;
  }
  if (header.type == MessageType::kRehello) return lose("it asks for a new greeting", true);
  if (header.type == MessageType::kWelcome) {
    return link == Link::kGreeting ? on_welcome(header, frame.payload) : broken("out of place");
  }
  if (header.session != session || session == 0) return;  // of an earlier session
  epoch = std::max(epoch, header.epoch);  // another learner may have forced a later one
  switch (header.type) {
    case MessageType::kHeartbeat:
      if (const auto beat = decode_heartbeat(frame.payload, &why); !beat) broken(why);
      else if (beat->probe) send(Channel::kControl, MessageType::kHeartbeat, encode(Heartbeat{}));
      break;
    case MessageType::kArm:
      if (const auto arm = decode_arm(frame.payload, &why); !arm) broken(why);
      else {
        for (auto& fragment : fragments) fragment.armed = false;
        for (const FragmentId p : arm->fragments) {
          if (p < fragments.size()) fragments[p].armed = true;
        }
      }
      break;
    case MessageType::kPull:
      if (const auto pull = decode_pull(frame.payload, &why); !pull) broken(why);
      else if (pull->fragment >= fragments.size()) broken("unknown fragment");
      else on_pull(header, *pull);
      break;
    case MessageType::kCredit:
      uplink.grant(header.offset);
      pump();
      break;
    case MessageType::kBegin:
      if (const auto begin = decode_begin(frame.payload, &why); !begin) broken(why);
      else if (begin->fragment >= fragments.size() || begin->kind != PayloadKind::kImage) broken("not an image");
      else on_begin(header, *begin);
      break;
    case MessageType::kChunk:
      downlink_credit.receive(frame.payload.size());
      on_transfer(downlink.chunk(header, frame.payload));
      break;
    case MessageType::kVerdict:
      if (const auto verdict = decode_verdict(frame.payload, &why); !verdict) broken(why);
      else if (verdict->fragment >= fragments.size()) broken("unknown fragment");
      else on_verdict(*verdict);
      break;
    case MessageType::kGoodbye:
      lose("it is shutting down", false);
      break;
    default:
      broken("not a message a syncer sends");
  }
}

void LearnerCore::Impl::on_welcome(const Header& header, Bytes payload) {
  std::string why;
  const auto refuse = [&](const std::string& text) {
    rejected = Reject{"malformed", text};
    holding = false;
    actions.push_back(DropChannel{Channel::kControl});
    actions.push_back(Rejected{*rejected});
  };
  const auto welcome = decode_welcome(payload, &why);
  if (!welcome) return refuse("the syncer's WELCOME cannot be read: " + why);
  Settings from_syncer;
  try {
    for (const auto& [name, value] : welcome->settings) from_syncer.set(name, value);
    check_plan(welcome->plan, welcome->layout);
  } catch (const std::exception& error) {
    return refuse(std::string("the syncer's WELCOME makes no sense: ") + error.what());
  }
  if (const auto difference = first_difference(options.layout, welcome->layout); !difference.empty()) {
    return refuse(difference);
  }
  if (plan && (*plan != welcome->plan || layout != welcome->layout)) {
    return refuse("the syncer came back with another plan (num_fragments or fragmenter changed); start this learner again");
  }
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    // The same life of the syncer says what it still holds. Another life will tell with its first version what the
    // recovered weights contain; until then nothing is known.
    if (header.epoch != session_epoch) continue;
    std::erase_if(fragments[p].sent, [&](const SentImage& image) {
      return image.staged.base.epoch == header.epoch && image.staged.to > welcome->merged_to[p] &&
             std::find(welcome->held.begin(), welcome->held.end(), std::pair(p, image.staged.to)) == welcome->held.end();
    });
    shrink_limbo(p, DiscardReason::kOverwritten);
  }
  session = header.session;
  epoch = session_epoch = header.epoch;
  lane_token = welcome->lane_token;
  run_clock = welcome->run_clock;
  run_tokens = welcome->run_tokens;
  settings = from_syncer;
  if (!plan) {
    plan = welcome->plan;
    layout = welcome->layout;
    fragments.resize(plan->size());
    payloads.resize(plan->size());
    for (FragmentId p = 0; p < plan->size(); ++p) {
      for (const auto kind : {PayloadKind::kContribution, PayloadKind::kAnchor, PayloadKind::kImage}) {
        payloads[p][static_cast<std::size_t>(kind)] = payload_layout(layout, *plan, p, kind, settings);
      }
    }
  }
  uplink.reset(settings.credit_window_bytes);
  downlink_credit.set_window(settings.credit_window_bytes);
  if (const auto total = downlink_credit.announce()) {
    send(Channel::kControl, MessageType::kCredit, {}, *total, downlink_credit.received());
  }
  link = Link::kLaning;
  attempt_deadline = now + settings.heartbeat_timeout_s;
  actions.push_back(ConnectChannel{Channel::kBulk});
}

void LearnerCore::Impl::on_pull(const Header& header, const Pull& pull) {
  LearnerFragment& fragment = fragments[pull.fragment];
  uplink.grant(header.offset);
  if (pull.kind == PayloadKind::kAnchor) {
    fragment.anchor_wanted = true;
    if (!fragment.adopting) send_anchor(pull.fragment);
    return pump();
  }
  // What the syncer neither holds nor can still receive will never be asked for again.
  std::erase_if(fragment.sent, [&](const SentImage& image) {
    return image.gone && image.staged.to < pull.held_to;
  });
  fragment.pull = pull;
  answer(pull.fragment);
}

// A waiting pull and a staged copy make an upload.
void LearnerCore::Impl::answer(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  if (!fragment.pull || !fragment.staged || link != Link::kUp || fragment.adopting) return;
  const Staged staged = *std::exchange(fragment.staged, std::nullopt);
  Begin begin;
  begin.kind = PayloadKind::kContribution;
  begin.fragment = p;
  begin.round = fragment.pull->round;
  begin.base = staged.base;
  begin.from = staged.from;
  begin.to = staged.to;
  begin.c_steps = staged.steps;
  begin.clock = staged.clock;
  fragment.pull.reset();

  Transfer transfer;
  transfer.fragment = p;
  transfer.kind = PayloadKind::kContribution;
  transfer.version = staged.base;
  transfer.begin = std::make_shared<const std::string>(encode(begin));
  transfer.image = {staged.bytes, 0, {}};
  transfer.total = staged.bytes->size();
  transfer.tag = next_tag++;
  fragment.sent.push_back({staged, fragment.from_steps + staged.steps, transfer.tag, false});
  if (const auto replaced = uplink.push(std::move(transfer))) {
    std::erase_if(fragment.sent, [&](const SentImage& image) { return image.tag == *replaced; });
  }
  ++contributions_sent;
  pump();
}

void LearnerCore::Impl::send_anchor(FragmentId p) {
  LearnerFragment& fragment = fragments[p];
  fragment.anchor_wanted = false;
  fragment.anchor_sending = true;
  Begin begin;
  begin.kind = PayloadKind::kAnchor;
  begin.fragment = p;
  begin.base = fragment.adopted;
  begin.clock = clock;
  begin.merged = fragment.merged_table;
  Transfer transfer;
  transfer.fragment = p;
  transfer.kind = PayloadKind::kAnchor;
  transfer.version = fragment.adopted;
  transfer.begin = std::make_shared<const std::string>(encode(begin));
  transfer.total = payloads[p][static_cast<std::size_t>(PayloadKind::kAnchor)].bytes;
  transfer.read = [this, p](std::uint64_t offset, std::span<std::byte> out) { options.read_anchor(p, offset, out); };
  transfer.tag = kAnchorTag | p;
  uplink.push(std::move(transfer));
}

void LearnerCore::Impl::pump() {
  if (link != Link::kUp) return;
  auto batch = uplink.take(header_template(), settings.chunk_bytes);
  for (auto& frame : batch.frames) actions.push_back(SendOn{Channel::kBulk, std::move(frame)});
  for (const auto tag : batch.finished) {
    if (tag & kAnchorTag) {
      fragments[static_cast<FragmentId>(tag)].anchor_sending = false;  // it may be overwritten again
      continue;
    }
    for (auto& fragment : fragments) {
      for (auto& image : fragment.sent) {
        if (image.tag == tag) image.gone = true;
      }
      const auto gone = std::count_if(fragment.sent.begin(), fragment.sent.end(),
                                      [](const SentImage& image) { return image.gone; });
      for (auto excess = gone - static_cast<std::ptrdiff_t>(kGoneImagesKept); excess > 0; --excess) {
        fragment.sent.erase(std::find_if(fragment.sent.begin(), fragment.sent.end(),
                                         [](const SentImage& image) { return image.gone; }));
      }
    }
  }
}

void LearnerCore::Impl::on_begin(const Header& header, const Begin& begin) {
  const LearnerFragment& fragment = fragments[begin.fragment];
  const bool news = begin.base > fragment.adopted && (!fragment.ready || begin.base > fragment.ready->version);
  const auto& expected = payloads[begin.fragment][static_cast<std::size_t>(PayloadKind::kImage)];
  on_transfer(downlink.begin(header, begin, expected.bytes, news));
}

void LearnerCore::Impl::on_transfer(Reassembly::Outcome outcome) {
  if (!outcome.error.empty()) {
    log(LogLevel::kWarning, "the syncer broke the protocol: " + outcome.error);
    return lose("protocol violation", false);
  }
  if (!outcome.complete) {
    if (const auto total = downlink_credit.announce()) {
      send(Channel::kControl, MessageType::kCredit, {}, *total, downlink_credit.received());
    }
    return;
  }
  // Announced at the end of every image: the syncer measures its round trip by it.
  send(Channel::kControl, MessageType::kCredit, {}, downlink_credit.grant_now(), downlink_credit.received());
  if (!outcome.bytes) return;
  const Begin& begin = *outcome.complete;
  fragments[begin.fragment].ready = ReadyImage{begin.base, begin.clock, std::move(outcome.bytes), begin.merged};
}

void LearnerCore::Impl::on_verdict(const Verdict& verdict) {
  LearnerFragment& fragment = fragments[verdict.fragment];
  std::erase_if(fragment.sent, [&](const SentImage& image) {
    return image.gone && image.staged.from == verdict.from && image.staged.to == verdict.to;
  });
  if (verdict.from == fragment.limbo_from) shrink_limbo(verdict.fragment, verdict.reason);
  if (!verdict.readopt) return;
  // NaN in one fragment has reached all others through the forward pass: take everything again.
  for (auto& other : fragments) other.readopt = verdict.reason;
  log(LogLevel::kError, fmt::format("the syncer refused fragment {} of this learner: {}; the global weights are "
                                    "taken again at the next step, with fresh optimizer state", verdict.fragment, verdict.text));
}

}  // namespace diloco
