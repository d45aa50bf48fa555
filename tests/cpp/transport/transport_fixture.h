// One world per test: servers and clients of either transport, and loops that poll all of them until something holds.
// Nothing here sleeps; a condition that never comes true ends at a deadline.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "diloco/base/clock.h"
#include "diloco/transport/inproc.h"
#include "diloco/transport/transport.h"

namespace diloco::transport_test {

enum class Kind { kInproc, kZmq };
inline std::string kind_name(Kind kind) { return kind == Kind::kInproc ? "inproc" : "zmq"; }

// Makes {server, client} pairs of one transport.
class World {
 public:
  explicit World(Kind kind) : inproc_(kind == Kind::kInproc ? InprocNetwork::make() : nullptr) {}
  std::unique_ptr<ServerTransport> server(const TransportLimits& limits = {}) {
    return inproc_ ? inproc_->server(limits) : make_zmq_server(limits);
  }
  std::unique_ptr<ClientTransport> client(const std::string& endpoint, const TransportLimits& limits = {},
                                          const std::string& name = "") {
    if (!inproc_) return make_zmq_client(endpoint, limits);
    inproc_->name_next_client(name);
    return inproc_->client(endpoint, limits);
  }
  InprocNetwork* inproc() { return inproc_.get(); }  // null with ZeroMQ

 private:
  std::shared_ptr<InprocNetwork> inproc_;
};

// One side and everything it has seen.
class Node {
 public:
  virtual ~Node() = default;
  virtual bool poll(Seconds timeout) = 0;  // true if something happened

  std::vector<InFrame> frames;
  std::vector<PeerGone> gone;
  std::vector<Channel> connected;
  std::vector<Disconnected> disconnected;
  std::vector<std::string> order;  // "frame", "gone", "connected", "disconnected" as they came

 protected:
  bool keep(std::vector<TransportEvent>& events) {
    for (TransportEvent& event : events) {
      if (auto* frame = std::get_if<InFrame>(&event)) {
        frames.push_back(std::move(*frame));
        order.push_back("frame");
      } else if (auto* peer = std::get_if<PeerGone>(&event)) {
        gone.push_back(*peer);
        order.push_back("gone");
      } else if (auto* up = std::get_if<Connected>(&event)) {
        connected.push_back(up->channel);
        order.push_back("connected");
      } else {
        disconnected.push_back(std::get<Disconnected>(event));
        order.push_back("disconnected");
      }
    }
    return !events.empty();
  }
};

class ServerNode : public Node {
 public:
  explicit ServerNode(World& world, const TransportLimits& limits = {}, const std::string& bind = "127.0.0.1:0")
      : transport(world.server(limits)), endpoint(transport->bind(bind)) {}
  bool poll(Seconds timeout) override {
    std::vector<TransportEvent> events;
    transport->poll(timeout, &events);
    return keep(events);
  }
  ServerTransport* operator->() { return transport.get(); }
  // Peer of the first frame whose header carries this incarnation; 0 if none has come.
  PeerId peer(Incarnation incarnation) const {
    for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame) {
      if (frame->header.incarnation == incarnation) return frame->peer;
    }
    return 0;
  }
  bool lost(PeerId peer) const {
    for (const PeerGone& one : gone) {
      if (one.peer == peer) return true;
    }
    return false;
  }
  std::unique_ptr<ServerTransport> transport;
  std::string endpoint;
};

class ClientNode : public Node {
 public:
  ClientNode(World& world, const std::string& endpoint, const TransportLimits& limits = {},
             const std::string& name = "")
      : transport(world.client(endpoint, limits, name)) {}
  bool poll(Seconds timeout) override {
    std::vector<TransportEvent> events;
    transport->poll(timeout, &events);
    return keep(events);
  }
  ClientTransport* operator->() { return transport.get(); }
  std::unique_ptr<ClientTransport> transport;
};

// Polls all nodes until `done` holds; false if that took longer than `limit_s`.
inline bool run_until(const std::vector<Node*>& nodes, const std::function<bool()>& done, Seconds limit_s = 20.0) {
  const TimePoint deadline = monotonic_now() + limit_s;
  while (!done()) {
    if (monotonic_now() >= deadline) return done();
    bool news = false;
    for (Node* node : nodes) news = node->poll(0) || news;
    if (!news && !nodes.empty()) nodes[0]->poll(0.001);
  }
  return true;
}

// Polls for a stretch of time in which something must *not* happen.
inline void run_for(const std::vector<Node*>& nodes, Seconds duration) {
  const TimePoint end = monotonic_now() + duration;
  run_until(nodes, [&] { return monotonic_now() >= end; }, duration + 1);
}

inline OutFrame frame(MessageType type, std::string body = "", Incarnation incarnation = 0) {
  OutFrame out;
  out.header.type = type;
  out.header.incarnation = incarnation;
  out.body = std::move(body);
  return out;
}

inline OutFrame chunk(Slice slice, std::uint64_t offset = 0, Incarnation incarnation = 0) {
  OutFrame out = frame(MessageType::kChunk, "", incarnation);
  out.header.offset = offset;
  out.slice = std::move(slice);
  return out;
}

inline std::string text_of(const InFrame& frame) {
  return {reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size()};
}

inline BufferPtr pattern(std::size_t bytes, unsigned seed = 1) {
  auto buffer = Buffer::make(bytes);
  for (std::size_t i = 0; i < bytes; ++i) buffer->data()[i] = static_cast<std::byte>(i * 31 + i / 251 + seed);
  return buffer;
}

// Parameterised over both transports.
class Transport : public ::testing::TestWithParam<Kind> {
 protected:
  World world{GetParam()};
  bool zmq() const { return GetParam() == Kind::kZmq; }

  // Connects one channel and, with `incarnation`, says HELLO (LANE on bulk) and waits until the server has it.
  void join(ServerNode& server, ClientNode& client, Channel channel, Incarnation incarnation) {
    const std::size_t before = client.connected.size();
    client->connect(channel);
    ASSERT_TRUE(run_until({&server, &client}, [&] { return client.connected.size() > before; }));
    const std::size_t frames = server.frames.size();
    const bool control = channel == Channel::kControl;
    ASSERT_TRUE(client->send(channel, frame(control ? MessageType::kHello : MessageType::kLane, control ? "hello" : "",
                                            incarnation)));
    ASSERT_TRUE(run_until({&server, &client}, [&] { return server.frames.size() > frames; }));
  }
};

}  // namespace diloco::transport_test
