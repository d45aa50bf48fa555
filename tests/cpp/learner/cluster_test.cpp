// Whole runs in one process: a syncer and learners that descend quadratic bowls.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "learner/net_test.h"
#include "scratch_dir.h"

namespace diloco {
namespace {

using namespace testing;

using Cluster = NetTest;
DILOCO_OVER_BOTH_NETS(Cluster);

double worst_distance(const std::vector<std::vector<float>>& weights, double value) {
  double worst = weights.empty() ? 1e9 : 0.0;
  for (const auto& tensor : weights) {
    for (const float w : tensor) worst = std::max(worst, std::abs(static_cast<double>(w) - value));
  }
  return worst;
}

std::vector<nlohmann::json> lines_of(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

// Each in a thread of its own until all of them have been merged and the global weights are at `goal`.
void train_all(std::vector<std::unique_ptr<Learner>>& learners, std::vector<Bowl>& bowls, const std::function<bool()>& done,
               Seconds limit_s = 60) {
  std::vector<std::thread> threads;
  std::atomic<int> finished{0};
  const int all = static_cast<int>(learners.size());
  for (std::size_t i = 0; i < learners.size(); ++i) {
    threads.emplace_back([&, i] {
      learners[i]->join(10);
      bool counted = false;
      // Whoever is done trains on until the last one is: nobody else's quorum may depend on the order of ending.
      EXPECT_TRUE(train_until(*learners[i], bowls[i], 0.05f, [&] {
        if (!counted && learners[i]->stats().contributions_merged >= 6 && done()) {
          counted = true;
          ++finished;
        }
        return finished == all;
      }, limit_s)) << learners[i]->stats().state << " merged " << learners[i]->stats().contributions_merged;
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(Cluster, OneLearnerReachesItsTargetAndTheSyncerFollows) {
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  Bowl bowl(3.0f);
  const auto learner = net.learner(syncer->endpoint(), named("solo"), bowl.store);
  EXPECT_TRUE(learner->join(20));
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] { return worst_distance(syncer->weights(), 3.0) < 0.05; }));
  EXPECT_LT(bowl.distance_to(3.0), 0.05);
  EXPECT_EQ(syncer->layout().tensors.size(), 4u);
  learner->close(5);
  EXPECT_EQ(learner->stats().state, "closed");
}

TEST_P(Cluster, ThreeLearnersMeetInTheMiddle) {
  const ScratchDir dir;
  SyncerOptions options;
  options.settings = small_settings();
  options.settings.merge = MergeKind::kMean;
  options.event_log = dir.path() + "/events.jsonl";
  auto syncer = net.syncer(options);
  std::vector<Bowl> bowls;
  std::vector<std::unique_ptr<Learner>> learners;
  for (int i = 0; i < 3; ++i) {
    bowls.emplace_back(static_cast<float>(i), bowl_shapes(), 10.0f * static_cast<float>(i));
    LearnerOptions mine = named("learner-" + std::to_string(i));
    mine.ledger_dir = dir.path();
    learners.push_back(net.learner(syncer->endpoint(), mine, bowls.back().store));
  }
  // Between the targets 0 and 2, whoever was the last to be merged alone.
  train_all(learners, bowls, [&] { return worst_distance(syncer->weights(), 1.0) < 0.9; });

  const auto status = nlohmann::json::parse(syncer->status_json());
  EXPECT_EQ(status["learners"].size(), 3u);
  EXPECT_EQ(status["fragments"].size(), 2u);
  EXPECT_GT(status["rounds_merged"].get<int>(), 0);
  EXPECT_GT(status["ledger"]["merged"].get<int>(), 0);
  for (auto& learner : learners) learner->close(5);
  for (auto& learner : learners) EXPECT_TRUE(learner->closed());
  syncer->stop(1.0);
  EXPECT_FALSE(syncer->running());
  EXPECT_FALSE(nlohmann::json::parse(syncer->status_json()).empty()) << "answers after the end, too";

  std::map<std::string, int> seen;
  double last = 0.0;
  for (const auto& line : lines_of(options.event_log)) {
    ++seen[line.at("event").get<std::string>()];
    EXPECT_GE(line.at("t").get<double>(), last);
    last = line.at("t").get<double>();
  }
  for (const char* event : {"start", "join", "plan", "init", "open", "merge", "published", "leave", "stop"}) {
    EXPECT_GT(seen[event], 0) << event;
  }
  EXPECT_EQ(seen["join"], 3);
  int ledgers = 0;
  for (const auto& file : std::filesystem::directory_iterator(dir.path())) ledgers += file.path().extension() == ".ledger";
  EXPECT_EQ(ledgers, 3);
}

TEST_P(Cluster, AdoptsTheWeightsOfTheFirstWhateverItStartedFrom) {
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  Bowl first(0.0f, bowl_shapes(), 5.0f), second(0.0f, bowl_shapes(), -7.0f);
  const auto one = net.learner(syncer->endpoint(), named("one"), first.store);
  ASSERT_TRUE(one->join(20));
  const auto two = net.learner(syncer->endpoint(), named("two"), second.store);
  ASSERT_TRUE(two->join(20));
  EXPECT_EQ(first.distance_to(5.0), 0.0);
  EXPECT_EQ(second.distance_to(5.0), 0.0);
  EXPECT_EQ(two->stats().adoptions, 2u);
}

// F100, the half about a quorum that is not there: training goes on, nothing is merged, and the status says why.
TEST_P(Cluster, QuorumAboveTheLearnersWaitsAndSaysSo) {
  SyncerOptions options;
  options.settings = small_settings();
  options.settings.min_quorum = 2;
  const auto syncer = net.syncer(options);
  Bowl bowl(1.0f);
  const auto learner = net.learner(syncer->endpoint(), named("lonely"), bowl.store);
  learner->join(20);
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] {
    return learner->stats().steps > 50 &&
           !nlohmann::json::parse(syncer->status_json())["waiting"].get<std::string>().empty();
  }));
  EXPECT_EQ(nlohmann::json::parse(syncer->status_json())["rounds_merged"], 0);
}

}  // namespace
}  // namespace diloco
