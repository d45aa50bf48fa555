#include "diloco/syncer/syncer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "diloco/base/errors.h"
#include "diloco/syncer/status_query.h"
#include "learner/net_test.h"

namespace diloco {
namespace {

using namespace testing;

using SyncerShell = NetTest;
DILOCO_OVER_BOTH_NETS(SyncerShell);

TEST_P(SyncerShell, AnswersBeforeAnyLearnerAndAfterItsEnd) {
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  EXPECT_TRUE(syncer->running());
  EXPECT_TRUE(syncer->weights().empty());
  EXPECT_TRUE(syncer->layout().tensors.empty());
  const auto status = nlohmann::json::parse(syncer->status_json());
  for (const char* key : {"epoch", "mode", "quorum", "uptime_s", "learners", "fragments", "rounds", "waiting", "ledger",
                          "rounds_merged", "bytes", "cut", "memory", "timings", "effective"}) {
    EXPECT_TRUE(status.contains(key)) << key;
  }
  EXPECT_GT(status["memory"]["payload_limit_bytes"].get<std::uint64_t>(), 1u << 20);
  syncer->stop(0);
  syncer->stop(0);
  EXPECT_FALSE(syncer->running());
  EXPECT_TRUE(nlohmann::json::parse(syncer->status_json()).contains("epoch"));
}

TEST_P(SyncerShell, ManyThreadsAskAndStop) {
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 50; ++n) EXPECT_FALSE(syncer->status_json().empty());
      syncer->stop(0.1);
      EXPECT_FALSE(syncer->running());
    });
  }
  for (auto& thread : threads) thread.join();
}

// A round whose upload takes a second, and a stop in the middle of it.
struct SyncerStop : ::testing::Test {
  void stop_in_mid_round(Seconds shutdown_s) {
    SyncerOptions options;
    options.settings = small_settings();
    options.settings.num_fragments = 1;
    options.settings.wire_dtype = WireDtype::kF32;
    options.settings.heartbeat_timeout_s = 30;
    options.log = [this](LogLevel, const std::string& text) { said += text + "\n"; };
    const auto syncer = net.syncer(options);
    net.inproc()->name_next_client("slow");
    Bowl bowl(1.0f, {{"w", {128, 128}}});
    const auto learner = net.learner(syncer->endpoint(), named("slow"), bowl.store);
    ASSERT_TRUE(learner->join(20));
    net.inproc()->set_bandwidth("slow", 64 << 10);
    const auto open_rounds = [&] { return nlohmann::json::parse(syncer->status_json())["rounds"].size(); };
    const TimePoint deadline = monotonic_now() + 30;
    while (open_rounds() == 0 && monotonic_now() < deadline) {
      bowl.step(0.1f);
      learner->boundary({1});
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_EQ(open_rounds(), 1u);
    learner->boundary({1});  // so that there is something to pull
    syncer->stop(shutdown_s);
    rounds_merged = nlohmann::json::parse(syncer->status_json())["rounds_merged"];
  }

  Net net{true};
  std::string said;  // on the syncer's I/O thread, read after its end
  int rounds_merged = -1;
};

TEST_F(SyncerStop, FinishesTheOpenRound) {
  stop_in_mid_round(30);
  EXPECT_EQ(rounds_merged, 1);
  EXPECT_NE(said.find("no round was left open"), std::string::npos) << said;
}

TEST_F(SyncerStop, GivesUpAfterTheStatedTimeAndSaysSo) {
  stop_in_mid_round(0.05);
  EXPECT_EQ(rounds_merged, 0);
  EXPECT_NE(said.find("gave up 1 open round"), std::string::npos) << said;
}

TEST(Syncer, BindThatOthersCanReachNeedsSayingSo) {
  SyncerOptions options;
  options.bind = "0.0.0.0:0";
  try {
    Syncer syncer(options);
    FAIL() << "bound";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("--insecure"), std::string::npos) << error.what();
  }
  options.insecure = true;
  options.log = [](LogLevel, const std::string&) {};
  EXPECT_NO_THROW(Syncer{options});
}

TEST(Syncer, BadSettingIsRefusedBeforeAnythingStarts) {
  SyncerOptions options;
  options.settings.min_quorum = 0;
  EXPECT_THROW(Syncer{options}, ConfigError);
}

TEST(Syncer, StatusQueryNeedsNoLearnerAndSaysWhenNobodyAnswers) {
  SyncerOptions options;
  options.log = [](LogLevel, const std::string&) {};
  Syncer syncer(options);
  EXPECT_TRUE(nlohmann::json::parse(query_status(syncer.endpoint(), 20)).contains("epoch"));
  const std::string endpoint = syncer.endpoint();
  syncer.stop(0);
  EXPECT_THROW(query_status(endpoint, 1.0), TransportError);
  EXPECT_THROW(query_status("localhost", 1.0), ConfigError);
}

TEST(Syncer, LogCallbackThatThrowsDoesNotStopIt) {
  SyncerOptions options;
  options.log = [](LogLevel, const std::string&) { throw std::runtime_error("broken"); };
  Syncer syncer(options);
  EXPECT_TRUE(syncer.running());
  syncer.stop(0);
}

}  // namespace
}  // namespace diloco
