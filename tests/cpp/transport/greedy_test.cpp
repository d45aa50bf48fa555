// Peers that cost memory without saying anything wrong: they do not read, or a message of theirs never ends.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "resident.h"
#include "transport/raw_tcp.h"
#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

TransportLimits unsent_limit(std::uint64_t bytes) {
  TransportLimits limits;
  limits.max_unsent_bytes = bytes;
  return limits;
}

std::string heartbeat(Incarnation incarnation = 0) {
  Header header;
  header.incarnation = incarnation;
  header.checksum = payload_checksum({});
  const auto bytes = encode_header(header);
  return zmtp_frame({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

TEST_P(Transport, PeerThatDoesNotReadIsCutAtTheBound) {
  constexpr std::uint64_t kBound = 2 << 20, kBody = 10000;
  ServerNode server(world, unsent_limit(kBound));
  ClientNode deaf(world, server.endpoint), witness(world, server.endpoint);
  // libzmq's client reads whatever its owner does; not to read takes a peer below it.
  RawTcp raw(zmq() ? server.endpoint : "127.0.0.1:1");
  if (zmq()) {
    ASSERT_TRUE(raw.handshake() && raw.send(heartbeat(1)));
    ASSERT_TRUE(run_until({&server}, [&] { return server.peer(1) != 0; }));
  } else {
    join(server, deaf, Channel::kControl, 1);
  }
  join(server, witness, Channel::kControl, 2);
  const PeerId peer = server.peer(1);
  std::size_t taken = 0;
  while (taken < 10000 && server->send(peer, frame(MessageType::kStatusReply, std::string(kBody, 's')))) ++taken;
  ASSERT_LT(taken, 10000u);
  EXPECT_GE(taken * (kBody + 2000), kBound);
  ASSERT_TRUE(run_until({&server}, [&] { return server.lost(peer); }));
  EXPECT_NE(server.gone[0].why.find("does not read"), std::string::npos) << server.gone[0].why;
  EXPECT_NE(server.gone[0].why.find(std::to_string(kBound)), std::string::npos) << server.gone[0].why;
  EXPECT_EQ(server->counters().unread, 1u);
  EXPECT_EQ(server->counters().malformed, 0u);
  EXPECT_FALSE(server->send(peer, frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(run_until({&server, &deaf}, [&] { return zmq() ? raw.closed() : !deaf.disconnected.empty(); }));
  // The other one never noticed.
  ASSERT_TRUE(witness->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 2)));
  ASSERT_TRUE(server->send(server.peer(2), frame(MessageType::kHeartbeat)));
  ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == 3 && witness.frames.size() == 1; }));
  EXPECT_EQ(server.gone.size(), 1u);
}

TEST_P(Transport, OneFrameAlwaysPassesWhateverItsSize) {
  ServerNode server(world, unsent_limit(1000));
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kControl, 1);
  const std::string body(8 << 20, 'w');
  for (std::size_t i = 1; i <= 3; ++i) {
    ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kWelcome, body)));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return client.frames.size() == i; }));
    // It has been read to its end, but libzmq may not have let go of it yet.
    run_for({&server, &client}, 0.05);
  }
  EXPECT_EQ(server->counters().unread, 0u);
}

// A window of chunks under way, with a reader that takes one at a time and tells so: for ever behind, never cut.
TEST_P(Transport, SlowReaderWithinItsCreditIsNotCut) {
  constexpr std::uint64_t kChunk = 64 << 10, kWindow = 16 * kChunk, kTotal = 400;
  ServerNode server(world, unsent_limit(kWindow + (64 << 10)));
  ClientNode slow(world, server.endpoint);
  join(server, slow, Channel::kBulk, 1);
  const auto buffer = pattern(kChunk);
  std::uint64_t sent = 0, told = 0;
  ASSERT_TRUE(run_until({&server}, [&] {
    while (sent < kTotal && (sent - told + 1) * kChunk <= kWindow) {
      EXPECT_TRUE(server->send(server.peer(1), chunk({buffer, 0, kChunk}, sent)));
      ++sent;
    }
    // The reader lets the window fill up each time before it looks.
    if (sent == kTotal || (sent - told + 1) * kChunk > kWindow) {
      slow.poll(0.001);
      told = slow.frames.size();
    }
    return told == kTotal;
  }));
  EXPECT_TRUE(server.gone.empty());
  EXPECT_EQ(server->counters().unread, 0u);
}

// More frames than the server lets wait for it, and then the end: all of them come, and come first.
TEST_P(Transport, AnEndBehindALongQueueComesLast) {
  ServerNode server(world);
  ClientNode client(world, server.endpoint);
  join(server, client, Channel::kBulk, 1);
  for (std::uint64_t i = 0; i < 3000; ++i) {
    ASSERT_TRUE(client->send(Channel::kBulk, chunk({pattern(1000), 0, 1000}, i)));
  }
  std::thread closer([&] { client->close(); });  // lingers until the server has read
  EXPECT_TRUE(run_until({&server}, [&] { return server.gone.size() == 1; }));
  closer.join();
  ASSERT_EQ(server.frames.size(), 3001u);
  EXPECT_EQ(server.frames.back().header.offset, 2999u);
  EXPECT_EQ(server.order.back(), "gone");
}

struct ZmqGreedy : ::testing::Test {
  struct Outcome {
    std::size_t wire = 0, grown = 0;
  };
  // Sends `block` over and over until the server hangs up or `enough` bytes have gone; says what memory grew by.
  Outcome flood(RawTcp& stranger, const std::string& block, std::size_t enough) {
    Outcome outcome;
    std::atomic<bool> ended = false;
    const std::size_t before = resident_bytes();
    std::size_t most = before;
    std::thread sender([&] {
      while (outcome.wire < enough && stranger.send(block)) outcome.wire += block.size();
      ended = true;
    });
    EXPECT_TRUE(run_until({&server}, [&] {
      most = std::max(most, resident_bytes());
      if (server.frames.size() > 1000) server.frames.clear(), server.order.clear();
      return ended.load();
    }, 60));
    sender.join();
    outcome.grown = most - before;
    return outcome;
  }
  // About 60 kB of frames with `body`, MORE set on each.
  static std::string unfinished(std::size_t body) {
    const std::string part = std::string(1, '\x01') + static_cast<char>(body) + std::string(body, 'x');
    std::string block;
    while (block.size() < 60000) block += part;
    return block;
  }
  static TransportLimits patient() {  // so that the deadline of the first frame plays no part
    TransportLimits limits;
    limits.first_frame_deadline_s = 60;
    return limits;
  }
  void introduce(RawTcp& stranger) {
    ASSERT_TRUE(stranger.handshake() && stranger.send(heartbeat()));
    ASSERT_TRUE(run_until({&server}, [&] { return server.frames.size() == 1; }));
  }
  void expect_cut(RawTcp& stranger) {
    EXPECT_TRUE(run_until({&server}, [&] { return stranger.closed() && server->counters().endless == 1; }));
    ClientNode witness(world, server.endpoint);
    witness->connect(Channel::kControl);
    ASSERT_TRUE(run_until({&server, &witness}, [&] { return !witness.connected.empty(); }));
    const std::size_t frames = server.frames.size();
    ASSERT_TRUE(witness->send(Channel::kControl, frame(MessageType::kHeartbeat)));
    EXPECT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == frames + 1; }));
  }

  static constexpr std::size_t kEnough = 256 << 20;  // a busy machine may look late
  World world{Kind::kZmq};
  ServerNode server{world, patient()};
  RawTcp stranger{server.endpoint};
};

// libzmq collects the parts of a message without a bound; two million of 30 bytes take 122 MiB.
TEST_F(ZmqGreedy, FirstMessageThatNeverEndsIsCut) {
  ASSERT_TRUE(stranger.handshake());
  const auto [wire, grown] = flood(stranger, unfinished(30), kEnough);
  EXPECT_LT(wire, kEnough);
  expect_cut(stranger);
  EXPECT_TRUE(server.gone.empty());  // it had not introduced itself
  RecordProperty("wire_bytes", std::to_string(wire));
  RecordProperty("grown_bytes", std::to_string(grown));
}

TEST_F(ZmqGreedy, LaterMessageThatNeverEndsIsCutSooner) {
  introduce(stranger);
  const auto [wire, grown] = flood(stranger, unfinished(30), kEnough);
  EXPECT_LT(wire, kEnough);
  expect_cut(stranger);
  ASSERT_EQ(server.gone.size(), 1u);
  EXPECT_NE(server.gone[0].why.find("does not end"), std::string::npos) << server.gone[0].why;
  RecordProperty("wire_bytes", std::to_string(wire));
  RecordProperty("grown_bytes", std::to_string(grown));
}

// The worst there is: two bytes on the wire take 64 in libzmq.
TEST_F(ZmqGreedy, EmptyPartsWithoutEndAreCut) {
  introduce(stranger);
  const auto [wire, grown] = flood(stranger, unfinished(0), 32 << 20);
  EXPECT_LT(wire, 32u << 20);
  expect_cut(stranger);
  RecordProperty("wire_bytes", std::to_string(wire));
  RecordProperty("grown_bytes", std::to_string(grown));
}

TEST_F(ZmqGreedy, MessagesFasterThanTheyAreReadDoNotPileUp) {
  ASSERT_TRUE(stranger.handshake());
  std::string block;
  while (block.size() < 60000) block += heartbeat();
  const auto [wire, grown] = flood(stranger, block, 100 << 20);
  EXPECT_GE(wire, 100u << 20) << "waiting is no reason to be cut";
  if (kResidentTells) {
    EXPECT_LT(grown, 32u << 20);
  }
  EXPECT_TRUE(server.gone.empty());
  RecordProperty("grown_bytes", std::to_string(grown));
}

// The largest messages there are, a piece at a time over many looks at them, are not endless.
TEST_F(ZmqGreedy, LargestMessagesPieceByPieceAreTaken) {
  std::size_t expected = 0;
  ASSERT_TRUE(stranger.handshake());
  for (const MessageType type : {MessageType::kHello, MessageType::kBegin, MessageType::kBegin}) {
    const std::string body(max_payload_bytes(type, 1 << 20), 'b');
    Header header;
    header.type = type;
    header.payload_bytes = body.size();
    header.checksum = payload_checksum(std::as_bytes(std::span(body.data(), body.size())));
    const auto bytes = encode_header(header);
    const std::string message =
        zmtp_frame({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, true) + zmtp_frame(body);
    for (std::size_t at = 0; at < message.size(); at += message.size() / 4 + 1) {
      std::atomic<bool> sent = false;
      std::thread sender([&] {
        EXPECT_TRUE(stranger.send(message.substr(at, message.size() / 4 + 1)));
        sent = true;
      });
      EXPECT_TRUE(run_until({&server}, [&] { return sent.load(); }));
      sender.join();
      run_for({&server}, 0.15);  // longer than one look is apart from the next
    }
    ASSERT_TRUE(run_until({&server}, [&] { return server.frames.size() == expected + 1; })) << message_name(type);
    ++expected;
  }
  EXPECT_EQ(server->counters().endless, 0u);
  EXPECT_TRUE(server.gone.empty());
}

}  // namespace
}  // namespace diloco::transport_test
