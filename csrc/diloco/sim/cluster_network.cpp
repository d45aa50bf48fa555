// Connections, and what becomes of a frame between two nodes.
#include <algorithm>

#include "diloco/sim/cluster_impl.h"

namespace diloco::sim {

namespace {

constexpr double kReorderDelays = 20.0;
constexpr Seconds kConnectAgainS = 1.0;  // TCP, when an attempt to connect gets no answer
constexpr Seconds kKeepaliveS = 25.0;  // until TCP finds a connection dead, as the transport sets it

bool carries(const LearnerNode& node, const Connection& connection, bool up) {
  return up ? !node.line.mute && !connection.dead_up : !node.line.deaf && !connection.dead_down;
}

}  // namespace

void Cluster::Impl::on_connect(const Event& event) {
  const std::size_t i = event.node;
  LearnerNode& node = nodes[i];
  const std::size_t place = line_of(event.shard, event.channel);
  if (event.life != node.life || !node.core || event.peer != node.attempts[place]) return;
  if (node.line.mute || node.line.deaf) return push(now + kConnectAgainS, event);
  const SyncerNode& syncer = syncers[event.shard];
  if (!syncer.core || syncer.stopped) {
    return feed_learner(i, ChannelDown{event.channel, "connection refused", event.shard});
  }
  connections.push_back({});
  const PeerId peer = connections.size();
  Connection& connection = connections.back();
  connection.learner = static_cast<std::uint32_t>(i);
  connection.incarnation = node.incarnation;
  connection.shard = event.shard;
  connection.channel = event.channel;
  connection.number = ++node.connections;
  connection.up_free = connection.down_free = connection.up_last = connection.down_last = now;
  node.peers[place] = peer;
  feed_learner(i, ChannelUp{event.channel, event.shard});
}

// By the syncer's cut what was sent before still arrives; by a reset or the learner nothing does.
void Cluster::Impl::close_connection(PeerId peer, bool tell_syncer, bool tell_learner, bool reset) {
  if (peer == 0 || !connection(peer).open) return;
  Connection& closed = connection(peer);
  closed.open = false;
  if (reset || tell_syncer) closed.readable = false;
  LearnerNode& node = nodes[closed.learner];
  auto& at_node = node.peers[line_of(closed.shard, closed.channel)];
  if (at_node == peer) at_node = 0;
  // What tells of it can be lost, too; then a keepalive that is not answered does.
  if (tell_syncer) {
    push(node.line.mute ? now + kKeepaliveS : std::max(now + node.link.delay_s, closed.up_last),
         {EventKind::kClosedUp, closed.learner, closed.shard, syncers[closed.shard].life, peer, closed.channel, {}, {}});
  }
  if (tell_learner) {
    push(node.line.deaf ? now + kKeepaliveS : arrival(closed.learner, false, closed, 0),
         {EventKind::kClosedDown, closed.learner, closed.shard, node.life, peer, closed.channel, {}, {}});
  }
}

TimePoint Cluster::Impl::arrival(std::size_t i, bool up, Connection& connection, std::uint64_t bytes) {
  const LearnerNode& node = nodes[i];
  TimePoint& free = up ? connection.up_free : connection.down_free;
  TimePoint& last = up ? connection.up_last : connection.down_last;
  double rate = up ? node.link.up_bytes_per_s : node.link.down_bytes_per_s;
  if (const double reads = node.line.read_bytes_per_s; !up && reads > 0.0) rate = rate > 0.0 ? std::min(rate, reads) : reads;
  free = std::max(free, now) + (rate > 0.0 ? static_cast<double>(bytes) / rate : 0.0);
  TimePoint when = free + node.link.delay_s;
  if (node.link.jitter_s > 0.0) {
    const auto sent = up ? connection.up_sent : connection.down_sent;
    when += node.link.jitter_s * unit(draw(options.seed, Purpose::kDelay, i, connection.number, up, sent));
  }
  return last = std::max(last, when);
}

// Nothing passes in this direction any more. TCP notices after a while, when its keepalive is not answered.
void Cluster::Impl::lose_stream(PeerId peer, Connection& connection, bool up) {
  if (!connection.dead_up && !connection.dead_down) {
    call_at(now + kKeepaliveS, [this, peer] { close_connection(peer, true, true); });
  }
  (up ? connection.dead_up : connection.dead_down) = true;
}

// Sends a frame on its way through whatever is wrong with the line at present.
void Cluster::Impl::dispatch(TimePoint when, Event event, std::size_t i, bool up, Connection& connection) {
  const LineFault& line = nodes[i].line;
  const std::uint64_t sent = up ? ++connection.up_sent : ++connection.down_sent;
  if (!carries(nodes[i], connection, up)) {
    lose_stream(event.peer, connection, up);
    return;
  }
  if (line.loss > 0.0 || line.duplicate > 0.0 || line.reorder > 0.0) {
    const std::uint64_t key = draw(options.seed, Purpose::kFate, i, connection.number, up, sent);
    const auto strikes = [&](std::uint64_t which, double probability) { return unit(mix(key + which)) < probability; };
    if (strikes(1, line.loss)) {
      connection.broken = true;
      return;
    }
    if (strikes(2, line.duplicate)) {
      connection.broken = true;
      push(when, event);
    }
    if (strikes(3, line.reorder)) {
      connection.broken = true;
      when += (nodes[i].link.delay_s + 0.001) * kReorderDelays * unit(mix(key + 4));
    }
  }
  push(when, std::move(event));
}

// Planted: one bit of every contribution is another than was staged.
void Cluster::Impl::change_payload(OutFrame& frame) {
  auto changed = Buffer::make(frame.slice.size);
  const auto bytes = frame.slice.bytes();
  std::copy(bytes.begin(), bytes.end(), changed->data());
  changed->data()[0] ^= std::byte{1};
  frame.slice = {std::move(changed), 0, bytes.size()};
}

void Cluster::Impl::send_up(PeerId peer, OutFrame frame) {
  if (peer == 0 || !connection(peer).open) return;
  Connection& on = connection(peer);
  const std::size_t i = on.learner;
  if (plant == Plant::kChangedPayload && frame.slice.size > 0) change_payload(frame);
  frame.header.payload_bytes = frame.payload().size();
  const TimePoint when = arrival(i, true, on, frame.header.payload_bytes + kHeaderBytes);
  Event event{EventKind::kFrameUp, on.learner, on.shard, syncers[on.shard].life, peer, on.channel, std::move(frame), {}};
  if (nodes[i].cut_off) nodes[i].held.push_back(std::move(event));
  else dispatch(when, std::move(event), i, true, on);
}

void Cluster::Impl::send_down(PeerId peer, OutFrame frame) {
  if (peer == 0 || peer > connections.size() || !connection(peer).open) return;
  Connection& on = connection(peer);
  const std::size_t i = on.learner;
  frame.header.payload_bytes = frame.payload().size();
  const TimePoint when = arrival(i, false, on, frame.header.payload_bytes + kHeaderBytes);
  dispatch(when, {EventKind::kFrameDown, on.learner, on.shard, nodes[i].life, peer, on.channel, std::move(frame), {}}, i, false,
           on);
}

// What a slow reader has not read yet arrives at the link's own pace once it is fast again.
void Cluster::Impl::read_faster(std::size_t i, double from_rate) {
  LearnerNode& node = nodes[i];
  const double to_rate = node.link.down_bytes_per_s;
  const double scale = to_rate > 0.0 ? std::min(1.0, from_rate / to_rate) : 0.0;
  const auto earlier = [&](TimePoint time) { return time <= now ? time : now + (time - now) * scale; };
  queue.retime([&](const Event& event, TimePoint time) {
    const bool for_it = event.kind == EventKind::kFrameDown || event.kind == EventKind::kClosedDown;
    return for_it && event.node == i ? earlier(time) : time;
  });
  for (Connection& one : connections) {
    if (one.learner != i) continue;
    one.down_free = earlier(one.down_free);
    one.down_last = earlier(one.down_last);
  }
}

// A connection that lost something does not outlive the fault: the stream breaks.
void Cluster::Impl::set_line(std::size_t i, const LineFault& line) {
  LearnerNode& node = nodes[i];
  const double read = node.line.read_bytes_per_s;
  node.line = line;
  if (read > 0.0 && line.read_bytes_per_s == 0.0) read_faster(i, read);
  if (line.loss == 0.0 && line.duplicate == 0.0 && line.reorder == 0.0) {
    for (const PeerId peer : std::vector(node.peers)) {
      if (peer != 0 && connection(peer).broken) close_connection(peer, true, true);
    }
  }
  update_well(i);
}

}  // namespace diloco::sim
