// Joining: those who die of it block nobody, a slow download ends and is made once, and no order of fragments sticks.
#include <random>

#include <nlohmann/json.hpp>

#include "sim/bare_syncer.h"

namespace diloco::sim {
namespace {

using nlohmann::json;

std::size_t count_lines(const Cluster& cluster, const std::string& words) {
  std::size_t count = 0;
  for (const auto& line : cluster.log_lines()) count += line.find(words) != std::string::npos;
  return count;
}

// One alone, killed while it waits for a quorum; then a hundred that die at any moment of joining, some without a sound;
// then two that stay.
TEST(Joins, AHundredThatCrashBlockNoQuorum) {
  constexpr std::size_t kCrashes = 100;
  std::mt19937_64 random(11);
  auto options = cluster_of(std::vector<Seconds>(kCrashes + 3, 1.0));
  options.settings.min_quorum = 2;
  for (std::size_t i = 1; i <= kCrashes; ++i) options.learners[i].start_s = 30.0 + 0.25 * static_cast<double>(i);
  for (const std::size_t i : {kCrashes + 1, kCrashes + 2}) options.learners[i].start_s = 60.0;
  Cluster cluster(options);
  cluster.run_until(20.0);
  const auto waiting = [&] { return status(cluster)["waiting"].get<std::string>(); };
  EXPECT_NE(waiting().find("1 of 2 learners are here (min_quorum)"), std::string::npos) << waiting();
  cluster.kill_learner(0);
  cluster.run_until(25.0);
  for (std::size_t i = 1; i <= kCrashes; ++i) {
    // HELLO, WELCOME, LANE and the first weights take some 10 ms each; a step of work comes after a second.
    const TimePoint at = options.learners[i].start_s + static_cast<double>(random() % 1500) / 1000.0;
    const auto end = [&cluster, i, silently = random() % 3 == 0] {
      silently ? cluster.freeze_learner(i, true) : cluster.kill_learner(i);
    };
    cluster.at(at, end);
  }
  cluster.run_until(120.0);
  const json status = json::parse(cluster.syncer()->status_json(cluster.now()));
  std::size_t here = 0;
  for (const auto& one : status["learners"]) here += one["state"] != "gone";
  EXPECT_EQ(here, 2u);
  EXPECT_EQ(waiting(), "");
  EXPECT_EQ(count_lines(cluster, "' joined ("), count_lines(cluster, "' left: ") + 2);
  EXPECT_GT(count_lines(cluster, "' left: silent for"), 10u);
  cluster.run_until(240.0);
  std::size_t merges = 0;
  for (const auto& merge : cluster.merges()) {
    if (merge.at < 120.0) continue;
    ++merges;
    EXPECT_EQ(merge.members.size(), 2u);
    for (const auto& member : merge.members) {
      EXPECT_TRUE(member.learner == "learner-101" || member.learner == "learner-102") << member.learner;
    }
  }
  EXPECT_GE(merges, 50u);  // 6 fragments per 12 s
  expect_sound(cluster);
}

// Three windows long, while the others go on: each fragment comes once before the learner has all, and work follows.
TEST(Joins, ADownloadOfThreeWindowsEndsAndIsMadeOnce) {
  auto options = cluster_of({1.0, 1.0, 1.0});
  options.layout = small_layout(3, 100, 100);
  options.settings.chunk_bytes = 4096;
  options.settings.credit_window_bytes = 16384;
  const Plan plan = make_plan(options.layout, options.settings.fragmenter, options.settings.num_fragments);
  std::uint64_t bytes = 0;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    bytes += payload_layout(options.layout, plan, p, PayloadKind::kImage, options.settings).bytes;
  }
  constexpr Seconds kThreeWindows = 36.0;
  options.learners[2].start_s = 100.0;
  options.learners[2].link = Link{0.01, 0.0, 0.0, static_cast<double>(bytes) / kThreeWindows};
  Cluster cluster(options);
  cluster.run_until(100.5);
  const auto has_all = [&] {
    const auto versions = cluster.learner(2)->stats().versions;
    return versions.size() == plan.size() &&
           std::none_of(versions.begin(), versions.end(), [](const Version& v) { return v.none(); });
  };
  TimePoint t = 100.5;
  while (!has_all() && t < 300.0) cluster.run_until(t += 0.5);
  EXPECT_GT(t, 100.0 + 2.5 * 12.0);
  EXPECT_LT(t, 100.0 + 1.2 * kThreeWindows);
  EXPECT_LE(cluster.learner(2)->stats().adoptions, plan.size() + 1);
  const std::size_t others = cluster.merges().size();
  EXPECT_GT(merges_with(cluster, "learner-0", 0, 100.0), 2u);  // nobody has waited for it
  const auto versions = cluster.learner(2)->stats().versions;

  // A connection that breaks now does not begin it again.
  const auto adoptions = cluster.learner(2)->stats().adoptions;
  cluster.cut_connections(2);
  cluster.run_until(t + kThreeWindows / 2);
  EXPECT_LE(cluster.learner(2)->stats().adoptions, adoptions + plan.size() / 2 + 1);
  cluster.run_until(t + 200.0);
  EXPECT_GT(cluster.merges().size(), others + 60);
  for (FragmentId p = 0; p < plan.size(); ++p) {
    EXPECT_GT(cluster.learner(2)->stats().versions[p], versions[p]) << p;
    EXPECT_GE(merges_with(cluster, "learner-2", p, t), 2u) << p;
  }
  expect_sound(cluster);
}

// The WELCOME alone takes longer than heartbeat_timeout_s on its link, and every answer 3 s: it is given longer each time,
// as the learner itself waits longer each time, and is in at the third attempt. Then silence counts as for anybody else.
TEST(Joins, ALinkOnWhichTheWelcomeTakesLongIsGivenLonger) {
  auto options = cluster_of({1.0, 1.0});
  options.learners[1].start_s = 30.0;
  options.learners[1].link = Link{1.5, 0.0, 2000.0, 300.0};
  Cluster cluster(options);
  cluster.run_until(150.0);
  EXPECT_EQ(cluster.learner(1)->stats().state, "training");
  EXPECT_GT(count_lines(cluster, "learner 'learner-1' left: "), 0u);  // or this shows nothing
  EXPECT_LE(count_lines(cluster, "learner 'learner-1' joined ("), 6u);
  cluster.run_until(500.0);
  EXPECT_LE(count_lines(cluster, "learner 'learner-1' joined ("), 6u);
  EXPECT_GE(merges_with(cluster, "learner-1", 0, 150.0), 2u);
  cluster.freeze_learner(1, true);
  cluster.run_until(500.0 + options.settings.heartbeat_timeout_s + 3.1);
  const json status = json::parse(cluster.syncer()->status_json(cluster.now()));
  for (const auto& one : status["learners"]) EXPECT_EQ(one["state"], one["id"] == "learner-1" ? "gone" : "live");
  expect_sound(cluster);
}

// What a returning learner holds it is not sent again.
struct Returning : BareSyncer {};

TEST_F(Returning, IsSentTheNewerFragmentsOnly) {
  make();
  const SessionId holder = join(10, 1, 1 << 20, "holder");
  upload(11, 1, holder, 0, 1, {});
  upload(11, 1, holder, 1, 2, {});
  ASSERT_TRUE(core->fragment(0) && core->fragment(1));
  const Version v0 = core->fragment(0)->version, v1 = core->fragment(1)->version;
  ASSERT_NE(join(20, 2, 1 << 20, "returning"), 0u);
  EXPECT_EQ(count(21, MessageType::kBegin), 2u);
  ASSERT_NE(join(30, 2, 1 << 20, "returning", {v0, v1}), 0u);  // the same life, on new connections
  EXPECT_EQ(count(31, MessageType::kBegin), 0u);
  ASSERT_NE(join(40, 2, 1 << 20, "returning", {v0, Version{}}), 0u);
  ASSERT_EQ(count(41, MessageType::kBegin), 1u);
  EXPECT_EQ(last(41, MessageType::kBegin)->header.fragment, 1u);
}

// Delays of any size and order, narrow links, joins at any time: every fragment is merged of everybody, in both modes.
class RandomDelays : public ::testing::TestWithParam<int> {};

TEST_P(RandomDelays, NoOrderOfFragmentsSticks) {
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random() % 10000) / 10000;
  };
  for (const Mode mode : {Mode::kDecoupled, Mode::kLockstep}) {
    auto options = cluster_of({1.0, 1.0, 1.0, 1.0}, 12, 1 + random() % 6);
    options.seed = random();
    options.settings.mode = mode;
    options.settings.min_quorum = 1 + random() % 3;
    options.settings.chunk_bytes = 64;
    options.settings.credit_window_bytes = 64 << (random() % 6);
    for (auto& learner : options.learners) {
      learner.start_s = uniform(0.0, 60.0);
      learner.step_s = uniform(0.3, 3.0);
      learner.link = Link{uniform(0.001, 1.5), uniform(0.0, 1.5), uniform(400, 4000), uniform(400, 4000)};
    }
    Cluster cluster(options);
    cluster.run_until(60.0 + 2 * cluster.patience());
    const TimePoint since = cluster.now();
    cluster.run_until(since + 2 * cluster.patience());
    const std::uint32_t fragments = cluster.syncer()->plan().size();
    for (const auto& learner : options.learners) {
      for (FragmentId p = 0; p < fragments; ++p) {
        EXPECT_GE(merges_with(cluster, learner.id, p, since), 1u)
            << learner.id << " fragment " << p << " mode " << options.settings.get("mode") << " seed " << GetParam();
      }
    }
    expect_sound(cluster);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomDelays, ::testing::Range(1, 13));

}  // namespace
}  // namespace diloco::sim
