// What a learner is told when the syncer does not want it.
#include <gtest/gtest.h>

#include "diloco/base/errors.h"
#include "learner/net_test.h"

namespace diloco {
namespace {

using namespace testing;

struct Refusal : NetTest {
  std::string refused_with(const std::string& endpoint, LearnerOptions options, std::shared_ptr<ParameterStore> store) {
    const auto learner = net.learner(endpoint, std::move(options), std::move(store));
    std::string text = "not refused";
    try {
      learner->join(20);
    } catch (const ConfigError& error) {
      text = error.what();
      EXPECT_THROW(learner->boundary(1), ConfigError) << "every call after";
      EXPECT_EQ(learner->stats().state, "rejected");
    }
    learner->close(1);
    return text;
  }
  void expect_all(const std::string& text, const std::vector<std::string>& parts) {
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  void expect_first_still_trains() {
    EXPECT_TRUE(train_until(*first, bowl, 0.1f, [&, goal = first->stats().contributions_merged + 2] {
      return first->stats().contributions_merged >= goal;
    }));
  }
  void start(Settings settings) {
    SyncerOptions options;
    options.settings = settings;
    syncer = net.syncer(options);
    LearnerOptions mine = named("first");
    mine.run_id = settings.run_id;
    first = net.learner(syncer->endpoint(), mine, bowl.store);
    ASSERT_TRUE(first->join(20));
  }

  Bowl bowl{1.0f};
  std::unique_ptr<Syncer> syncer;
  std::unique_ptr<Learner> first;
};
DILOCO_OVER_BOTH_NETS(Refusal);

TEST_P(Refusal, OtherModelNamesTheFirstParameterOnBothSides) {
  start(small_settings());
  auto shapes = bowl_shapes();
  shapes[0].shape = {4, 9};
  const auto other = std::make_shared<ArrayStore>(shapes);
  expect_all(refused_with(syncer->endpoint(), named("other"), other), {"a.weight", "(4, 8)", "(4, 9)", "layout"});
  expect_first_still_trains();
}

TEST_P(Refusal, OtherRunId) {
  Settings settings = small_settings();
  settings.run_id = "monday";
  start(settings);
  LearnerOptions options = named("stray");
  options.run_id = "tuesday";
  expect_all(refused_with(syncer->endpoint(), options, std::make_shared<ArrayStore>(bowl_shapes())),
             {"monday", "tuesday", "run_id"});
}

TEST_P(Refusal, OtherSettingNamesBothValues) {
  start(small_settings());
  LearnerOptions options = named("stubborn");
  options.settings["sync_every"] = "99";
  expect_all(refused_with(syncer->endpoint(), options, std::make_shared<ArrayStore>(bowl_shapes())),
             {"sync_every", "99", "8"});
}

TEST_P(Refusal, FullRun) {
  Settings settings = small_settings();
  settings.max_learners = 1;
  start(settings);
  expect_all(refused_with(syncer->endpoint(), named("second"), std::make_shared<ArrayStore>(bowl_shapes())),
             {"full", "max_learners"});
}

// F055: two learners with one id. The one that runs is not disturbed; the newcomer is told who has the name.
TEST_P(Refusal, IdOfALivingLearner) {
  start(small_settings());
  const auto text = refused_with(syncer->endpoint(), named("first"), std::make_shared<ArrayStore>(bowl_shapes()));
  expect_all(text, {"duplicate_id", "first", std::to_string(::getpid())});
  expect_first_still_trains();
}

TEST_P(Refusal, IdThatIsTooLongNeverLeavesTheMachine) {
  start(small_settings());
  EXPECT_THROW(net.learner(syncer->endpoint(), named(std::string(65, 'x')), bowl.store), ConfigError);
}

}  // namespace
}  // namespace diloco
