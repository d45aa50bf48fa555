#include "diloco/sim/cluster.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "diloco/base/errors.h"
#include "diloco/merge/merge.h"
#include "diloco/sim/cluster_impl.h"

namespace diloco::sim {

namespace {

constexpr std::size_t kFirstKind = 32;  // below: message types

const char* kind_name(EventKind kind) {
  switch (kind) {
    case EventKind::kConnect: return "connect";
    case EventKind::kClosedUp: return "closed_to_syncer";
    case EventKind::kClosedDown: return "closed_to_learner";
    case EventKind::kStep: return "step";
    case EventKind::kLearnerTick: return "timer_learner";
    case EventKind::kSyncerTick: return "timer_syncer";
    case EventKind::kScreen: return "work_screen";
    case EventKind::kInit: return "work_init";
    case EventKind::kMerge: return "work_merge";
    case EventKind::kPersist: return "work_persist";
    case EventKind::kFrameUp:
    case EventKind::kFrameDown:
    case EventKind::kCall: break;
  }
  return "";
}

bool for_learner(EventKind kind) {
  return kind == EventKind::kFrameDown || kind == EventKind::kClosedDown || kind == EventKind::kStep ||
         kind == EventKind::kLearnerTick || kind == EventKind::kConnect;
}

ClusterOptions checked(ClusterOptions options) {
  const auto want = [](bool ok, const std::string& text) {
    if (!ok) throw ConfigError(text);
  };
  want(options.delay_s >= 0.0 && options.bytes_per_s >= 0.0 && options.merge_s >= 0.0,
       "delay_s, bytes_per_s and merge_s must be at least 0");
  for (const auto& learner : options.learners) {
    const std::string name = "learner '" + learner.id + "': ";
    want(std::isfinite(learner.step_s) && learner.step_s > 0.0, name + "step_s must be above 0");
    want(std::isfinite(learner.start_s) && learner.start_s >= 0.0, name + "start_s must be at least 0");
    want(learner.jitter >= 0.0 && learner.jitter < 1.0, name + "jitter must be at least 0 and below 1");
  }
  return options;
}

}  // namespace

Cluster::Impl::Impl(ClusterOptions given) : options(checked(std::move(given))), invariants(options) {
  nodes.resize(options.learners.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].spec = options.learners[i];
    nodes[i].attempts.resize(2 * options.shards);
    nodes[i].peers.resize(2 * options.shards);
    nodes[i].link = options.link_of(nodes[i].spec);
    call_at(options.learners[i].start_s, [this, i] {
      if (!nodes[i].core) start_learner(i);
    });
  }
  syncers.resize(options.shards);
  for (std::uint32_t shard = 0; shard < options.shards; ++shard) start_syncer(shard);
}

// ---- the loop ----

void Cluster::Impl::push(TimePoint time, Event event) { queue.push(std::max(time, now), std::move(event)); }

void Cluster::Impl::call_at(TimePoint time, std::function<void()> what) {
  push(time, {EventKind::kCall, 0, 0, 0, 0, Channel::kControl, {}, std::move(what)});
}

void Cluster::Impl::run_until(TimePoint t) {
  while (!queue.empty() && queue.next_time() <= t) {
    if (options.stop_at_violation && !invariants.violations().empty()) return;
    if (options.max_events > 0 && events >= options.max_events) return;
    now = queue.next_time();
    Event event = queue.pop();
    handle(event);
  }
  now = std::max(now, t);
}

void Cluster::Impl::set_alarm(Alarm& alarm, TimePoint deadline, EventKind kind, std::uint32_t node, std::uint32_t shard,
                              std::uint64_t life) {
  alarm.wanted = deadline;
  if (deadline >= kNoDeadline || alarm.armed <= deadline) return;
  alarm.armed = deadline;
  push(deadline, {kind, node, shard, life, ++alarm.generation, Channel::kControl, {}, {}});
}

// False if the deadline is gone or has moved on.
bool Cluster::Impl::fires(Alarm& alarm, const Event& event) {
  if (event.peer != alarm.generation) return false;
  alarm.armed = kNoDeadline;
  if (alarm.wanted <= now) return true;
  set_alarm(alarm, alarm.wanted, event.kind, event.node, event.shard, event.life);
  return false;
}

// A deadline that a tick has served must not stay where it was for long, or the shell spins.
void Cluster::Impl::must_sleep(Alarm& alarm, const Event& event) {
  constexpr unsigned kMost = 4;
  alarm.times = alarm.served == now ? alarm.times + 1 : 1;
  alarm.served = now;
  if (alarm.wanted > now || alarm.times < kMost) return;
  invariants.fail("deadline_served", fmt::format("the {} wants a tick at once after {} at {:.6f} s",
                                                 event.kind == EventKind::kSyncerTick ? "syncer" : "learner", alarm.times, now));
  alarm.wanted = alarm.armed = kNoDeadline;
  ++alarm.generation;
}

void Cluster::Impl::release(std::vector<Event>& held) {
  for (auto& event : std::exchange(held, {})) push(now, std::move(event));
}

void Cluster::Impl::update_well(std::size_t i) {
  const LearnerNode& node = nodes[i];
  invariants.set_well(i, node.core && !node.frozen && !node.cut_off && !node.rejected && node.line == LineFault{});
}

// It needs its time again until it is merged.
void Cluster::Impl::disturb(std::size_t i) {
  invariants.set_well(i, false);
  update_well(i);
}

void Cluster::Impl::poison(std::size_t i, LearnerNode::Poison poison) {
  nodes[i].poison = poison;
  disturb(i);
}

void Cluster::Impl::count(const Event& event) {
  const bool frame = event.kind == EventKind::kFrameUp || event.kind == EventKind::kFrameDown;
  const Header& header = event.frame.header;
  ++counts.at(frame ? static_cast<std::size_t>(header.type) : kFirstKind + static_cast<std::size_t>(event.kind));
  invariants.begin_event(++events, now);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &now, sizeof bits);
  hash = mix(hash ^ bits ^ mix(std::uint64_t{event.shard} << 40 | static_cast<std::uint64_t>(event.kind) << 32 | event.node));
  if (!frame) return;
  hash = mix(hash ^ header.session ^ (header.offset << 20) ^ (header.total << 40) ^ static_cast<std::uint64_t>(header.type));
  if (const auto payload = event.frame.payload(); !payload.empty()) hash ^= checksum(payload);
}

void Cluster::Impl::handle(Event& event) {
  if (event.kind == EventKind::kCall) return std::get<std::function<void()>>(event.work)();
  if (for_learner(event.kind)) {
    LearnerNode& node = nodes[event.node];
    if (event.life != node.life || !node.core) return;
    if (event.kind == EventKind::kLearnerTick && (!fires(node.alarm, event) || node.frozen)) return;
    const bool from_outside = event.kind == EventKind::kFrameDown || event.kind == EventKind::kClosedDown;
    if (node.frozen || (node.cut_off && from_outside)) return node.held.push_back(std::move(event));
  } else {
    SyncerNode& node = syncers[event.shard];
    if (event.life != node.life || !node.core) return;
    if (event.kind == EventKind::kSyncerTick && (!fires(node.alarm, event) || node.frozen)) return;
    if (node.frozen) return node.held.push_back(std::move(event));
  }
  switch (event.kind) {
    case EventKind::kFrameUp: {
      if (!connection(event.peer).open) return;
      count(event);
      const auto payload = event.frame.payload();
      invariants.shard(event.shard).at_syncer(event.peer, event.frame.header, payload, syncer_now(event.shard));
      feed_syncer(event.shard, FrameEvent{event.peer, event.frame.header, payload});
      break;
    }
    case EventKind::kFrameDown: {
      if (!connection(event.peer).readable) return;
      count(event);
      const auto payload = event.frame.payload();
      invariants.shard(event.shard).at_learner(event.node, event.frame.header, payload);
      feed_learner(event.node, ChannelFrame{event.channel, event.frame.header, payload, event.shard});
      break;
    }
    case EventKind::kConnect:
      count(event);
      on_connect(event);
      break;
    case EventKind::kClosedUp:
      count(event);
      invariants.shard(event.shard).peer_gone(event.peer);
      feed_syncer(event.shard, PeerGoneEvent{event.peer, "closed"});
      break;
    case EventKind::kClosedDown:
      count(event);
      connection(event.peer).readable = false;
      feed_learner(event.node, ChannelDown{event.channel, "closed", event.shard});
      break;
    case EventKind::kStep:
      count(event);
      step(event.node);
      break;
    case EventKind::kLearnerTick:
      count(event);
      feed_learner(event.node, Tick{});
      must_sleep(nodes[event.node].alarm, event);
      break;
    case EventKind::kSyncerTick:
      count(event);
      feed_syncer(event.shard, Tick{});
      must_sleep(syncers[event.shard].alarm, event);
      break;
    case EventKind::kScreen:
      count(event);
      invariants.shard(event.shard).screen_done(std::get<ScreenDone>(event.work).job);
      feed_syncer(event.shard, std::get<ScreenDone>(event.work));
      break;
    case EventKind::kInit:
      count(event);
      feed_syncer(event.shard, std::get<InitDone>(event.work));
      break;
    case EventKind::kMerge:
      count(event);
      invariants.shard(event.shard).merge_done(std::get<MergeDone>(event.work).job);
      feed_syncer(event.shard, std::get<MergeDone>(event.work));
      break;
    case EventKind::kPersist:
      count(event);
      feed_syncer(event.shard, std::get<Persisted>(event.work));
      break;
    case EventKind::kCall: break;
  }
}

// ---- the interface ----

Cluster::Cluster(ClusterOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Cluster::~Cluster() = default;
void Cluster::run_until(TimePoint t) { impl_->run_until(t); }
TimePoint Cluster::now() const { return impl_->now; }
void Cluster::kill_learner(std::size_t i) { impl_->kill_learner(i); }
void Cluster::start_learner(std::size_t i) { impl_->start_learner(i); }
void Cluster::freeze_learner(std::size_t i, bool frozen) { impl_->freeze_learner(i, frozen); }
void Cluster::partition_learner(std::size_t i, bool cut_off) {
  LearnerNode& node = impl_->nodes[i];
  node.cut_off = cut_off;
  impl_->update_well(i);
  if (!node.frozen && !cut_off) impl_->release(node.held);
}
void Cluster::kill_syncer(std::uint32_t shard) { impl_->kill_syncer(shard); }
void Cluster::start_syncer(std::uint32_t shard) { impl_->start_syncer(shard); }
void Cluster::freeze_syncer(bool frozen, std::uint32_t shard) { impl_->freeze_syncer(shard, frozen); }
void Cluster::poison(std::size_t i) { impl_->poison(i, LearnerNode::Poison::kNan); }
void Cluster::poison_huge(std::size_t i) { impl_->poison(i, LearnerNode::Poison::kHuge); }
void Cluster::stop_syncer(Seconds give_up_after_s, std::uint32_t shard) {
  impl_->feed_syncer(shard, ShutdownEvent{give_up_after_s});
}
void Cluster::set_line(std::size_t i, const LineFault& line) { impl_->set_line(i, line); }
void Cluster::cut_connections(std::size_t i, std::uint32_t shard) {
  for (const Channel channel : {Channel::kControl, Channel::kBulk}) {
    impl_->close_connection(impl_->nodes[i].peers[line_of(shard, channel)], true, true);
  }
  impl_->disturb(i);
}
void Cluster::jump_clock(std::size_t i, Seconds by) {
  impl_->nodes[i].clock_ahead += by;
  impl_->disturb(i);
  impl_->call_at(impl_->now, [this, i] { impl_->feed_learner(i, Tick{}); });
}
void Cluster::jump_syncer_clock(Seconds by, std::uint32_t shard) { impl_->jump_syncer_clock(shard, by); }
void Cluster::plant(Plant plant) { impl_->plant = plant; }
void Cluster::at(TimePoint time, std::function<void()> what) { impl_->call_at(time, std::move(what)); }

SyncerCore* Cluster::syncer(std::uint32_t shard) { return impl_->syncers.at(shard).core.get(); }
LearnerCore* Cluster::learner(std::size_t i) { return impl_->nodes[i].core.get(); }
const std::vector<MergeRecord>& Cluster::merges() const { return impl_->merges; }
const std::vector<float>& Cluster::parameters(std::size_t i, std::size_t tensor) const {
  return impl_->nodes[i].local.at(tensor);
}
std::uint64_t Cluster::steps(std::size_t i) const { return impl_->nodes[i].steps; }
Seconds Cluster::longest_hold(std::size_t i) const { return impl_->nodes[i].longest_hold; }
bool Cluster::syncer_stopped(std::uint32_t shard) const { return impl_->syncers.at(shard).stopped; }
const std::vector<std::string>& Cluster::log_lines() const { return impl_->logs; }
const std::vector<std::string>& Cluster::records() const { return impl_->records; }
std::uint64_t Cluster::peak_payload_bytes() const { return impl_->peak_payload; }
const std::vector<Violation>& Cluster::violations() const { return impl_->invariants.violations(); }
std::uint64_t Cluster::events() const { return impl_->events; }
std::uint64_t Cluster::event_hash() const { return impl_->hash; }
bool Cluster::rejected(std::size_t i) const { return impl_->nodes[i].rejected; }
Seconds Cluster::patience() const { return impl_->invariants.patience(); }

std::map<std::string, std::uint64_t> Cluster::events_by_kind() const {
  std::map<std::string, std::uint64_t> out;
  for (std::size_t i = 0; i < impl_->counts.size(); ++i) {
    if (impl_->counts[i] == 0) continue;
    out[i < kFirstKind ? std::string("message_") + message_name(static_cast<MessageType>(i))
                       : kind_name(static_cast<EventKind>(i - kFirstKind))] = impl_->counts[i];
  }
  return out;
}

std::vector<std::string> Cluster::check() const {
  std::vector<std::string> texts;
  for (const auto& violation : impl_->invariants.violations()) {
    texts.push_back(fmt::format("{}: {}", violation.invariant, violation.text));
  }
  return texts;
}

Tensors Cluster::global_parameters() const {
  Tensors tensors(impl_->options.layout.tensors.size());
  const Plan* plan = impl_->plan();
  if (!plan) return {};
  for (FragmentId p = 0; p < plan->size(); ++p) {
    const SyncerCore* owner = impl_->syncers[plan->fragments[p].shard].core.get();
    const auto state = owner ? owner->fragment(p) : nullptr;
    if (!state) return {};
    const float* values = state->theta->f32();
    for (const auto tensor : plan->fragments[p].tensors) {
      const auto numel = impl_->options.layout.tensors[tensor].numel();
      tensors[tensor].assign(values, values + numel);
      values += numel;
    }
  }
  return tensors;
}

double Cluster::merged_fraction(const std::string& id) const {
  double merged = 0.0, made = 0.0;
  for (const auto& merge : impl_->merges) {
    for (const auto& member : merge.members) {
      if (member.learner == id) merged += static_cast<double>(member.to - member.from);
    }
  }
  const Plan* plan = impl_->plan();
  const auto fragments = plan ? plan->size() : 1u;
  for (const LearnerNode& node : impl_->nodes) {
    if (node.spec.id == id) made += static_cast<double>(node.tokens) * fragments;
  }
  return made > 0.0 ? merged / made : 0.0;
}

Layout small_layout(int matrices, std::int64_t rows, std::int64_t cols) {
  Layout layout;
  for (int i = 0; i < matrices; ++i) {
    layout.tensors.push_back({fmt::format("layer.{}.weight", i), {rows, cols}, Dtype::kF32, {}});
    layout.tensors.push_back({fmt::format("layer.{}.bias", i), {rows}, Dtype::kF32, {}});
  }
  return layout;
}

}  // namespace diloco::sim
