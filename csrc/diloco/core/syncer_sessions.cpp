// HELLO to goodbye: who may join, under which name, and when a connection's life is over.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

constexpr Seconds kProbeS = 2.0;  // how long the holder of a learner id may take to show it is alive

Session* SyncerCore::Impl::session_of(PeerId peer) {
  const auto at = peer_session.find(peer);
  if (at == peer_session.end()) return nullptr;
  const auto it = sessions.find(at->second);
  return it == sessions.end() || it->second.control == 0 ? nullptr : &it->second;
}

std::size_t SyncerCore::Impl::live_sessions() const {
  return static_cast<std::size_t>(
      std::count_if(sessions.begin(), sessions.end(), [](const auto& s) { return s.second.control != 0; }));
}

void SyncerCore::Impl::reject(PeerId peer, const std::string& code, const std::string& text) {
  send(peer, MessageType::kReject, nullptr, encode(Reject{code, text}));
  actions.push_back(CutPeer{peer, "rejected: " + text});
  log(LogLevel::kWarning, "refused a peer (" + code + "): " + text);
  record(nlohmann::json{{"event", "reject"}, {"code", code}, {"text", text}});
}

void SyncerCore::Impl::violation(Session& session, const std::string& text) {
  const std::string learner = session.account->learner;
  reject(session.control, "malformed", fmt::format("protocol violation by '{}': {}", learner, text));
  end_session(session.id, "protocol violation: " + text, true);
}

std::string SyncerCore::Impl::settings_difference(const std::map<std::string, std::string>& wanted) const {
  for (const auto& [name, value] : wanted) {
    try {
      Settings copy = settings;
      copy.set(name, value);
      if (copy.get(name) != settings.get(name)) {
        return fmt::format("setting '{}': this learner asks for {}, the run has {}; settings live on the syncer, so "
                           "change it there or leave it out here", name, copy.get(name), settings.get(name));
      }
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return {};
}

void SyncerCore::Impl::on_hello(PeerId peer, const Header& header, Bytes payload) {
  if (header.protocol != kProtocolVersion) {
    return reject(peer, "protocol",
                  fmt::format("this syncer speaks protocol {}, the learner speaks {}; install the same diloco version "
                              "on both sides", kProtocolVersion, header.protocol));
  }
  if (header.shard != options.shard) {
    return reject(peer, "shard", fmt::format("this is syncer shard {} of {}, the learner takes it for shard {}; its list "
                                             "of addresses must name the shards in order", options.shard,
                                             options.shards, header.shard));
  }
  std::string why;
  const auto hello = decode_hello(payload, &why);
  if (!hello) return reject(peer, "malformed", "HELLO: " + why);
  if (hello->role != Role::kLearner) {
    return reject(peer, "role", "only the role 'learner' is spoken; 'operator' and 'monitor' are reserved");
  }
  if (header.incarnation == 0) return reject(peer, "malformed", "HELLO: the incarnation is 0");
  if (!settings.run_id.empty() && hello->run_id != settings.run_id) {
    return reject(peer, "run_id",
                  fmt::format("the run here is '{}', learner '{}' belongs to run '{}'; check run_id and the address",
                              settings.run_id, hello->learner_id, hello->run_id));
  }
  if (const auto text = settings_difference(hello->settings); !text.empty()) return reject(peer, "settings", text);

  if (const Life* life = life_of(header.incarnation)) {
    if (life->learner != hello->learner_id) {
      return reject(peer, "learner_id", fmt::format("incarnation {} belongs to learner '{}', not '{}'",
                                                    hex(header.incarnation), life->learner, hello->learner_id));
    }
    if (life->tombstoned) return reject(peer, "superseded", life->tombstone);
  }
  // Who comes back is alive: a newcomer of its name that waits for the end of its session is refused first.
  if (const Session* before = session_of(peer)) {
    if (before->account->incarnation == header.incarnation) resolve_pending(before->id, true);
    end_session(before->id, "said HELLO again", false);
  }
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || session.account->learner != hello->learner_id) continue;
    if (session.account->incarnation == header.incarnation) {
      resolve_pending(id, true);
      end_session(id, "reconnected", true);
      break;
    }
    for (const auto& [other, pending] : pending_hellos) {
      if (pending.probed == id) {
        return reject(peer, "duplicate_id", fmt::format("another newcomer named '{}' is being checked; give every "
                                                        "learner its own learner_id", hello->learner_id));
      }
    }
    pending_hellos[peer] = {peer, header, *hello, id, now + kProbeS};
    send(session.control, MessageType::kHeartbeat, &session, encode(Heartbeat{true, {}, 0.0}));
    return;
  }
  admit(peer, header, *hello);
}

void SyncerCore::Impl::resolve_pending(SessionId probed, bool alive) {
  std::vector<PendingHello> ready;
  for (const auto& [peer, pending] : pending_hellos) {
    if (pending.probed == probed) ready.push_back(pending);
  }
  for (const auto& pending : ready) {
    pending_hellos.erase(pending.peer);
    const auto it = sessions.find(probed);
    const bool there = it != sessions.end() && it->second.control != 0;
    if (alive && there) {
      const Account& holder = *it->second.account;
      reject(pending.peer, "duplicate_id",
             fmt::format("learner_id '{}' is taken by a live learner (host {}, pid {}); give every learner its own",
                         holder.learner, holder.host, holder.pid));
      continue;
    }
    if (there) {
      Account& account = *it->second.account;
      bury(account, fmt::format("learner '{}' was silent and has been replaced by a newcomer (host {}, pid {})",
                                account.learner, pending.hello.host, pending.hello.pid));
      send(it->second.control, MessageType::kReject, &it->second, encode(Reject{"superseded", account.tombstone}));
      end_session(probed, "superseded", true);
    }
    admit(pending.peer, pending.header, pending.hello);
  }
}

void SyncerCore::Impl::set_layout(const Layout& given) {
  plan = make_plan(given, settings.fragmenter, settings.num_fragments, options.shards);
  layout = given;
  extents = {{layout->tensors.size(), plan.size()}};
  slots.clear();
  fill_slots();
}

void SyncerCore::Impl::announce_layout() {
  nlohmann::json fragments = nlohmann::json::array();
  for (const auto& fragment : plan.fragments) {
    nlohmann::json names = nlohmann::json::array();
    for (const auto tensor : fragment.tensors) names.push_back(layout->tensors[tensor].name);
    fragments.push_back({{"tensors", names}, {"numel", fragment.numel}, {"shard", fragment.shard}});
  }
  record(nlohmann::json{{"event", "plan"}, {"fragments", fragments}});
  std::string text = fmt::format("layout: {} tensors, {} elements in {} fragments", layout->tensors.size(),
                                 layout->numel(), plan.size());
  if (options.shards > 1) {
    text += fmt::format(", {} of them on this shard, {} of {}", owned_fragments(), options.shard, options.shards);
  }
  log(LogLevel::kInfo, text);
  if (settings.merge_overrides == Settings{}.merge_overrides) return;  // common names, which few models have all of
  for (const auto& rule : unmatched_rules(*layout, settings)) {
    log(LogLevel::kWarning, fmt::format("merge_overrides: \"{}\" matches no parameter of this model, such as '{}'; rules are "
                                        "separated by semicolons", rule, layout->tensors.front().name));
  }
}

void SyncerCore::Impl::bump_epoch(std::uint64_t at_least) {
  const bool first = epoch == 0;
  epoch = std::max({epoch + 1, options.epoch_floor + 1, at_least});
  record(nlohmann::json{{"event", "epoch"}, {"epoch", epoch}});
  if (first) return;
  log(LogLevel::kWarning, fmt::format("a learner has seen a later epoch; this syncer goes on as epoch {}", epoch));
  for (auto& [incarnation, account] : accounts) {  // bases of an earlier epoch are not merged
    for (FragmentId p = 0; p < account.mailbox.size(); ++p) refuse_held(account, p, "the epoch has changed");
  }
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (!slots[p].state) continue;
    auto renamed = std::make_shared<FragmentState>(*slots[p].state);
    renamed->version.epoch = epoch;
    slots[p].state = std::move(renamed);
    slots[p].retained.clear();
    publish(p, slots[p].round, slots[p].clock);
  }
}

void SyncerCore::Impl::admit(PeerId peer, const Header& header, const Hello& hello) {
  std::size_t ranks = hello.parts;  // those of an island with a connection count as one learner each
  for (const auto& [id, session] : sessions) ranks += session.control != 0 ? session.lanes.size() : 0;
  if (ranks > settings.max_learners) {
    return reject(peer, "full", fmt::format("max_learners = {} learners are here already{}", settings.max_learners,
                                            ranks > live_sessions() + 1 ? " (each part of an island counts as one)" : ""));
  }
  if (!accounts.contains(header.incarnation) && !settled.contains(header.incarnation) && !room_for_newcomer()) {
    return reject(peer, "full", fmt::format("this run has had {} incarnations of learners, at most {} are remembered; "
                                            "start a new run from a checkpoint", incarnations(), kMaxIncarnations));
  }
  const bool first = !layout;
  const auto forget_layout = [this] {  // another model may do
    layout.reset();
    plan = {};
    extents.clear();
    slots.clear();
  };
  try {
    check_layout(hello.layout);
    if (first) {
      Layout began = hello.layout;  // what was added later is agreed on as it was then
      if (!hello.grown_from.empty()) began.tensors.resize(hello.grown_from.front());
      set_layout(began);
    }
  } catch (const std::exception& error) {
    if (first) forget_layout();
    return reject(peer, "layout", error.what());
  }
  Fit fits = fit(hello);
  if (!fits.difference.empty()) {
    return reject(peer, "layout", fits.difference + "; every learner of a run trains the same model (for another "
                                      "model start another syncer)");
  }
  if (const auto text = memory_short(live_sessions() + 1); !text.empty()) {
    if (first) forget_layout();
    return reject(peer, "memory", text);
  }
  if (first) announce_layout();
  // Another life of the syncer may have used our epoch: a learner we do not know that has seen one is the sign.
  const bool known = life_of(header.incarnation) != nullptr;
  if (epoch == 0 || hello.highest_epoch > epoch || (hello.highest_epoch == epoch && !known)) {
    bump_epoch(hello.highest_epoch + 1);
  }

  Account& account = account_for(header.incarnation, hello);
  SessionId id = 0;
  while (id == 0 || sessions.contains(id)) id = options.random();
  Session& session = sessions[id];
  session.id = id;
  session.control = peer;
  session.lane_token = options.random();
  session.account = &account;
  // The WELCOME may take long on a slow link; who was given up on it before has longer, as long as a learner waits for it.
  session.liveness.start(now, settings.heartbeat_interval_s, settings.heartbeat_timeout_s,
                         settings.heartbeat_timeout_s * (1 + std::min(account.unheard, 5u)));
  session.clock = hello.clock;
  session.steps = hello.steps;
  session.tokens = hello.tokens;
  session.last_step = now;
  for (;; fits = fit(hello)) {  // several additions may be due at once
    account.fragments = fits.fragments;
    session.beyond = fits.beyond;
    session.beyond_adopted = !fits.beyond.empty() && hello.adopted.size() > fits.fragments &&
                             !hello.adopted[fits.fragments].none();
    if (!grow_if_agreed(id)) break;
  }
  fit_to_plan(session);
  const std::uint32_t reported = known_fragments(hello, fits);
  for (FragmentId p = 0; p < reported; ++p) {
    if (owns(p)) session.adopted[p] = hello.adopted[p];
  }
  account.adopted = session.adopted;
  session.ranks = hello.ranks;
  session.lanes.resize(hello.parts);
  if (hello.parts > 1) session.tensors = indices_in(*layout, hello.layout);
  for (BulkLane& lane : session.lanes) lane.uplink_credit.reset(settings.credit_window_bytes, settings.credit_window_bytes);
  session.lanes.front().downlink.reset(hello.downlink_credit, sender_window(settings.credit_window_bytes));
  if (hello.parts > 1) bind_part(session, session.lanes.front(), hello.part);
  peer_session[peer] = id;

  // From an earlier life of the syncer; what the recovered weights contain comes with the anchors, but a contribution
  // from before what the learner knows to be merged is a repetition in any case.
  for (FragmentId p = 0; p < reported; ++p) {
    if (owns(p)) account.merged_to[p] = std::max(account.merged_to[p], hello.merged_to[p]);
  }

  Welcome welcome;
  welcome.lane_token = session.lane_token;
  welcome.layout = *layout;
  welcome.layout.tensors.resize(fits.tensors);
  welcome.plan = first_of(plan, account.fragments);
  for (const Extent& extent : extents) {
    if (extent.tensors < fits.tensors) welcome.grown_from.push_back(static_cast<std::uint32_t>(extent.tensors));
  }
  welcome.settings = settings.to_map();
  for (FragmentId p = 0; p < account.fragments; ++p) {
    welcome.versions.push_back(slots[p].state ? slots[p].state->version : Version{});
    welcome.merged_to.push_back(account.merged_to[p]);
  }
  for_each_held([&](const Contribution& held) {
    if (held.incarnation == account.incarnation && session.has(held.begin.fragment)) {
      welcome.held.emplace_back(held.begin.fragment, held.begin.to);
    }
  });
  for (const auto& [other, life] : past) welcome.run_tokens += life.tokens;
  for (const auto& [other, life] : accounts) {
    welcome.run_tokens += life.tokens;
    welcome.run_clock = std::max(welcome.run_clock, life.clock);
  }
  send(peer, MessageType::kWelcome, &session, encode(welcome));
  record(nlohmann::json{{"event", "join"}, {"learner", account.learner}, {"incarnation", hex(account.incarnation)},
                        {"host", account.host}, {"pid", account.pid}, {"epoch", epoch}});
  log(LogLevel::kInfo, fmt::format("learner '{}' joined ({}, pid {})", account.learner, account.host, account.pid));
  say_fit(account.learner, fits);
  maybe_recover(session);
}

void SyncerCore::Impl::end_session(SessionId id, const std::string& why, bool cut) {
  const auto it = sessions.find(id);
  if (it == sessions.end() || it->second.control == 0) return;
  Session& session = it->second;
  const auto end = [&](PeerId& peer) {
    if (peer == 0) return;
    peer_session.erase(peer);
    if (cut) actions.push_back(CutPeer{peer, why});
    peer = 0;
  };
  end(session.control);
  for (BulkLane& lane : session.lanes) end(lane.peer);
  session.whole = false;
  dead.push_back(id);
  for (auto& [number, round] : rounds) {
    // What was not delivered is gone with the connection; if the learner returns in time it is asked again.
    if (round.waiting.erase(id) > 0) round.pulled.erase(session.account->learner);
  }
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (slots[p].init_from == id && slots[p].init_job == 0) slots[p].init_from = 0;
  }
  record(nlohmann::json{{"event", "leave"}, {"learner", session.account->learner},
                        {"incarnation", hex(session.account->incarnation)}, {"why", why}});
  log(LogLevel::kInfo, fmt::format("learner '{}' left: {}", session.account->learner, why));
  resolve_pending(id, false);
  elect_anchors();
}

void SyncerCore::Impl::on_peer_gone(PeerId peer, const std::string& why) {
  pending_hellos.erase(peer);
  if (Session* session = session_of(peer)) end_session(session->id, "connection lost: " + why, true);
}

void SyncerCore::Impl::on_heartbeat(Session& session, const Heartbeat& heartbeat) {
  session.account->discarded = heartbeat.discarded;
  session.lr = heartbeat.lr;
  check_lr(session);
  if (heartbeat.probe) send(session.control, MessageType::kHeartbeat, &session, encode(Heartbeat{}));
}

// A learner whose learning rate stays far from all others' follows another schedule: one that was restarted, mostly.
void SyncerCore::Impl::check_lr(Session& session) {
  constexpr double kFactor = 4.0;
  constexpr unsigned kSayAt = 10;  // heartbeats in a row: during a warm-up learners that started together differ briefly
  double nearest = 0.0, apart = kNever;
  for (const auto& [id, other] : sessions) {
    if (other.control == 0 || &other == &session || other.lr <= 0.0 || session.lr <= 0.0) continue;
    const double ratio = std::max(other.lr / session.lr, session.lr / other.lr);
    if (ratio < apart) apart = ratio, nearest = other.lr;
  }
  session.lr_apart = nearest > 0.0 && apart > kFactor ? session.lr_apart + 1 : 0;
  if (session.lr_apart != kSayAt) return;
  log(LogLevel::kWarning,
      fmt::format("learner '{}' trains with learning rate {:.3g}, the others with {:.3g} at the nearest: does it follow "
                  "another schedule? The run is at clock {}; a learner's stats() have run_clock and run_tokens to place a "
                  "schedule by", session.account->learner, session.lr, nearest, session.clock));
}

void SyncerCore::Impl::on_step(Session& session, const Step& step) {
  if (step.steps > session.steps) {
    const auto made = static_cast<double>(step.steps - session.steps);
    const Seconds took = now - session.last_step;
    if (session.steps > 0 && took > 0.0) {
      session.step_s.add(took / made);
      if (step.tokens >= session.tokens) {
        session.tokens_per_s.add(static_cast<double>(step.tokens - session.tokens) / took);
      }
    }
    session.last_step = now;
  }
  session.steps = std::max(session.steps, step.steps);
  session.tokens = std::max(session.tokens, step.tokens);
  session.clock = std::max(session.clock, step.clock);
  Account& account = *session.account;
  account.steps = session.steps;
  account.tokens = session.tokens;
  account.clock = session.clock;
  for (const auto& [fragment, version] : step.adopted) {
    if (!session.has(fragment)) return violation(session, fmt::format("STEP adopts fragment {}", fragment));
    if (owns(fragment)) session.adopted[fragment] = std::max(session.adopted[fragment], version);
  }
  account.adopted = session.adopted;
  for (const auto& [fragment, version] : step.adopted) {
    if (owns(fragment)) send_held_back(session, fragment);
  }
}

bool SyncerCore::Impl::stalled(const Session& session) const {
  return now >= session.last_step + stall_after_s(session.step_s.value_or(0.0));
}

}  // namespace diloco
