// The cluster's state, private to sim/cluster*.cpp:
//   cluster.cpp          the loop over events, the faults, the views
//   cluster_network.cpp  connections, and what becomes of a frame
//   cluster_syncer.cpp   the syncer's shards: their actions, their event logs
//   cluster_learner.cpp  the learner nodes: steps, boundaries, their parameters
#pragma once

#include <array>
#include <deque>

#include <nlohmann/json_fwd.hpp>

#include "diloco/sim/cluster.h"
#include "diloco/sim/event_queue.h"
#include "diloco/sim/invariants.h"
#include "diloco/sim/random.h"

namespace diloco::sim {

constexpr TimePoint kNoDeadline = 1e200;  // the cores' "never" is above

// When the cluster's clock shows at least `deadline` of a core whose clock is ahead by so much.
inline TimePoint seen_from_outside(TimePoint deadline, Seconds ahead) {
  constexpr Seconds kRounding = 1e-9;
  return ahead == 0.0 ? deadline : deadline - ahead + kRounding;
}

// When a node wants its next tick. One event in the queue per node: a deadline that moves on is noticed when it fires.
struct Alarm {
  TimePoint wanted = kNoDeadline;  // on the cluster's clock
  TimePoint armed = kNoDeadline;   // when the event in the queue fires
  std::uint64_t generation = 0;    // of that event
  TimePoint served = -1.0;         // time of the last tick, and how many there were at that time
  unsigned times = 0;
};

struct Connection {
  std::uint32_t learner = 0;
  Incarnation incarnation = 0;
  std::uint32_t shard = 0;
  Channel channel = Channel::kControl;
  std::uint64_t number = 0;  // of this learner's connections
  bool open = true;          // frames from the learner count
  bool readable = true;      // frames to the learner still arrive
  bool dead_up = false, dead_down = false;  // something was lost half-open: nothing passes any more
  bool broken = false;       // lost, repeated or changed the order of something
  TimePoint up_free = 0.0, down_free = 0.0;  // bandwidth: when the line is free again
  TimePoint up_last = 0.0, down_last = 0.0;  // arrival of the last message: nothing overtakes it
  std::uint64_t up_sent = 0, down_sent = 0;  // messages
};

// Place of a connection among those of its learner, which has two to each shard.
inline std::size_t line_of(std::uint32_t shard, Channel channel) { return 2 * shard + static_cast<std::size_t>(channel); }

struct LearnerNode {
  LearnerSpec spec;
  Link link;
  std::unique_ptr<LearnerCore> core;
  Incarnation incarnation = 0;
  std::uint64_t life = 0;
  Tensors local, anchor;
  std::vector<PeerId> peers;            // by line_of(); 0 = none
  std::vector<std::uint64_t> attempts;  // to connect, by line_of(); a drop ends the one under way
  std::uint64_t connections = 0;
  LineFault line;
  bool frozen = false, cut_off = false, rejected = false;
  TimePoint frozen_at = 0.0;
  enum class Poison { kNone, kNan, kHuge } poison = Poison::kNone;
  bool holding = false;
  TimePoint hold_since = 0.0;
  Seconds longest_hold = 0.0;
  Seconds clock_ahead = 0.0;  // of the core's clock
  Alarm alarm;
  std::uint64_t steps = 0;
  std::uint64_t tokens = 0;  // of all lives
  std::vector<Event> held;  // while frozen or partitioned
};

// A shard of the syncer.
struct SyncerNode {
  std::unique_ptr<SyncerCore> core;
  std::uint64_t life = 0;
  bool stopped = false;
  bool frozen = false;
  TimePoint frozen_at = 0.0;
  Seconds clock_ahead = 0.0;
  std::uint64_t epoch_floor = 0;  // as its event log on disk tells the next life
  Alarm alarm;
  std::vector<Event> held;
};

struct Cluster::Impl {
  explicit Impl(ClusterOptions given);

  // cluster.cpp
  void run_until(TimePoint t);
  void push(TimePoint time, Event event);
  void handle(Event& event);
  void count(const Event& event);
  void call_at(TimePoint time, std::function<void()> what);
  void set_alarm(Alarm& alarm, TimePoint deadline, EventKind kind, std::uint32_t node, std::uint32_t shard,
                 std::uint64_t life);
  bool fires(Alarm& alarm, const Event& event);
  void must_sleep(Alarm& alarm, const Event& event);
  void update_well(std::size_t i);
  void disturb(std::size_t i);
  void poison(std::size_t i, LearnerNode::Poison poison);
  void release(std::vector<Event>& held);

  // cluster_network.cpp
  void on_connect(const Event& event);
  void close_connection(PeerId peer, bool tell_syncer, bool tell_learner, bool reset = true);
  void send_up(PeerId peer, OutFrame frame);
  void send_down(PeerId peer, OutFrame frame);
  TimePoint arrival(std::size_t i, bool up, Connection& connection, std::uint64_t bytes);
  void dispatch(TimePoint when, Event event, std::size_t i, bool up, Connection& connection);
  static void change_payload(OutFrame& frame);
  void read_faster(std::size_t i, double from_rate);
  void lose_stream(PeerId peer, Connection& connection, bool up);
  void set_line(std::size_t i, const LineFault& line);
  Connection& connection(PeerId peer) { return connections.at(peer - 1); }

  // cluster_syncer.cpp
  void start_syncer(std::uint32_t shard);
  void kill_syncer(std::uint32_t shard);
  void freeze_syncer(std::uint32_t shard, bool frozen);
  void jump_syncer_clock(std::uint32_t shard, Seconds by);
  void feed_syncer(std::uint32_t shard, const SyncerEvent& event);
  void run(std::uint32_t shard, SyncerAction& action);
  void run_later(std::uint32_t shard, Seconds delay, EventKind kind, decltype(Event::work) work);
  void on_record(std::uint32_t shard, const std::string& line);
  void keep_merge(std::uint32_t shard, const nlohmann::json& json);
  void void_merges(std::uint32_t shard, FragmentId fragment, Version after, bool restore);
  TimePoint syncer_now(std::uint32_t shard) const { return now + syncers[shard].clock_ahead; }
  const Plan* plan() const;  // of any shard that lives and has one; else null

  // cluster_learner.cpp
  void start_learner(std::size_t i);
  void kill_learner(std::size_t i);
  void freeze_learner(std::size_t i, bool frozen);
  void first_parameters(std::size_t i);
  void push_step(std::size_t i);  // its next one
  void step(std::size_t i);
  std::uint64_t train(std::size_t i);
  void walk(std::size_t i);
  void finish_boundary(std::size_t i);
  void feed_learner(std::size_t i, const LearnerEvent& event);
  bool run(std::size_t i, LearnerAction& action);
  void stage(std::size_t i, const Stage& stage);
  void apply(std::size_t i, const AdoptFragment& adopt);
  TimePoint learner_now(const LearnerNode& node) const { return now + node.clock_ahead; }

  ClusterOptions options;
  Invariants invariants;
  TimePoint now = 0.0;
  EventQueue queue;
  std::vector<SyncerNode> syncers;  // by shard
  std::vector<LearnerNode> nodes;
  std::deque<Connection> connections;  // by peer, from 1
  std::vector<MergeRecord> merges;
  std::vector<std::string> logs, records;
  std::uint64_t peak_payload = 0;
  Plant plant = Plant::kNone;
  bool planted = false;

  std::uint64_t events = 0;
  std::uint64_t hash = 0;
  std::array<std::uint64_t, 64> counts{};  // by message type; above 32 by EventKind
};

}  // namespace diloco::sim
