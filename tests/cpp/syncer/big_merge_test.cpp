// Heartbeats and answers go on while a worker merges. 64 MiB by default; DILOCO_SOAK=1 makes it 1 GiB (about 8 GiB of
// memory).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "learner/net_test.h"
#include "sized.h"

namespace diloco {
namespace {

using namespace testing;

using BigMerge = NetTest;
DILOCO_OVER_BOTH_NETS(BigMerge);

TEST_P(BigMerge, NobodyIsTakenForDead) {
  const std::int64_t rows = 256 * sized("MiB", 64, 1024);
  SyncerOptions options;
  options.settings = small_settings();
  options.settings.num_fragments = 1;
  options.settings.sync_every = 2;
  options.settings.wire_dtype = WireDtype::kF32;
  options.settings.heartbeat_interval_s = 0.1;
  options.settings.heartbeat_timeout_s = 2.0;
  const auto syncer = net.syncer(options);
  Bowl bowl(1.0f, {{"big", {rows, 1024}}});
  const auto learner = net.learner(syncer->endpoint(), named("big"), bowl.store);
  ASSERT_TRUE(learner->join(100));
  ASSERT_TRUE(wait_until([&] { return !syncer->weights().empty(); }));
  std::atomic<bool> end{false};
  std::uint64_t answers = 0;
  std::thread watcher([&] {
    while (!end) {
      const auto status = nlohmann::json::parse(syncer->status_json());
      for (const auto& round : status["rounds"]) answers += round["text"].get<std::string>().find("merg") != std::string::npos;
    }
  });
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] { return learner->stats().contributions_merged >= 1; }, 100));
  end = true;
  watcher.join();
  EXPECT_GT(answers, 0u) << "nobody was answered while the merge ran";
  EXPECT_EQ(learner->stats().reconnects, 0u);
  EXPECT_EQ(nlohmann::json::parse(syncer->status_json())["learners"][0]["state"], "live");
  learner->close(5);
}

}  // namespace
}  // namespace diloco
