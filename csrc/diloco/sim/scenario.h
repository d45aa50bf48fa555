// One simulation, whole: settings, layout, learners, network, and every fault with its time. What its JSON text says is all
// there is, so a scenario that failed fails again; and as all random numbers are hashes (random.h), the rest of it goes on
// as before when a fault is taken out.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "diloco/sim/cluster.h"

namespace diloco::sim {

enum class FaultKind : std::uint8_t {
  kKillLearner,    // SIGKILL; started again after `lasts_s`
  kFreezeLearner,  // SIGSTOP for `lasts_s`
  kPartition,      // nothing passes, nobody is told, nothing is lost
  kMute,           // half-open: what the learner sends is lost
  kDeaf,           // half-open: what is sent to it is lost
  kSlowReader,     // reads `amount` bytes a second
  kLoss,           // share `amount` of its messages
  kDuplicate,
  kReorder,
  kCut,            // its connections to a shard are reset
  kNan,            // its parameters become NaN after each step, for `lasts_s`
  kHuge,           // the same with 3e38
  kLearnerClock,   // jumps forward by `amount` s
  kKillSyncer,     // these three: a shard
  kFreezeSyncer,
  kSyncerClock,
};
constexpr std::size_t kFaultKinds = 16;
const char* fault_name(FaultKind kind);

struct Fault {
  FaultKind kind = FaultKind::kKillLearner;
  TimePoint at_s = 0.0;
  std::size_t learner = 0;
  Seconds lasts_s = 0.0;
  double amount = 0.0;
  std::uint32_t shard = 0;
};

struct Scenario {
  std::uint64_t seed = 1;
  bool values = false;  // tensors move, and every merge is recomputed
  std::map<std::string, std::string> settings;  // those that differ from their defaults
  std::uint32_t matrices = 2;                   // of rows x cols, each with a bias
  std::int64_t rows = 2, cols = 2;
  std::vector<LearnerSpec> learners;
  std::uint32_t shards = 1;                     // of the syncer
  Seconds merge_s = 0.01, persist_s = 0.0;
  std::uint64_t payload_memory_bytes = 1ull << 30;
  Seconds script_s = 100.0;  // faults end then; whoever is dead or was sent away is started again
  Seconds heal_s = 0.0;      // undisturbed after that
  std::vector<Fault> faults;
  Plant plant = Plant::kNone;
};

std::string to_json(const Scenario& scenario);
// Throws ConfigError if the text is no scenario.
Scenario scenario_from_json(const std::string& text);

ClusterOptions cluster_options(const Scenario& scenario);
// Any settings, any network, any faults.
Scenario random_scenario(std::uint64_t seed, bool values);

struct Outcome {
  std::vector<Violation> violations;  // empty is good; stopped at the first event that has any
  std::uint64_t events = 0, merges = 0, hash = 0;
  TimePoint ended_s = 0.0;
  std::map<std::string, std::uint64_t> events_by_kind, faults;
  std::vector<std::string> lines;  // log and event log, if wanted
};
// `max_events`: stops there; 0 = no limit.
Outcome run_scenario(const Scenario& scenario, std::uint64_t max_events = 0, bool keep_lines = false);

// A smaller scenario that violates the same invariant first, in as few events as can be found with `max_runs` tries. The
// given one, if it violates nothing.
Scenario shrink(const Scenario& scenario, std::size_t max_runs = 600);

}  // namespace diloco::sim
