// Shards and learners killed and started in any order, by seed: what is whole goes on, nothing is merged twice.
#include <random>

#include "core/shard_harness.h"

namespace diloco::test {
namespace {

class RandomShards : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomShards, KeepTheInvariants) {
  std::mt19937_64 random(GetParam());
  const auto pick = [&](std::uint64_t n) { return random() % n; };
  Settings settings = short_run();
  settings.sync_every = static_cast<std::uint32_t>(2 + pick(10));
  settings.overlap_steps = static_cast<std::uint32_t>(pick(2));
  settings.num_fragments = static_cast<std::uint32_t>(3 + pick(4));
  settings.adopt = static_cast<Adopt>(pick(3));
  settings.chunk_bytes = 64 << pick(4);
  ShardHarness run(settings, static_cast<std::uint32_t>(1 + pick(3)), 2 + pick(2));
  run.start();
  run.run_until(15.0);
  ASSERT_NE(run.learner(0).plan(), nullptr);
  const Plan plan = *run.learner(0).plan();
  TimePoint t = 15.0;
  for (int event = 0; event < 20; ++event) {
    run.run_until(t += static_cast<double>(1 + pick(1000)) / 100.0);
    const auto s = static_cast<std::uint32_t>(pick(run.shards()));
    const std::size_t i = pick(run.learners());
    if (pick(2) == 0) run.shard_lives(s) ? run.kill_shard(s) : run.start_shard(s);
    else run.learner_lives(i) ? run.kill_learner(i) : run.start_learner(i);
  }
  for (std::uint32_t s = 0; s < run.shards(); ++s) {
    if (!run.shard_lives(s)) run.start_shard(s);
  }
  for (std::size_t i = 0; i < run.learners(); ++i) {
    if (!run.learner_lives(i)) run.start_learner(i);
  }
  run.run_until(t + 100.0);
  for (std::size_t i = 0; i < run.learners(); ++i) {
    EXPECT_EQ(run.learner(i).stats().state, "training") << i;
    for (FragmentId p = 0; p < plan.size(); ++p) {
      EXPECT_GT(run.merged_since(t + 20.0, p, "learner-" + std::to_string(i)), 0u) << "learner " << i << " fragment " << p;
    }
  }
  EXPECT_TRUE(run.ends().empty());
  run.expect_sound(plan);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomShards, ::testing::Range<std::uint64_t>(1, 61));

}  // namespace
}  // namespace diloco::test
