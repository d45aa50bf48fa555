// The in-process network's scripted faults.
#include <gtest/gtest.h>

#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

class InprocScript : public ::testing::Test {
 protected:
  InprocScript() {
    for (ClientNode* client : {&a, &b}) (*client)->connect(Channel::kControl);
    EXPECT_TRUE(run_until({&server, &a, &b}, [&] { return a.connected.size() == 1 && b.connected.size() == 1; }));
    a->send(Channel::kControl, frame(MessageType::kHello, "", 1));
    b->send(Channel::kControl, frame(MessageType::kHello, "", 2));
    EXPECT_TRUE(run_until({&server, &a, &b}, [&] { return server.frames.size() == 2; }));
  }
  World world{Kind::kInproc};
  InprocNetwork& net = *world.inproc();
  ServerNode server{world};
  ClientNode a{world, server.endpoint, {}, "a"}, b{world, server.endpoint, {}, "b"};
};

TEST_F(InprocScript, DelayHoldsFramesForItsClientOnly) {
  net.set_delay("a", 0.2);
  const TimePoint start = monotonic_now();
  a->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 1));
  b->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 2));
  ASSERT_TRUE(run_until({&server}, [&] { return server.frames.size() == 3; }));
  EXPECT_EQ(server.frames[2].header.incarnation, 2u);
  ASSERT_TRUE(run_until({&server}, [&] { return server.frames.size() == 4; }));
  EXPECT_GE(monotonic_now() - start, 0.2);
  // Order survives a delay that shrinks.
  a->send(Channel::kControl, frame(MessageType::kHeartbeat, "first", 1));
  net.set_delay("a", 0);
  a->send(Channel::kControl, frame(MessageType::kHeartbeat, "second", 1));
  ASSERT_TRUE(run_until({&server}, [&] { return server.frames.size() == 6; }));
  EXPECT_EQ(text_of(server.frames[4]), "first");
}

TEST_F(InprocScript, BandwidthSpreadsFrames) {
  net.set_bandwidth("a", 1e6);
  const TimePoint start = monotonic_now();
  for (int i = 0; i < 3; ++i) a->send(Channel::kControl, frame(MessageType::kChunk, std::string(100000, 'x'), 1));
  ASSERT_TRUE(run_until({&server}, [&] { return server.frames.size() == 5; }));
  EXPECT_GE(monotonic_now() - start, 0.3);
}

TEST_F(InprocScript, PartitionHoldsFramesAndTellsNobody) {
  net.partition("a", true);
  a->send(Channel::kControl, frame(MessageType::kHeartbeat, "held", 1));
  EXPECT_TRUE(server->send(server.peer(1), frame(MessageType::kHeartbeat)));
  b->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 2));
  ASSERT_TRUE(run_until({&server, &a, &b}, [&] { return server.frames.size() == 3; }));
  run_for({&server, &a, &b}, 0.1);
  EXPECT_EQ(server.frames.size(), 3u);
  EXPECT_TRUE(server.gone.empty() && a.disconnected.empty() && a.frames.empty());
  net.partition("a", false);
  ASSERT_TRUE(run_until({&server, &a, &b}, [&] { return server.frames.size() == 4 && a.frames.size() == 1; }));
  EXPECT_EQ(text_of(server.frames[3]), "held");
}

TEST_F(InprocScript, ConnectDuringAPartitionWaits) {
  net.partition("", true);
  ClientNode c(world, server.endpoint, {}, "c");
  c->connect(Channel::kControl);
  run_for({&server, &c}, 0.1);
  EXPECT_TRUE(c.order.empty());
  net.partition("", false);
  ASSERT_TRUE(run_until({&server, &c}, [&] { return c.connected.size() == 1; }));
}

TEST_F(InprocScript, ClosingBehindAPartitionIsNotHeardUntilItHeals) {
  net.partition("a", true);
  const PeerId peer = server.peer(1);
  a->close();
  run_for({&server}, 0.1);
  EXPECT_TRUE(server.gone.empty());
  net.partition("a", false);
  ASSERT_TRUE(run_until({&server}, [&] { return server.lost(peer); }));
}

TEST_F(InprocScript, FramesHeldLongerThanTheLingerAreLost) {
  TransportLimits limits;
  limits.linger_s = 0.05;
  ClientNode c(world, server.endpoint, limits, "c");
  c->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&server, &c}, [&] { return c.connected.size() == 1; }));
  c->send(Channel::kControl, frame(MessageType::kHello, "", 3));
  ASSERT_TRUE(run_until({&server, &c}, [&] { return server.peer(3) != 0; }));
  net.partition("c", true);
  c->send(Channel::kControl, frame(MessageType::kGoodbye, "never heard", 3));
  c->close();
  run_for({&server}, 0.1);
  net.partition("c", false);
  ASSERT_TRUE(run_until({&server}, [&] { return server.lost(server.peer(3)); }));
  EXPECT_EQ(server.frames.back().header.type, MessageType::kHello);
}

TEST_F(InprocScript, ResetTellsBothSides) {
  a->send(Channel::kControl, frame(MessageType::kHeartbeat, "lost", 1));
  net.reset("a");
  ASSERT_TRUE(run_until({&server, &a, &b}, [&] { return server.lost(server.frames[0].peer) && a.disconnected.size() == 1; }));
  EXPECT_EQ(server.frames.size(), 2u);
  EXPECT_TRUE(b.disconnected.empty());
  a->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&server, &a}, [&] { return a.connected.size() == 2; }));
}

TEST_F(InprocScript, RawBytesAreCountedAndCostNobodyElseAnything) {
  for (const std::string& bytes : {std::string(), std::string("GET / HTTP/1.1"), std::string(144, '\0'), std::string(5000, '\xff')}) {
    net.inject_raw(server.endpoint, bytes);
  }
  ASSERT_TRUE(run_until({&server}, [&] { return server->counters().malformed == 4; }));
  EXPECT_TRUE(server.gone.empty());
  a->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 1));
  ASSERT_TRUE(run_until({&server, &a}, [&] { return server.frames.size() == 3; }));
}

}  // namespace
}  // namespace diloco::transport_test
