// Scenarios by seed. Each part draws from a stream of its own.
#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "diloco/sim/random.h"
#include "diloco/sim/scenario.h"

namespace diloco::sim {

namespace {

enum Part : std::uint64_t { kShape, kSettings, kLearners, kFaults, kShards, kMemory };

Stream stream(std::uint64_t seed, Part part, std::uint64_t index = 0) {
  return Stream(draw(seed, Purpose::kScenario, part, index));
}

double log_uniform(Stream& random, double low, double high) { return low * std::pow(high / low, random.uniform(0.0, 1.0)); }
// Few digits: a scenario is read by people, too.
double rounded(double value) { return std::round(value * 1e4) / 1e4; }

template <class... Choices>
std::string one_of(Stream& random, Choices... choices) {
  const std::array<const char*, sizeof...(choices)> all = {choices...};
  return all[random.below(all.size())];
}

void choose_settings(Scenario& s) {
  Stream random = stream(s.seed, kSettings);
  auto& set = s.settings;
  const std::uint32_t fragments = std::min<std::uint32_t>(1 + static_cast<std::uint32_t>(random.below(8)), 2 * s.matrices);
  // Mostly much to exchange: steps alone say little.
  const std::uint32_t every = 1 + static_cast<std::uint32_t>(random.below(random.chance(0.15) ? 24 : 2 * fragments));
  const bool lockstep = random.chance(0.08), arrival = !lockstep && random.chance(0.1);
  set["num_fragments"] = std::to_string(fragments);
  set["sync_every"] = std::to_string(every);
  set["overlap_steps"] = std::to_string(random.below(std::min(4u, every)));
  set["mode"] = lockstep ? "lockstep" : "decoupled";
  if (lockstep) set["offsets"] = one_of(random, "staggered", "streaming");
  set["fragmenter"] = one_of(random, "balanced", "layer", "strided", "tensor");
  const auto inflight = random.chance(0.6) ? 0 : 1 + random.below(3);
  if (!lockstep) set["max_inflight"] = std::to_string(inflight);
  set["min_quorum"] = std::to_string(arrival ? 1 : 1 + random.below(std::min<std::size_t>(3, s.learners.size())));
  set["grace"] = arrival ? "none" : one_of(random, "adaptive", "adaptive", "adaptive", "fixed", "none");
  if (arrival) {
    set["trigger"] = "arrival";
    set["step_counts"] = one_of(random, "fixed", "dylu");
  }
  if (set["grace"] == "adaptive") {
    set["grace_gamma"] = fmt::format("{}", rounded(random.uniform(0.1, 0.95)));
    if (random.chance(0.5)) set["grace_cap_s"] = fmt::format("{}", rounded(log_uniform(random, 0.01, 1.0)));
  } else if (set["grace"] == "fixed") {
    set["grace_s"] = fmt::format("{}", rounded(log_uniform(random, 0.01, 2.0)));
  }
  set["weights"] = one_of(random, "tokens_per_step", "tokens", "equal");
  if (random.chance(0.3)) set["staleness_discount"] = fmt::format("{}", rounded(random.uniform(0.0, 2.0)));
  set["merge"] = one_of(random, "rda", "mean");
  if (random.chance(0.15)) set["anchor"] = "syncer";
  if (random.chance(0.1)) set["max_staleness"] = std::to_string(2 + random.below(8));
  set["outer_optimizer"] = one_of(random, "sgd", "sgd", "sgd", "nesterov", "nesterov", "adam", "delayed_nesterov");
  if (set["outer_optimizer"] != "sgd") set["outer_momentum"] = fmt::format("{}", rounded(random.uniform(0.1, 0.95)));
  if (set["outer_optimizer"] == "delayed_nesterov") {
    const std::uint64_t delay = 1 + random.below(4);
    set["outer_delay"] = std::to_string(delay);
    set["outer_delay_c"] = fmt::format("{}", std::floor(random.uniform(0.0, 1.0 / static_cast<double>(delay)) * 1e4) / 1e4);
  }
  set["outer_lr"] = fmt::format("{}", rounded(random.uniform(0.3, 1.0)));
  set["adopt"] = one_of(random, "rebase", "rebase", "overwrite", "blend");
  if (set["adopt"] == "blend") set["blend_alpha"] = fmt::format("{}", rounded(random.uniform(0.0, 0.95)));
  if (random.chance(0.3)) {
    const auto carry = every + random.below(3 * every);
    if (set["adopt"] == "rebase") set["max_carry_steps"] = std::to_string(carry);
  }
  set["wire_dtype"] = one_of(random, "f32", "bf16");
  set["downlink_dtype"] = one_of(random, "f32", "bf16", "param");
  const std::uint64_t chunk = 64ull << (random.chance(0.6) ? 0 : random.below(4));
  set["chunk_bytes"] = std::to_string(chunk);
  set["credit_window_bytes"] = std::to_string(random.chance(0.3) ? 8u << 20 : chunk * (1 + random.below(4)));
  set["max_bad_payloads"] = std::to_string(1 + random.below(4));
  const double interval = rounded(random.uniform(1.5, 5.0));
  set["heartbeat_interval_s"] = fmt::format("{}", interval);
  set["heartbeat_timeout_s"] = fmt::format("{}", rounded(interval * random.uniform(2.0, 3.0)));
}

// Mostly one; never more than there are fragments.
void choose_shards(Scenario& s) {
  Stream random = stream(s.seed, kShards);
  const auto fragments = static_cast<std::uint32_t>(std::stoul(s.settings.at("num_fragments")));
  if (random.chance(0.3)) s.shards = std::min(fragments, 2 + static_cast<std::uint32_t>(random.below(2)));
}

// Mostly plenty; sometimes just enough for a quorum of the largest fragment, or of some more.
void choose_memory(Scenario& s) {
  Stream random = stream(s.seed, kMemory);
  if (!random.chance(0.15)) return;
  const ClusterOptions options = cluster_options(s);
  const Settings& settings = options.settings;
  const Plan plan = make_plan(options.layout, settings.fragmenter, settings.num_fragments, s.shards);
  std::uint64_t largest = 0;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    largest = std::max(largest, payload_layout(options.layout, plan, p, PayloadKind::kContribution, settings).bytes);
  }
  const std::uint64_t members = settings.mode == Mode::kLockstep ? s.learners.size() : settings.min_quorum;
  s.payload_memory_bytes = (members + random.below(4)) * largest;
}

void choose_learners(Scenario& s, Stream& shape) {
  const std::size_t count = 1 + shape.below(5);
  const double step = log_uniform(shape, 0.3, 2.0);
  for (std::size_t i = 0; i < count; ++i) {
    Stream random = stream(s.seed, kLearners, i);
    LearnerSpec spec;
    spec.id = fmt::format("learner-{}", i);
    if (i > 0 && random.chance(0.04)) spec.id = s.learners[random.below(i)].id;  // somebody else's name
    spec.step_s = rounded(step * log_uniform(random, 0.8, 3.0));
    spec.start_s = random.chance(0.5) ? 0.0 : rounded(random.uniform(0.0, 15.0));
    spec.tokens_per_step = 1 + random.below(200);
    spec.token_jitter = random.below(20);
    spec.target = static_cast<float>(rounded(random.uniform(-1.0, 1.0)));
    spec.jitter = rounded(random.uniform(0.0, 0.4));
    Link link;
    link.delay_s = rounded(log_uniform(random, 0.001, 0.5));
    link.jitter_s = random.chance(0.5) ? 0.0 : rounded(link.delay_s * random.uniform(0.0, 2.0));
    if (random.chance(0.3)) link.up_bytes_per_s = std::round(log_uniform(random, 3000.0, 50000.0));
    if (random.chance(0.3)) link.down_bytes_per_s = std::round(log_uniform(random, 3000.0, 50000.0));
    spec.link = link;
    s.learners.push_back(std::move(spec));
  }
}

Fault choose_fault(const Scenario& s, Stream random) {
  Fault fault;
  // The usual ones are tried more often.
  constexpr std::array kKinds = {
      FaultKind::kKillLearner, FaultKind::kKillLearner, FaultKind::kFreezeLearner, FaultKind::kFreezeLearner,
      FaultKind::kPartition, FaultKind::kPartition, FaultKind::kMute, FaultKind::kDeaf, FaultKind::kSlowReader,
      FaultKind::kLoss, FaultKind::kDuplicate, FaultKind::kReorder, FaultKind::kCut, FaultKind::kNan, FaultKind::kHuge,
      FaultKind::kLearnerClock, FaultKind::kKillSyncer, FaultKind::kKillSyncer, FaultKind::kFreezeSyncer,
      FaultKind::kSyncerClock};
  fault.kind = kKinds[random.below(kKinds.size())];
  fault.at_s = rounded(random.uniform(0.0, s.script_s));
  fault.learner = random.below(s.learners.size());
  fault.lasts_s = std::min(rounded(log_uniform(random, 0.5, 40.0)), s.script_s - fault.at_s);
  switch (fault.kind) {
    case FaultKind::kSlowReader: fault.amount = std::round(log_uniform(random, 50.0, 2000.0)); break;
    case FaultKind::kLoss:
    case FaultKind::kDuplicate:
    case FaultKind::kReorder: fault.amount = rounded(log_uniform(random, 0.005, 0.5)); break;
    case FaultKind::kLearnerClock:
    case FaultKind::kSyncerClock: fault.amount = rounded(log_uniform(random, 0.1, 60.0)); break;
    default: break;
  }
  const bool of_shard = fault.kind == FaultKind::kCut || fault.kind >= FaultKind::kKillSyncer;
  if (of_shard) fault.shard = static_cast<std::uint32_t>(random.below(s.shards));
  return fault;
}

}  // namespace

Scenario random_scenario(std::uint64_t seed, bool values) {
  Scenario s;
  s.seed = seed;
  s.values = values;
  Stream shape = stream(seed, kShape);
  s.matrices = 1 + static_cast<std::uint32_t>(shape.below(4));
  s.rows = values ? 1 + static_cast<std::int64_t>(shape.below(6)) : 2;
  s.cols = values ? 1 + static_cast<std::int64_t>(shape.below(8)) : 2;
  choose_learners(s, shape);
  choose_settings(s);
  choose_shards(s);
  choose_memory(s);
  s.merge_s = rounded(log_uniform(shape, 0.001, 0.3));
  s.persist_s = shape.chance(0.5) ? 0.0 : rounded(log_uniform(shape, 0.001, 0.3));
  double rate = 0.0;
  for (const auto& learner : s.learners) rate += 1.0 / learner.step_s;
  const double steps = values ? 80.0 : 100.0;  // of all learners together, while the faults last
  s.script_s = std::round(std::max(20.0, steps / rate));
  const bool quiet = shape.chance(0.15);
  const std::size_t faults = quiet ? 0 : 1 + shape.below(10);
  for (std::size_t i = 0; i < faults; ++i) s.faults.push_back(choose_fault(s, stream(seed, kFaults, i)));
  s.heal_s = -1.0;  // as long as the slowest needs
  return s;
}

}  // namespace diloco::sim
