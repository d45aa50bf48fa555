// The syncer's shards: each with its core, what that asks for, and its event log.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/sim/cluster_impl.h"

namespace diloco::sim {

constexpr Seconds kScreenS = 1e-4;

void Cluster::Impl::start_syncer(std::uint32_t shard) {
  SyncerNode& node = syncers[shard];
  SyncerCoreOptions core;
  core.settings = options.settings;
  core.shard = shard;
  core.shards = options.shards;
  core.payload_memory_bytes = options.payload_memory_bytes;
  core.epoch_floor = node.epoch_floor;
  ++node.life;
  core.random = Stream(draw(options.seed, Purpose::kSyncerCore, (std::uint64_t{shard} << 32) + node.life));
  node.core = std::make_unique<SyncerCore>(std::move(core));
  node.alarm = {};
  node.clock_ahead = 0.0;
  node.stopped = node.frozen = false;
  node.held.clear();
  invariants.shard(shard).starts();
  invariants.shard(shard).set_well(true);
  feed_syncer(shard, Tick{});
}

void Cluster::Impl::kill_syncer(std::uint32_t shard) {
  syncers[shard].core.reset();
  syncers[shard].held.clear();
  invariants.shard(shard).dies();
  invariants.shard(shard).set_well(false);
  for (PeerId peer = 1; peer <= connections.size(); ++peer) {
    if (connection(peer).shard == shard) close_connection(peer, false, true);
  }
}

// The time a process did not run is left out of its clock (base/core_clock.h).
void Cluster::Impl::freeze_syncer(std::uint32_t shard, bool frozen) {
  SyncerNode& node = syncers[shard];
  if (frozen == node.frozen || !node.core) return;
  node.frozen = frozen;
  invariants.shard(shard).set_well(!frozen);
  if (frozen) {
    node.frozen_at = now;
    return;
  }
  node.clock_ahead -= now - node.frozen_at;
  invariants.shard(shard).disturbed();
  release(node.held);
  call_at(now, [this, shard, life = node.life] {
    if (life == syncers[shard].life) feed_syncer(shard, Tick{});
  });
}

void Cluster::Impl::jump_syncer_clock(std::uint32_t shard, Seconds by) {
  SyncerNode& node = syncers[shard];
  if (!node.core || node.frozen) return;
  node.clock_ahead += by;
  invariants.shard(shard).disturbed();
  invariants.shard(shard).set_well(false);
  invariants.shard(shard).set_well(!node.stopped);
  call_at(now, [this, shard] { feed_syncer(shard, Tick{}); });
}

const Plan* Cluster::Impl::plan() const {
  for (const SyncerNode& node : syncers) {
    if (node.core && node.core->plan().size() > 0) return &node.core->plan();
  }
  return nullptr;
}

void Cluster::Impl::feed_syncer(std::uint32_t shard, const SyncerEvent& event) {
  SyncerNode& node = syncers[shard];
  if (!node.core) return;
  const std::uint64_t life = node.life;
  invariants.shard(shard).before_actions(syncer_now(shard));
  auto actions = node.core->handle(event, syncer_now(shard));
  for (auto& action : actions) run(shard, action);
  if (!node.core || life != node.life) return;
  peak_payload = std::max(peak_payload, node.core->payload_bytes_held());
  invariants.shard(shard).after_syncer(*node.core);
  set_alarm(node.alarm, seen_from_outside(node.core->next_deadline(), node.clock_ahead), EventKind::kSyncerTick, 0, shard,
            node.life);
}

void Cluster::Impl::run_later(std::uint32_t shard, Seconds delay, EventKind kind, decltype(Event::work) work) {
  push(now + delay, {kind, 0, shard, syncers[shard].life, 0, Channel::kControl, {}, std::move(work)});
}

void Cluster::Impl::run(std::uint32_t shard, SyncerAction& action) {
  ShardInvariants& watch = invariants.shard(shard);
  if (auto* send = std::get_if<SendTo>(&action)) {
    watch.from_syncer(send->peer, send->frame);
    send_down(send->peer, std::move(send->frame));
  } else if (auto* cut = std::get_if<CutPeer>(&action)) {
    close_connection(cut->peer, false, true, false);
  } else if (auto* screen_job = std::get_if<RunScreen>(&action)) {
    watch.runs_screen(*screen_job);
    run_later(shard, kScreenS, EventKind::kScreen,
              ScreenDone{screen_job->job, screen(screen_job->layout, screen_job->payload->data())});
  } else if (auto* init = std::get_if<RunInit>(&action)) {
    InitDone done{init->job, run_init(init->init)};
    watch.runs_init(done.result);
    run_later(shard, kScreenS, EventKind::kInit, std::move(done));
  } else if (auto* merge = std::get_if<RunMerge>(&action)) {
    MergeDone done{merge->job, run_merge(merge->merge)};
    watch.runs_merge(*merge, done.result, *syncers[shard].core);
    run_later(shard, options.merge_s, EventKind::kMerge, std::move(done));
  } else if (auto* persist = std::get_if<Persist>(&action)) {
    watch.persists(*persist);
    run_later(shard, options.persist_s, EventKind::kPersist, Persisted{persist->fragment, persist->state->version});
  } else if (auto* text = std::get_if<Log>(&action)) {
    if (options.keep_lines) {
      logs.push_back(options.shards > 1 ? fmt::format("shard {}: {}", shard, text->text) : std::move(text->text));
    }
  } else if (auto* record = std::get_if<Record>(&action)) {
    on_record(shard, record->line);
    if (plant == Plant::kForgedMerge && !planted && record->line.find("\"event\":\"merge\"") != std::string::npos) {
      planted = true;
      on_record(shard, record->line);
    }
  } else if (std::holds_alternative<Stopped>(action)) {
    syncers[shard].stopped = true;
    watch.set_well(false);
  }
}

void Cluster::Impl::on_record(std::uint32_t shard, const std::string& line) {
  if (options.keep_lines) records.push_back(line);
  const auto json = nlohmann::json::parse(line);
  const std::string& event = json["event"].get_ref<const std::string&>();
  if (event == "epoch") {
    syncers[shard].epoch_floor = json["epoch"];
  } else if (event == "merge") {
    keep_merge(shard, json);
    return;
  } else if (event == "init" && json["from"] != "recovered") {
    // Weights from a fresh learner: earlier merges are void, unless a recovery in the same life brings them back.
    void_merges(shard, json["fragment"], {}, false);
  } else if (event == "recover") {
    void_merges(shard, json["fragment"], {json["from_version"][0], json["from_version"][1]}, true);
  }
  invariants.shard(shard).record(json, nullptr);
}

void Cluster::Impl::keep_merge(std::uint32_t shard, const nlohmann::json& json) {
  MergeRecord merge;
  merge.fragment = json["fragment"];
  merge.version = {json["version"][0], json["version"][1]};
  merge.at = now;
  merge.shard = shard;
  merge.syncer_life = syncers[shard].life;
  merge.reason = json["reason"];
  for (const auto& member : json["members"]) {
    merge.members.push_back({member["learner"],
                             std::stoull(member["incarnation"].get_ref<const std::string&>(), nullptr, 16),
                             member["from"], member["to"], member["weight"]});
  }
  merges.push_back(std::move(merge));
  invariants.shard(shard).record(json, &merges.back());
}

// Merges of a fragment after this version went down with an earlier state; with `restore` what became void in this life of
// its shard comes back first.
void Cluster::Impl::void_merges(std::uint32_t shard, FragmentId fragment, Version after, bool restore) {
  const std::uint64_t life = syncers[shard].life;
  for (std::size_t index = 0; index < merges.size(); ++index) {
    MergeRecord& merge = merges[index];
    if (merge.fragment != fragment) continue;
    if (restore && merge.lost_in_life == life) {
      merge.lost_in_life = 0;
      invariants.merge_restored(index, merge);
    }
    if (merge.version > after && merge.lost_in_life == 0) {
      merge.lost_in_life = life;
      invariants.merge_voided(index, merge);
    }
  }
}

}  // namespace diloco::sim
