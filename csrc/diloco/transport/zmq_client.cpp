#include <algorithm>
#include <array>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/transport/endpoint.h"
#include "diloco/transport/zmq_common.h"

namespace diloco {
namespace {

using namespace zmq_detail;

constexpr Seconds kConnectTimeout = 5.0;

// One connection: a DEALER that connects once and is thrown away when that ends.
struct Line {
  Socket socket;
  Monitor monitor;
  TimePoint started = 0;
  bool tcp = false;        // the TCP connection stands
  bool connected = false;  // so does ZeroMQ's own handshake, and the owner knows
  bool ended = false;
  std::string why;
};

class Client {
 public:
  Client(const std::string& endpoint, const TransportLimits& limits)
      : endpoint_(split_remote_endpoint(endpoint).canonical()), limits_(limits) {
    require_ipv4(split_remote_endpoint(endpoint).host);
  }

  void connect(Channel channel);
  void disconnect(Channel channel) { line(channel) = close_line(std::move(line(channel)), limits_.linger_s); }
  void poll(Seconds timeout, std::vector<TransportEvent>* events);
  bool send(Channel channel, OutFrame frame);
  void wake() { waker_.wake(); }
  void close();
  TransportCounters counters() const { return counters_; }

 private:
  // libzmq's own two limits, and a little: some failures (a name that no longer resolves) it does not report.
  Seconds connect_limit() const { return kConnectTimeout + limits_.first_frame_deadline_s + 0.5; }
  Line& line(Channel channel) { return lines_[static_cast<std::size_t>(channel)]; }
  static Line close_line(Line old, Seconds linger) {
    old.monitor.stop();
    old.socket.close(linger);
    return {};
  }
  void open(Line& fresh);
  void serve(Channel channel, TimePoint now, std::vector<TransportEvent>* events);
  void drain_monitor(Line& line, Channel channel, std::vector<TransportEvent>* events);
  bool drain_frames(Line& line, Channel channel, std::vector<TransportEvent>* events);

  const std::string endpoint_;
  const TransportLimits limits_;
  Context context_;
  std::array<Line, 2> lines_;
  Waker waker_;
  TransportCounters counters_;
  bool closed_ = false;
};

void Client::connect(Channel channel) {
  if (closed_) return;
  disconnect(channel);
  Line& fresh = line(channel);
  fresh.started = monotonic_now();
  try {
    open(fresh);
  } catch (const TransportError& error) {
    fresh.ended = true;
    fresh.why = "cannot connect to " + endpoint_ + ": " + error.what();
  }
}

void Client::open(Line& fresh) {
  fresh.socket = Socket(context_, ZMQ_DEALER);
  const std::uint64_t largest = std::max({max_payload_bytes(MessageType::kWelcome, limits_.chunk_bytes),
                                          max_payload_bytes(MessageType::kStatusReply, limits_.chunk_bytes),
                                          limits_.chunk_bytes});
  set_common_options(fresh.socket, largest, limits_.first_frame_deadline_s);
  fresh.socket.set(ZMQ_CONNECT_TIMEOUT, static_cast<int>(kConnectTimeout * 1000));
  // Nothing may reconnect behind our back: the socket is closed as soon as its connection ends. The documented ways to
  // say so, RECONNECT_IVL -1 and IMMEDIATE 1, make libzmq throw away frames that have arrived and not been read yet,
  // such as the REJECT before a cut; so the delay is 24 days instead.
  fresh.socket.set(ZMQ_RECONNECT_IVL, std::numeric_limits<int>::max());
  fresh.monitor = Monitor(context_, fresh.socket,
                          ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CLOSED | ZMQ_EVENT_DISCONNECTED |
                              ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                              ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH);
  if (zmq_connect(fresh.socket.get(), endpoint_.c_str()) != 0) throw TransportError(error_text());
}

void Client::poll(Seconds timeout, std::vector<TransportEvent>* events) {
  const TimePoint until = monotonic_now() + timeout;
  const std::size_t before = events->size();
  for (;;) {
    const TimePoint now = monotonic_now();
    for (const Channel channel : {Channel::kControl, Channel::kBulk}) serve(channel, now, events);
    if (events->size() > before || waker_.take() || now >= until) return;

    std::vector<zmq_pollitem_t> items = {{nullptr, waker_.fd(), ZMQ_POLLIN, 0}};
    TimePoint next = until;
    for (const Line& line : lines_) {
      if (!line.socket) continue;
      items.push_back({line.socket.get(), 0, ZMQ_POLLIN, 0});
      items.push_back({line.monitor.get(), 0, ZMQ_POLLIN, 0});
      if (!line.connected) next = std::min(next, line.started + connect_limit());
    }
    if (!wait(items.data(), static_cast<int>(items.size()), next)) return;
  }
}

void Client::serve(Channel channel, TimePoint now, std::vector<TransportEvent>* events) {
  Line& one = line(channel);
  if (!one.socket && !one.ended) return;
  drain_monitor(one, channel, events);
  // Frames that came before the end are delivered before the end is told.
  if (one.connected && !drain_frames(one, channel, events)) return;
  if (!one.connected && !one.ended && now >= one.started + connect_limit()) {
    one.ended = true;
    one.why = "no answer from " + endpoint_;
  }
  if (!one.ended) return;
  events->emplace_back(Disconnected{channel, one.why});
  one = close_line(std::move(one), 0);
}

void Client::drain_monitor(Line& line, Channel channel, std::vector<TransportEvent>* events) {
  const auto end = [&](const std::string& why) {
    if (!line.ended) line.why = why;
    line.ended = true;
  };
  while (const auto event = line.monitor.next()) {
    if (event->event == ZMQ_EVENT_CONNECTED) {
      line.tcp = true;
    } else if (event->event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
      line.connected = true;
      events->emplace_back(Connected{channel});
    } else if (is_handshake_failure(event->event)) {
      end("the handshake with " + endpoint_ + " failed: not a syncer, or one that is overloaded");
    } else if (event->event == ZMQ_EVENT_CLOSED && !line.tcp) {
      const bool quick = monotonic_now() < line.started + kConnectTimeout;
      end(quick ? "connection refused: nothing listens at " + endpoint_ + ", or it cannot be reached"
                : "no answer from " + endpoint_ + " within 5 s");
    } else if (event->event == ZMQ_EVENT_DISCONNECTED) {
      end(line.connected ? "connection to " + endpoint_ + " was closed by the other side or lost"
                         : endpoint_ + " closed the connection during the handshake");
    }
  }
}

// True when nothing more has arrived.
bool Client::drain_frames(Line& line, Channel channel, std::vector<TransportEvent>* events) {
  Received received;
  const std::uint64_t enough = counters_.bytes_in + kBytesPerPoll;
  for (std::size_t i = 0; i < kFramesPerPoll && counters_.bytes_in < enough; ++i) {
    if (!receive(line.socket.get(), false, received)) return true;
    std::string why;
    const auto header = open_received(received, limits_, &why);
    if (!header) {
      ++counters_.malformed;
      line.ended = true;
      line.why = "malformed frame from " + endpoint_ + ": " + why;
      return true;
    }
    const auto payload = received.payload_bytes();
    ++counters_.frames_in;
    counters_.bytes_in += received.header->bytes().size() + payload.size();
    events->emplace_back(InFrame{0, channel, *header, payload, received.payload});
  }
  return false;
}

bool Client::send(Channel channel, OutFrame frame) {
  Line& one = line(channel);
  std::uint64_t bytes = 0;
  if (!one.connected || one.ended || !send_frame(one.socket.get(), "", std::move(frame), nullptr, &bytes)) {
    ++counters_.undeliverable;
    return false;
  }
  ++counters_.frames_out;
  counters_.bytes_out += bytes;
  return true;
}

void Client::close() {
  if (closed_) return;
  closed_ = true;
  for (const Channel channel : {Channel::kControl, Channel::kBulk}) disconnect(channel);
  context_.terminate();
}

class ZmqClient : public ClientTransport {
 public:
  ZmqClient(const std::string& endpoint, const TransportLimits& limits)
      : client_(std::make_unique<Client>(endpoint, limits)) {}
  ~ZmqClient() override { close(); }
  void connect(Channel channel) override { client_->connect(channel); }
  void disconnect(Channel channel) override { client_->disconnect(channel); }
  void poll(Seconds timeout, std::vector<TransportEvent>* events) override { client_->poll(timeout, events); }
  bool send(Channel channel, OutFrame frame) override { return client_->send(channel, std::move(frame)); }
  void wake() override { client_->wake(); }
  void close() override {
    if (!client_.in_child()) client_->close();
  }
  TransportCounters counters() const override { return client_->counters(); }

 private:
  ForkSafe<Client> client_;
};

}  // namespace

std::unique_ptr<ClientTransport> make_zmq_client(const std::string& endpoint, const TransportLimits& limits) {
  return std::make_unique<ZmqClient>(endpoint, limits);
}

}  // namespace diloco
