// Three learners add the same tensors in any order at any time, connections are cut, the syncer is killed and comes back
// without state: nobody is thrown out or holds for ever, everything the run began with is merged, and the account adds up.
#include <algorithm>
#include <random>

#include "core/shard_harness.h"

namespace diloco::test {
namespace {

class RandomGrowth : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomGrowth, KeepsTheInvariants) {
  std::mt19937_64 random(GetParam());
  const auto pick = [&](std::uint64_t n) { return random() % n; };
  Settings settings = short_run();
  settings.sync_every = 8;
  settings.num_fragments = 2;
  settings.overlap_steps = 1;
  settings.min_quorum = 2;
  settings.heartbeat_timeout_s = 5.0;
  settings.heartbeat_interval_s = 0.5;
  settings.adopt = static_cast<Adopt>(pick(3));
  settings.mode = static_cast<Mode>(pick(2));
  if (settings.mode == Mode::kDecoupled && pick(3) == 0) {
    settings.trigger = Trigger::kArrival;
    settings.grace = Grace::kNone;
    settings.min_quorum = 1;
  }
  ShardHarness run(settings, 1, 3, GetParam());
  run.start();

  struct Event {
    TimePoint at;
    std::function<bool()> what;  // false: later
  };
  std::vector<Event> events;
  for (std::size_t i = 0; i < run.learners(); ++i) {
    std::vector<std::string> names = {"head", "tail"};
    if (pick(2)) std::swap(names[0], names[1]);
    const TimePoint first = 20.0 + static_cast<double>(pick(100)), second = first + static_cast<double>(1 + pick(60));
    for (const auto& [at, name] : {std::pair(first, names[0]), std::pair(second, names[1])}) {
      events.push_back({at, [&run, i, name = name] { return run.grow(i, {{name, {3}}, {name + ".bias", {2, 2}}}); }});
    }
    events.push_back({20.0 + static_cast<double>(pick(200)), [&run, i, channel = static_cast<Channel>(pick(2))] {
                        run.feed_learner(i, ChannelDown{channel, "cable", 0});
                        return true;
                      }});
  }
  for (std::uint64_t n = pick(3); n > 0; --n) {
    events.push_back({40.0 + static_cast<double>(pick(160)), [&run] {
                        run.kill_shard(0);
                        run.start_shard(0);
                        return true;
                      }});
  }
  for (TimePoint t = 20.0; t < 420.0; t += 0.37) {
    run.run_until(t);
    std::erase_if(events, [t](const Event& event) { return event.at < t && event.what(); });
  }
  EXPECT_TRUE(events.empty());
  EXPECT_TRUE(run.ends().empty()) << run.ends().front();
  Plan longest;
  for (std::size_t i = 0; i < run.learners(); ++i) {
    const LearnerStats stats = run.learner(i).stats();
    std::uint64_t sum = stats.tokens_merged + stats.tokens_outstanding + stats.tokens_absent;
    for (const auto& [reason, tokens] : stats.discarded) sum += tokens;
    EXPECT_EQ(sum, stats.tokens * stats.versions.size()) << "learner " << i;
    EXPECT_GE(stats.steps, 200u) << "learner " << i << " holds for " << run.learner(i).holding_for();
    for (FragmentId p = 0; p < 2; ++p) {
      EXPECT_GT(run.merged_since(380.0, p, "learner-" + std::to_string(i)), 0u) << "learner " << i << " fragment " << p;
    }
    if (run.learner(i).plan()->size() > longest.size()) longest = *run.learner(i).plan();
  }
  EXPECT_GT(longest.size(), 2u);
  run.expect_sound(longest);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomGrowth, ::testing::Range<std::uint64_t>(1, 61));

}  // namespace
}  // namespace diloco::test
