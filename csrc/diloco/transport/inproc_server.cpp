#include <algorithm>

#include "diloco/base/errors.h"
#include "diloco/transport/endpoint.h"
#include "diloco/transport/frame_check.h"
#include "diloco/transport/inproc_network.h"

namespace diloco::inproc {
namespace {

class Server : public ServerTransport {
 public:
  Server(std::shared_ptr<Network> network, const TransportLimits& limits) : network_(std::move(network)) {
    state_.limits = limits;
  }
  ~Server() override { close(); }

  std::string bind(const std::string& text) override {
    Endpoint endpoint = split_endpoint(text);
    const std::lock_guard lock(network_->mutex);
    if (port_ != 0 || closed_) throw TransportError("this transport is already bound or closed");
    if (endpoint.port == 0) {
      while (network_->bound.contains(network_->next_port)) ++network_->next_port;
      endpoint.port = network_->next_port++;
    }
    if (!network_->bound.emplace(endpoint.port, &state_).second) {
      throw TransportError("port " + std::to_string(endpoint.port) +
                           " is already in use; choose another port, or 0 to have one chosen");
    }
    port_ = endpoint.port;
    if (endpoint.host == "*") endpoint.host = "0.0.0.0";
    if (endpoint.host == "localhost") endpoint.host = "127.0.0.1";
    return endpoint.canonical();
  }

  void poll(Seconds timeout, std::vector<TransportEvent>* events) override {
    std::unique_lock lock(network_->mutex);
    const TimePoint until = monotonic_now() + timeout;
    const std::size_t before = events->size();
    for (;;) {
      const TimePoint now = monotonic_now();
      TimePoint next = kNever;
      for (PeerGone& gone : cut_off_) events->emplace_back(std::move(gone));
      cut_off_.clear();
      collect(now, next, events);
      if (events->size() > before || state_.woken || now >= until) break;
      network_->wait(lock, std::min(until, next));
    }
    state_.woken = false;
  }

  bool send(PeerId peer, OutFrame frame) override {
    const std::lock_guard lock(network_->mutex);
    const auto found = state_.links.find(peer);
    if (found == state_.links.end()) {
      ++state_.counters.undeliverable;
      return false;
    }
    Link& link = *found->second;
    if (link.down.unsent > state_.limits.max_unsent_bytes) {
      ++state_.counters.unread;
      ++state_.counters.undeliverable;
      cut_off_.push_back({peer, unread_text(link.down.unsent, state_.limits)});
      link.down.clear();
      forget(link, "the syncer closed the connection", monotonic_now());
      return false;
    }
    network_->push_frame(link, link.down, std::move(frame), state_.counters);
    return true;
  }

  void cut(PeerId peer, const std::string& why) override {
    const std::lock_guard lock(network_->mutex);
    const auto found = state_.links.find(peer);
    if (found == state_.links.end()) return;
    forget(*found->second, why, monotonic_now() + kCutGrace);
  }

  void wake() override {
    const std::lock_guard lock(network_->mutex);
    state_.woken = true;
    network_->news.notify_all();
  }

  void close() override {
    const std::lock_guard lock(network_->mutex);
    if (closed_) return;
    closed_ = true;
    if (port_ != 0) network_->bound.erase(port_);
    while (!state_.links.empty()) {
      forget(*state_.links.begin()->second, "the syncer closed the connection",
             monotonic_now() + state_.limits.linger_s);
    }
  }

  TransportCounters counters() const override {
    const std::lock_guard lock(network_->mutex);
    return state_.counters;
  }

 private:
  void forget(Link& link, const std::string& why, TimePoint expires) {
    link.up.heard = false;
    link.up.clear();
    network_->push_end(link, link.down, why, expires);
    state_.links.erase(link.peer);  // may end the link's life
  }

  void collect(TimePoint now, TimePoint& next, std::vector<TransportEvent>* events) {
    std::vector<LinkPtr> links;
    for (const auto& [peer, link] : state_.links) links.push_back(link);
    std::size_t budget = kFramesPerPoll;
    for (const LinkPtr& link : links) {
      while (budget > 0 && take(*link, now, next, events)) --budget;
      if (link->greeted || !link->up.heard) continue;
      const TimePoint deadline = link->opened_at + state_.limits.first_frame_deadline_s;
      if (now >= deadline) forget(*link, "no first frame in time", now);
      else next = std::min(next, deadline);
    }
  }

  // One arrived item of one peer; false when there is none, or no peer any more.
  bool take(Link& link, TimePoint now, TimePoint& next, std::vector<TransportEvent>* events) {
    const PeerId peer = link.peer;
    Item* arrived = link.up.heard ? network_->arrived(link, link.up, now, next) : nullptr;
    if (!arrived) return false;
    const Item item = std::move(*arrived);
    link.up.pop();
    if (item.kind == Item::Kind::kEnd) {
      if (link.greeted) events->emplace_back(PeerGone{peer, item.why});
      link.down.heard = false;
      link.up.heard = false;
      state_.links.erase(peer);
      return false;
    }
    std::string why;
    const auto header = open_frame(std::as_bytes(std::span(item.head.data(), item.head.size())), item.payload,
                                   state_.limits, &why);
    if (!header) {
      ++state_.counters.malformed;
      if (link.greeted) events->emplace_back(PeerGone{peer, "malformed frame: " + why});
      forget(link, "the syncer closed the connection", now);
      return false;
    }
    link.greeted = true;
    ++state_.counters.frames_in;
    state_.counters.bytes_in += item.head.size() + item.payload.size();
    events->emplace_back(InFrame{peer, Channel::kControl, *header, item.payload, item.keep_alive});
    return true;
  }

  std::shared_ptr<Network> network_;
  ServerState state_;  // guarded by network_->mutex
  std::vector<PeerGone> cut_off_;  // hung up on, and not told yet; guarded likewise
  std::uint16_t port_ = 0;
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<ServerTransport> make_server(std::shared_ptr<Network> network, const TransportLimits& limits) {
  return std::make_unique<Server>(std::move(network), limits);
}

}  // namespace diloco::inproc
