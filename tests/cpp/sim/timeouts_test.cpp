// Heartbeats, stall, grace: in every order that the settings allow, a learner that falls silent is waited for no longer
// than the shortest of them says, expires, and comes back.
#include <random>

#include <nlohmann/json.hpp>

#include "sim/clusters.h"

namespace diloco::sim {
namespace {

struct Times {
  Seconds interval, timeout, grace;
  Grace kind;
};

Times any_times(std::mt19937_64& random) {
  const auto pick = [&](const std::vector<double>& of) { return of[random() % of.size()]; };
  Times times;
  times.interval = pick({0.05, 0.5, 1.0, 5.0, 20.0});
  times.timeout = times.interval * pick({2.0, 3.0, 10.0});
  times.grace = pick({0.05, 0.5, 3.0, 30.0, 300.0});
  times.kind = std::vector{Grace::kAdaptive, Grace::kFixed, Grace::kNone}[random() % 3];
  return times;
}

std::string state_of(Cluster& cluster, const std::string& id) {
  const auto status = nlohmann::json::parse(cluster.syncer()->status_json(cluster.now()));
  for (const auto& one : status["learners"]) {
    if (one["id"] == id) return one["state"];
  }
  return "unknown";
}

class Silence : public ::testing::TestWithParam<int> {};

TEST_P(Silence, IsSurvivedInEveryOrderOfTheTimeouts) {
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  for (int i = 0; i < 8; ++i) {
    const Times times = any_times(random);
    auto options = cluster_of({1.0, 1.0, 1.0});
    options.seed = random();
    options.settings.min_quorum = 1 + random() % 2;
    options.settings.heartbeat_interval_s = times.interval;
    options.settings.heartbeat_timeout_s = times.timeout;
    options.settings.grace = times.kind;
    if (times.kind == Grace::kFixed) options.settings.grace_s = times.grace;
    if (times.kind == Grace::kAdaptive) options.settings.grace_cap_s = times.grace;
    ASSERT_NO_THROW(options.settings.validate());
    SCOPED_TRACE(::testing::Message() << "interval " << times.interval << " timeout " << times.timeout << " grace "
                                      << options.settings.get("grace") << " " << times.grace << " quorum "
                                      << options.settings.min_quorum);
    Cluster cluster(options);
    const TimePoint silent = 100.0 + static_cast<double>(random() % 1000) / 100;
    cluster.run_until(silent);
    const bool frozen = random() % 2 == 0;
    if (frozen) cluster.freeze_learner(2, true);
    else cluster.partition_learner(2, true);
    // Its steps fail to come: after 5 of them it counts as stalled, and no round waits for it. So that is how long the
    // others may be held up, whatever grace and heartbeat_timeout_s are.
    cluster.run_until(silent + 6.0);
    const std::size_t before = cluster.merges().size();
    cluster.run_until(silent + 66.0);
    EXPECT_GE(cluster.merges().size() - before, 25u);  // 6 fragments, once per 12 s each
    cluster.run_until(silent + std::max(67.0, times.timeout + 0.1));
    EXPECT_EQ(state_of(cluster, "learner-2"), "gone");  // expired by heartbeat, and by nothing else
    if (frozen) cluster.freeze_learner(2, false);
    else cluster.partition_learner(2, false);
    const TimePoint back = cluster.now();
    cluster.run_until(back + 3 * times.timeout + 120.0);
    EXPECT_EQ(state_of(cluster, "learner-2"), "live");
    for (FragmentId p = 0; p < 6; ++p) EXPECT_GE(merges_with(cluster, "learner-2", p, back), 1u) << p;
    expect_sound(cluster);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Silence, ::testing::Range(1, 5));

}  // namespace
}  // namespace diloco::sim
