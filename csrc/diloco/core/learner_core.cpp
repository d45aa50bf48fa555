#include "diloco/core/learner_core.h"

#include <algorithm>

#include <fmt/format.h>

#include "diloco/base/errors.h"
#include "diloco/core/learner_impl.h"

namespace diloco {

LearnerCore::LearnerCore(LearnerCoreOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
LearnerCore::~LearnerCore() = default;
std::vector<LearnerAction> LearnerCore::handle(const LearnerEvent& event, TimePoint now) {
  return impl_->handle(event, now);
}
TimePoint LearnerCore::next_deadline() const { return impl_->next_deadline(); }
bool LearnerCore::holding() const { return impl_->holding; }
bool LearnerCore::joined() const {
  for (const auto& link : impl_->links) {
    if (!link.up()) return false;
  }
  for (FragmentId p = 0; p < impl_->fragments.size(); ++p) {
    const LearnerFragment& fragment = impl_->fragments[p];
    const bool coming = fragment.ready && !impl_->island();
    if (!impl_->serves(impl_->link_of(p), p)) continue;
    if (!coming && fragment.adopted.epoch != impl_->link_of(p).epoch) return false;
  }
  return true;
}
std::string LearnerCore::holding_for() const { return impl_->holding_for(); }
const Plan* LearnerCore::plan() const { return impl_->plan ? &*impl_->plan : nullptr; }
const Layout& LearnerCore::layout() const { return impl_->layout; }
const Settings& LearnerCore::settings() const { return impl_->settings; }
const PayloadLayout& LearnerCore::payload(FragmentId fragment, PayloadKind kind) const {
  return impl_->payloads.at(fragment)[static_cast<std::size_t>(kind)];
}
LearnerStats LearnerCore::stats() const { return impl_->stats(); }

LearnerCore::Impl::Impl(LearnerCoreOptions given) : options(std::move(given)), layout(options.layout) {
  check_layout(layout);
  if (options.shards == 0) throw ConfigError("shards: expected at least 1, got 0");
  if (options.island && options.shards > 1) throw ConfigError("an island needs a syncer of one shard");
  links.resize(options.shards);
  for (std::uint32_t shard = 0; shard < options.shards; ++shard) links[shard].shard = shard;
}

std::vector<LearnerAction> LearnerCore::Impl::handle(const LearnerEvent& event, TimePoint time) {
  now = time;
  if (!started) {
    started = true;
    for (auto& link : links) link.away_since = link.retry_at = now;
  }
  std::visit(
      [this](const auto& e) {
        using E = std::decay_t<decltype(e)>;
        if constexpr (std::is_same_v<E, ChannelUp>) on_channel_up(links.at(e.shard), e.channel);
        if constexpr (std::is_same_v<E, ChannelDown>) lose(links.at(e.shard), e.why, false);
        if constexpr (std::is_same_v<E, ChannelFrame>) on_frame(e);
        if constexpr (std::is_same_v<E, Boundary>) on_boundary(e);
        if constexpr (std::is_same_v<E, IslandPlanned>) on_island_planned(e);
        if constexpr (std::is_same_v<E, Grow>) on_grow(e);
        if constexpr (std::is_same_v<E, StagesDone>) on_stages_done();
        if constexpr (std::is_same_v<E, Recheck>) on_recheck();
        if constexpr (std::is_same_v<E, AdoptsDone>) on_adopts_done();
        if constexpr (std::is_same_v<E, JoinAdopt>) adopt_ready();
        if constexpr (std::is_same_v<E, CloseEvent>) {
          if (!closing) closing = now + e.flush_s;
          if (e.tokens > 0) {
            tokens += e.tokens;
            actions.push_back(Progress{tokens});
            for (auto& link : links) report(link);
          }
        }
      },
      event);
  on_time();
  return std::exchange(actions, {});
}

void LearnerCore::Impl::on_time() {
  if (closed) return;
  if (closing) return leave_politely();
  if (rejected || gave_up || give_up()) return;
  for (auto& link : links) on_time(link);
}

// Everything that was sent goes out, then GOODBYE; then the syncer closes the connections. If this side did, the end of the
// bulk connection might overtake the GOODBYE on the other.
void LearnerCore::Impl::leave_politely() {
  const bool late = now >= *closing;
  const bool flushed = std::all_of(links.begin(), links.end(),
                                   [](const ShardLink& link) { return !link.up() || link.uplink.idle(); });
  if (!said_goodbye && !flushed && !late) return;
  for (auto& link : links) {
    if (!said_goodbye && link.up()) send(link, Channel::kControl, MessageType::kGoodbye, {});
  }
  said_goodbye = true;
  const bool alone = std::none_of(links.begin(), links.end(), [](const ShardLink& link) { return link.up(); });
  if (!alone && !late) return;
  closed = true;
  actions.push_back(Closed{});
}

void LearnerCore::Impl::on_time(ShardLink& link) {
  if (link.down()) {
    if (now < link.retry_at) return;
    link.state = ShardLink::State::kConnecting;
    link.attempt_deadline = now + settings.heartbeat_timeout_s * (1 + std::min(link.failures, 5u));  // a slow link needs longer
    actions.push_back(ConnectChannel{Channel::kControl, link.shard});
  } else if (!link.up() && now >= link.attempt_deadline) {
    lose(link, "no answer to the greeting", false);
  } else if (link.up() && link.liveness.silent(now)) {
    lose(link, fmt::format("silent for {:.1f} s", settings.heartbeat_timeout_s), true);
  } else if (link.welcomed() && link.liveness.must_speak(now)) {
    beat(link);
  }
}

void LearnerCore::Impl::beat(ShardLink& link) {
  link.liveness.said(now);
  Heartbeat beat;
  beat.lr = lr;
  beat.discarded = link.discarded;
  send(link, Channel::kControl, MessageType::kHeartbeat, encode(beat));
}

bool LearnerCore::Impl::give_up() {
  const auto gone = std::find_if(links.begin(), links.end(), [this](const ShardLink& link) {
    return !link.up() && options.give_up_after_s > 0.0 && now >= link.away_since + options.give_up_after_s;
  });
  if (gone == links.end()) return false;
  gave_up = true;
  holding = false;
  actions.push_back(GaveUp{fmt::format("no {} for {:.1f} s (give_up_after_s); start it, or raise the limit",
                                       name_of(*gone), options.give_up_after_s)});
  leave();
  return true;
}

TimePoint LearnerCore::Impl::next_deadline() const {
  constexpr TimePoint kNever = 1e300;
  if (closed) return kNever;
  if (closing) return *closing;
  if (rejected || gave_up) return kNever;
  TimePoint at = kNever;
  for (const auto& link : links) {
    if (link.welcomed()) at = std::min(at, link.liveness.deadline());
    if (!link.up()) at = std::min(at, link.down() ? link.retry_at : link.attempt_deadline);
    if (!link.up() && options.give_up_after_s > 0.0 && started) {
      at = std::min(at, link.away_since + options.give_up_after_s);
    }
  }
  return at;
}

const char* LearnerCore::Impl::state() const {
  if (closed || closing) return "closed";
  if (rejected || gave_up) return "rejected";
  const auto joined = std::count_if(links.begin(), links.end(), [](const ShardLink& link) { return link.ever_joined; });
  if (joined == 0) return "connecting";
  if (static_cast<std::size_t>(joined) < links.size()) return "joining";
  return std::all_of(links.begin(), links.end(), [](const ShardLink& link) { return link.up(); }) ? "training" : "away";
}

LearnerStats LearnerCore::Impl::stats() const {
  LearnerStats out;
  out.state = state();
  out.steps = steps;
  out.tokens = tokens;
  out.clock = clock;
  out.run_clock = run_clock;
  out.run_tokens = run_tokens;
  out.adoptions = adoptions;
  out.contributions_sent = contributions_sent;
  out.contributions_merged = contributions_merged;
  out.tokens_merged = tokens_merged;
  for (const auto& link : links) {
    if (!link.up()) out.shards_away.push_back(link.shard);
    out.epoch = std::max(out.epoch, link.epoch);
    out.reconnects += link.reconnects;
    out.arriving_bytes += link.downlink.bytes_held();
    for (const auto& [reason, count] : link.discarded) {
      (reason == reason_name(DiscardReason::kAbsent) ? out.tokens_absent : out.discarded[reason]) += count;
    }
  }
  for (const auto& fragment : fragments) {
    out.tokens_outstanding += tokens - fragment.from + (fragment.limbo_to - fragment.limbo_from);
    out.versions.push_back(fragment.adopted);
    for (const auto& buffer : fragment.pool) out.staged_bytes += buffer->size();
    for (const auto& image : fragment.sent) out.sent_image_bytes += image.staged.bytes->size();
    if (fragment.ready) out.arriving_bytes += fragment.ready->bytes->size();
  }
  return out;
}

}  // namespace diloco
