// What a server or client refuses, at the cost of that one connection.
#include <gtest/gtest.h>

#include <map>

#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

TransportLimits small() {
  TransportLimits limits;
  limits.chunk_bytes = 4096;
  return limits;
}

TEST_P(Transport, LargestFrameOfATypePassesAndOneByteMoreIsCut) {
  for (const MessageType type : {MessageType::kChunk, MessageType::kHeartbeat, MessageType::kGoodbye,
                                 MessageType::kStep, MessageType::kLane, MessageType::kStatus, MessageType::kCtl}) {
    ServerNode server(world, small());
    ClientNode client(world, server.endpoint, small()), witness(world, server.endpoint, small());
    join(server, witness, Channel::kControl, 9);
    join(server, client, Channel::kControl, 1);
    const PeerId peer = server.peer(1);
    const std::size_t limit = max_payload_bytes(type, small().chunk_bytes);
    ASSERT_TRUE(client->send(Channel::kControl, frame(type, std::string(limit, 'x'))));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 3; }));
    EXPECT_EQ(server.frames.back().payload.size(), limit);
    ASSERT_TRUE(client->send(Channel::kControl, frame(type, std::string(limit + 1, 'x'))));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return server.lost(peer) && !client.disconnected.empty(); }))
        << message_name(type);
    EXPECT_EQ(server.frames.size(), 3u);
    EXPECT_EQ(server->counters().malformed, 1u);
    EXPECT_NE(server.gone[0].why.find(message_name(type)), std::string::npos) << server.gone[0].why;
    EXPECT_NE(server.gone[0].why.find(std::to_string(limit)), std::string::npos) << server.gone[0].why;
    ASSERT_TRUE(witness->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 9)));
    ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == 4; }));
  }
}

TEST_P(Transport, ClientRefusesOverlongFramesToo) {
  ServerNode server(world, small());
  ClientNode client(world, server.endpoint, small());
  join(server, client, Channel::kBulk, 1);
  ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kChunk, std::string(4096, 'x'))));
  ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kChunk, std::string(4097, 'x'))));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return !client.disconnected.empty(); }));
  EXPECT_EQ(client.frames.size(), 1u);
  EXPECT_EQ(client->counters().malformed, 1u);
  EXPECT_NE(client.disconnected[0].why.find("CHUNK"), std::string::npos) << client.disconnected[0].why;
}

TEST_P(Transport, WrongChecksumCutsThatPeerOnly) {
  ServerNode server(world);
  ClientNode bad(world, server.endpoint), good(world, server.endpoint);
  join(server, bad, Channel::kControl, 1);
  join(server, bad, Channel::kBulk, 2);
  join(server, good, Channel::kBulk, 3);
  const PeerId control = server.peer(1), bulk = server.peer(2);
  OutFrame damaged = frame(MessageType::kChunk, "data", 2);
  damaged.header.checksum = 42;
  damaged.checksum_known = true;
  ASSERT_TRUE(bad->send(Channel::kBulk, std::move(damaged)));
  ASSERT_TRUE(bad->send(Channel::kBulk, frame(MessageType::kChunk, "later", 2)));
  ASSERT_TRUE(run_until({&server, &bad, &good}, [&] { return server.lost(bulk) && !bad.disconnected.empty(); }));
  EXPECT_EQ(bad.disconnected[0].channel, Channel::kBulk);
  EXPECT_FALSE(server.lost(control));
  EXPECT_EQ(server->counters().malformed, 1u);
  EXPECT_NE(server.gone[0].why.find("checksum"), std::string::npos) << server.gone[0].why;
  for (const InFrame& in : server.frames) EXPECT_NE(text_of(in), "later");
  ASSERT_TRUE(good->send(Channel::kBulk, frame(MessageType::kChunk, "fine", 3)));
  ASSERT_TRUE(run_until({&server, &good}, [&] { return text_of(server.frames.back()) == "fine"; }));
}

TEST_P(Transport, WrongChecksumFromTheServerDisconnects) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  OutFrame damaged = frame(MessageType::kChunk, "data");
  damaged.checksum_known = true;
  ASSERT_TRUE(server->send(server.peer(1), std::move(damaged)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return !client.disconnected.empty(); }));
  EXPECT_TRUE(client.frames.empty());
  EXPECT_NE(client.disconnected[0].why.find("checksum"), std::string::npos);
}

TEST_P(Transport, UnknownTypeIsCutAndReservedTypesAreDelivered) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kMarker, "m")));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 2; }));
  EXPECT_TRUE(is_reserved(server.frames[1].header.type));
  ASSERT_TRUE(client->send(Channel::kControl, frame(static_cast<MessageType>(99))));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return !client.disconnected.empty() && !server.gone.empty(); }));
  EXPECT_NE(server.gone[0].why.find("unknown message type 99"), std::string::npos) << server.gone[0].why;
}

TEST_P(Transport, OtherProtocolVersionsHelloIsDeliveredSoThatItCanBeRefused) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  client->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&server, &client}, [&] { return !client.connected.empty(); }));
  OutFrame hello = frame(MessageType::kHello, "of the future");
  hello.header.protocol = 77;
  hello.header.checksum = 1;
  hello.checksum_known = true;
  ASSERT_TRUE(client->send(Channel::kControl, std::move(hello)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 1; }));
  EXPECT_EQ(server.frames[0].header.protocol, 77);
  EXPECT_EQ(text_of(server.frames[0]), "of the future");
  // And a refusal in another version reaches a client.
  OutFrame reject = frame(MessageType::kReject, "protocol 77, expected 1");
  reject.header.protocol = 78;
  ASSERT_TRUE(server->send(server.frames[0].peer, std::move(reject)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return client.frames.size() == 1; }));
  OutFrame step = frame(MessageType::kStep, "s");
  step.header.protocol = 77;
  ASSERT_TRUE(client->send(Channel::kControl, std::move(step)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return !server.gone.empty(); }));
  EXPECT_NE(server.gone[0].why.find("77"), std::string::npos);
}

TEST_P(Transport, FirstFrameDeadlineCutsTheSilentOnly) {
  TransportLimits limits;
  limits.first_frame_deadline_s = 1;
  ServerNode server(world, limits);
  ClientNode talker(world, server.endpoint), silent(world, server.endpoint);
  silent->connect(Channel::kControl);
  // On a busy machine the talker may itself be late, and then comes again.
  std::size_t tries = 0;
  ASSERT_TRUE(run_until({&server, &talker}, [&] {
    if (talker.disconnected.size() == tries) {
      talker->connect(Channel::kControl);
      ++tries;
    }
    talker->send(Channel::kControl, frame(MessageType::kHello, "", 1));
    return server.peer(1) != 0;
  }));
  ASSERT_TRUE(run_until({&server, &talker, &silent}, [&] { return !silent.disconnected.empty(); }));
  const std::size_t ended = talker.disconnected.size();
  run_for({&server, &talker}, 1.5);
  EXPECT_EQ(talker.disconnected.size(), ended);
  EXPECT_TRUE(server.gone.empty());
  ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(run_until({&server, &talker}, [&] { return talker.frames.size() == 1; }));
}

TEST_P(Transport, MaxPeersTurnsTheRestAwayAndLetsThemInLater) {
  TransportLimits limits;
  limits.max_peers = 3;
  ServerNode server(world, limits);
  std::vector<std::unique_ptr<ClientNode>> in;
  for (Incarnation i = 1; i <= 3; ++i) {
    in.push_back(std::make_unique<ClientNode>(world, server.endpoint));
    join(server, *in.back(), Channel::kControl, i);
  }
  ClientNode extra(world, server.endpoint);
  extra->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&server, &extra}, [&] {
    extra->send(Channel::kControl, frame(MessageType::kHello, "", 4));
    return !extra.disconnected.empty();
  }));
  EXPECT_TRUE(server.gone.empty());
  const PeerId leaving = server.peer(1);
  in[0]->transport->close();
  ASSERT_TRUE(run_until({&server}, [&] { return server.lost(leaving); }));
  const std::size_t before = server.frames.size();
  join(server, extra, Channel::kControl, 5);
  EXPECT_EQ(server.frames.size(), before + 1);
}

TEST_P(Transport, ManyConnectionsComeAndGoWithoutConfusion) {
  // Descriptors are reused at once; every frame must still belong to the peer that sent it.
  ServerNode server(world);
  for (Incarnation i = 1; i <= 100; ++i) {
    ClientNode client(world, server.endpoint);
    client->connect(Channel::kControl);
    ASSERT_TRUE(run_until({&client, &server}, [&] { return !client.connected.empty(); }));
    ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHello, "hi", i)));
    ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kGoodbye, "bye", i)));
    client->close();  // the server has not looked yet
    if (i % 3 != 0) continue;
    ASSERT_TRUE(run_until({&server}, [&] { return server.gone.size() == i; }));
  }
  ASSERT_TRUE(run_until({&server}, [&] { return server.gone.size() == 100; }));
  ASSERT_EQ(server.frames.size(), 200u);
  std::map<PeerId, std::vector<Incarnation>> by_peer;
  for (const InFrame& in : server.frames) by_peer[in.peer].push_back(in.header.incarnation);
  EXPECT_EQ(by_peer.size(), 100u);
  for (const auto& [peer, list] : by_peer) {
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(list[0], list[1]);
    EXPECT_TRUE(server.lost(peer));
  }
}

}  // namespace
}  // namespace diloco::transport_test
