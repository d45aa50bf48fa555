// What the shells need of a network. Two implementations pass one test suite (tests/cpp/transport): ZeroMQ, and an
// in-process network with scripted faults.
//
// Thread rule: every method belongs to the one I/O thread that owns the object, except wake(), which any thread may
// call. Nothing here waits except poll() and close(). Loss of a peer is an event, never an exception; constructors and
// bind() throw TransportError (port in use, unresolvable name) or ConfigError (malformed endpoint: the message suggests
// the form).
//
// On the wire a message is one frame, the header, or two, header and payload; an empty payload is not sent.
//
// fork(): a child may not use what its parent made. Every method but close() throws std::logic_error there, and
// close() and the destructor do nothing, so a child's exit does not disturb the parent.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "diloco/base/types.h"
#include "diloco/wire/frame.h"

namespace diloco {

// Incoming message. Header decoded, payload size and checksum verified, size limits of the type enforced. The payload
// lives as long as this object.
struct InFrame {
  PeerId peer = 0;  // server side; 0 on the client
  Channel channel = Channel::kControl;  // client side; the server learns it from kLane
  Header header;
  std::span<const std::byte> payload;
  std::shared_ptr<void> keep_alive;
};

// Server: the connection ended by itself, or was cut for a malformed frame, an endless message or for not reading. Only
// for peers that delivered a frame, after the last of their frames; not after cut().
struct PeerGone {
  PeerId peer = 0;
  std::string why;
};
struct Connected {      // client
  Channel channel = Channel::kControl;
};
struct Disconnected {   // client
  Channel channel = Channel::kControl;
  std::string why;
};
using TransportEvent = std::variant<InFrame, PeerGone, Connected, Disconnected>;

struct TransportLimits {
  std::uint64_t chunk_bytes = 1 << 20;  // payload bound of kChunk; other types: max_payload_bytes()
  // Server: a connection that sends no valid frame by then is cut. Client: limit of ZeroMQ's own handshake.
  Seconds first_frame_deadline_s = 5.0;
  std::uint32_t max_peers = 1024;        // server: further connections are cut
  // Server: a peer to which more than this is unsent when a further frame comes is cut: it does not read. One frame
  // always passes, whatever its size. Above what a slow reader may rightly have coming: its credit and a WELCOME.
  std::uint64_t max_unsent_bytes = 64 << 20;
  Seconds linger_s = 2.0;                // close(): how long queued frames may still go out
};

struct TransportCounters {
  std::uint64_t bytes_in = 0, bytes_out = 0, frames_in = 0, frames_out = 0;
  std::uint64_t malformed = 0;      // frames refused: header, size, checksum; the peer was cut
  std::uint64_t endless = 0;        // server: peers cut because their message did not end within the largest size
  std::uint64_t unread = 0;         // server: peers cut because they did not read what was sent to them
  std::uint64_t undeliverable = 0;  // sends to peers that were gone
};

class ServerTransport {
 public:
  virtual ~ServerTransport() = default;
  // "tcp://127.0.0.1:0", "host:port", "*:port"; returns the real endpoint with the port the kernel chose.
  virtual std::string bind(const std::string& endpoint) = 0;
  // Waits up to `timeout` seconds (0: not at all) or until wake(); appends what happened.
  virtual void poll(Seconds timeout, std::vector<TransportEvent>* events) = 0;
  // False if the peer is gone, or is cut here for not reading (a PeerGone event follows or preceded); never blocks.
  virtual bool send(PeerId peer, OutFrame frame) = 0;
  // Ends the connection of one peer and ignores whatever still comes from it; no PeerGone follows. A frame sent just
  // before (REJECT) is given up to 1 s to go out.
  virtual void cut(PeerId peer, const std::string& why) = 0;
  virtual void wake() = 0;
  virtual void close() = 0;  // idempotent; lingers up to limits.linger_s
  virtual TransportCounters counters() const = 0;
};

class ClientTransport {
 public:
  virtual ~ClientTransport() = default;
  // Starts connecting one channel; Connected or Disconnected follows within 11 s. Closes an older connection of
  // the channel. Nothing reconnects by itself: after Disconnected the owner decides when to call this again.
  virtual void connect(Channel channel) = 0;
  virtual void disconnect(Channel channel) = 0;  // no event follows
  virtual void poll(Seconds timeout, std::vector<TransportEvent>* events) = 0;
  virtual bool send(Channel channel, OutFrame frame) = 0;  // false if not connected
  virtual void wake() = 0;
  virtual void close() = 0;  // idempotent; lingers up to limits.linger_s
  virtual TransportCounters counters() const = 0;
};

// ZeroMQ (zmq_server.cpp, zmq_client.cpp). Endpoints: "tcp://host:port" or "host:port"; checked and resolved before use.
std::unique_ptr<ServerTransport> make_zmq_server(const TransportLimits& limits);
std::unique_ptr<ClientTransport> make_zmq_client(const std::string& endpoint, const TransportLimits& limits);
// Canonical "tcp://host:port" (host may be "*", port 0: for bind only), or ConfigError that suggests the right form ("expected HOST:PORT, for example
// 127.0.0.1:29400; got 'localhost'").
std::string parse_endpoint(const std::string& text);
// True if every IPv4 address of the host is in 127/8. A name that does not resolve, and "*", are not loopback.
bool is_loopback_endpoint(const std::string& canonical);
std::string zmq_version_text();  // "4.3.4 (curve)"

}  // namespace diloco
