#include "diloco/transport/inproc.h"

#include <algorithm>

#include "diloco/base/errors.h"
#include "diloco/transport/endpoint.h"
#include "diloco/transport/frame_check.h"
#include "diloco/transport/inproc_network.h"

namespace diloco {

std::shared_ptr<InprocNetwork> InprocNetwork::make() { return std::make_shared<inproc::Network>(); }

namespace inproc {

std::unique_ptr<ServerTransport> Network::server(const TransportLimits& limits) {
  return make_server(std::static_pointer_cast<Network>(shared_from_this()), limits);
}

std::unique_ptr<ClientTransport> Network::client(const std::string& endpoint, const TransportLimits& limits) {
  const Endpoint remote = split_remote_endpoint(endpoint);
  std::string name;
  {
    const std::lock_guard lock(mutex);
    name = next_name_.empty() ? "client" + std::to_string(++unnamed_) : next_name_;
    next_name_.clear();
  }
  return make_client(std::static_pointer_cast<Network>(shared_from_this()), name, remote.port, limits);
}

void Network::name_next_client(const std::string& name) {
  const std::lock_guard lock(mutex);
  next_name_ = name;
}

template <typename F>
void Network::each_script(const std::string& client_name, F apply) {
  if (!client_name.empty()) return apply(script(client_name));
  apply(default_script_);
  for (auto& [name, one] : scripts_) apply(one);
}

template <typename F>
void Network::each_link(const std::string& client_name, F apply) {
  for (const auto& weak : links) {
    const LinkPtr link = weak.lock();
    if (link && (client_name.empty() || link->client_name == client_name)) apply(*link);
  }
}

void Network::set_delay(const std::string& client_name, Seconds one_way) {
  const std::lock_guard lock(mutex);
  each_script(client_name, [&](Script& s) { s.delay = one_way; });
}

void Network::set_bandwidth(const std::string& client_name, double bytes_per_s) {
  const std::lock_guard lock(mutex);
  each_script(client_name, [&](Script& s) { s.bandwidth = bytes_per_s; });
}

void Network::partition(const std::string& client_name, bool cut_off) {
  const std::lock_guard lock(mutex);
  each_script(client_name, [&](Script& s) { s.partitioned = cut_off; });
  if (!cut_off) {
    // What was held arrives now at the earliest.
    const TimePoint now = monotonic_now();
    each_link(client_name, [&](Link& link) {
      for (Pipe* pipe : {&link.up, &link.down}) {
        for (Item& item : pipe->items) item.at = std::max(item.at, now);
      }
    });
  }
  news.notify_all();
}

void Network::reset(const std::string& client_name) {
  const std::lock_guard lock(mutex);
  each_link(client_name, [&](Link& link) {
    for (Pipe* pipe : {&link.up, &link.down}) end_now(*pipe, "connection reset by peer");
  });
}

void Network::inject_raw(const std::string& endpoint, std::string bytes) {
  const std::uint16_t port = split_remote_endpoint(endpoint).port;
  const std::lock_guard lock(mutex);
  const LinkPtr link = open_link("stranger" + std::to_string(++unnamed_), Channel::kControl, port);
  const std::size_t size = bytes.size();
  Item item;
  item.head = std::move(bytes);
  push(*link, link->up, std::move(item), size);
}

Script& Network::script(const std::string& client_name) {
  return scripts_.try_emplace(client_name, default_script_).first->second;
}

void Network::push(Link& link, Pipe& pipe, Item item, std::size_t bytes) {
  if (!pipe.heard) return;
  const Script& s = script(link.client_name);
  const TimePoint start = std::max(monotonic_now(), pipe.busy_until);
  pipe.busy_until = s.bandwidth > 0 ? start + static_cast<double>(bytes) / s.bandwidth : start;
  item.at = pipe.last_at = std::max(pipe.last_at, pipe.busy_until + s.delay);
  if (item.kind == Item::Kind::kFrame) item.cost = bytes + kFrameOverhead;
  pipe.unsent += item.cost;
  pipe.items.push_back(std::move(item));
  news.notify_all();
}

void Network::push_frame(Link& link, Pipe& pipe, OutFrame frame, TransportCounters& counters) {
  seal(frame);
  const auto header = encode_header(frame.header);
  const auto held = std::make_shared<OutFrame>(std::move(frame));
  Item item;
  item.head.assign(reinterpret_cast<const char*>(header.data()), header.size());
  item.payload = held->payload();
  item.keep_alive = held;
  const std::size_t bytes = header.size() + item.payload.size();
  ++counters.frames_out;
  counters.bytes_out += bytes;
  push(link, pipe, std::move(item), bytes);
}

void Network::push_end(Link& link, Pipe& pipe, const std::string& why, TimePoint expires) {
  pipe.expires = std::min(pipe.expires, expires);
  Item item;
  item.kind = Item::Kind::kEnd;
  item.why = why;
  push(link, pipe, std::move(item), 0);
  if (!pipe.items.empty()) pipe.items.back().at = std::min(pipe.items.back().at, pipe.expires);
}

void Network::end_now(Pipe& pipe, const std::string& why) {
  if (!pipe.heard) return;
  Item item;
  item.kind = Item::Kind::kEnd;
  item.why = why;
  item.at = 0;
  pipe.clear();
  pipe.items.push_back(std::move(item));
  news.notify_all();
}

Item* Network::arrived(Link& link, Pipe& pipe, TimePoint now, TimePoint& next) {
  if (script(link.client_name).partitioned) return nullptr;
  while (!pipe.items.empty()) {
    Item& item = pipe.items.front();
    if (item.kind == Item::Kind::kFrame && item.at > pipe.expires) {
      pipe.pop();
    } else if (item.at > now) {
      next = std::min(next, item.at);
      return nullptr;
    } else {
      return &item;
    }
  }
  return nullptr;
}

LinkPtr Network::open_link(const std::string& client_name, Channel channel, std::uint16_t port) {
  const auto link = std::make_shared<Link>();
  link->client_name = client_name;
  link->channel = channel;
  link->opened_at = monotonic_now();
  std::erase_if(links, [](const std::weak_ptr<Link>& weak) { return weak.expired(); });
  links.push_back(link);
  const auto server = bound.find(port);
  if (server == bound.end()) {
    link->up.heard = false;
    push_end(*link, link->down, "connection refused", kNever);
    return link;
  }
  ServerState& state = *server->second;
  if (state.links.size() >= state.limits.max_peers) {
    link->up.heard = false;
    push_end(*link, link->down, "connection closed by the syncer", kNever);
    return link;
  }
  link->peer = state.next_peer++;
  state.links[link->peer] = link;
  Item item;
  item.kind = Item::Kind::kConnected;
  push(*link, link->down, std::move(item), 0);
  // The answer has travelled both ways.
  link->down.last_at = link->down.items.back().at += script(client_name).delay;
  return link;
}

void Network::wait(std::unique_lock<std::mutex>& lock, TimePoint until) {
  const Seconds left = std::min(until - monotonic_now(), 3600.0);
  if (left > 0) news.wait_for(lock, std::chrono::duration<double>(left));
}

}  // namespace inproc
}  // namespace diloco
