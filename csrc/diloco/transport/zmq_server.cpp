#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/transport/endpoint.h"
#include "diloco/transport/frame_check.h"
#include "diloco/transport/tcp_bytes.h"
#include "diloco/transport/zmq_common.h"

namespace diloco {
namespace {

using namespace zmq_detail;

constexpr Seconds kCutGrace = 1.0;    // for the last frame to a peer being cut
constexpr Seconds kCutSettle = 0.02;  // libzmq releases a small frame just before it writes it to the kernel
constexpr Seconds kCutTick = 0.005;
constexpr Seconds kGoneLimit = 1.0;   // PeerGone is told after so long even if other peers' frames never run dry
constexpr Seconds kLookEvery = 0.1;   // at how much has come without making a message
constexpr std::uint64_t kFramingBytes = 1 << 16;  // greeting, ZMTP's headers and commands, libzmq's read buffer
constexpr int kQueuedMessages = 16;  // of one peer: then TCP makes it wait. Nothing is dropped on this side of a ROUTER

// Tells sockets on one descriptor apart, also one whose peer has reset it.
struct SocketId {
  std::uint32_t major = 0, minor = 0;
  std::uint64_t number = 0;  // 0: not open
  bool open() const { return number != 0; }
  bool operator==(const SocketId&) const = default;
};

// Descriptors here are libzmq's: by now one may be closed, or belong to anything that another thread has opened, and the
// question is harmless. fstat() asks the same, but ThreadSanitizer takes it for a use of what that thread has there.
SocketId socket_of(int fd) {
  struct statx info {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_INO, &info) != 0) return {};
  return {info.stx_dev_major, info.stx_dev_minor, info.stx_ino};
}

// A ROUTER's own routing ids are a zero byte and a counter: of two on one descriptor the higher is the newer.
std::optional<std::uint32_t> serial_of(const std::string& routing_id) {
  if (routing_id.size() != 5 || routing_id[0] != '\0') return std::nullopt;
  std::uint32_t serial = 0;
  for (std::size_t i = 1; i < 5; ++i) serial = serial << 8 | static_cast<unsigned char>(routing_id[i]);
  return serial;
}

// Of two routing ids on one descriptor. One that a peer has chosen itself, which no learner does, gives way.
bool is_older(const std::string& a, const std::string& b) {
  const auto x = serial_of(a), y = serial_of(b);
  return !x || (y && static_cast<std::int32_t>(*x - *y) < 0);
}

// A TCP connection that libzmq has accepted, known by its descriptor until libzmq says it is closed.
struct Connection {
  SocketId socket;
  TimePoint accepted_at = 0;
  std::string routing_id;  // of its peer, "" before the first frame
  bool doubtful = false;   // that frame may still have been of the connection that had the descriptor before
  bool shut = false;
  bool excess = false;     // accepted above max_peers
  std::optional<std::uint64_t> read;  // bytes libzmq had read when last looked at
  std::uint64_t read_before = 0;      // the same when last a message had come of them
};

// A connection that libzmq has reported the end of. It does so before it hands over the last frames and closes the
// descriptor, so only once it is seen closed are those frames there to be read.
struct Ended {
  SocketId socket;
  std::string routing_id;  // "" if that cannot be told: a frame of one not heard yet may still come
  bool closed = false;
};

struct Peer {
  PeerId id = 0;
  int fd = -1;  // -1: its connection has ended, or cannot be told
  bool announced = false;  // has delivered a valid frame
  bool spoke = false;      // has delivered something since its connection was last looked at
  bool ignored = false;    // cut: nothing it sends counts
  bool ended = false;
  std::string why;
  TimePoint ended_at = 0;
  std::shared_ptr<Outstanding> outstanding = std::make_shared<Outstanding>(0);
};

struct Cut {
  int fd = -1;
  std::shared_ptr<Outstanding> outstanding;
  TimePoint at = 0;  // at the latest; brought forward when everything is out
  bool settling = false;
};

class Server {
 public:
  explicit Server(const TransportLimits& limits) : limits_(limits), router_(context_, ZMQ_ROUTER) {
    set_common_options(router_, largest_message(false), limits.first_frame_deadline_s);
    router_.set(ZMQ_RCVHWM, kQueuedMessages);
    router_.set(ZMQ_ROUTER_MANDATORY, 1);
    router_.set(ZMQ_BACKLOG, 1024);  // all learners come back at once after a restart
    monitor_ = Monitor(context_, router_,
                       ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                           ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH);
  }

  std::string bind(const std::string& text);
  void poll(Seconds timeout, std::vector<TransportEvent>* events);
  bool send(PeerId peer, OutFrame frame);
  void cut(PeerId peer);
  void wake() { waker_.wake(); }
  void close();
  TransportCounters counters() const { return counters_; }

 private:
  using Peers = std::unordered_map<std::string, Peer>;

  void drain_monitor();
  void on_accepted(int fd);
  void on_disconnected(int fd);
  bool drain_router(std::vector<TransportEvent>* events);
  void on_message(const Received& received, std::vector<TransportEvent>* events);
  Peer& introduce(const std::string& routing_id, int fd);
  void mark_ended(Peer& peer, const std::string& why);
  void report_gone(TimePoint now, bool drained, std::vector<TransportEvent>* events);
  void hang_up(const std::string& routing_id, Peer& peer);
  void disown(const std::string& routing_id, Peer& peer, Connection& connection);
  std::uint64_t largest_message(bool announced) const;
  void look();
  void cut_endless(bool drained);
  void serve_deadlines(TimePoint now);
  TimePoint next_deadline() const;
  void shut(int fd);

  const TransportLimits limits_;
  Context context_;
  Socket router_;
  Monitor monitor_;
  Waker waker_;
  TransportCounters counters_;

  std::unordered_map<int, Connection> connections_;  // by descriptor
  std::set<int> silent_;                             // descriptors that have not sent a frame
  std::map<int, Ended> just_ended_;  // descriptors whose connection ended, until its last frame has been read
  std::vector<int> crowded_;         // descriptors accepted above max_peers
  Peers peers_;                                      // by routing id
  std::unordered_map<PeerId, std::string> routing_ids_;  // of peers not ignored
  std::set<std::string> ended_;                      // routing ids of peers to report gone
  std::vector<Cut> cuts_;
  std::vector<PeerGone> cut_off_;  // hung up on, and not told yet
  TimePoint next_look_ = 0, last_drained_ = 0;
  PeerId next_peer_ = 1;
};

std::string Server::bind(const std::string& text) {
  if (!router_) throw TransportError("this transport is closed");
  Endpoint endpoint = split_endpoint(text);
  const std::string asked = endpoint.canonical();
  if (endpoint.host != "*") endpoint.host = require_ipv4(endpoint.host).front();
  const std::string port = endpoint.port == 0 ? "*" : std::to_string(endpoint.port);
  if (zmq_bind(router_.get(), ("tcp://" + endpoint.host + ":" + port).c_str()) == 0) return router_.last_endpoint();
  switch (zmq_errno()) {
    case EADDRINUSE:
      throw TransportError("cannot listen on " + asked + ": port " + port +
                           " is already in use (another syncer?); choose another port, or 0 to have one chosen");
    case EADDRNOTAVAIL:
    case ENODEV:
      throw TransportError("cannot listen on " + asked + ": " + endpoint.host +
                           " is not an address of this machine; use 127.0.0.1, one of its addresses, or *");
    case EACCES:
      throw TransportError("cannot listen on " + asked + ": no permission for port " + port +
                           "; choose one above 1023");
    default: throw TransportError("cannot listen on " + asked + ": " + error_text());
  }
}

void Server::poll(Seconds timeout, std::vector<TransportEvent>* events) {
  if (!router_) return;
  const TimePoint until = monotonic_now() + timeout;
  const std::size_t before = events->size();
  for (;;) {
    const TimePoint now = monotonic_now();
    serve_deadlines(now);
    drain_monitor();
    const bool looking = now >= next_look_;
    if (looking) look();
    const bool drained = drain_router(events);
    if (drained) last_drained_ = now;
    if (looking && (drained || now >= last_drained_ + kGoneLimit)) cut_endless(drained);
    report_gone(now, drained, events);
    for (PeerGone& gone : cut_off_) events->emplace_back(std::move(gone));
    cut_off_.clear();
    if (events->size() > before || waker_.take() || now >= until) return;
    zmq_pollitem_t items[] = {{router_.get(), 0, ZMQ_POLLIN, 0},
                              {monitor_.get(), 0, ZMQ_POLLIN, 0},
                              {nullptr, waker_.fd(), ZMQ_POLLIN, 0}};
    if (!wait(items, 3, std::min(until, next_deadline()))) return;
  }
}

void Server::drain_monitor() {
  while (const auto event = monitor_.next()) {
    if (event->event == ZMQ_EVENT_ACCEPTED) on_accepted(event->value);
    if (event->event == ZMQ_EVENT_DISCONNECTED) on_disconnected(event->value);
  }
  // Only now: one whose end has not been reported by here was open when its socket was looked at.
  for (const int fd : std::exchange(crowded_, {})) {
    const auto found = connections_.find(fd);
    if (found != connections_.end() && found->second.excess) shut(fd);
  }
  for (auto& [fd, ended] : just_ended_) {
    const SocketId now = socket_of(fd);
    ended.closed = ended.closed || !now.open() || now != ended.socket;
  }
}

void Server::on_accepted(int fd) {
  if (connections_.contains(fd)) on_disconnected(fd);
  Connection connection;
  connection.socket = socket_of(fd);
  connection.accepted_at = monotonic_now();
  if (const auto before = just_ended_.find(fd); before != just_ended_.end()) before->second.closed = true;
  connection.excess = connections_.size() >= limits_.max_peers;
  if (connection.excess) crowded_.push_back(fd);
  connections_[fd] = std::move(connection);
  silent_.insert(fd);
}

void Server::on_disconnected(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  const bool told = !found->second.doubtful && serial_of(found->second.routing_id);
  const auto before = just_ended_.find(fd);
  const bool told_before = before == just_ended_.end() || !before->second.routing_id.empty();
  just_ended_[fd] = {found->second.socket, told && told_before ? found->second.routing_id : "", false};
  silent_.erase(fd);
  std::erase_if(cuts_, [&](const Cut& cut) { return cut.fd == fd; });
  if (const auto peer = peers_.find(found->second.routing_id); peer != peers_.end()) {
    mark_ended(peer->second, "connection closed by the peer");
    ended_.insert(peer->first);
  }
  connections_.erase(found);
}

// Reads what has arrived; true if there was nothing more, false if the share of one poll was used up.
bool Server::drain_router(std::vector<TransportEvent>* events) {
  Received received;
  const std::uint64_t enough = counters_.bytes_in + kBytesPerPoll;
  for (std::size_t i = 0; i < kFramesPerPoll && counters_.bytes_in < enough; ++i) {
    if (!receive(router_.get(), true, received)) return true;
    on_message(received, events);
  }
  return false;
}

void Server::on_message(const Received& received, std::vector<TransportEvent>* events) {
  auto found = peers_.find(received.routing_id);
  if (found == peers_.end()) {
    introduce(received.routing_id, received.header ? received.header->source_fd() : -1);
    found = peers_.find(received.routing_id);
  }
  Peer& peer = found->second;
  peer.spoke = true;
  if (const auto connection = connections_.find(peer.fd); connection != connections_.end()) {
    connection->second.doubtful = connection->second.doubtful && just_ended_.contains(peer.fd);
  }
  if (peer.ignored) return;
  std::string why;
  const auto header = open_received(received, limits_, &why);
  if (!header) {
    ++counters_.malformed;
    if (peer.announced) events->emplace_back(PeerGone{peer.id, "malformed frame: " + why});
    hang_up(received.routing_id, peer);
    return;
  }
  peer.announced = true;
  const auto payload = received.payload_bytes();
  ++counters_.frames_in;
  counters_.bytes_in += received.header->bytes().size() + payload.size();
  events->emplace_back(InFrame{peer.id, Channel::kControl, *header, payload, received.payload});
}

// First frame under this routing id: finds the connection it came by. libzmq tells descriptors only, and reuses them;
// ACCEPTED comes before any frame of a connection, so the monitor is read first.
Peer& Server::introduce(const std::string& routing_id, int fd) {
  drain_monitor();
  Peer peer;
  peer.id = next_peer_++;
  const auto connection = connections_.find(fd);
  bool open = connection != connections_.end();
  if (open && !connection->second.routing_id.empty()) {
    const std::string& other = connection->second.routing_id;
    if (!connection->second.doubtful || is_older(routing_id, other)) {
      open = false;
    } else if (const auto stale = peers_.find(other); stale != peers_.end()) {
      mark_ended(stale->second, "connection closed by the peer");
      ended_.insert(other);
    }
  }
  if (open) {
    peer.fd = fd;
    connection->second.routing_id = routing_id;
    const auto before = just_ended_.find(fd);
    connection->second.doubtful = before != just_ended_.end() && (before->second.routing_id.empty() ||
                                                                  !is_older(before->second.routing_id, routing_id));
    silent_.erase(fd);
  } else {
    mark_ended(peer, "connection closed by the peer");
    ended_.insert(routing_id);
  }
  routing_ids_[peer.id] = routing_id;
  return peers_[routing_id] = std::move(peer);
}

void Server::mark_ended(Peer& peer, const std::string& why) {
  peer.fd = -1;
  if (peer.ended) return;
  peer.ended = true;
  peer.why = why;
  peer.ended_at = monotonic_now();
}

// libzmq hands over a connection's frames before it reports the end of it, so once nothing more can be read after the
// report, the peer's last frame has been seen.
void Server::report_gone(TimePoint now, bool drained, std::vector<TransportEvent>* events) {
  if (drained) std::erase_if(just_ended_, [](const auto& entry) { return entry.second.closed; });
  for (auto it = ended_.begin(); it != ended_.end();) {
    const auto peer = peers_.find(*it);
    if (!drained && now < peer->second.ended_at + kGoneLimit) {
      ++it;
      continue;
    }
    if (peer->second.announced && !peer->second.ignored) {
      events->emplace_back(PeerGone{peer->second.id, peer->second.why});
    }
    routing_ids_.erase(peer->second.id);
    peers_.erase(peer);
    it = ended_.erase(it);
  }
}

// Ends a peer that broke the rules: at once, nothing is owed to it.
void Server::hang_up(const std::string& routing_id, Peer& peer) {
  peer.ignored = true;
  routing_ids_.erase(peer.id);
  const auto connection = connections_.find(peer.fd);
  if (connection == connections_.end()) return;
  if (connection->second.doubtful) disown(routing_id, peer, connection->second);
  else shut(peer.fd);
}

// Perhaps it was somebody else's frame. Leaves the connection to prove itself.
void Server::disown(const std::string& routing_id, Peer& peer, Connection& connection) {
  connection.routing_id.clear();
  silent_.insert(peer.fd);
  mark_ended(peer, "");
  ended_.insert(routing_id);
}

// The most one message of a peer may have. HELLO is the first of its connection.
std::uint64_t Server::largest_message(bool announced) const {
  const std::uint64_t later =
      std::max(max_payload_bytes(MessageType::kBegin, limits_.chunk_bytes), limits_.chunk_bytes);
  return announced ? later : std::max(later, max_payload_bytes(MessageType::kHello, limits_.chunk_bytes));
}

// libzmq hands a message over when its last part is there, and bounds the size of a part, not their number. So the
// kernel is asked what has been read of a connection without a message coming of it: first that, then the messages are
// taken, and with them all that was whole by then.
void Server::look() {
  next_look_ = monotonic_now() + kLookEvery;
  for (auto& [fd, connection] : connections_) {
    const bool same = !connection.shut && connection.socket.open() && socket_of(fd) == connection.socket;
    connection.read = same ? tcp_bytes_read(fd) : std::nullopt;
  }
}

// Where the messages never run dry, as many whole ones as libzmq queues may still be waiting.
void Server::cut_endless(bool drained) {
  const std::uint64_t waiting = drained ? 0 : kQueuedMessages;
  std::vector<int> endless;
  for (auto& [fd, connection] : connections_) {
    if (!connection.read) continue;
    const auto peer = peers_.find(connection.routing_id);
    const bool known = peer != peers_.end();
    if (known && std::exchange(peer->second.spoke, false)) connection.read_before = *connection.read;
    const std::uint64_t largest = largest_message(known && peer->second.announced) + kHeaderBytes;
    const std::uint64_t limit = largest * (waiting + 1) + kFramingBytes;
    if (*connection.read > connection.read_before + limit) endless.push_back(fd);
  }
  for (const int fd : endless) {
    ++counters_.endless;
    const Connection& connection = connections_.at(fd);
    if (const auto peer = peers_.find(connection.routing_id); peer != peers_.end() && !peer->second.ignored) {
      const std::uint64_t bytes = *connection.read - connection.read_before;
      if (peer->second.announced) {
        cut_off_.push_back({peer->second.id, "a message that does not end: " + std::to_string(bytes) +
                                                 " bytes so far, at most " + std::to_string(largest_message(true)) +
                                                 " are allowed"});
      }
      peer->second.ignored = true;
      routing_ids_.erase(peer->second.id);
    }
    shut(fd);
  }
}

bool Server::send(PeerId peer_id, OutFrame frame) {
  const auto routing_id = routing_ids_.find(peer_id);
  if (!router_ || routing_id == routing_ids_.end()) {
    ++counters_.undeliverable;
    return false;
  }
  Peer& peer = peers_.at(routing_id->second);
  if (const auto unsent = peer.outstanding->load(std::memory_order_acquire); unsent > limits_.max_unsent_bytes) {
    ++counters_.unread;
    ++counters_.undeliverable;
    if (peer.announced) cut_off_.push_back({peer.id, unread_text(unsent, limits_)});
    hang_up(std::string(routing_id->second), peer);
    return false;
  }
  std::uint64_t bytes = 0;
  if (!send_frame(router_.get(), routing_id->second, std::move(frame), peer.outstanding, &bytes)) {
    ++counters_.undeliverable;
    mark_ended(peer, "connection lost");
    ended_.insert(routing_id->second);
    return false;
  }
  ++counters_.frames_out;
  counters_.bytes_out += bytes;
  return true;
}

void Server::cut(PeerId peer_id) {
  const auto routing_id = routing_ids_.find(peer_id);
  if (routing_id == routing_ids_.end()) return;
  Peer& peer = peers_.at(routing_id->second);
  peer.ignored = true;
  if (const auto connection = connections_.find(peer.fd); connection != connections_.end()) {
    if (connection->second.doubtful) disown(routing_id->second, peer, connection->second);
    else cuts_.push_back({peer.fd, peer.outstanding, monotonic_now() + kCutGrace, false});
  }
  routing_ids_.erase(routing_id);
}

void Server::serve_deadlines(TimePoint now) {
  std::vector<int> due;
  for (Cut& cut : cuts_) {
    if (!cut.settling && cut.outstanding->load(std::memory_order_acquire) == 0) {
      cut.settling = true;
      cut.at = std::min(cut.at, now + kCutSettle);
    }
    if (now >= cut.at) due.push_back(cut.fd);
  }
  for (const int fd : silent_) {
    if (now >= connections_[fd].accepted_at + limits_.first_frame_deadline_s) due.push_back(fd);
  }
  for (const int fd : due) shut(fd);
}

TimePoint Server::next_deadline() const {
  TimePoint next = cuts_.empty() ? kNever : monotonic_now() + kCutTick;
  for (const int fd : silent_) {
    const Connection& connection = connections_.at(fd);
    if (!connection.shut) next = std::min(next, connection.accepted_at + limits_.first_frame_deadline_s);
  }
  return connections_.empty() ? next : std::min(next, next_look_);
}

// A ROUTER cannot close one peer by a supported call. Shutting the descriptor down makes libzmq see the end of it. A
// descriptor that has been closed and reused meanwhile is left alone; a duplicate of it stays what it was when checked.
void Server::shut(int fd) {
  std::erase_if(cuts_, [&](const Cut& cut) { return cut.fd == fd; });
  const auto found = connections_.find(fd);
  if (found == connections_.end() || found->second.shut) return;
  found->second.shut = true;
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  const int same = own >= 0 ? own : fd;  // no descriptor to spare
  if (found->second.socket.open() && socket_of(same) == found->second.socket) ::shutdown(same, SHUT_RDWR);
  if (own >= 0) ::close(own);
}

void Server::close() {
  if (!router_) return;
  monitor_.stop();
  router_.close(limits_.linger_s);
  context_.terminate();
}

class ZmqServer : public ServerTransport {
 public:
  explicit ZmqServer(const TransportLimits& limits) : server_(std::make_unique<Server>(limits)) {}
  ~ZmqServer() override { close(); }
  std::string bind(const std::string& endpoint) override { return server_->bind(endpoint); }
  void poll(Seconds timeout, std::vector<TransportEvent>* events) override { server_->poll(timeout, events); }
  bool send(PeerId peer, OutFrame frame) override { return server_->send(peer, std::move(frame)); }
  void cut(PeerId peer, const std::string&) override { server_->cut(peer); }
  void wake() override { server_->wake(); }
  void close() override {
    if (!server_.in_child()) server_->close();
  }
  TransportCounters counters() const override { return server_->counters(); }

 private:
  ForkSafe<Server> server_;
};

}  // namespace

std::unique_ptr<ServerTransport> make_zmq_server(const TransportLimits& limits) {
  return std::make_unique<ZmqServer>(limits);
}

}  // namespace diloco
