// Connections that come, end and come back.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "diloco/base/errors.h"
#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

TEST_P(Transport, SendToAPeerNobodyKnows) {
  ServerNode server(world);
  EXPECT_FALSE(server->send(12345, frame(MessageType::kHeartbeat)));
  EXPECT_EQ(server->counters().undeliverable, 1u);
  ClientNode client(world, server.endpoint);
  EXPECT_FALSE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  EXPECT_EQ(client->counters().undeliverable, 1u);
  client->connect(Channel::kControl);
  EXPECT_FALSE(client->send(Channel::kBulk, frame(MessageType::kHeartbeat)));
}

TEST_P(Transport, ClosingClientDeliversWhatItSentAndThenIsGone) {
  for (int i = 0; i < 20; ++i) {
    ServerNode server(world);
    ClientNode client(world, server.endpoint);
    join(server, client, Channel::kControl, 1);
    const PeerId peer = server.peer(1);
    for (int k = 0; k < 10; ++k) ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kStep, "s", 1)));
    ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kGoodbye, "bye", 1)));
    client->close();
    ASSERT_TRUE(run_until({&server}, [&] { return server.lost(peer); }));
    ASSERT_EQ(server.frames.size(), 12u);
    EXPECT_EQ(text_of(server.frames.back()), "bye");
    EXPECT_EQ(server.order.back(), "gone");
    EXPECT_EQ(server.gone.size(), 1u);
    EXPECT_FALSE(server.gone[0].why.empty());
    EXPECT_FALSE(server->send(peer, frame(MessageType::kHeartbeat)));
  }
}

TEST_P(Transport, DisconnectedChannelIsGoneAndTheOtherStays) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  join(server, client, Channel::kBulk, 2);
  const PeerId control = server.peer(1), bulk = server.peer(2);
  client->disconnect(Channel::kBulk);
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.lost(bulk); }));
  EXPECT_FALSE(server.lost(control));
  EXPECT_TRUE(client.disconnected.empty());  // what one asks for is no event
  EXPECT_FALSE(client->send(Channel::kBulk, frame(MessageType::kLane)));
  ASSERT_TRUE(server->send(control, frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return client.frames.size() == 1; }));
}

TEST_P(Transport, ReconnectingGivesANewPeer) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  std::vector<PeerId> peers;
  for (Incarnation i = 1; i <= 10; ++i) {
    join(server, client, Channel::kControl, i);  // closes the older connection
    const PeerId peer = server.peer(i);
    EXPECT_TRUE(std::find(peers.begin(), peers.end(), peer) == peers.end());
    if (!peers.empty()) {
      ASSERT_TRUE(run_until({&server, &client}, [&] { return server.lost(peers.back()); }));
    }
    peers.push_back(peer);
    ASSERT_TRUE(server->send(peer, frame(MessageType::kHeartbeat, "", i)));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return client.frames.size() == i; }));
    EXPECT_EQ(client.frames.back().header.incarnation, i);
  }
  EXPECT_EQ(server.gone.size(), 9u);
}

TEST_P(Transport, CutDeliversTheLastFrameAndThenDisconnects) {
  ServerNode server(world);
  for (Incarnation i = 1; i <= 30; ++i) {
    ClientNode client(world, server.endpoint);
    join(server, client, Channel::kControl, i);
    const PeerId peer = server.peer(i);
    ASSERT_TRUE(server->send(peer, frame(MessageType::kReject, "go away")));
    server->cut(peer, "test");
    ASSERT_TRUE(run_until({&server, &client}, [&] { return !client.disconnected.empty(); }));
    ASSERT_EQ(client.frames.size(), 1u) << "round " << i;
    EXPECT_EQ(text_of(client.frames[0]), "go away");
    EXPECT_EQ(client.order.back(), "disconnected");
    EXPECT_FALSE(client.disconnected[0].why.empty());
    EXPECT_FALSE(server->send(peer, frame(MessageType::kHeartbeat)));
    EXPECT_FALSE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  }
  EXPECT_TRUE(server.gone.empty());  // nothing follows a cut
}

TEST_P(Transport, CutReachesAClientThatKeepsSending) {
  ServerNode server(world);
  const auto buffer = pattern(1 << 20);
  for (Incarnation i = 1; i <= 10; ++i) {
    ClientNode client(world, server.endpoint);
    join(server, client, Channel::kBulk, i);
    const PeerId peer = server.peer(i);
    for (int k = 0; k < 20; ++k) client->send(Channel::kBulk, chunk({buffer, 0, 1 << 20}));
    ASSERT_TRUE(server->send(peer, frame(MessageType::kReject, "enough")));
    server->cut(peer, "test");
    const std::size_t heard = server.frames.size();
    ASSERT_TRUE(run_until({&server, &client}, [&] {
      client->send(Channel::kBulk, chunk({buffer, 0, 1 << 20}));
      return !client.disconnected.empty();
    }));
    ASSERT_EQ(client.frames.size(), 1u) << "round " << i;
    EXPECT_EQ(text_of(client.frames[0]), "enough");
    EXPECT_EQ(server.frames.size(), heard);  // ignored from the moment of the cut
  }
}

// A server that was busy elsewhere finds the end of one connection, the next one on the same descriptor and its first
// frame all at once.
TEST_P(Transport, CutReachesWhoCameWhileTheServerWasAway) {
  ServerNode server(world);
  auto before = std::make_unique<ClientNode>(world, server.endpoint);
  join(server, *before, Channel::kControl, 1000);
  for (Incarnation i = 1; i <= 30; ++i) {
    before.reset();
    auto client = std::make_unique<ClientNode>(world, server.endpoint);
    client->transport->connect(Channel::kControl);
    ASSERT_TRUE(run_until({client.get()}, [&] { return client->connected.size() == 1; }));
    ASSERT_TRUE((*client)->send(Channel::kControl, frame(MessageType::kHello, "hello", i)));
    run_for({client.get()}, 0.01);  // long enough, mostly, for the frame to be there as well
    ASSERT_TRUE(run_until({&server, client.get()}, [&] { return server.peer(i) != 0; }));
    ASSERT_TRUE(server->send(server.peer(i), frame(MessageType::kReject, "go away")));
    server->cut(server.peer(i), "test");
    ASSERT_TRUE(run_until({&server, client.get()}, [&] { return !client->disconnected.empty(); }, 3.0)) << "round " << i;
    ASSERT_EQ(client->frames.size(), 1u) << "round " << i;
    before = std::move(client);
    before->transport->connect(Channel::kControl);
    ASSERT_TRUE(run_until({&server, before.get()}, [&] { return before->connected.size() == 2; }));
    ASSERT_TRUE((*before)->send(Channel::kControl, frame(MessageType::kHello, "again", 1000 + i)));
    ASSERT_TRUE(run_until({&server, before.get()}, [&] { return server.peer(1000 + i) != 0; }));
  }
}

TEST_P(Transport, CutDoesNotTouchTheOthers) {
  ServerNode server(world);
  ClientNode bad(world, server.endpoint), good(world, server.endpoint);
  join(server, bad, Channel::kControl, 1);
  join(server, good, Channel::kControl, 2);
  server->cut(server.peer(1), "test");
  server->cut(server.peer(1), "twice is fine");
  server->cut(99999, "so is nobody");
  ASSERT_TRUE(run_until({&server, &bad, &good}, [&] { return !bad.disconnected.empty(); }));
  ASSERT_TRUE(good->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 2)));
  ASSERT_TRUE(server->send(server.peer(2), frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(run_until({&server, &good}, [&] { return good.frames.size() == 1 && server.frames.size() == 3; }));
  EXPECT_TRUE(good.disconnected.empty());
}

TEST_P(Transport, ServerGoneDisconnectsBothChannels) {
  auto server = std::make_unique<ServerNode>(world);
  ClientNode client(world, server->endpoint);
  join(*server, client, Channel::kControl, 1);
  join(*server, client, Channel::kBulk, 2);
  server.reset();
  ASSERT_TRUE(run_until({&client}, [&] { return client.disconnected.size() == 2; }));
  EXPECT_FALSE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  run_for({&client}, 0.1);
  EXPECT_EQ(client.disconnected.size(), 2u);  // told once each
}

TEST_P(Transport, ServerRestartsOnTheSamePort) {
  auto server = std::make_unique<ServerNode>(world);
  const std::string endpoint = server->endpoint;
  ClientNode client(world, endpoint);
  join(*server, client, Channel::kControl, 1);
  for (Incarnation i = 2; i < 6; ++i) {
    server.reset();
    ASSERT_TRUE(run_until({&client}, [&] { return client.disconnected.size() == i - 1; }));
    server = std::make_unique<ServerNode>(world, TransportLimits{}, endpoint);
    EXPECT_EQ(server->endpoint, endpoint);
    run_for({server.get(), &client}, 0.05);
    EXPECT_TRUE(server->frames.empty());  // nothing reconnects by itself
    join(*server, client, Channel::kControl, i);
  }
}

TEST_P(Transport, ClientBeforeServerIsRefusedAndWorksOnRetry) {
  std::string endpoint;
  { endpoint = ServerNode(world).endpoint; }  // a port that is free now
  ClientNode client(world, endpoint);
  for (std::size_t i = 1; i <= 3; ++i) {
    client->connect(Channel::kControl);
    ASSERT_TRUE(run_until({&client}, [&] { return client.disconnected.size() == i; }));
    EXPECT_NE(client.disconnected.back().why.find("refused"), std::string::npos) << client.disconnected.back().why;
    EXPECT_TRUE(client.connected.empty());
  }
  ServerNode server(world, {}, endpoint);
  join(server, client, Channel::kControl, 1);
}

TEST_P(Transport, LingerDeliversWhatIsQueued) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  const auto buffer = pattern(1 << 20);
  std::thread closer;
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(client->send(Channel::kBulk, chunk({buffer, 0, 1 << 20}, i)));
  closer = std::thread([&] { client->close(); });  // waits while the server reads
  EXPECT_TRUE(run_until({&server}, [&] { return server.lost(server.frames.at(0).peer); }));
  closer.join();
  ASSERT_EQ(server.frames.size(), 31u);
  for (std::size_t i = 0; i < 30; ++i) EXPECT_EQ(server.frames[i + 1].header.offset, i);
}

TEST_P(Transport, ServerLingerDeliversWhatIsQueued) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  const auto buffer = pattern(1 << 20);
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(server->send(server.peer(1), chunk({buffer, 0, 1 << 20}, i)));
  std::thread closer([&] { server->close(); });
  EXPECT_TRUE(run_until({&client}, [&] { return !client.disconnected.empty(); }));
  closer.join();
  EXPECT_EQ(client.frames.size(), 30u);
}

TEST_P(Transport, LingerIsBoundedWhenNobodyReads) {
  TransportLimits limits;
  limits.linger_s = 0.3;
  limits.max_unsent_bytes = 1 << 30;
  ServerNode server(world, limits);
  ClientNode client(world, server.endpoint, limits);
  join(server, client, Channel::kBulk, 1);
  const auto buffer = pattern(1 << 20);
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(client->send(Channel::kBulk, chunk({buffer, 0, 1 << 20})));
    ASSERT_TRUE(server->send(server.peer(1), chunk({buffer, 0, 1 << 20})));
  }
  const TimePoint start = monotonic_now();
  client->close();
  server->close();
  EXPECT_LT(monotonic_now() - start, 10);
  server.frames.clear();
}

// The server looks at descriptors that libzmq has closed and that are something else by now, of another thread: harmless,
// and ThreadSanitizer must not take it for a use of that.
TEST_P(Transport, WhatWasAConnectionIsAnotherThreadsByNow) {
  ServerNode server(world);
  const std::string endpoint = server.endpoint;
  std::atomic<bool> done = false;
  std::thread others([&] {
    for (int i = 0; i < 30; ++i) {
      ClientNode client(world, endpoint);
      client->connect(Channel::kControl);
      EXPECT_TRUE(run_until({&client}, [&] { return !client.connected.empty(); }));
      client->send(Channel::kControl, frame(MessageType::kHello, "", static_cast<Incarnation>(i + 1)));
      client->close();
      std::vector<std::unique_ptr<ClientNode>> more;
      for (int k = 0; k < 8; ++k) more.push_back(std::make_unique<ClientNode>(world, endpoint));
    }
    done = true;
  });
  EXPECT_TRUE(run_until({&server}, [&] { return done && server.gone.size() == 30; }));
  others.join();
}

TEST_P(Transport, CloseIsIdempotentAndFinal) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  const PeerId peer = server.peer(1);
  for (int i = 0; i < 3; ++i) {
    client->close();
    server->close();
  }
  EXPECT_FALSE(server->send(peer, frame(MessageType::kHeartbeat)));
  EXPECT_FALSE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  server->cut(peer, "nothing to cut");
  client->connect(Channel::kControl);
  client->disconnect(Channel::kControl);
  server->wake();
  client->wake();
  run_for({&server, &client}, 0.05);
  EXPECT_EQ(client.connected.size(), 1u);
  EXPECT_EQ(server->counters().frames_in, 1u);
  EXPECT_THROW(server->bind("127.0.0.1:0"), TransportError);
}

TEST_P(Transport, NeverConnectedClosesAtOnce) {
  ServerNode server(world);
  ClientNode idle(world, server.endpoint);
  ClientNode connecting(world, server.endpoint);
  connecting->connect(Channel::kControl);
  const TimePoint start = monotonic_now();
  idle->close();
  connecting->close();
  EXPECT_LT(monotonic_now() - start, 10);
}

TEST_P(Transport, OnePortOneServer) {
  ServerNode first(world);
  auto second = world.server();
  const std::string port = first.endpoint.substr(first.endpoint.rfind(':') + 1);
  try {
    second->bind(first.endpoint);
    FAIL() << "bound twice";
  } catch (const TransportError& error) {
    EXPECT_NE(std::string(error.what()).find("port " + port + " is already in use"), std::string::npos) << error.what();
  }
  // The first one is undisturbed, and the refused one can still bind elsewhere.
  ClientNode client(world, first.endpoint);
  join(first, client, Channel::kControl, 1);
  EXPECT_NE(second->bind("127.0.0.1:0"), first.endpoint);
}

TEST_P(Transport, ThirtyTwoServersAtOnceGetTheirOwnPorts) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::string> endpoints(32);
    std::vector<std::unique_ptr<ServerTransport>> servers(32);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 32; ++i) {
      servers[i] = world.server();
      threads.emplace_back([&, i] { endpoints[i] = servers[i]->bind("127.0.0.1:0"); });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& endpoint : endpoints) {
      EXPECT_EQ(parse_endpoint(endpoint), endpoint);
      EXPECT_EQ(std::count(endpoints.begin(), endpoints.end(), endpoint), 1);
      EXPECT_NE(endpoint.substr(endpoint.rfind(':')), ":0");
    }
  }
}

}  // namespace
}  // namespace diloco::transport_test
