// Where the first weights come from: the learners' anchors. A fresh run takes them from its first learner; a syncer
// that lost its state takes each fragment from whoever adopted the newest version of it.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

// Longer than a learner's longest back-off: those that trained on while the syncer was away are all here by then.
constexpr Seconds kGatherS = 3.0;

// A learner that reports versions of an earlier epoch: the state was lost, so give the others a moment to report
// theirs before electing. Weights taken from a fresh learner meanwhile give way as long as no outer step has been made
// on them; weights recovered from an older version do not, since others have settled their accounts by them.
void SyncerCore::Impl::maybe_recover(Session& session) {
  bool has_versions = false;
  for (FragmentId p = 0; p < slots.size(); ++p) {
    const Version reported = session.adopted[p];
    if (reported.none() || reported.epoch == epoch) continue;
    has_versions = true;
    FragmentSlot& slot = slots[p];
    if (!slot.state || reported <= slot.origin) continue;
    if (slot.merged_here || slot.open_round != 0 || !slot.origin.none()) {
      log(LogLevel::kWarning,
          fmt::format("fragment {}: learner '{}' holds the later version {}, but this syncer has already gone on from "
                      "{}; that progress is lost", p, session.account->learner, to_string(reported),
                      to_string(slot.origin)));
      continue;
    }
    if (slot.init_from == 0) {
      slot.gave_way = slot.state->version;
      slot.state = nullptr;  // elect again; this learner now has the newest
      for (auto& [id, other] : sessions) {
        // Of an island some ranks may have all of it: it is finished there, or they would never adopt the same.
        if (!other.island()) other.lanes.front().downlink.drop(p);
      }
      for (auto& [incarnation, account] : accounts) refuse_held(account, p, "the weights it started from gave way");
    }
  }
  bool missing = false;
  for (FragmentId p = 0; p < slots.size(); ++p) {
    missing = missing || (owns(p) && !slots[p].state && slots[p].init_from == 0);
  }
  if (has_versions && missing && !elect_at) {
    elect_at = now + kGatherS;
  }
}

// What this syncer gave out in its own epoch is its origin again, not something newer.
Version SyncerCore::Impl::before_this_life(FragmentId p, Version held) const {
  return held.epoch == epoch ? slots[p].origin : held;
}

void SyncerCore::Impl::elect_anchors() {
  if (elect_at && now < *elect_at) return;
  elect_at.reset();
  for (FragmentId p = 0; p < slots.size(); ++p) {
    FragmentSlot& slot = slots[p];
    if (!owns(p) || slot.state || slot.init_from != 0 || slot.init_job != 0) continue;
    const auto holds = [&](const Session& session) { return before_this_life(p, session.adopted[p]); };
    Session* best = nullptr;
    for (auto& [id, session] : sessions) {
      if (session.control == 0 || !session.whole || !session.has(p)) continue;
      if (!best || holds(session) > holds(*best)) best = &session;
    }
    if (!best) continue;
    slot.init_from = best->id;
    Pull pull;
    pull.kind = PayloadKind::kAnchor;
    pull.fragment = p;
    send(best->control, MessageType::kPull, best, encode(pull), p, best->uplink_credit().grant_now());
  }
}

void SyncerCore::Impl::on_anchor(Session& session, const Begin& begin, BufferPtr bytes) {
  FragmentSlot& slot = slots[begin.fragment];
  if (slot.init_from != session.id || slot.init_job != 0) return;  // elected somebody else meanwhile
  if (const std::size_t all = incarnations_with(begin.merged); all > kMaxIncarnations) {
    return violation(session, fmt::format("with the merged table of its anchor of fragment {} the run has {} "
                                          "incarnations, at most {} are allowed", begin.fragment, all,
                                          kMaxIncarnations));
  }
  slot.init_begin = begin;
  slot.init_learner = session.account->learner;
  slot.init_job = next_job++;
  jobs[slot.init_job] = {begin.fragment, 0, {}};
  InitJob job;
  job.in = slot.anchor;
  job.out = slot.image_layout;
  job.outer = outer_options(settings);
  job.payload = std::move(bytes);
  // Other weights never go by a version that somebody has adopted already.
  job.version = {epoch, std::max(begin.base.n, slot.gave_way.none() ? 0 : slot.gave_way.n + 1)};
  job.chunk_bytes = settings.chunk_bytes;
  actions.push_back(RunInit{slot.init_job, std::move(job)});
}

void SyncerCore::Impl::on_init_done(const InitDone& done) {
  const auto it = jobs.find(done.job);
  if (it == jobs.end()) return;
  const FragmentId p = it->second.fragment;
  jobs.erase(it);
  FragmentSlot& slot = slots[p];
  const SessionId from = std::exchange(slot.init_from, 0);
  slot.init_job = 0;
  const Begin begin = *std::exchange(slot.init_begin, std::nullopt);
  if (!done.result.finite) {
    log(LogLevel::kError, fmt::format("fragment {}: the weights of learner '{}' are not finite; it is ejected", p,
                                      slot.init_learner));
    if (const auto at = sessions.find(from); at != sessions.end() && at->second.control != 0) {
      Account& account = *at->second.account;
      bury(account, "its initial weights are not finite (NaN or Inf)");
      send(at->second.control, MessageType::kReject, &at->second, encode(Reject{"ejected", account.tombstone}));
      end_session(from, account.tombstone, true);
    }
    return elect_anchors();
  }
  const Version base = before_this_life(p, begin.base);
  for (const auto& [id, session] : sessions) {
    const Version reported = session.adopted[p];
    if (session.control == 0 || reported.epoch == epoch || reported <= base) continue;
    return elect_anchors();  // somebody newer came while these weights were on their way; nobody has seen them
  }
  auto state = std::make_shared<FragmentState>(*done.result.state);
  state->version.epoch = epoch;
  slot.state = std::move(state);
  slot.image = done.result.image;
  slot.origin = base;
  slot.clock = std::max(slot.clock, begin.clock);
  slot.due = std::max(slot.due, begin.clock > 0 ? next_due_clock(p, begin.clock) : Clock{0});
  for (const auto& [incarnation, to] : begin.merged) {
    // The bytes contain these intervals; nothing before `to` may be merged again, nothing after it has been.
    settle(incarnation, p, to);
  }
  const bool recovered = !base.none();
  if (recovered) {
    // Merges of later versions, as far as the log shows any, went down with the old state.
    record(nlohmann::json{{"event", "recover"}, {"fragment", p}, {"from_version", to_json(base)},
                          {"version", to_json(slot.state->version)}, {"from", slot.init_learner}});
  }
  record(nlohmann::json{{"event", "init"}, {"fragment", p}, {"version", to_json(slot.state->version)},
                        {"from", recovered ? "recovered" : slot.init_learner}});
  publish(p, 0, slot.clock);
  if (fragments_without_weights() > 0) return;
  log(LogLevel::kInfo, recovered ? "the global weights are recovered from the learners' anchors"
                                 : "the global weights are initialised from learner '" + slot.init_learner + "'");
}

}  // namespace diloco
