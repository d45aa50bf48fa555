#include "diloco/transport/zmq_common.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/transport/frame_check.h"

namespace diloco::zmq_detail {
namespace {

// libzmq's queues order what its I/O thread does after what we did; ThreadSanitizer, which cannot see them, is told.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
void hand_over(void* address) { __tsan_release(address); }
void take_over(void* address) { __tsan_acquire(address); }
#else
void hand_over(void*) {}
void take_over(void*) {}
#endif

// What libzmq holds of a frame of ours until it has sent it.
struct Hold {
  OutFrame frame;
  std::array<std::byte, kHeaderBytes> header;
  std::shared_ptr<Outstanding> outstanding;
  std::uint64_t cost = 0;
  ~Hold() {
    if (outstanding) outstanding->fetch_sub(cost, std::memory_order_release);
  }
};

// Runs on libzmq's I/O thread.
void release(void*, void* hint) {
  take_over(hint);
  delete static_cast<Hold*>(hint);
}

bool send_part(void* socket, zmq_msg_t& message, bool more) {
  int rc;
  do {
    rc = zmq_msg_send(&message, socket, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0));
  } while (rc < 0 && zmq_errno() == EINTR);
  if (rc < 0) zmq_msg_close(&message);
  return rc >= 0;
}

bool send_copy(void* socket, const void* data, std::size_t size, bool more) {
  zmq_msg_t message;
  if (zmq_msg_init_size(&message, size) != 0) throw std::bad_alloc();
  std::memcpy(zmq_msg_data(&message), data, size);
  return send_part(socket, message, more);
}

}  // namespace

void Context::terminate() {
  if (!handle_) return;
  while (zmq_ctx_term(handle_) != 0 && zmq_errno() == EINTR) {
  }
  handle_ = nullptr;
}

Socket::Socket(Context& context, int type) : handle_(zmq_socket(context.get(), type)) {
  if (!handle_) throw TransportError("cannot make a socket: " + error_text());
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close(0);
    handle_ = std::exchange(other.handle_, nullptr);
  }
  return *this;
}

void Socket::set(int option, int value) {
  if (zmq_setsockopt(handle_, option, &value, sizeof value) != 0) {
    throw TransportError("cannot set socket option " + std::to_string(option) + ": " + error_text());
  }
}

void Socket::set64(int option, std::int64_t value) {
  if (zmq_setsockopt(handle_, option, &value, sizeof value) != 0) {
    throw TransportError("cannot set socket option " + std::to_string(option) + ": " + error_text());
  }
}

std::string Socket::last_endpoint() const {
  char text[256] = {};
  std::size_t size = sizeof text;
  zmq_getsockopt(handle_, ZMQ_LAST_ENDPOINT, text, &size);
  return text;
}

void Socket::close(Seconds linger) {
  if (!handle_) return;
  const int milliseconds = static_cast<int>(std::clamp(linger, 0.0, 3600.0) * 1000);
  zmq_setsockopt(handle_, ZMQ_LINGER, &milliseconds, sizeof milliseconds);
  zmq_close(handle_);
  handle_ = nullptr;
}

void set_common_options(Socket& socket, std::uint64_t max_frame_bytes, Seconds handshake_limit) {
  socket.set(ZMQ_SNDHWM, 0);
  socket.set(ZMQ_RCVHWM, 0);
  socket.set(ZMQ_IPV6, 0);
  // Until close() says otherwise. A listener keeps the value that its socket has when it is bound and gives it to
  // connections that are lost: with the default, for ever, the frames queued for one would hold up close() for ever.
  socket.set(ZMQ_LINGER, 0);
  socket.set(ZMQ_HANDSHAKE_IVL, std::max(1, static_cast<int>(std::min(handshake_limit, 3600.0) * 1000)));
  socket.set(ZMQ_TCP_KEEPALIVE, 1);
  socket.set(ZMQ_TCP_KEEPALIVE_IDLE, 10);
  socket.set(ZMQ_TCP_KEEPALIVE_INTVL, 5);
  socket.set(ZMQ_TCP_KEEPALIVE_CNT, 3);
  socket.set64(ZMQ_MAXMSGSIZE, static_cast<std::int64_t>(std::max<std::uint64_t>(max_frame_bytes, kHeaderBytes)));
}

std::span<const std::byte> Message::bytes() const {
  return {static_cast<const std::byte*>(zmq_msg_data(&message_)), zmq_msg_size(&message_)};
}

bool receive(void* socket, bool with_routing_id, Received& out) {
  out = {};
  auto part = std::make_shared<Message>();
  if (!part->receive(socket)) return false;
  if (with_routing_id) {
    const auto id = part->bytes();
    out.routing_id.assign(reinterpret_cast<const char*>(id.data()), id.size());
    if (!part->more()) return true;
    part = std::make_shared<Message>();
    if (!part->receive(socket)) return true;
  }
  out.header = part;
  while (part->more()) {
    part = std::make_shared<Message>();
    if (!part->receive(socket)) break;
    if (out.payload) out.too_many_frames = true;
    else out.payload = part;
  }
  return true;
}

std::optional<Header> open_received(const Received& received, const TransportLimits& limits, std::string* why) {
  if (received.too_many_frames || !received.header) {
    *why = "a message has one or two frames, this one " + std::string(received.header ? "more" : "none");
    return std::nullopt;
  }
  return open_frame(received.header->bytes(), received.payload_bytes(), limits, why);
}

bool send_frame(void* socket, const std::string& routing_id, OutFrame frame,
                const std::shared_ptr<Outstanding>& outstanding, std::uint64_t* bytes) {
  seal(frame);
  if (!routing_id.empty() && !send_copy(socket, routing_id.data(), routing_id.size(), true)) return false;

  auto hold = std::make_unique<Hold>();
  hold->header = encode_header(frame.header);
  hold->frame = std::move(frame);
  const auto payload = hold->frame.payload();
  *bytes = kHeaderBytes + payload.size();
  const void* data = hold->header.data();
  std::size_t size = kHeaderBytes;
  if (!payload.empty()) {
    if (!send_copy(socket, data, size, true)) return false;
    data = payload.data();
    size = payload.size();
  }
  if (outstanding) {
    hold->cost = *bytes + kFrameOverhead;
    outstanding->fetch_add(hold->cost, std::memory_order_relaxed);
    hold->outstanding = outstanding;
  }
  zmq_msg_t message;
  if (zmq_msg_init_data(&message, const_cast<void*>(data), size, release, hold.get()) != 0) throw std::bad_alloc();
  hand_over(hold.release());
  return send_part(socket, message, false);
}

Monitor::Monitor(Context& context, Socket& monitored, int events)
    : monitored_(monitored.get()), pair_(context, ZMQ_PAIR) {
  static std::atomic<std::uint64_t> counter{0};
  // libzmq's I/O thread waits when this queue is full, and with it every connection.
  pair_.set(ZMQ_RCVHWM, 0);
  const std::string endpoint = "inproc://monitor" + std::to_string(++counter);
  if (zmq_socket_monitor(monitored.get(), endpoint.c_str(), events) != 0 ||
      zmq_connect(pair_.get(), endpoint.c_str()) != 0) {
    throw TransportError("cannot watch a socket: " + error_text());
  }
}

Monitor& Monitor::operator=(Monitor&& other) noexcept {
  if (this != &other) {
    stop();
    monitored_ = std::exchange(other.monitored_, nullptr);
    pair_ = std::move(other.pair_);
  }
  return *this;
}

// In this order: libzmq would wait for ever to report to a closed socket.
void Monitor::stop() {
  if (monitored_) zmq_socket_monitor(monitored_, nullptr, 0);
  monitored_ = nullptr;
  pair_.close(0);
}

std::optional<MonitorEvent> Monitor::next() {
  Message head, address;
  if (!pair_ || !head.receive(pair_.get())) return std::nullopt;
  if (head.more()) address.receive(pair_.get());
  const auto bytes = head.bytes();
  if (bytes.size() < 6) return MonitorEvent{};
  std::uint16_t event;
  std::int32_t value;
  std::memcpy(&event, bytes.data(), sizeof event);
  std::memcpy(&value, bytes.data() + sizeof event, sizeof value);
  return MonitorEvent{event, value};
}

bool is_handshake_failure(int event) {
  return event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL || event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL ||
         event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
}

Waker::Waker() : fd_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
  if (fd_ < 0) throw TransportError(std::string("cannot make a timerfd: ") + std::strerror(errno));
}

Waker::~Waker() { ::close(fd_); }

void Waker::wake() {
  if (armed_.exchange(true, std::memory_order_acq_rel)) return;
  itimerspec soon{};
  soon.it_value.tv_nsec = kDelayNanoseconds;
  ::timerfd_settime(fd_, 0, &soon, nullptr);
}

bool Waker::take() {
  std::uint64_t times = 0;
  const bool rang = ::read(fd_, &times, sizeof times) == sizeof times;
  return armed_.exchange(false, std::memory_order_acq_rel) || rang;
}

bool wait(zmq_pollitem_t* items, int count, TimePoint until) {
  const Seconds left = std::clamp(until - monotonic_now(), 0.0, 3600.0);
  const int rc = zmq_poll(items, count, static_cast<long>(std::ceil(left * 1000)));
  return rc >= 0 || zmq_errno() != EINTR;
}

std::string error_text() { return zmq_strerror(zmq_errno()); }

}  // namespace diloco::zmq_detail

namespace diloco {

std::string zmq_version_text() {
  int major, minor, patch;
  zmq_version(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch) +
         (zmq_has("curve") ? " (curve)" : " (no curve)");
}

}  // namespace diloco
