// Thin RAII over libzmq's C interface, shared by server and client. Private to the ZeroMQ transport.
//
// Not zmq.hpp: its destructors would touch libzmq in a forked child, where the I/O threads do not exist.
#pragma once

#include <unistd.h>
#include <zmq.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "diloco/base/types.h"
#include "diloco/transport/transport.h"

namespace diloco::zmq_detail {

constexpr TimePoint kNever = std::numeric_limits<double>::infinity();
// One poll() hands over at most about so much: its caller has timers to serve.
constexpr std::size_t kFramesPerPoll = 512;
constexpr std::uint64_t kBytesPerPoll = 16 << 20;

// Owns a T, unless fork() has made this process a copy: then using it throws and destroying it leaks.
template <typename T>
class ForkSafe {
 public:
  explicit ForkSafe(std::unique_ptr<T> object) : object_(std::move(object)) {}
  ~ForkSafe() {
    if (in_child()) object_.release();
  }
  bool in_child() const { return ::getpid() != pid_; }
  T* operator->() const {
    if (in_child()) {
      throw std::logic_error("this connection was made in process " + std::to_string(pid_) +
                             " and cannot be used in process " + std::to_string(::getpid()) +
                             ", a fork() of it; make a new one there, or start the child with spawn");
    }
    return object_.get();
  }

 private:
  const pid_t pid_ = ::getpid();
  std::unique_ptr<T> object_;
};

class Context {
 public:
  Context() : handle_(zmq_ctx_new()) {}
  ~Context() { terminate(); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  void* get() const { return handle_; }
  void terminate();  // waits for closed sockets to linger

 private:
  void* handle_;
};

class Socket {
 public:
  Socket() = default;
  Socket(Context& context, int type);
  ~Socket() { close(0); }
  Socket(Socket&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Socket& operator=(Socket&& other) noexcept;
  void* get() const { return handle_; }
  explicit operator bool() const { return handle_ != nullptr; }
  void set(int option, int value);
  void set64(int option, std::int64_t value);
  std::string last_endpoint() const;
  void close(Seconds linger);

 private:
  void* handle_ = nullptr;
};

// Options both ends share: no high-water mark (credit bounds memory, nothing is ever dropped), keepalive, limits of
// frame size and of ZeroMQ's handshake.
void set_common_options(Socket& socket, std::uint64_t max_frame_bytes, Seconds handshake_limit);

// Received frame. Movable through shared_ptr only; closing is safe on any thread.
class Message {
 public:
  Message() { zmq_msg_init(&message_); }
  ~Message() { zmq_msg_close(&message_); }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  bool receive(void* socket) { return zmq_msg_recv(&message_, socket, ZMQ_DONTWAIT) >= 0; }
  bool more() const { return zmq_msg_more(&message_) != 0; }
  int source_fd() const { return zmq_msg_get(&message_, ZMQ_SRCFD); }
  std::span<const std::byte> bytes() const;

 private:
  mutable zmq_msg_t message_;
};

// A message of ours as received: header and payload, one of them or neither missing. False if there is none. A message
// of more than two frames is read to its end and marked.
struct Received {
  std::string routing_id;  // ROUTER only
  std::shared_ptr<Message> header, payload;  // payload may be null
  bool too_many_frames = false;
  std::span<const std::byte> payload_bytes() const {
    return payload ? payload->bytes() : std::span<const std::byte>{};
  }
};
bool receive(void* socket, bool with_routing_id, Received& out);
// open_frame() over it.
std::optional<Header> open_received(const Received& received, const TransportLimits& limits, std::string* why);

// Bytes handed to libzmq and not yet released by it, with what holding them costs. Lowered on libzmq's I/O thread.
using Outstanding = std::atomic<std::uint64_t>;

// Sends a sealed frame without copying its payload; `routing_id` empty for DEALER. False if the peer cannot be reached.
bool send_frame(void* socket, const std::string& routing_id, OutFrame frame,
                const std::shared_ptr<Outstanding>& outstanding, std::uint64_t* bytes);

struct MonitorEvent {
  int event = 0;
  int value = 0;
};

// Events of one socket, which must outlive this.
class Monitor {
 public:
  Monitor() = default;
  Monitor(Context& context, Socket& monitored, int events);
  ~Monitor() { stop(); }
  Monitor(Monitor&& other) noexcept
      : monitored_(std::exchange(other.monitored_, nullptr)), pair_(std::move(other.pair_)) {}
  Monitor& operator=(Monitor&& other) noexcept;
  std::optional<MonitorEvent> next();
  void* get() const { return pair_.get(); }
  void stop();

 private:
  void* monitored_ = nullptr;
  Socket pair_;
};
bool is_handshake_failure(int event);

// Wakes a poll from any thread, 50 us later and by a timer. Waking another thread directly would be a scheduling point
// in the caller, which is the training thread at the end of a boundary: on a busy machine it lost its core there in one
// step of fifteen, and half of all its time in DiLoCo with it (docs/decisions.md).
class Waker {
 public:
  Waker();
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;
  void wake();
  bool take();  // true if woken since the last take
  int fd() const { return fd_; }

 private:
  static constexpr long kDelayNanoseconds = 50'000;
  int fd_;
  std::atomic<bool> armed_ = false;
};

// Waits on the items until `until`; false if a signal interrupted the wait.
bool wait(zmq_pollitem_t* items, int count, TimePoint until);
std::string error_text();

}  // namespace diloco::zmq_detail
