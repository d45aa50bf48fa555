// Randomised schedules by seed: any order of kills, freezes, partitions and syncer restarts keeps the invariants.
#include <algorithm>
#include <iostream>
#include <random>

#include "sim/clusters.h"
#include "sized.h"

namespace diloco::sim {
namespace {

// What a failing seed looks like from inside, for whoever has to explain it.
void show(Cluster& cluster) {
  const auto& lines = cluster.log_lines();
  for (std::size_t i = lines.size() > 40 ? lines.size() - 40 : 0; i < lines.size(); ++i) std::cerr << lines[i] << "\n";
  for (const auto& violation : cluster.check()) {
    const auto id = violation.substr(0, violation.find(' '));
    const auto at = violation.find("fragment ");
    if (at != std::string::npos) std::cerr << violation << "\n" << cluster.account_text(id, std::stoul(violation.substr(at + 9)));
  }
  if (cluster.syncer()) std::cerr << cluster.syncer()->status_json(cluster.now()) << "\n";
}

void keeps_the_invariants(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint64_t n) { return random() % n; };
  auto options = cluster_of({});
  const std::size_t learners = 2 + pick(4);
  for (std::size_t i = 0; i < learners; ++i) {
    options.learners.push_back({"learner-" + std::to_string(i), 0.5 + static_cast<double>(pick(300)) / 100.0,
                                static_cast<double>(pick(10)), 1 + pick(200), 1.0f, static_cast<double>(pick(40)) / 100.0});
  }
  options.seed = seed;
  options.settings.sync_every = 1 + static_cast<std::uint32_t>(pick(24));
  options.settings.num_fragments = 1 + static_cast<std::uint32_t>(pick(6));
  options.settings.overlap_steps = static_cast<std::uint32_t>(pick(std::min(4u, options.settings.sync_every)));
  options.settings.min_quorum = 1 + static_cast<std::uint32_t>(pick(2));
  options.settings.adopt = static_cast<Adopt>(pick(3));
  options.settings.grace = static_cast<Grace>(pick(3));
  if (options.settings.grace == Grace::kFixed) options.settings.grace_s = 0.2;
  options.delay_s = static_cast<double>(1 + pick(500)) / 1000.0;
  options.bytes_per_s = pick(2) == 0 ? 0.0 : 3000.0;
  options.settings.chunk_bytes = 64 << pick(5);
  Cluster cluster(options);
  bool syncer_alive = true;
  std::vector<bool> alive(learners, true), frozen(learners), cut(learners);
  TimePoint t = 20.0;
  for (int event = 0; event < 30; ++event) {
    cluster.run_until(t += static_cast<double>(1 + pick(20)));
    const std::size_t i = pick(learners);
    switch (pick(6)) {
      case 0:
        if (alive[i]) cluster.kill_learner(i);
        else cluster.start_learner(i);
        alive[i] = !alive[i];
        frozen[i] = frozen[i] && alive[i];
        break;
      case 1:
        if (!alive[i]) break;
        cluster.freeze_learner(i, frozen[i] = !frozen[i]);
        break;
      case 2:
        cluster.partition_learner(i, cut[i] = !cut[i]);
        break;
      case 3:
        if (syncer_alive) cluster.kill_syncer();
        else cluster.start_syncer();
        syncer_alive = !syncer_alive;
        break;
      case 4:
        if (alive[i]) cluster.poison(i);
        break;
      default:
        break;
    }
    for (const auto& violation : cluster.check()) ADD_FAILURE() << "seed " << seed << " t " << t << ": " << violation;
    if (::testing::Test::HasFailure()) {
      show(cluster);
      return;
    }
  }
  // Heal everything: every live learner must be merged again in every fragment.
  if (!syncer_alive) cluster.start_syncer();
  for (std::size_t i = 0; i < learners; ++i) {
    if (cut[i]) cluster.partition_learner(i, false);
    if (frozen[i]) cluster.freeze_learner(i, false);
    if (!alive[i]) cluster.start_learner(i);
  }
  const TimePoint healed = t;
  cluster.run_until(t + 600.0);
  expect_sound(cluster);
  // Ejected for their poison, or superseded by themselves; with fewer than K left nothing can be merged.
  const auto out = [&](std::size_t i) { return cluster.learner(i)->stats().state == "rejected"; };
  std::size_t left = 0;
  for (std::size_t i = 0; i < learners; ++i) left += !out(i);
  for (std::size_t i = 0; i < learners && left >= options.settings.min_quorum; ++i) {
    if (out(i)) continue;
    for (FragmentId p = 0; p < cluster.syncer()->plan().size(); ++p) {
      EXPECT_GT(merges_with(cluster, "learner-" + std::to_string(i), p, healed), 0u)
          << "seed " << seed << ": learner " << i << " is starved on fragment " << p;
    }
  }
  if (::testing::Test::HasFailure()) show(cluster);
}

constexpr std::uint64_t kTests = 100;

// Test i of 100 runs the seeds i, i + 100, i + 200, ...
class RandomSchedule : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomSchedule, KeepsTheInvariants) {
  const auto last = kTests * static_cast<std::uint64_t>(testing::sized("seeds", 1, 20));
  for (std::uint64_t seed = GetParam(); seed <= last && !HasFailure(); seed += kTests) keeps_the_invariants(seed);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomSchedule, ::testing::Range<std::uint64_t>(1, kTests + 1));

// Each of these once counted tokens twice.
class OnceFound : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(OnceFound, KeepsTheInvariants) { keeps_the_invariants(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Seeds, OnceFound, ::testing::Values<std::uint64_t>(321, 1092));

}  // namespace
}  // namespace diloco::sim
