#include <algorithm>

#include "diloco/transport/frame_check.h"
#include "diloco/transport/inproc_network.h"

namespace diloco::inproc {
namespace {

class Client : public ClientTransport {
 public:
  Client(std::shared_ptr<Network> network, const std::string& name, std::uint16_t port, const TransportLimits& limits)
      : network_(std::move(network)), port_(port) {
    state_.name = name;
    state_.limits = limits;
  }
  ~Client() override { close(); }

  void connect(Channel channel) override {
    const std::lock_guard lock(network_->mutex);
    if (closed_) return;
    drop(channel);
    slot(channel) = network_->open_link(state_.name, channel, port_);
  }

  void disconnect(Channel channel) override {
    const std::lock_guard lock(network_->mutex);
    drop(channel);
  }

  void poll(Seconds timeout, std::vector<TransportEvent>* events) override {
    std::unique_lock lock(network_->mutex);
    const TimePoint until = monotonic_now() + timeout;
    const std::size_t before = events->size();
    for (;;) {
      const TimePoint now = monotonic_now();
      TimePoint next = kNever;
      for (const Channel channel : {Channel::kControl, Channel::kBulk}) collect(channel, now, next, events);
      if (events->size() > before || state_.woken || now >= until) break;
      network_->wait(lock, std::min(until, next));
    }
    state_.woken = false;
  }

  bool send(Channel channel, OutFrame frame) override {
    const std::lock_guard lock(network_->mutex);
    const LinkPtr& link = slot(channel);
    if (!link || !link->connected) {
      ++state_.counters.undeliverable;
      return false;
    }
    network_->push_frame(*link, link->up, std::move(frame), state_.counters);
    return true;
  }

  void wake() override {
    const std::lock_guard lock(network_->mutex);
    state_.woken = true;
    network_->news.notify_all();
  }

  void close() override {
    const std::lock_guard lock(network_->mutex);
    closed_ = true;
    for (const Channel channel : {Channel::kControl, Channel::kBulk}) drop(channel);
  }

  TransportCounters counters() const override {
    const std::lock_guard lock(network_->mutex);
    return state_.counters;
  }

 private:
  LinkPtr& slot(Channel channel) { return state_.links[static_cast<std::size_t>(channel)]; }

  void drop(Channel channel) {
    LinkPtr& link = slot(channel);
    if (!link) return;
    link->down.heard = false;
    link->down.clear();
    network_->push_end(*link, link->up, "connection closed by the peer", monotonic_now() + state_.limits.linger_s);
    link.reset();
  }

  void lose(Channel channel, const std::string& why, std::vector<TransportEvent>* events) {
    events->emplace_back(Disconnected{channel, why});
    drop(channel);
  }

  void collect(Channel channel, TimePoint now, TimePoint& next, std::vector<TransportEvent>* events) {
    std::size_t budget = kFramesPerPoll;
    while (budget-- > 0 && slot(channel) && take(channel, now, next, events)) {
    }
    const LinkPtr& link = slot(channel);
    if (!link || link->connected) return;
    const TimePoint deadline = link->opened_at + kConnectTimeout;
    if (now >= deadline) lose(channel, "no answer within 5 s", events);
    else next = std::min(next, deadline);
  }

  bool take(Channel channel, TimePoint now, TimePoint& next, std::vector<TransportEvent>* events) {
    const LinkPtr link = slot(channel);
    Item* arrived = network_->arrived(*link, link->down, now, next);
    if (!arrived) return false;
    const Item item = std::move(*arrived);
    link->down.pop();
    if (item.kind == Item::Kind::kConnected) {
      link->connected = true;
      events->emplace_back(Connected{channel});
      return true;
    }
    if (item.kind == Item::Kind::kEnd) {
      lose(channel, item.why, events);
      return false;
    }
    std::string why;
    const auto header = open_frame(std::as_bytes(std::span(item.head.data(), item.head.size())), item.payload,
                                   state_.limits, &why);
    if (!header) {
      ++state_.counters.malformed;
      lose(channel, "malformed frame: " + why, events);
      return false;
    }
    ++state_.counters.frames_in;
    state_.counters.bytes_in += item.head.size() + item.payload.size();
    events->emplace_back(InFrame{0, channel, *header, item.payload, item.keep_alive});
    return true;
  }

  std::shared_ptr<Network> network_;
  const std::uint16_t port_;
  ClientState state_;  // guarded by network_->mutex
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<ClientTransport> make_client(std::shared_ptr<Network> network, const std::string& name,
                                             std::uint16_t port, const TransportLimits& limits) {
  return std::make_unique<Client>(std::move(network), name, port, limits);
}

}  // namespace diloco::inproc
