// The syncer node: the core, what it asks for, and its event log.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "diloco/sim/cluster_impl.h"

namespace diloco::sim {

constexpr Seconds kScreenS = 1e-4;

void Cluster::Impl::start_syncer() {
  SyncerCoreOptions core;
  core.settings = options.settings;
  core.payload_memory_bytes = options.payload_memory_bytes;
  core.epoch_floor = epoch_floor;
  ++syncer_node.life;
  core.random = Stream(draw(options.seed, Purpose::kSyncerCore, syncer_node.life));
  syncer_node.core = std::make_unique<SyncerCore>(std::move(core));
  syncer_node.alarm = {};
  syncer_node.clock_ahead = 0.0;
  syncer_node.stopped = syncer_node.frozen = false;
  syncer_node.held.clear();
  invariants.syncer_starts();
  invariants.set_well(Invariants::kSyncer, true);
  feed_syncer(Tick{});
}

void Cluster::Impl::kill_syncer() {
  syncer_node.core.reset();
  syncer_node.held.clear();
  invariants.syncer_dies();
  invariants.set_well(Invariants::kSyncer, false);
  for (PeerId peer = 1; peer <= connections.size(); ++peer) close_connection(peer, false, true);
}

// The time a process did not run is left out of its clock (base/core_clock.h).
void Cluster::Impl::freeze_syncer(bool frozen) {
  if (frozen == syncer_node.frozen || !syncer_node.core) return;
  syncer_node.frozen = frozen;
  invariants.set_well(Invariants::kSyncer, !frozen);
  if (frozen) {
    syncer_node.frozen_at = now;
    return;
  }
  syncer_node.clock_ahead -= now - syncer_node.frozen_at;
  invariants.syncer_disturbed();
  release(syncer_node.held);
  call_at(now, [this, life = syncer_node.life] {
    if (life == syncer_node.life) feed_syncer(Tick{});
  });
}

void Cluster::Impl::feed_syncer(const SyncerEvent& event) {
  if (!syncer_node.core) return;
  const std::uint64_t life = syncer_node.life;
  invariants.before_actions(syncer_now());
  auto actions = syncer_node.core->handle(event, syncer_now());
  for (auto& action : actions) run(action);
  if (!syncer_node.core || life != syncer_node.life) return;
  peak_payload = std::max(peak_payload, syncer_node.core->payload_bytes_held());
  invariants.after_syncer(*syncer_node.core);
  set_alarm(syncer_node.alarm, seen_from_outside(syncer_node.core->next_deadline(), syncer_node.clock_ahead),
            EventKind::kSyncerTick, 0, syncer_node.life);
}

void Cluster::Impl::run_later(Seconds delay, EventKind kind, decltype(Event::work) work) {
  push(now + delay, {kind, 0, syncer_node.life, 0, Channel::kControl, {}, std::move(work)});
}

void Cluster::Impl::run(SyncerAction& action) {
  if (auto* send = std::get_if<SendTo>(&action)) {
    invariants.from_syncer(send->peer, send->frame);
    send_down(send->peer, std::move(send->frame));
  } else if (auto* cut = std::get_if<CutPeer>(&action)) {
    close_connection(cut->peer, false, true, false);
  } else if (auto* screen_job = std::get_if<RunScreen>(&action)) {
    invariants.runs_screen(*screen_job);
    run_later(kScreenS, EventKind::kScreen,
              ScreenDone{screen_job->job, screen(screen_job->layout, screen_job->payload->data())});
  } else if (auto* init = std::get_if<RunInit>(&action)) {
    InitDone done{init->job, run_init(init->init)};
    invariants.runs_init(done.result);
    run_later(kScreenS, EventKind::kInit, std::move(done));
  } else if (auto* merge = std::get_if<RunMerge>(&action)) {
    MergeDone done{merge->job, run_merge(merge->merge)};
    invariants.runs_merge(*merge, done.result, *syncer_node.core);
    run_later(options.merge_s, EventKind::kMerge, std::move(done));
  } else if (auto* persist = std::get_if<Persist>(&action)) {
    invariants.persists(*persist);
    run_later(options.persist_s, EventKind::kPersist, Persisted{persist->fragment, persist->state->version});
  } else if (auto* text = std::get_if<Log>(&action)) {
    if (options.keep_lines) logs.push_back(std::move(text->text));
  } else if (auto* record = std::get_if<Record>(&action)) {
    on_record(record->line);
    if (plant == Plant::kForgedMerge && !planted && record->line.find("\"event\":\"merge\"") != std::string::npos) {
      planted = true;
      on_record(record->line);
    }
  } else if (std::holds_alternative<Stopped>(action)) {
    syncer_node.stopped = true;
    invariants.set_well(Invariants::kSyncer, false);
  }
}

void Cluster::Impl::on_record(const std::string& line) {
  if (options.keep_lines) records.push_back(line);
  const auto json = nlohmann::json::parse(line);
  const std::string& event = json["event"].get_ref<const std::string&>();
  if (event == "epoch") {
    epoch_floor = json["epoch"];
  } else if (event == "merge") {
    keep_merge(json);
    return;
  } else if (event == "init" && json["from"] != "recovered") {
    // Weights from a fresh learner: earlier merges are void, unless a recovery in the same life brings them back.
    void_merges(json["fragment"], {}, 0);
  } else if (event == "recover") {
    void_merges(json["fragment"], {json["from_version"][0], json["from_version"][1]}, syncer_node.life);
  }
  invariants.record(json, nullptr);
}

void Cluster::Impl::keep_merge(const nlohmann::json& json) {
  MergeRecord merge;
  merge.fragment = json["fragment"];
  merge.version = {json["version"][0], json["version"][1]};
  merge.at = now;
  merge.syncer_life = syncer_node.life;
  merge.reason = json["reason"];
  for (const auto& member : json["members"]) {
    merge.members.push_back({member["learner"],
                             std::stoull(member["incarnation"].get_ref<const std::string&>(), nullptr, 16),
                             member["from"], member["to"], member["weight"]});
  }
  merges.push_back(std::move(merge));
  invariants.record(json, &merges.back());
}

// Merges of a fragment after this version went down with an earlier state; what was void in `restore_life` comes back
// first.
void Cluster::Impl::void_merges(FragmentId fragment, Version after, std::uint64_t restore_life) {
  for (std::size_t index = 0; index < merges.size(); ++index) {
    MergeRecord& merge = merges[index];
    if (merge.fragment != fragment) continue;
    if (restore_life != 0 && merge.lost_in_life == restore_life) {
      merge.lost_in_life = 0;
      invariants.merge_restored(index, merge);
    }
    if (merge.version > after && merge.lost_in_life == 0) {
      merge.lost_in_life = syncer_node.life;
      invariants.merge_voided(index, merge);
    }
  }
}

}  // namespace diloco::sim
