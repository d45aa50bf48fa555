#include "diloco/core/syncer_core.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/base/errors.h"
#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

SyncerCore::SyncerCore(SyncerCoreOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
SyncerCore::~SyncerCore() = default;
std::vector<SyncerAction> SyncerCore::handle(const SyncerEvent& event, TimePoint now) {
  return impl_->handle(event, now);
}
TimePoint SyncerCore::next_deadline() const { return impl_->next_deadline(); }
std::shared_ptr<const FragmentState> SyncerCore::fragment(FragmentId fragment) const {
  return fragment < impl_->slots.size() ? impl_->slots[fragment].state : nullptr;
}
const Plan& SyncerCore::plan() const { return impl_->plan; }
const Layout& SyncerCore::layout() const {
  static const Layout none;
  return impl_->layout ? *impl_->layout : none;
}
std::uint64_t SyncerCore::epoch() const { return impl_->epoch; }
std::uint64_t SyncerCore::rounds_merged() const { return impl_->rounds_merged; }
std::uint64_t SyncerCore::payload_bytes_held() const { return impl_->payload_bytes_held(); }
std::string SyncerCore::status_json(TimePoint now) const {
  impl_->now = now;
  return impl_->status_json();
}

SyncerCore::Impl::Impl(SyncerCoreOptions given) : options(std::move(given)), settings(options.settings) {
  settings.validate();
  if (options.shard >= options.shards) {
    throw ConfigError(fmt::format("shard: expected 0 to {} (shards = {}), got {}", options.shards - 1, options.shards,
                                  options.shard));
  }
}

bool SyncerCore::Impl::owns(FragmentId p) const {
  return p < plan.size() && plan.fragments[p].shard == options.shard;
}

std::uint32_t SyncerCore::Impl::owned_fragments(std::uint32_t of_first) const {
  std::uint32_t count = 0;
  for (FragmentId p = 0; p < std::min(of_first, plan.size()); ++p) count += owns(p);
  return count;
}

std::uint32_t SyncerCore::Impl::fragments_without_weights() const {
  std::uint32_t count = 0;
  for (FragmentId p = 0; p < plan.size(); ++p) count += owns(p) && !slots[p].state;
  return count;
}

void SyncerCore::Impl::send(PeerId peer, MessageType type, const Session* session, std::string body,
                            FragmentId fragment, std::uint64_t offset) {
  OutFrame frame;
  frame.header.type = type;
  frame.header.epoch = epoch;
  frame.header.fragment = fragment;
  frame.header.shard = options.shard;
  frame.header.offset = offset;
  if (session) {
    frame.header.session = session->id;
    frame.header.incarnation = session->account->incarnation;
  }
  frame.body = std::move(body);
  actions.push_back(SendTo{peer, std::move(frame)});
}

std::vector<SyncerAction> SyncerCore::Impl::handle(const SyncerEvent& event, TimePoint time) {
  now = time;
  if (started < 0.0) {
    started = now;
    record(nlohmann::json{{"event", "start"}, {"epoch", epoch}, {"settings", settings.to_map()}});
    say_gains();
  }
  std::visit(
      [this](const auto& e) {
        using E = std::decay_t<decltype(e)>;
        if constexpr (std::is_same_v<E, FrameEvent>) on_frame(e);
        if constexpr (std::is_same_v<E, PeerGoneEvent>) {
          probes.gone(e.peer);
          on_peer_gone(e.peer, e.why);
        }
        if constexpr (std::is_same_v<E, ScreenDone>) on_screen_done(e);
        if constexpr (std::is_same_v<E, MergeDone>) on_merge_done(e);
        if constexpr (std::is_same_v<E, InitDone>) on_init_done(e);
        if constexpr (std::is_same_v<E, Persisted>) on_persisted(e);
        if constexpr (std::is_same_v<E, ShutdownEvent>) {
          if (!shutdown_at) {
            shutdown_at = now + e.give_up_after_s;
            log(LogLevel::kInfo, fmt::format("stopping: {} open round(s), waiting at most {:.1f} s", rounds.size(),
                                             e.give_up_after_s));
          }
        }
      },
      event);
  on_tick();
  for (const SessionId id : dead) sessions.erase(id);
  dead.clear();
  settle_superseded();
  return std::exchange(actions, {});
}

void SyncerCore::Impl::on_frame(const FrameEvent& frame) {
  const Header& header = frame.header;
  if (header.type == MessageType::kStatus) {
    send(frame.peer, MessageType::kStatusReply, nullptr, status_json());
    return;
  }
  if (header.type == MessageType::kProbe) return on_probe(frame);
  if (header.type == MessageType::kHello) return on_hello(frame.peer, header, frame.payload);
  if (is_reserved(header.type)) {
    return reject(frame.peer, "malformed",
                  fmt::format("message type {} is reserved and not spoken yet", message_name(header.type)));
  }
  if (header.shard != options.shard) {
    const std::string text = fmt::format("{} for syncer shard {}; this is shard {} of {}", message_name(header.type),
                                         header.shard, options.shard, options.shards);
    if (Session* session = session_of(frame.peer)) return violation(*session, text);
    return reject(frame.peer, "shard", text);
  }
  if (header.type == MessageType::kLane) return on_lane(frame.peer, header, frame.payload);
  Session* session = session_of(frame.peer);
  if (!session || header.session != session->id) {
    // Frames queued by a DEALER reach a restarted syncer before any HELLO does.
    send(frame.peer, MessageType::kRehello, nullptr, {});
    return;
  }
  // The control connection alone shows life: it has the heartbeats, and may be dead while bulk is not.
  if (frame.peer == session->control) session->liveness.heard(now);
  // Of the first part CREDIT and MISS come on the control connection, of the others on their own.
  BulkLane* own = lane_of(*session, frame.peer);
  if (own) own->liveness.heard(now);
  BulkLane& lane = own ? *own : session->lanes.front();
  const bool control_only = header.type == MessageType::kStep || header.type == MessageType::kGoodbye;
  if (own && own != &session->lanes.front() && control_only) {
    return violation(*session, fmt::format("{} on the bulk connection of part {}", message_name(header.type),
                                           own - session->lanes.data()));
  }
  session->account->last_contact = now;
  if (!pending_hellos.empty()) resolve_pending(session->id, true);

  std::string why;
  const auto malformed = [&] { violation(*session, fmt::format("{}: {}", message_name(header.type), why)); };
  switch (header.type) {
    case MessageType::kStep:
      if (const auto step = decode_step(frame.payload, &why)) on_step(*session, *step); else malformed();
      break;
    case MessageType::kHeartbeat:
      if (own) break;  // a sign of life is all it is
      if (const auto beat = decode_heartbeat(frame.payload, &why)) on_heartbeat(*session, *beat); else malformed();
      break;
    case MessageType::kCredit:
      lane.downlink.grant(header.offset, header.total);
      if (&lane == &session->lanes.front()) note_delivery(*session, header.total);
      pump(*session);
      break;
    case MessageType::kBegin:
      if (const auto begin = decode_begin(frame.payload, &why)) on_begin(*session, lane, header, *begin); else malformed();
      break;
    case MessageType::kChunk:
      on_chunk(*session, lane, header, frame.payload);
      break;
    case MessageType::kMiss:
      on_miss(*session, lane, header.fragment);
      break;
    case MessageType::kGoodbye:
      end_session(session->id, "said goodbye", true);
      break;
    default:
      why = "not a message a learner sends";
      malformed();
  }
}

// Everything that depends on time or on what just changed. Idempotent.
void SyncerCore::Impl::on_tick() {
  if (stopped) return;
  std::vector<std::pair<SessionId, std::string>> silent;
  for (auto& [id, session] : sessions) {
    if (session.control == 0) continue;
    std::string who;
    serve_lanes(session, &who);
    if (!who.empty()) silent.emplace_back(id, who);
    if (session.liveness.silent(now)) {
      silent.emplace_back(id, "silent");
      session.account->unheard += !session.liveness.heard_once();
    } else if (session.liveness.must_speak(now)) {
      session.liveness.said(now);
      send(session.control, MessageType::kHeartbeat, &session, encode(Heartbeat{}));
    }
  }
  for (const auto& [id, who] : silent) {
    end_session(id, fmt::format("{} for {:.1f} s", who, settings.heartbeat_timeout_s), true);
  }
  std::vector<PendingHello> expired;
  for (const auto& [peer, pending] : pending_hellos) {
    if (now >= pending.deadline) expired.push_back(pending);
  }
  for (const auto& pending : expired) resolve_pending(pending.probed, false);
  grow_if_agreed(0);
  if (elect_at && now >= *elect_at) elect_anchors();

  const auto clock = clock_now();
  const Seconds step = xi_step();
  if (settings.trigger == Trigger::kArrival) {
    open_on_arrival();
    pull_due();
  } else {
    open_rounds(clock, step);
    pull_contributors();
  }
  check_rounds();
  update_armed(clock, step);
  say_waiting();

  const bool working = std::any_of(rounds.begin(), rounds.end(),
                                   [](const auto& r) { return r.second.phase != RoundPhase::kCollecting; });
  if (shutdown_at && (rounds.empty() || now >= *shutdown_at || (live_sessions() == 0 && !working))) {
    stopped = true;
    std::string text = rounds.empty() ? std::string("stopped: no round was left open")
                                      : fmt::format("stopped: gave up {} open round(s)",
                                                    rounds.size());
    for (auto& [id, session] : sessions) {
      if (session.control != 0) send(session.control, MessageType::kGoodbye, &session, {});
    }
    record(nlohmann::json{{"event", "stop"}, {"text", text}});
    log(LogLevel::kInfo, text);
    actions.push_back(Stopped{text});
  }
}

// How far outer steps go, before the first one is made.
void SyncerCore::Impl::say_gains() {
  const OuterGain gain = outer_gain(outer_options(settings));
  const std::string reach =
      settings.outer_optimizer == OuterKind::kAdam
          ? fmt::format("an outer step moves a weight by about outer_lr = {} at most", settings.outer_lr)
          : fmt::format("the first outer step is {:.3g} x the merged change, in the long run {:.3g} x",
                        gain.first, gain.long_run);
  log(LogLevel::kInfo, fmt::format("preset {}, outer optimizer {}: {}", settings.get("preset"),
                                   settings.get("outer_optimizer"), reach));
  for (const auto& warning : outer_warnings(settings)) log(LogLevel::kWarning, warning);
}

// What keeps outer steps from happening, once it has lasted, and then every so often: with too few learners the others
// train on alone, and nothing else would look wrong.
void SyncerCore::Impl::say_waiting() {
  const std::string text = live_sessions() > 0 ? waiting_text() : std::string();
  if (!stuck.due(!text.empty(), now)) return;
  log(LogLevel::kWarning, "waiting: " + text);
}

TimePoint SyncerCore::Impl::next_deadline() const {
  TimePoint at = kNever;
  if (stopped) return at;
  for (const auto& [id, session] : sessions) {
    at = std::min(at, session.liveness.deadline());
    for (std::size_t part = 1; part < session.lanes.size(); ++part) {
      if (session.lanes[part].peer != 0) at = std::min(at, session.lanes[part].liveness.deadline());
    }
    if (!stalled(session)) at = std::min(at, session.last_step + stall_after_s(session.step_s.value_or(0.0)));
  }
  for (const auto& [peer, pending] : pending_hellos) at = std::min(at, pending.deadline);
  for (const auto& [id, round] : rounds) {
    // One that has passed was looked at: the round waits for something else (lockstep, a member that went).
    if (round.phase == RoundPhase::kCollecting && round.deadline && *round.deadline > now) at = std::min(at, *round.deadline);
  }
  if (elect_at) at = std::min(at, *elect_at);
  at = std::min(at, stuck.next());
  if (shutdown_at) at = std::min(at, *shutdown_at);
  return at;
}

}  // namespace diloco
