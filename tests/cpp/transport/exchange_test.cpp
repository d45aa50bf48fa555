// Frames that arrive: both channels, both directions, order, sizes, ownership of buffers.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <thread>

#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

TEST_P(Transport, ConnectsAndSaysHelloOnBothChannels) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 7);
  join(server, client, Channel::kBulk, 8);
  ASSERT_EQ(server.frames.size(), 2u);
  EXPECT_EQ(server.frames[0].header.type, MessageType::kHello);
  EXPECT_EQ(text_of(server.frames[0]), "hello");
  EXPECT_EQ(server.frames[0].header.payload_bytes, 5u);
  EXPECT_EQ(server.frames[1].header.type, MessageType::kLane);
  EXPECT_NE(server.frames[0].peer, server.frames[1].peer);
  EXPECT_NE(server.frames[0].peer, 0u);
  // Answers find the connection the question came from.
  ASSERT_TRUE(server->send(server.peer(8), frame(MessageType::kBegin, "b")));
  ASSERT_TRUE(server->send(server.peer(7), frame(MessageType::kWelcome, "c")));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return client.frames.size() == 2; }));
  for (const InFrame& in : client.frames) {
    EXPECT_EQ(in.channel, in.header.type == MessageType::kBegin ? Channel::kBulk : Channel::kControl);
    EXPECT_EQ(in.peer, 0u);
  }
  EXPECT_TRUE(server.gone.empty());
  EXPECT_TRUE(client.disconnected.empty());
}

TEST_P(Transport, HeaderFieldsTravelUnchanged) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  OutFrame out = frame(MessageType::kHeartbeat, "abc");
  Header& h = out.header;
  h.flags = 3; h.session = 5; h.epoch = 6; h.incarnation = 7; h.fragment = 8; h.shard = 9; h.version = {10, 11};
  h.lane = 12; h.part = 13; h.parts = 14; h.codec = 1; h.colour = 15; h.transfer = 16; h.offset = 17; h.total = 18;
  Header expected = h;
  expected.payload_bytes = 3;
  expected.checksum = payload_checksum(std::as_bytes(std::span("abc", 3)));
  ASSERT_TRUE(client->send(Channel::kControl, std::move(out)));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 2; }));
  EXPECT_EQ(server.frames[1].header, expected);
}

TEST_P(Transport, ThousandChunksKeepTheirOrderBothWays) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  const auto buffer = pattern(1000 * 777);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    ASSERT_TRUE(client->send(Channel::kBulk, chunk({buffer, i * 777, 777}, i)));
    ASSERT_TRUE(server->send(server.peer(1), chunk({buffer, i * 777, 777}, i)));
  }
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 1001 && client.frames.size() == 1000; }));
  for (std::uint64_t i = 0; i < 1000; ++i) {
    for (const InFrame* in : {&server.frames[i + 1], &client.frames[i]}) {
      ASSERT_EQ(in->header.offset, i);
      ASSERT_TRUE(std::equal(in->payload.begin(), in->payload.end(), buffer->data() + i * 777));
    }
  }
}

TEST_P(Transport, BodiesSlicesAndEmptyPayloads) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  const auto buffer = pattern(100);
  ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHeartbeat, "x")));
  ASSERT_TRUE(client->send(Channel::kControl, chunk({buffer, 10, 0})));
  ASSERT_TRUE(client->send(Channel::kControl, chunk({buffer, 99, 1})));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 5; }));
  EXPECT_TRUE(server.frames[1].payload.empty());
  EXPECT_EQ(text_of(server.frames[2]), "x");
  EXPECT_TRUE(server.frames[3].payload.empty());
  ASSERT_EQ(server.frames[4].payload.size(), 1u);
  EXPECT_EQ(server.frames[4].payload[0], buffer->data()[99]);
}

TEST_P(Transport, ChecksumIsFilledInUnlessKnown) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  const auto buffer = pattern(5000);
  OutFrame known = chunk({buffer, 0, 5000});
  known.header.checksum = payload_checksum(buffer->bytes());
  known.checksum_known = true;
  ASSERT_TRUE(client->send(Channel::kBulk, std::move(known)));
  ASSERT_TRUE(client->send(Channel::kBulk, chunk({buffer, 0, 5000})));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 3; }));
  EXPECT_EQ(server.frames[1].header.checksum, server.frames[2].header.checksum);
}

TEST_P(Transport, BuffersAreReleasedOnceSent) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  const auto up = pattern(1 << 20), down = pattern(1 << 20);
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(client->send(Channel::kBulk, chunk({up, 0, 1 << 20})));
    ASSERT_TRUE(server->send(server.peer(1), chunk({down, 0, 1 << 20})));
  }
  ASSERT_TRUE(run_until({&server, &client}, [&] {
    const bool all = server.frames.size() == 9 && client.frames.size() == 8;
    if (all) {
      server.frames.clear();
      client.frames.clear();
    }
    return all;
  }));
  // libzmq lets go of the last message when it has written it, perhaps after we have read it.
  EXPECT_TRUE(run_until({&server, &client}, [&] { return up.use_count() == 1 && down.use_count() == 1; }));
}

TEST_P(Transport, PayloadOutlivesTheTransport) {
  std::vector<InFrame> kept;
  const auto buffer = pattern(200000);
  {
    ServerNode server(world);
    ClientNode client(world, server.endpoint);
    join(server, client, Channel::kBulk, 1);
    ASSERT_TRUE(client->send(Channel::kBulk, chunk({buffer, 0, 200000})));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 2; }));
    kept = std::move(server.frames);
  }
  EXPECT_TRUE(std::equal(kept[1].payload.begin(), kept[1].payload.end(), buffer->data()));
}

TEST_P(Transport, CountersCountHeadersAndPayloads) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kHeartbeat, "four")));
  ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() == 2 && client.frames.size() == 1; }));
  const TransportCounters s = server->counters(), c = client->counters();
  EXPECT_EQ(s.frames_in, 2u);
  EXPECT_EQ(c.frames_out, 2u);
  EXPECT_EQ(s.bytes_in, 2 * kHeaderBytes + 5);
  EXPECT_EQ(c.bytes_out, s.bytes_in);
  EXPECT_EQ(s.frames_out, 1u);
  EXPECT_EQ(s.bytes_out, kHeaderBytes + 4);
  EXPECT_EQ(c.bytes_in, s.bytes_out);
  EXPECT_EQ(s.malformed + c.malformed + s.undeliverable + c.undeliverable, 0u);
}

TEST_P(Transport, SlowReaderHoldsUpNobody) {
  ServerNode server(world);
  ClientNode slow(world, server.endpoint), quick(world, server.endpoint);
  join(server, slow, Channel::kBulk, 1);
  join(server, quick, Channel::kControl, 2);
  const auto buffer = pattern(1 << 20);
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(server->send(server.peer(1), chunk({buffer, 0, 1 << 20}, i)));
  // 64 MiB lie with a client that does not read; the other one is served as if nothing were.
  for (std::size_t i = 1; i <= 50; ++i) {
    ASSERT_TRUE(quick->send(Channel::kControl, frame(MessageType::kHeartbeat)));
    ASSERT_TRUE(server->send(server.peer(2), frame(MessageType::kHeartbeat)));
    ASSERT_TRUE(run_until({&server, &quick}, [&] { return server.frames.size() == i + 2 && quick.frames.size() == i; }));
  }
  ASSERT_TRUE(run_until({&server, &slow}, [&] { return slow.frames.size() == 64; }));
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(slow.frames[i].header.offset, i);
}

TEST_P(Transport, HeartbeatsPassWhileBulkIsSaturated) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  join(server, client, Channel::kBulk, 2);
  const auto buffer = pattern(1 << 20);
  const std::size_t chunks = 200;
  for (std::size_t i = 0; i < chunks; ++i) ASSERT_TRUE(client->send(Channel::kBulk, chunk({buffer, 0, 1 << 20}, i)));
  ASSERT_TRUE(client->send(Channel::kControl, frame(MessageType::kHeartbeat)));
  std::size_t before = 0;
  ASSERT_TRUE(run_until({&server, &client}, [&] {
    std::size_t seen = 0;
    bool heartbeat = false;
    for (const InFrame& in : server.frames) {
      seen += in.header.type == MessageType::kChunk;
      if (in.header.type == MessageType::kHeartbeat && !heartbeat) {
        heartbeat = true;
        before = seen;
      }
    }
    return heartbeat && seen == chunks;
  }));
  EXPECT_LT(before, chunks);  // it did not queue behind the bulk data it was sent after
}

TEST_P(Transport, FiftyClients) {
  ServerNode server(world);
  std::vector<std::unique_ptr<ClientNode>> clients;
  std::vector<Node*> nodes = {&server};
  for (std::size_t i = 0; i < 50; ++i) {
    clients.push_back(std::make_unique<ClientNode>(world, server.endpoint));
    nodes.push_back(clients.back().get());
    (*clients.back())->connect(Channel::kControl);
    (*clients.back())->connect(Channel::kBulk);
  }
  ASSERT_TRUE(run_until(nodes, [&] {
    return std::all_of(clients.begin(), clients.end(), [](const auto& c) { return c->connected.size() == 2; });
  }));
  for (std::size_t i = 0; i < 50; ++i) {
    for (std::size_t k = 0; k < 10; ++k) {
      for (const Channel channel : {Channel::kControl, Channel::kBulk}) {
        OutFrame out = frame(MessageType::kHeartbeat, std::to_string(k), i + 1);
        out.header.lane = static_cast<std::uint16_t>(channel);
        ASSERT_TRUE((*clients[i])->send(channel, std::move(out)));
      }
    }
  }
  ASSERT_TRUE(run_until(nodes, [&] { return server.frames.size() == 1000; }));
  std::map<PeerId, std::vector<const InFrame*>> by_peer;
  for (const InFrame& in : server.frames) by_peer[in.peer].push_back(&in);
  EXPECT_EQ(by_peer.size(), 100u);
  for (const auto& [peer, list] : by_peer) {
    ASSERT_EQ(list.size(), 10u);
    for (std::size_t k = 0; k < 10; ++k) {
      EXPECT_EQ(list[k]->header.incarnation, list[0]->header.incarnation);
      EXPECT_EQ(text_of(*list[k]), std::to_string(k));
    }
  }
  for (const auto& [peer, list] : by_peer) ASSERT_TRUE(server->send(peer, frame(MessageType::kHeartbeat, "", peer)));
  ASSERT_TRUE(run_until(nodes, [&] {
    return std::all_of(clients.begin(), clients.end(), [](const auto& c) { return c->frames.size() == 2; });
  }));
}

TEST_P(Transport, WakeFromAnotherThreadEndsThePoll) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  for (int i = 0; i < 20; ++i) {
    std::thread waker([&] { i % 2 ? server->wake() : client->wake(); });
    const TimePoint start = monotonic_now();
    if (i % 2) server.poll(30);
    else client.poll(30);
    waker.join();
    ASSERT_LT(monotonic_now() - start, 20);
  }
  // A wake before the poll counts too, and only once.
  server->wake();
  server->wake();
  const TimePoint start = monotonic_now();
  server.poll(30);
  EXPECT_LT(monotonic_now() - start, 20);
  server.poll(0.01);
  EXPECT_TRUE(server.order.empty());
}

TEST_P(Transport, PollWithoutTimeDoesNotWait) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  const TimePoint start = monotonic_now();
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(server.poll(0));
    EXPECT_FALSE(client.poll(0));
  }
  EXPECT_LT(monotonic_now() - start, 10);
}

TEST_P(Transport, TrafficFromTwoThreads) {
  // Server and client in threads of their own, as in a product; the suite under TSan watches what they share.
  ServerNode server(world);
  const std::string endpoint = server.endpoint;
  const std::uint64_t count = 300;
  std::thread learner([&] {
    ClientNode client(world, endpoint);
    client->connect(Channel::kBulk);
    if (!run_until({&client}, [&] { return !client.connected.empty(); })) return;
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto buffer = pattern(20000, static_cast<unsigned>(i));
      client->send(Channel::kBulk, chunk({buffer, 0, 20000}, i));
    }
    EXPECT_TRUE(run_until({&client}, [&] { return client.frames.size() == count; }));
    for (std::uint64_t i = 0; i < client.frames.size(); ++i) EXPECT_EQ(client.frames[i].header.offset, i);
  });
  std::size_t echoed = 0;
  EXPECT_TRUE(run_until({&server}, [&] {
    for (; echoed < server.frames.size(); ++echoed) {
      const InFrame& in = server.frames[echoed];
      const auto copy = Buffer::make(in.payload.size());
      std::copy(in.payload.begin(), in.payload.end(), copy->data());
      EXPECT_TRUE(server->send(in.peer, chunk({copy, 0, copy->size()}, in.header.offset)));
    }
    return echoed == count && !server.gone.empty();
  }));
  learner.join();
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Over, Transport, ::testing::Values(Kind::kInproc, Kind::kZmq),
                         [](const auto& info) { return kind_name(info.param); });

}  // namespace diloco::transport_test
