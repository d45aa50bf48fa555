#include "diloco/syncer/link_probe.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/core/probe_turns.h"
#include "diloco/syncer/syncer.h"
#include "learner/bowl.h"

namespace diloco {
namespace {

using namespace testing;

std::unique_ptr<Syncer> running_syncer() {
  SyncerOptions options;
  options.settings = small_settings();
  options.log = [](LogLevel, const std::string&) {};
  return std::make_unique<Syncer>(std::move(options));
}

TEST(LinkProbe, MeasuresARunningSyncerBothWays) {
  const auto syncer = running_syncer();
  const LinkProbe link = probe_link(syncer->endpoint(), 60);
  EXPECT_GT(link.round_trip_s, 0.0);
  EXPECT_LT(link.round_trip_s, 5.0);
  EXPECT_GT(link.up_bytes_per_s, 1e6);
  EXPECT_GT(link.down_bytes_per_s, 1e6);
  EXPECT_LE(link.up_bytes + link.down_bytes, kProbeBurstBytes / 2);  // two measurements pass without a wait
  EXPECT_EQ(link.waited_s, 0.0);
  const auto bytes = nlohmann::json::parse(syncer->status_json())["bytes"];
  EXPECT_GE(bytes["in"].get<std::uint64_t>(), link.up_bytes);
  EXPECT_GE(bytes["out"].get<std::uint64_t>(), link.down_bytes);
}

// The second one waits for its turn, and measures all the same.
TEST(LinkProbe, WaitsWhenItIsToldTo) {
  const auto syncer = running_syncer();
  LinkProbe first, second;
  std::thread other([&] { first = probe_link(syncer->endpoint(), 60); });
  second = probe_link(syncer->endpoint(), 60);
  other.join();
  EXPECT_GT(first.down_bytes_per_s, 0.0);
  EXPECT_GT(second.down_bytes_per_s, 0.0);
  EXPECT_GT(first.waited_s + second.waited_s, 0.0);
}

TEST(LinkProbe, DisturbsNoLearner) {
  const auto syncer = running_syncer();
  Net net(false);
  Bowl bowl{1.0f};
  const auto learner = net.learner(syncer->endpoint(), named("steady"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  std::atomic<bool> done = false;
  std::thread other([&] {
    EXPECT_GT(probe_link(syncer->endpoint(), 60).up_bytes_per_s, 0.0);
    done = true;
  });
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] { return done && learner->stats().contributions_merged >= 2; }));
  other.join();
  EXPECT_EQ(learner->stats().reconnects, 0u);
}

TEST(LinkProbe, TellsTheRunOnceThereIsOne) {
  const auto syncer = running_syncer();
  EXPECT_FALSE(ask_run(syncer->endpoint(), 20));
  Net net(false);
  Bowl bowl{1.0f};
  const auto learner = net.learner(syncer->endpoint(), named("a"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  const auto run = ask_run(syncer->endpoint(), 20);
  ASSERT_TRUE(run);
  EXPECT_EQ(run->layout, syncer->layout());
}

TEST(LinkProbe, AsksTheProtocolAndIsRefusedByName) {
  const auto syncer = running_syncer();
  const ProtocolAnswer answer = ask_protocol(syncer->endpoint(), 20);
  EXPECT_EQ(answer.protocol, kProtocolVersion);
  EXPECT_EQ(answer.reject.code, "role");
}

TEST(LinkProbe, SaysWhenItIsNotLetInTime) {
  const auto syncer = running_syncer();
  probe_link(syncer->endpoint(), 60);
  probe_link(syncer->endpoint(), 60);  // the budget is as good as used up now
  try {
    const TimePoint start = monotonic_now();
    while (monotonic_now() < start + 30) probe_link(syncer->endpoint(), 0.3);
    FAIL() << "measured without end";
  } catch (const TransportError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("measuring may take"), std::string::npos) << text;
    EXPECT_NE(text.find("try again later"), std::string::npos) << text;
  }
}

TEST(LinkProbe, NobodyThere) {
  const auto syncer = running_syncer();
  const std::string endpoint = syncer->endpoint();
  syncer->stop(0);
  EXPECT_THROW(probe_link(endpoint, 1.0), TransportError);
  EXPECT_THROW(ask_run(endpoint, 1.0), TransportError);
  EXPECT_THROW(ask_protocol(endpoint, 1.0), TransportError);
  EXPECT_THROW(probe_link("localhost", 1.0), ConfigError);
}

}  // namespace
}  // namespace diloco
