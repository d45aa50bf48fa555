// PROBE, told to the bare core.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "diloco/core/probe_turns.h"
#include "diloco/core/syncer_core.h"
#include "diloco/sim/cluster.h"

namespace diloco {
namespace {

struct Probe : ::testing::Test {
  Probe() {
    settings.sync_every = 12;
    settings.num_fragments = 2;
    SyncerCoreOptions options;
    options.settings = settings;
    options.random = [this] { return random(); };
    core = std::make_unique<SyncerCore>(std::move(options));
  }
  // Of the messages that this event makes, the last one to the peer.
  std::optional<OutFrame> tell(PeerId peer, const Header& header, const std::string& body = {}) {
    std::optional<OutFrame> reply;
    for (auto& action : core->handle(FrameEvent{peer, header, std::as_bytes(std::span(body))}, now)) {
      if (auto* send = std::get_if<SendTo>(&action); send && send->peer == peer) reply = std::move(send->frame);
      if (std::holds_alternative<Log>(action)) ++logged;
      cuts += std::holds_alternative<CutPeer>(action);
    }
    return reply;
  }
  OutFrame probe(PeerId peer, std::uint64_t up, std::uint64_t down, std::uint8_t flags = 0) {
    Header header;
    header.type = MessageType::kProbe;
    header.flags = flags;
    header.transfer = 77;
    header.total = down;
    const auto reply = tell(peer, header, std::string(up, 'x'));
    EXPECT_TRUE(reply);
    EXPECT_EQ(reply->header.type, MessageType::kProbeReply);
    EXPECT_EQ(reply->header.transfer, 77u);
    EXPECT_EQ(reply->header.session, 0u);
    return *reply;
  }
  void join(PeerId peer, const std::string& id) {
    Hello hello;
    hello.learner_id = id;
    hello.layout = sim::small_layout(2, 4, 5);
    Header header;
    header.type = MessageType::kHello;
    header.incarnation = peer;
    ASSERT_EQ(tell(peer, header, encode(hello))->header.type, MessageType::kWelcome);
  }
  static std::string text_of(const OutFrame& reply) {
    EXPECT_EQ(reply.header.flags, kProbeRefused);
    return reply.body;
  }

  Settings settings;
  std::mt19937_64 random{3};
  std::unique_ptr<SyncerCore> core;
  TimePoint now = 1.0;
  int cuts = 0, logged = 0;
};

TEST_F(Probe, BytesForBytesWithoutHello) {
  EXPECT_EQ(probe(1, 0, 0).payload().size(), 0u);
  EXPECT_EQ(probe(1, kProbeFrameBytes, 0).payload().size(), 0u);
  for (const std::uint64_t down : {std::uint64_t{1}, std::uint64_t{4097}, kProbeFrameBytes}) {
    const OutFrame reply = probe(1, 0, down);
    EXPECT_EQ(reply.header.flags, 0);
    EXPECT_EQ(reply.payload().size(), down);
  }
  EXPECT_EQ(nlohmann::json::parse(core->status_json(now))["learners"].size(), 0u);
  EXPECT_EQ(cuts, 0);
}

TEST_F(Probe, OversizedIsRefusedAndSaysTheLimit) {
  for (const std::uint64_t down : {kProbeFrameBytes + 1, ~std::uint64_t{0}}) {
    const std::string text = text_of(probe(1, 0, down));
    EXPECT_NE(text.find("at most 262144 bytes, got " + std::to_string(down)), std::string::npos) << text;
  }
  // More than that does not come through a transport.
  EXPECT_EQ(max_payload_bytes(MessageType::kProbe, 64 << 20), kProbeFrameBytes);
  EXPECT_NE(text_of(probe(1, 0, 0, 6)).find("flags"), std::string::npos);
}

TEST_F(Probe, TheBudgetIsCountedBothWaysAndRefills) {
  std::uint64_t moved = 0;
  OutFrame reply = probe(1, kProbeFrameBytes, kProbeFrameBytes);
  for (; reply.header.flags == 0; reply = probe(1, kProbeFrameBytes, kProbeFrameBytes)) moved += 2 * kProbeFrameBytes;
  EXPECT_EQ(moved, kProbeBurstBytes);
  EXPECT_NE(reply.body.find("8388608 bytes a second"), std::string::npos) << reply.body;
  EXPECT_EQ(reply.payload().size(), reply.body.size());
  now += static_cast<double>(reply.header.offset) / 1000;
  EXPECT_EQ(probe(1, kProbeFrameBytes, kProbeFrameBytes).header.flags, 0);
}

TEST_F(Probe, OnePeerAtATimeUntilItIsGone) {
  EXPECT_EQ(probe(1, 0, 0).header.flags, 0);
  EXPECT_NE(text_of(probe(2, 0, 0)).find("somebody else"), std::string::npos);
  core->handle(PeerGoneEvent{1, "closed"}, now);
  EXPECT_EQ(probe(2, 0, 0).header.flags, 0);
}

// The run goes first: while a learner's sign of life is overdue, nobody may fill the network.
TEST_F(Probe, NobodyMeasuresWhileAHeartbeatIsOverdue) {
  join(10, "a");
  EXPECT_EQ(probe(1, 0, 0).header.flags, 0);
  now += settings.heartbeat_timeout_s / 2 + 0.1;
  const std::string text = text_of(probe(1, 0, 0));
  EXPECT_NE(text.find("learner 'a' has not been heard for 2.6 s, and counts as gone after 5 s"), std::string::npos) << text;
  Header beat;
  beat.type = MessageType::kHeartbeat;
  beat.incarnation = 10;
  // Whoever it is, asking is no sign of life of the learner.
  EXPECT_EQ(probe(10, 0, 0).header.flags, kProbeRefused);
  now += settings.heartbeat_timeout_s;  // now it is gone, and needs nothing
  core->handle(Tick{}, now);
  EXPECT_EQ(probe(1, 0, 0).header.flags, 0);
}

TEST_F(Probe, NobodyMeasuresASyncerThatStops) {
  join(10, "a");
  core->handle(ShutdownEvent{10.0}, now);
  EXPECT_NE(text_of(probe(1, 0, 0)).find("stopping"), std::string::npos);
}

TEST_F(Probe, TellsTheRunWithoutAnythingToJoinItBy) {
  EXPECT_EQ(probe(1, 0, 0, kProbeRun).header.flags, kProbeRun);
  EXPECT_TRUE(probe(1, 0, 0, kProbeRun).body.empty());  // nobody has joined
  join(10, "a");
  const OutFrame reply = probe(1, 0, 0, kProbeRun);
  std::string why;
  const auto run = decode_welcome(std::as_bytes(std::span(reply.body)), &why);
  ASSERT_TRUE(run) << why;
  EXPECT_EQ(run->lane_token, 0u);
  EXPECT_EQ(first_difference(run->layout, core->layout()), "");
  EXPECT_EQ(run->plan, core->plan());
  EXPECT_EQ(run->settings.at("sync_every"), "12");
  // Making it is work: it counts as a mebibyte at least.
  int told = 0;
  while (probe(1, 0, 0, kProbeRun).header.flags == kProbeRun) ++told;
  EXPECT_LE(told, static_cast<int>(kProbeBurstBytes >> 20));
}

TEST(ProbeBytes, CannotBeCompressedAndStayTheSame) {
  const auto bytes = probe_bytes();
  ASSERT_EQ(bytes->size(), kProbeFrameBytes);
  std::array<std::uint64_t, 256> count{};
  for (std::size_t i = 0; i < bytes->size(); ++i) ++count[std::to_integer<int>(bytes->data()[i])];
  for (const auto n : count) EXPECT_NEAR(static_cast<double>(n), kProbeFrameBytes / 256.0, 200.0);
  EXPECT_EQ(probe_bytes(), bytes);
}

}  // namespace
}  // namespace diloco
