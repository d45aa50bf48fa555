// What `diloco status` shows. docs/operations.md explains every key.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

namespace {

template <class Versions>
nlohmann::json versions_json(const Versions& versions) {
  nlohmann::json out = nlohmann::json::array();
  for (const auto& version : versions) out.push_back(to_json(version));
  return out;
}

// Tokens times fragments, but for those from before a fragment's tensors were added to the model.
std::uint64_t processed_by(const Life& life, std::uint64_t fragments) {
  const auto absent = life.discarded.find(reason_name(DiscardReason::kAbsent));
  const std::uint64_t all = life.tokens * fragments;
  return all - (absent == life.discarded.end() ? 0 : std::min(all, absent->second));
}

// A ledger over lives.
struct Sums {
  std::uint64_t lives = 0, processed = 0, merged = 0;
  std::map<std::string, std::uint64_t> discarded;
  void add(const Life& life, std::uint64_t fragments) {
    ++lives;
    processed += processed_by(life, fragments);
    merged += life.merged_tokens;
    for (const auto& [reason, tokens] : life.discarded) {
      if (reason != reason_name(DiscardReason::kAbsent)) discarded[reason] += tokens;
    }
  }
};

}  // namespace

std::string SyncerCore::Impl::waiting_text() const {
  const std::size_t live = live_sessions();
  if (!layout) return "no learner has joined yet";
  if (const auto missing = fragments_without_weights(); missing > 0) {
    return fmt::format("{} of {} fragments have no weights yet", missing, owned_fragments());
  }
  if (live < settings.min_quorum) {
    return fmt::format("{} of {} learners are here (min_quorum); no outer step until then, {}", live, settings.min_quorum,
                       settings.mode == Mode::kLockstep ? "in lockstep they wait" : "learners train on locally");
  }
  if (!clock_now()) {
    return fmt::format("fewer than {} learners (min_quorum) have made a step lately", settings.min_quorum);
  }
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (slots[p].due_since != 0.0 && now - slots[p].due_since > 1.0) {
      return fmt::format("fragment {} is due since {:.1f} s: {} round(s) open, {} of {} payload bytes held", p,
                         now - slots[p].due_since, rounds.size(), payload_bytes_held(), options.payload_memory_bytes);
    }
  }
  return {};
}

std::string SyncerCore::Impl::status_json() const {
  using nlohmann::json;
  json out;
  out["epoch"] = epoch;
  out["mode"] = settings.get("mode");
  out["quorum"] = settings.min_quorum;
  out["uptime_s"] = started < 0.0 ? 0.0 : now - started;

  std::map<Incarnation, const Session*> live;
  for (const auto& [id, session] : sessions) {
    if (session.control != 0) live[session.account->incarnation] = &session;
  }
  Sums all;
  std::map<std::string, Sums> by_learner;
  const auto count = [&](const Life& life) {
    all.add(life, owned_fragments(life.fragments));
    by_learner[life.learner].add(life, owned_fragments(life.fragments));
  };
  for (const auto& [incarnation, life] : past) count(life);
  std::uint64_t in_flight = 0;
  for (const auto& [incarnation, account] : accounts) {
    count(account);
    for (const auto& held : account.mailbox) in_flight += held ? held->begin.to - held->begin.from : 0;
  }
  json learners = json::array();
  for (const auto& [incarnation, account] : accounts) {
    if (superseded.contains(incarnation)) continue;
    const auto it = live.find(incarnation);
    const Session* session = it == live.end() ? nullptr : it->second;
    const std::uint64_t tokens = processed_by(account, owned_fragments(account.fragments));
    const Sums& sums = by_learner.at(account.learner);
    learners.push_back(
        {{"id", account.learner}, {"incarnation", hex(incarnation)}, {"host", account.host}, {"pid", account.pid},
         {"state", session ? (stalled(*session) ? "stalled" : "live") : "gone"},
         {"step", account.steps}, {"clock", account.clock}, {"tokens", account.tokens},
         {"tokens_per_s", session ? session->tokens_per_s.value_or(0.0) : 0.0},
         {"step_s", session ? session->step_s.value_or(0.0) : 0.0},
         {"last_contact_s", now - account.last_contact}, {"versions", versions_json(account.adopted)},
         {"merged_fraction",
          tokens > 0 ? static_cast<double>(account.merged_tokens) / static_cast<double>(tokens) : 0.0},
         {"bad_payloads", account.bad_payloads}, {"lives", sums.lives}, {"ranks", session ? session->ranks : 0},
         {"parts", session ? session->lanes.size() : 0}, {"parts_connected", session ? session->lanes_bound() : 0},
         {"ledger", {{"processed", sums.processed}, {"merged", sums.merged}, {"discarded", sums.discarded}}}});
  }
  for (const auto& [number, round] : rounds) {
    for (const auto& member : round.members) in_flight += member.begin.to - member.begin.from;
  }
  out["learners"] = learners;

  json fragments = json::array();
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (!owns(p)) continue;
    fragments.push_back({{"index", p}, {"version", to_json(slots[p].state ? slots[p].state->version : Version{})},
                         {"numel", plan.fragments[p].numel}, {"tensors", plan.fragments[p].tensors.size()},
                         {"due", slots[p].due}, {"shard", plan.fragments[p].shard}});
  }
  out["fragments"] = fragments;

  json open = json::array();
  for (const auto& [number, round] : rounds) {
    json waiting_for = json::array();
    for (const auto& [id, session] : sessions) {
      if (session.control != 0 && round.waiting.contains(id)) waiting_for.push_back(session.account->learner);
    }
    const std::size_t complete =
        round.phase == RoundPhase::kCollecting ? view_of(round).complete : round.members.size();
    const char* phase = round.phase == RoundPhase::kMerging      ? "merging"
                        : round.phase == RoundPhase::kPersisting ? "persisting"
                        : complete < round.quorum                ? "waits for its quorum"
                                                                 : "in its grace window";
    open.push_back({{"round", round.id}, {"fragment", round.fragment}, {"clock", round.clock},
                    {"age_s", now - round.opened}, {"complete", complete}, {"pulled", round.pulled},
                    {"waiting_for", waiting_for},
                    {"text", fmt::format("round {} of fragment {} {}: {} of {} contributions (min_quorum {})",
                                         round.id, round.fragment, phase, complete, round.pulled.size(),
                                         round.quorum)}});
  }
  out["rounds"] = open;
  out["waiting"] = waiting_text();
  // Learners report what they discarded with their heartbeats, so the last term lags by up to a heartbeat; the exact
  // account is `diloco audit`.
  std::uint64_t accounted = all.merged + in_flight;
  for (const auto& [reason, tokens] : all.discarded) accounted += tokens;
  out["ledger"] = {{"processed", all.processed}, {"merged", all.merged}, {"in_flight", in_flight},
                   {"discarded", all.discarded},
                   {"outstanding", all.processed > accounted ? all.processed - accounted : 0}};
  out["rounds_merged"] = rounds_merged;
  out["memory"] = {{"payload_bytes", payload_bytes_held()}, {"payload_limit_bytes", options.payload_memory_bytes},
                   {"retained_bytes", retained_bytes()}};
  const Seconds step = xi_step();
  out["timings"] = {{"step_s", step}, {"quorum_s", xi_quorum.value_or(0.0)}, {"sync_s", xi_sync.value_or(0.0)},
                    {"round_s", round_s.value_or(0.0)}};
  out["effective"] = {{"sync_every", due_gap.value_or(settings.sync_every)},
                      {"overlap_steps", step > 0.0 ? round_s.value_or(0.0) / step : 0.0}};
  out["settings"] = settings.to_map();
  return out.dump();
}

}  // namespace diloco
