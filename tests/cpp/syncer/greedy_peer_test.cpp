// Peers that would have the whole program's memory.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "diloco/core/probe_turns.h"
#include "learner/bowl.h"
#include "resident.h"
#include "transport/raw_tcp.h"

namespace diloco {
namespace {

using namespace testing;

std::string request(MessageType type, std::uint64_t total = 0) {
  Header header;
  header.type = type;
  header.total = total;
  header.checksum = payload_checksum({});
  const auto bytes = encode_header(header);
  return transport_test::zmtp_frame({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

TEST(GreedyPeer, AskingForTheStatusWithoutReadingItEndsAtTheBound) {
  Net net(false);
  SyncerOptions options;
  options.settings = small_settings();
  options.settings.heartbeat_timeout_s = 5.0;
  const auto syncer = net.syncer(options);
  Bowl bowl{1.0f};
  const auto learner = net.learner(syncer->endpoint(), named("steady"), bowl.store);
  ASSERT_TRUE(learner->join(20));

  transport_test::RawTcp raw(syncer->endpoint());
  ASSERT_TRUE(raw.handshake());
  const std::uint64_t before = resident_bytes();
  std::uint64_t most = before;
  std::thread asker([&] {
    std::string requests;
    for (int i = 0; i < 100; ++i) requests += request(MessageType::kStatus);
    for (int i = 0; i < 300 && raw.send(requests); ++i) {
    }
  });
  std::uint64_t steps = 0;
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] {
    most = std::max(most, resident_bytes());
    // A status costs the syncer as much as the replies do.
    return ++steps % 50 == 0 && nlohmann::json::parse(syncer->status_json())["cut"]["unread"] == 1;
  }, 90));
  asker.join();
  // The bound is 24 MiB; the allocator keeps some more. Without it the replies would be twice as much.
  if (kResidentTells) {
    EXPECT_LT(most - before, std::uint64_t{48} << 20);
  }
  RecordProperty("grown_bytes", std::to_string(most - before));
  const auto goal = learner->stats().contributions_merged + 2;
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] { return learner->stats().contributions_merged >= goal; }));
  EXPECT_EQ(learner->stats().reconnects, 0u);
}

// All replies are the same bytes, so they cost nothing; and they end at the bound for unsent data or at that for measuring.
TEST(GreedyPeer, ProbingWithoutReadingEndsAtTheBound) {
  Net net(false);
  SyncerOptions options;
  options.settings = small_settings();
  const auto syncer = net.syncer(options);
  Bowl bowl{1.0f};
  const auto learner = net.learner(syncer->endpoint(), named("steady"), bowl.store);
  ASSERT_TRUE(learner->join(20));
  const auto status = [&] { return nlohmann::json::parse(syncer->status_json()); };

  transport_test::RawTcp raw(syncer->endpoint());
  ASSERT_TRUE(raw.handshake());
  const std::uint64_t before = resident_bytes(), sent = status()["bytes"]["out"];
  std::uint64_t most = before;
  std::string requests;
  for (int i = 0; i < 1000; ++i) requests += request(MessageType::kProbe, kProbeFrameBytes);
  std::thread asker([&] { raw.send(requests); });
  EXPECT_TRUE(train_until(*learner, bowl, 0.1f, [&] {
    most = std::max(most, resident_bytes());
    return status()["cut"]["unread"] == 1;
  }));
  asker.join();
  EXPECT_LT(status()["bytes"]["out"].get<std::uint64_t>() - sent, kProbeBurstBytes);
  if (kResidentTells) {
    EXPECT_LT(most - before, std::uint64_t{16} << 20);
  }
  EXPECT_EQ(learner->stats().reconnects, 0u);
}

}  // namespace
}  // namespace diloco
