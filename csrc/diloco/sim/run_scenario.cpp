#include <algorithm>

#include "diloco/sim/random.h"
#include "diloco/sim/scenario.h"

namespace diloco::sim {

namespace {

// The script: every fault begins, and most end.
class Script {
 public:
  Script(const Scenario& scenario, Cluster& cluster) : scenario_(scenario), cluster_(cluster) {
    on_line_.resize(scenario.learners.size());
    for (const Fault& fault : scenario.faults) {
      cluster.at(fault.at_s, [this, &fault] { begin(fault); });
      cluster.at(fault.at_s + fault.lasts_s, [this, &fault] { end(fault); });
    }
    cluster.at(scenario.script_s, [this] { heal(); });
  }
  const std::map<std::string, std::uint64_t>& begun() const { return begun_; }

 private:
  void begin(const Fault& fault) {
    const std::size_t i = fault.learner;
    ++begun_[fault_name(fault.kind)];
    switch (fault.kind) {
      case FaultKind::kKillLearner: cluster_.kill_learner(i); break;
      case FaultKind::kFreezeLearner: if (cluster_.learner(i)) cluster_.freeze_learner(i, true); break;
      case FaultKind::kPartition: cluster_.partition_learner(i, true); break;
      case FaultKind::kCut: cluster_.cut_connections(i, fault.shard); break;
      case FaultKind::kNan:
      case FaultKind::kHuge: poison(fault); break;
      case FaultKind::kLearnerClock: cluster_.jump_clock(i, fault.amount); break;
      case FaultKind::kKillSyncer: cluster_.kill_syncer(fault.shard); break;
      case FaultKind::kFreezeSyncer: cluster_.freeze_syncer(true, fault.shard); break;
      case FaultKind::kSyncerClock: cluster_.jump_syncer_clock(fault.amount, fault.shard); break;
      default:
        on_line_[i].push_back(&fault);
        set_line(i);
    }
  }

  void end(const Fault& fault) {
    const std::size_t i = fault.learner;
    switch (fault.kind) {
      case FaultKind::kKillLearner: if (!cluster_.learner(i)) cluster_.start_learner(i); break;
      case FaultKind::kFreezeLearner: if (cluster_.learner(i)) cluster_.freeze_learner(i, false); break;
      case FaultKind::kPartition: cluster_.partition_learner(i, false); break;
      case FaultKind::kKillSyncer: if (!cluster_.syncer(fault.shard)) cluster_.start_syncer(fault.shard); break;
      case FaultKind::kFreezeSyncer: cluster_.freeze_syncer(false, fault.shard); break;
      case FaultKind::kCut:
      case FaultKind::kNan:
      case FaultKind::kHuge:
      case FaultKind::kLearnerClock:
      case FaultKind::kSyncerClock: break;
      default:
        std::erase(on_line_[i], &fault);
        set_line(i);
    }
  }

  // At every step until the fault is over.
  void poison(const Fault& fault) {
    if (fault.kind == FaultKind::kNan) cluster_.poison(fault.learner);
    else cluster_.poison_huge(fault.learner);
    const Seconds step = scenario_.learners[fault.learner].step_s;
    if (cluster_.now() + step >= fault.at_s + fault.lasts_s) return;
    cluster_.at(cluster_.now() + step, [this, &fault] { poison(fault); });
  }

  void set_line(std::size_t i) {
    LineFault line;
    for (const Fault* fault : on_line_[i]) {
      switch (fault->kind) {
        case FaultKind::kMute: line.mute = true; break;
        case FaultKind::kDeaf: line.deaf = true; break;
        case FaultKind::kSlowReader: line.read_bytes_per_s = fault->amount; break;
        case FaultKind::kLoss: line.loss = fault->amount; break;
        case FaultKind::kDuplicate: line.duplicate = fault->amount; break;
        case FaultKind::kReorder: line.reorder = fault->amount; break;
        default: break;
      }
    }
    cluster_.set_line(i, line);
  }

  void heal() {
    for (std::uint32_t shard = 0; shard < scenario_.shards; ++shard) {
      if (!cluster_.syncer(shard)) cluster_.start_syncer(shard);
    }
    for (std::size_t i = 0; i < on_line_.size(); ++i) {
      if (cluster_.rejected(i)) cluster_.kill_learner(i);
      if (!cluster_.learner(i)) cluster_.start_learner(i);
    }
  }

  const Scenario& scenario_;
  Cluster& cluster_;
  std::vector<std::vector<const Fault*>> on_line_;
  std::map<std::string, std::uint64_t> begun_;
};

}  // namespace

ClusterOptions cluster_options(const Scenario& s) {
  ClusterOptions options;
  for (const auto& [name, value] : s.settings) options.settings.set(name, value);
  options.layout = small_layout(static_cast<int>(s.matrices), s.rows, s.cols);
  options.layout.tensors.front().name = "embed.weight";  // averaged whatever `merge` says
  options.learners = s.learners;
  options.shards = s.shards;
  options.merge_s = s.merge_s;
  options.persist_s = s.persist_s;
  options.payload_memory_bytes = s.payload_memory_bytes;
  options.seed = s.seed;
  options.light = !s.values;
  options.check_values = s.values;
  options.stop_at_violation = true;
  return options;
}

Outcome run_scenario(const Scenario& scenario, std::uint64_t max_events, bool keep_lines) {
  ClusterOptions options = cluster_options(scenario);
  options.max_events = max_events;
  options.keep_lines = keep_lines;
  Cluster cluster(std::move(options));
  cluster.plant(scenario.plant);
  const Script script(scenario, cluster);
  cluster.run_until(scenario.script_s);
  const Seconds heal = scenario.heal_s >= 0.0 ? scenario.heal_s : cluster.patience() + 1.0;
  cluster.run_until(scenario.script_s + heal);
  Outcome outcome;
  outcome.violations = cluster.violations();
  outcome.events = cluster.events();
  outcome.merges = cluster.merges().size();
  outcome.hash = cluster.event_hash();
  outcome.ended_s = cluster.now();
  outcome.events_by_kind = cluster.events_by_kind();
  outcome.faults = script.begun();
  if (!keep_lines) return outcome;
  outcome.lines = cluster.log_lines();
  outcome.lines.insert(outcome.lines.end(), cluster.records().begin(), cluster.records().end());
  for (std::size_t i = 0; i < scenario.learners.size(); ++i) {
    const LearnerCore* learner = cluster.learner(i);
    if (learner && learner->holding()) outcome.lines.push_back(scenario.learners[i].id + " holds for " + learner->holding_for());
  }
  for (std::uint32_t shard = 0; shard < scenario.shards; ++shard) {
    if (const SyncerCore* syncer = cluster.syncer(shard)) outcome.lines.push_back(syncer->status_json(cluster.now()));
  }
  return outcome;
}

}  // namespace diloco::sim
