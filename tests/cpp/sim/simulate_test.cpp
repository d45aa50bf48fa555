// Random scenarios: whatever the settings, the network and the faults, the invariants hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "diloco/base/errors.h"
#include "diloco/sim/random.h"
#include "diloco/sim/simulate.h"
#include "sized.h"

namespace diloco::sim {
namespace {

constexpr std::uint64_t kParts = 8;  // tests that ctest can run side by side, with seeds of their own
constexpr std::uint64_t kSeedsApart = 1'000'000;
// Sanitizers are slower by this much at least; one thread shows them little that is new.
#if defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kSlower = 20;
constexpr std::uint64_t kEventsOfOne = 5000;  // of a scenario that was once found
#elif defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kSlower = 5;
constexpr std::uint64_t kEventsOfOne = 20'000;
#else
constexpr std::uint64_t kSlower = 1;
constexpr std::uint64_t kEventsOfOne = 0;  // all
#endif

void expect_sound(const SimulateReport& report) {
  for (const auto& [seed, violation] : report.violations) {
    ADD_FAILURE() << violation.invariant << " with seed " << seed << " at event " << violation.event << ": " << violation.text;
  }
}

class RandomScenarios : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomScenarios, WithoutTensors) {
  SimulateOptions options;
  options.events = static_cast<std::uint64_t>(testing::sized("events", 1'000'000 / kParts, 100'000'000 / kParts)) / kSlower;
  options.seed = 1 + GetParam() * kSeedsApart;
  const SimulateReport report = simulate(options);
  expect_sound(report);
  EXPECT_GE(report.events, options.events);
  EXPECT_LE(report.share_of_steps_and_heartbeats(), 0.5);
  EXPECT_LE(report.events, 200 * report.merges);
}

TEST_P(RandomScenarios, WithSmallTensors) {
  const auto schedules = static_cast<std::uint64_t>(testing::sized("schedules", 1000 / kParts, 20'000 / kParts)) / kSlower;
  SimulateReport all;
  for (std::uint64_t i = 0; i < schedules; ++i) {
    SimulateOptions options;
    options.events = 1;  // one scenario
    options.values = true;
    options.seed = 1 + GetParam() * kSeedsApart + i;
    const SimulateReport report = simulate(options);
    expect_sound(report);
    if (HasFailure()) return;
    for (const auto& [kind, count] : report.faults) all.faults[kind] += count;
  }
  if (schedules >= 100) {
    EXPECT_EQ(all.faults.size(), kFaultKinds) << "a kind of fault never happened";
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, RandomScenarios, ::testing::Range<std::uint64_t>(0, kParts));

// Each of these once violated an invariant.
std::vector<std::string> once_found() {
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(DILOCO_SCENARIOS)) names.push_back(file.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

class OnceFound : public ::testing::TestWithParam<std::string> {};

TEST_P(OnceFound, IsSoundNow) {
  std::ifstream in(std::filesystem::path(DILOCO_SCENARIOS) / (GetParam() + ".json"));
  std::stringstream text;
  text << in.rdbuf();
  const Outcome outcome = run_scenario(scenario_from_json(text.str()), kEventsOfOne);
  for (const auto& violation : outcome.violations) ADD_FAILURE() << violation.invariant << ": " << violation.text;
  EXPECT_GT(outcome.events, 100u);
}

INSTANTIATE_TEST_SUITE_P(Files, OnceFound, ::testing::ValuesIn(once_found()), [](const auto& info) { return info.param; });

TEST(Scenario, FilesOfWhatWasFoundAreThere) { EXPECT_GE(once_found().size(), 20u); }

TEST(Scenario, ItsTextIsAllOfIt) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Scenario scenario = random_scenario(seed, seed % 2 == 0);
    const Scenario again = scenario_from_json(to_json(scenario));
    EXPECT_EQ(to_json(again), to_json(scenario));
    const Outcome a = run_scenario(scenario, 2000), b = run_scenario(again, 2000);
    EXPECT_EQ(a.hash, b.hash) << seed;
    EXPECT_EQ(a.events, b.events);
  }
}

TEST(Scenario, BadTextIsRefusedNamingWhatIsWrong) {
  EXPECT_THROW(scenario_from_json("{}"), ConfigError);
  EXPECT_THROW(scenario_from_json("no json"), ConfigError);
  std::string text = to_json(random_scenario(3, false));
  const auto at = text.find("diloco.scenario.1");
  EXPECT_THROW(scenario_from_json(text.replace(at, 17, "diloco.scenario.9")), ConfigError);
}

// What has been drawn for one thing does not depend on the others: without a fault that comes late, all is as before
// until then.
TEST(Scenario, TakingAFaultOutChangesNothingBeforeIt) {
  Scenario scenario = random_scenario(7, true);
  scenario.faults = {{FaultKind::kLoss, 5.0, 0, 10.0, 0.1}, {FaultKind::kKillLearner, 60.0, 0, 5.0, 0.0}};
  scenario.script_s = 90.0;
  const Outcome both = run_scenario(scenario);
  std::uint64_t before = 0;
  Scenario until = scenario;
  until.script_s = 59.0;
  until.heal_s = 0.0;
  before = run_scenario(until).events;
  scenario.faults.pop_back();
  ASSERT_GT(before, 100u);
  EXPECT_EQ(run_scenario(scenario, before).hash, run_scenario(until, before).hash);
  EXPECT_GT(both.events, before);
}

// A mistake made outside the cores is found, and what is left of the scenario is small enough to be read.
class Planted : public ::testing::TestWithParam<std::pair<Plant, const char*>> {};

TEST_P(Planted, IsFoundAndShrinksToFiftyEvents) {
  const auto [plant, invariant] = GetParam();
  Scenario scenario = random_scenario(12, true);
  scenario.plant = plant;
  const Outcome found = run_scenario(scenario);
  ASSERT_FALSE(found.violations.empty());
  EXPECT_EQ(found.violations.front().invariant, invariant);
  const Scenario small = shrink(scenario);
  const Outcome outcome = run_scenario(small);
  ASSERT_FALSE(outcome.violations.empty());
  EXPECT_EQ(outcome.violations.front().invariant, invariant);
  EXPECT_LE(outcome.events, 50u) << to_json(small);
  EXPECT_EQ(outcome.violations.front().event, outcome.events);
}

INSTANTIATE_TEST_SUITE_P(Plants, Planted,
                         ::testing::Values(std::pair(Plant::kForgedMerge, "merged_once"),
                                           std::pair(Plant::kChangedPayload, "payload_intact"),
                                           std::pair(Plant::kLyingLearner, "counters")));

TEST(Random, StreamsAreIndependentAndReproducible) {
  EXPECT_EQ(draw(1, Purpose::kWalk, 2, 3), draw(1, Purpose::kWalk, 2, 3));
  EXPECT_NE(draw(1, Purpose::kWalk, 2, 3), draw(1, Purpose::kWalk, 3, 2));
  EXPECT_NE(draw(1, Purpose::kWalk, 2, 3), draw(1, Purpose::kFate, 2, 3));
  EXPECT_NE(draw(1, Purpose::kWalk, 2, 3), draw(2, Purpose::kWalk, 2, 3));
  double sum = 0.0;
  Stream stream(5);
  for (int i = 0; i < 10000; ++i) sum += stream.uniform(0.0, 1.0);
  EXPECT_NEAR(sum / 10000.0, 0.5, 0.02);
}

}  // namespace
}  // namespace diloco::sim
