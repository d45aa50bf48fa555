// Bytes that no peer of ours sends: they cost their sender the connection and nobody else anything.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "transport/raw_tcp.h"
#include "transport/transport_fixture.h"

namespace diloco::transport_test {
namespace {

// One server and a well-behaved peer. `patience`: how long a stranger may take to say something valid.
class ZmqRawBase : public ::testing::Test {
 protected:
  explicit ZmqRawBase(Seconds patience) : limits_(limits(patience)) {
    witness->connect(Channel::kControl);
    EXPECT_TRUE(run_until({&server, &witness}, [&] { return !witness.connected.empty(); }));
    ping();
  }
  // The well-behaved peer is served as ever.
  void ping() {
    const std::size_t in = server.frames.size(), out = witness.frames.size();
    ASSERT_TRUE(witness->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 1)));
    ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == in + 1; }));
    ASSERT_TRUE(server->send(server.peer(1), frame(MessageType::kHeartbeat)));
    ASSERT_TRUE(run_until({&server, &witness}, [&] { return witness.frames.size() == out + 1; }));
    EXPECT_TRUE(witness.disconnected.empty());
  }
  bool hangs_up_on(RawTcp& stranger) {
    return run_until({&server, &witness}, [&] { return stranger.closed(); });
  }
  static TransportLimits limits(Seconds patience) {
    TransportLimits l;
    l.first_frame_deadline_s = patience;
    l.chunk_bytes = 1 << 16;
    return l;
  }
  static std::string header_bytes(const Header& header) {
    const auto bytes = encode_header(header);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static Header sealed(MessageType type, const std::string& body) {
    Header header;
    header.type = type;
    header.payload_bytes = body.size();
    header.checksum = payload_checksum(std::as_bytes(std::span(body.data(), body.size())));
    return header;
  }

  const TransportLimits limits_;
  World world{Kind::kZmq};
  ServerNode server{world, limits_};
  ClientNode witness{world, server.endpoint};
};
struct ZmqRaw : ZmqRawBase {  // tests that do not wait for the deadline, on machines however slow
  ZmqRaw() : ZmqRawBase(60) {}
};
struct ZmqRawDeadline : ZmqRawBase {
  ZmqRawDeadline() : ZmqRawBase(1.5) {}
};

TEST_F(ZmqRaw, TheHandWrittenPeerIsUnderstood) {
  RawTcp peer(server.endpoint);
  const std::string body = "hi";
  ASSERT_TRUE(peer.handshake());
  ASSERT_TRUE(peer.send(zmtp_frame(header_bytes(sealed(MessageType::kGoodbye, body)), true) + zmtp_frame(body)));
  ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == 2; }));
  EXPECT_EQ(text_of(server.frames[1]), "hi");
  // An empty second frame is as good as none.
  ASSERT_TRUE(peer.send(zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")), true) + zmtp_frame("")));
  ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == 3; }));
  EXPECT_FALSE(peer.closed());
}

TEST_F(ZmqRawDeadline, RandomBytes) {
  std::mt19937_64 random(5);
  std::vector<std::unique_ptr<RawTcp>> strangers;
  for (int i = 0; i < 150; ++i) {
    strangers.push_back(std::make_unique<RawTcp>(server.endpoint));
    std::string bytes(1 + random() % 3000, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 3 == 0) bytes = "\xff" + bytes;  // looks like ZMTP
    if (i % 3 == 1) strangers.back()->handshake();  // is ZMTP, then noise
    strangers.back()->send(bytes);
    if (i % 5 == 0) ping();
  }
  for (auto& stranger : strangers) ASSERT_TRUE(hangs_up_on(*stranger));
  ping();
  EXPECT_TRUE(server.gone.empty());
}

TEST_F(ZmqRawDeadline, HttpRequest) {
  RawTcp browser(server.endpoint);
  browser.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(hangs_up_on(browser));
  ping();
}

TEST_F(ZmqRaw, TruncationOfEveryKind) {
  const std::string body(50, 'b');
  const std::string greeting = zmtp_greeting() + zmtp_ready();
  for (std::size_t size = 0; size < greeting.size(); size += 3) {
    RawTcp stranger(server.endpoint);
    ASSERT_TRUE(stranger.send(greeting.substr(0, size)));
    if (size % 2 == 0) run_for({&server, &witness}, 0.001);
  }  // and hangs up
  const std::string message = zmtp_frame(header_bytes(sealed(MessageType::kGoodbye, body)), true) + zmtp_frame(body);
  for (std::size_t size = 0; size < message.size(); ++size) {
    RawTcp stranger(server.endpoint);
    ASSERT_TRUE(stranger.handshake() && stranger.send(message.substr(0, size)));
    if (size % 7 == 0) run_for({&server, &witness}, 0.001);
  }
  ping();
  EXPECT_EQ(server.frames.size(), 2u);  // nothing of it was believed
  EXPECT_EQ(server->counters().malformed, 0u);
}

TEST_F(ZmqRawDeadline, HalfAFrameAndThenSilenceMeetsTheDeadline) {
  std::vector<std::unique_ptr<RawTcp>> strangers;
  for (const std::size_t size : {0, 5, 64, 80, 94}) {
    strangers.push_back(std::make_unique<RawTcp>(server.endpoint));
    ASSERT_TRUE(strangers.back()->send((zmtp_greeting() + zmtp_ready()).substr(0, size)));
  }
  const std::string message = zmtp_frame(header_bytes(sealed(MessageType::kStep, "")));
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, message.size() - 1}) {
    strangers.push_back(std::make_unique<RawTcp>(server.endpoint));
    if (strangers.back()->handshake()) strangers.back()->send(message.substr(0, size));
  }
  for (auto& stranger : strangers) EXPECT_TRUE(hangs_up_on(*stranger));
  ping();
}

TEST_F(ZmqRaw, MalformedMessagesAreCountedAndCut) {
  const std::string body = "body";
  const Header good = sealed(MessageType::kGoodbye, body);
  Header longer = good, shorter = good, damaged = good;
  longer.payload_bytes = 5;
  shorter.payload_bytes = 3;
  damaged.checksum ^= 1;
  std::string bad_magic = header_bytes(good);
  bad_magic[0] = 'X';
  Header huge = sealed(MessageType::kChunk, "");
  huge.payload_bytes = ~0ull;
  const std::vector<std::string> messages = {
      zmtp_frame("x"), zmtp_frame(""), zmtp_frame("", true) + zmtp_frame(""), zmtp_frame(header_bytes(good)),
      zmtp_frame(header_bytes(longer), true) + zmtp_frame(body), zmtp_frame(header_bytes(shorter), true) + zmtp_frame(body),
      zmtp_frame(header_bytes(damaged), true) + zmtp_frame(body), zmtp_frame(bad_magic, true) + zmtp_frame(body),
      zmtp_frame(header_bytes(good), true) + zmtp_frame(body, true) + zmtp_frame("third"),
      zmtp_frame(header_bytes(good).substr(0, 143), true) + zmtp_frame(body), zmtp_frame(header_bytes(good) + "1"),
      zmtp_frame(header_bytes(huge), true) + zmtp_frame("1"), zmtp_frame(std::string(5, 'x'), true) + zmtp_frame(header_bytes(good), true) + zmtp_frame(body)};
  std::uint64_t count = 0;
  for (const std::string& message : messages) {
    RawTcp stranger(server.endpoint);
    ASSERT_TRUE(stranger.handshake() && stranger.send(message));
    ASSERT_TRUE(hangs_up_on(stranger)) << "message " << count;
    EXPECT_EQ(server->counters().malformed, ++count);
    ping();
  }
  EXPECT_TRUE(server.gone.empty());  // none of them had introduced itself
}

TEST_F(ZmqRaw, MalformedAfterAGoodFrameIsReported) {
  RawTcp peer(server.endpoint);
  ASSERT_TRUE(peer.handshake() && peer.send(zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")))));
  ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == 2; }));
  ASSERT_TRUE(peer.send(zmtp_frame("nonsense") + zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")))));
  ASSERT_TRUE(hangs_up_on(peer));
  ASSERT_EQ(server.gone.size(), 1u);
  EXPECT_EQ(server.gone[0].peer, server.frames[1].peer);
  EXPECT_NE(server.gone[0].why.find("malformed"), std::string::npos);
  EXPECT_EQ(server.frames.size(), 2u);
}

std::size_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stoul(line.substr(6));
  }
  return 0;
}

TEST_F(ZmqRaw, OversizeAnnouncementsCostNothing) {
  const std::size_t before = resident_kib();
  for (const std::uint64_t size : {std::uint64_t{1} << 30, std::uint64_t{1} << 62, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    std::vector<std::unique_ptr<RawTcp>> strangers;
    for (int i = 0; i < 20; ++i) {
      strangers.push_back(std::make_unique<RawTcp>(server.endpoint));
      std::string frame = "\x02";
      for (int shift = 56; shift >= 0; shift -= 8) frame += static_cast<char>(size >> shift & 0xff);
      ASSERT_TRUE(strangers.back()->handshake() && strangers.back()->send(frame));
    }
    for (auto& stranger : strangers) ASSERT_TRUE(hangs_up_on(*stranger)) << size;
  }
  ping();
  const std::size_t after = resident_kib();
  EXPECT_LT(after, before + 64 * 1024);
}

TEST_F(ZmqRawDeadline, StrangerNamingItselfLikeAnotherPeerDoesNotReplaceIt) {
  // ZMTP lets a peer choose its routing id; taking over somebody's is what ROUTER_HANDOVER would allow.
  for (int i = 0; i < 2; ++i) {
    const std::string ready_body =
        std::string("\x05READY\x0bSocket-Type\x00\x00\x00\x06" "DEALER", 28) +
        std::string("\x08Identity\x00\x00\x00\x05" "twin", 17) + std::to_string(i);
    const std::string ready = std::string("\x04", 1) + static_cast<char>(ready_body.size()) + ready_body;
    RawTcp first(server.endpoint), second(server.endpoint);
    const std::size_t frames = server.frames.size();
    ASSERT_TRUE(first.handshake(ready) && first.send(zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")))));
    ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == frames + 1; }));
    ASSERT_TRUE(second.handshake(ready) && second.send(zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")))));
    ASSERT_TRUE(hangs_up_on(second));  // never heard: the first-frame deadline takes it
    EXPECT_FALSE(first.closed());
    EXPECT_EQ(server.frames.size(), frames + 1);
    first.close();
    ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.gone.size() == static_cast<std::size_t>(i) + 1; }));
  }
}

// Its message is read when the next connection has the descriptor already, and libzmq names the descriptor only.
TEST_F(ZmqRaw, WhatAClosedConnectionSaidIsNotHeldAgainstTheNextOneOnItsDescriptor) {
  const std::string good = zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")));
  const std::string endless = std::string("\x02\x7f", 2) + std::string(7, '\xff');  // more than a message may have
  const std::string bad = zmtp_frame(std::string(kHeaderBytes, 'x'));
  for (const bool valid : {true, false}) {
    const int spare = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    RawTcp first(server.endpoint);
    ASSERT_TRUE(first.handshake());
    ASSERT_TRUE(first.send((valid ? good : bad) + endless));
    first.wait_closed();  // by libzmq; the server has not been asked for anything
    ::close(spare);       // for this end of the next: its server's end takes what the first left
    RawTcp second(server.endpoint);
    ASSERT_TRUE(second.handshake());
    const auto malformed = server->counters().malformed;
    const std::size_t frames = server.frames.size();
    if (valid) {
      ASSERT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == frames + 1; }));
      server->cut(server.frames.back().peer, "refused");
    } else {
      ASSERT_TRUE(run_until({&server, &witness}, [&] { return server->counters().malformed == malformed + 1; }));
    }
    const auto cut = [&] { return second.closed(); };
    EXPECT_FALSE(run_until({&server, &witness}, cut, 1.5)) << valid;  // a cut waits at most 1 s for its last frame
    const std::size_t heard = server.frames.size();
    ASSERT_TRUE(second.send(good));
    EXPECT_TRUE(run_until({&server, &witness}, [&] { return server.frames.size() == heard + 1; })) << valid;
  }
  ping();
}

TEST_F(ZmqRaw, ConnectAndCloseStorm) {
  for (int round = 0; round < 30; ++round) {
    std::vector<std::unique_ptr<RawTcp>> strangers;
    for (int i = 0; i < 20; ++i) {
      strangers.push_back(std::make_unique<RawTcp>(server.endpoint));
      if (i % 2) strangers.back()->send(zmtp_greeting());
    }
  }
  ping();
  ClientNode late(world, server.endpoint, limits_);
  late->connect(Channel::kControl);
  ASSERT_TRUE(run_until({&server, &late}, [&] { return !late.connected.empty(); }));
  ASSERT_TRUE(late->send(Channel::kControl, frame(MessageType::kHeartbeat, "", 2)));
  ASSERT_TRUE(run_until({&server, &late}, [&] { return server.peer(2) != 0; }));
  EXPECT_TRUE(server.gone.empty());
}

TEST_F(ZmqRawDeadline, ClientMeetsSomethingThatIsNoSyncer) {
  // A listener that accepts and says nothing of ours; another that speaks at once.
  for (const bool talks : {false, true}) {
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
    ASSERT_EQ(::listen(listener, 4), 0);
    ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    ClientNode client(world, "127.0.0.1:" + std::to_string(ntohs(address.sin_port)), limits_);
    client->connect(Channel::kControl);
    const int accepted = ::accept(listener, nullptr, nullptr);
    const std::string text = "SSH-2.0-OpenSSH_9.2\r\n" + std::string(200, 'x');
    if (talks) ASSERT_GT(::send(accepted, text.data(), text.size(), MSG_NOSIGNAL), 0);
    else ::shutdown(accepted, SHUT_RDWR);
    ASSERT_TRUE(run_until({&client}, [&] { return !client.disconnected.empty(); }));
    EXPECT_NE(client.disconnected[0].why.find("handshake"), std::string::npos) << client.disconnected[0].why;
    EXPECT_TRUE(client.frames.empty());
    ::close(accepted);
    ::close(listener);
  }
}

// Connections are lost in the moment in which their server closes, with frames still queued for them: libzmq's listener
// once waited for ever for somebody to take those.
TEST_F(ZmqRaw, AServerClosesThoughPeersWithQueuedFramesAreLostMeanwhile) {
  TransportLimits brief;
  brief.linger_s = 0.1;
  const auto buffer = pattern(1 << 20);
  for (int round = 0; round < 20; ++round) {
    ServerNode closing(world, brief);
    std::vector<std::unique_ptr<RawTcp>> peers;
    for (int i = 0; i < 8; ++i) {
      peers.push_back(std::make_unique<RawTcp>(closing.endpoint));
      ASSERT_TRUE(peers.back()->handshake());
      ASSERT_TRUE(peers.back()->send(zmtp_frame(header_bytes(sealed(MessageType::kHeartbeat, "")))));
    }
    ASSERT_TRUE(run_until({&closing}, [&] { return closing.frames.size() == peers.size(); }));
    for (const InFrame& hello : closing.frames) {
      for (std::uint64_t i = 0; i < 12; ++i) ASSERT_TRUE(closing->send(hello.peer, chunk({buffer, 0, 1 << 20}, i)));
    }
    std::thread loss([&] {
      for (const auto& peer : peers) peer->close();
    });
    for (std::atomic<int> spin = 0; spin < round * 1000;) ++spin;
    closing->close();  // would not return
    loss.join();
  }
}

}  // namespace
}  // namespace diloco::transport_test
