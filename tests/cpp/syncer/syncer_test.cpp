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
                          "rounds_merged", "bytes", "memory", "timings", "effective"}) {
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
