#include "diloco/core/learner_core.h"

#include <algorithm>

#include <fmt/format.h>

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
  if (impl_->link != Impl::Link::kUp) return false;
  return std::all_of(impl_->fragments.begin(), impl_->fragments.end(), [this](const LearnerFragment& fragment) {
    return fragment.ready.has_value() || fragment.adopted.epoch == impl_->epoch;
  });
}
std::string LearnerCore::holding_for() const {
  for (FragmentId p = 0; p < impl_->fragments.size(); ++p) {
    if (impl_->must_hold(p)) return fmt::format("fragment {} after version {}", p,
                                                to_string(impl_->fragments[p].adopted));
  }
  return {};
}
const Plan* LearnerCore::plan() const { return impl_->plan ? &*impl_->plan : nullptr; }
const Layout& LearnerCore::layout() const { return impl_->layout; }
const Settings& LearnerCore::settings() const { return impl_->settings; }
const PayloadLayout& LearnerCore::payload(FragmentId fragment, PayloadKind kind) const {
  return impl_->payloads.at(fragment)[static_cast<std::size_t>(kind)];
}
LearnerStats LearnerCore::stats() const { return impl_->stats(); }

LearnerCore::Impl::Impl(LearnerCoreOptions given) : options(std::move(given)), layout(options.layout) {
  check_layout(layout);
}

std::vector<LearnerAction> LearnerCore::Impl::handle(const LearnerEvent& event, TimePoint time) {
  now = time;
  if (away_since < 0.0) away_since = retry_at = now;
  std::visit(
      [this](const auto& e) {
        using E = std::decay_t<decltype(e)>;
        if constexpr (std::is_same_v<E, ChannelUp>) on_channel_up(e.channel);
        if constexpr (std::is_same_v<E, ChannelDown>) lose(e.why, false);
        if constexpr (std::is_same_v<E, ChannelFrame>) on_frame(e);
        if constexpr (std::is_same_v<E, Boundary>) on_boundary(e);
        if constexpr (std::is_same_v<E, StagesDone>) on_stages_done();
        if constexpr (std::is_same_v<E, Recheck>) on_recheck();
        if constexpr (std::is_same_v<E, AdoptsDone>) on_adopts_done();
        if constexpr (std::is_same_v<E, JoinAdopt>) adopt_ready();
        if constexpr (std::is_same_v<E, CloseEvent>) {
          if (!closing) closing = now + e.flush_s;
        }
      },
      event);
  on_time();
  return std::exchange(actions, {});
}

void LearnerCore::Impl::on_time() {
  if (closed) return;
  if (closing) {
    const bool flushed = link != Link::kUp || uplink.idle();
    if (!flushed && now < *closing) return;
    if (link == Link::kUp) send(Channel::kControl, MessageType::kGoodbye, {});
    closed = true;
    actions.push_back(Closed{});
    return;
  }
  if (rejected || gave_up) return;
  if (link != Link::kUp && options.give_up_after_s > 0.0 && now >= away_since + options.give_up_after_s) {
    gave_up = true;
    holding = false;
    actions.push_back(GaveUp{fmt::format("no syncer at {} for {:.1f} s (give_up_after_s); start it, or raise the limit",
                                         options.endpoint_text, options.give_up_after_s)});
    return;
  }
  if (link == Link::kDown && now >= retry_at) {
    link = Link::kConnecting;
    attempt_deadline = now + settings.heartbeat_timeout_s;
    actions.push_back(ConnectChannel{Channel::kControl});
  } else if (link != Link::kDown && link != Link::kUp && now >= attempt_deadline) {
    lose("no answer to the greeting", false);
  } else if (link == Link::kUp) {
    if (liveness.silent(now)) {
      lose(fmt::format("silent for {:.1f} s", settings.heartbeat_timeout_s), true);
    } else if (liveness.must_speak(now)) {
      liveness.said(now);
      Heartbeat beat;
      beat.lr = lr;
      for (std::size_t i = 0; i < discarded.size(); ++i) {
        if (discarded[i] > 0) beat.discarded[reason_name(static_cast<DiscardReason>(i))] = discarded[i];
      }
      send(Channel::kControl, MessageType::kHeartbeat, encode(beat));
    }
  }
}

TimePoint LearnerCore::Impl::next_deadline() const {
  constexpr TimePoint kNever = 1e300;
  if (closed) return kNever;
  if (closing) return *closing;
  if (rejected || gave_up) return kNever;
  TimePoint at = kNever;
  if (link == Link::kDown) at = retry_at;
  else if (link == Link::kUp) at = liveness.deadline();
  else at = attempt_deadline;
  if (link != Link::kUp && options.give_up_after_s > 0.0 && away_since >= 0.0) {
    at = std::min(at, away_since + options.give_up_after_s);
  }
  return at;
}

LearnerStats LearnerCore::Impl::stats() const {
  LearnerStats out;
  out.state = closed || closing ? "closed"
              : rejected || gave_up ? "rejected"
              : link == Link::kUp ? (ever_joined ? "training" : "joining")
              : ever_joined ? "away" : "connecting";
  out.epoch = epoch;
  out.steps = steps;
  out.tokens = tokens;
  out.clock = clock;
  out.run_clock = run_clock;
  out.run_tokens = run_tokens;
  out.adoptions = adoptions;
  out.contributions_sent = contributions_sent;
  out.contributions_merged = contributions_merged;
  out.reconnects = reconnects;
  out.tokens_merged = tokens_merged;
  for (std::size_t i = 0; i < discarded.size(); ++i) {
    if (discarded[i] > 0) out.discarded[reason_name(static_cast<DiscardReason>(i))] = discarded[i];
  }
  for (const auto& fragment : fragments) {
    out.tokens_outstanding += tokens - fragment.from + (fragment.limbo_to - fragment.limbo_from);
    out.versions.push_back(fragment.adopted);
    for (const auto& buffer : fragment.pool) out.staged_bytes += buffer->size();
    for (const auto& image : fragment.sent) out.sent_image_bytes += image.staged.bytes->size();
    if (fragment.ready) out.arriving_bytes += fragment.ready->bytes->size();
  }
  out.arriving_bytes += downlink.bytes_held();
  return out;
}

}  // namespace diloco
