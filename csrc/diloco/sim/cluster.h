// Virtual cluster: the production cores under a virtual clock and a scripted network, in one process, deterministic by
// seed. Learners are arrays that walk towards a target, so that merges and adoptions move real numbers. The syncer is one
// shard or several, each with a clock, lives and an event log of its own, and with two connections from every learner.
//
// Single-threaded. The invariants of docs/simulate.md are checked after every event; violations() and check() tell.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/core/syncer_core.h"

namespace diloco::sim {

// A learner's way to the syncer, the same to all shards. Rates are per connection and direction; 0 = unlimited.
struct Link {
  Seconds delay_s = 0.01;  // one way
  Seconds jitter_s = 0.0;  // up to this much more, message by message; their order stays
  double up_bytes_per_s = 0.0;
  double down_bytes_per_s = 0.0;
};

// What goes wrong on all of a learner's connections while it lasts. Loss, repetition and a changed order do not happen to a TCP
// stream unless something is badly broken; the cores must survive them all the same. Probabilities are per message.
struct LineFault {
  double loss = 0.0;
  double duplicate = 0.0;
  double reorder = 0.0;           // a message takes up to 20 delays longer, others overtake it
  bool mute = false;              // half-open: nothing from the learner arrives, nobody is told
  bool deaf = false;              // half-open: nothing to the learner arrives
  double read_bytes_per_s = 0.0;  // slow reader; 0 = as fast as the link
  bool operator==(const LineFault&) const = default;
};

struct LearnerSpec {
  std::string id;
  Seconds step_s = 1.0;
  Seconds start_s = 0.0;
  std::uint64_t tokens_per_step = 100;
  float target = 1.0f;  // where its data pulls every parameter
  double jitter = 0.0;  // step time varies by +- this share
  std::uint64_t token_jitter = 0;  // a step has up to this many tokens more
  std::optional<Link> link;        // its own; else that of the cluster
};

using Tensors = std::vector<std::vector<float>>;  // by tensor of the layout

// Learners of the caller's own, in place of arrays that walk towards a target. Both are called inside run_until().
struct Training {
  // A life begins: fill the parameters. Their addresses stay the same until the learner's next life.
  std::function<void(std::size_t learner, Tensors& local)> begin;
  // One inner step on the parameters, in place; returns its tokens.
  std::function<std::uint64_t(std::size_t learner, Tensors& local)> step;
};

struct ClusterOptions {
  Settings settings;
  Layout layout;
  std::vector<LearnerSpec> learners;
  std::uint32_t shards = 1;         // of the syncer
  Seconds delay_s = 0.01;           // one way
  double bytes_per_s = 0.0;         // per connection and direction; 0 = unlimited
  Seconds merge_s = 0.01;
  Seconds persist_s = 0.0;
  std::uint64_t seed = 1;
  std::uint64_t payload_memory_bytes = 1ull << 30;  // of each shard
  double learning_rate = 0.05;
  Training training;  // empty: arrays that walk towards LearnerSpec::target
  bool light = false;         // one element of a tensor changes in a step, instead of all of them
  bool check_values = false;  // invariants recompute every merge, displacement and adoption, too
  bool keep_lines = true;     // records() and log_lines() grow
  bool stop_at_violation = false;  // run_until() returns at the first one
  std::uint64_t max_events = 0;    // run_until() returns after so many in all; 0 = no limit

  Link link_of(const LearnerSpec& learner) const {
    return learner.link.value_or(Link{delay_s, 0.0, bytes_per_s, bytes_per_s});
  }
};

// An invariant that did not hold.
struct Violation {
  std::string invariant;  // its name
  std::string text;       // one sentence
  std::uint64_t event = 0;
  TimePoint at = 0.0;
};

// Mistakes made on purpose, outside the cores: they show that the invariants and the shrinker work.
enum class Plant {
  kNone,
  kForgedMerge,     // the event log tells a merge twice
  kChangedPayload,  // a contribution changes on its way, and no checksum tells
  kLyingLearner,    // a learner counts steps that it has not made
};

struct MergeRecord {
  FragmentId fragment = 0;
  Version version;
  TimePoint at = 0.0;
  std::uint32_t shard = 0;
  std::uint64_t syncer_life = 0;  // of that shard
  std::string reason;
  struct Member {
    std::string learner;
    Incarnation incarnation = 0;
    std::uint64_t from = 0, to = 0;
    double weight = 0.0;
  };
  std::uint64_t lost_in_life = 0;  // 0, or the life of the shard that went on without this version
  std::vector<Member> members;
};

class Cluster {
 public:
  // Throws ConfigError for times that are negative or without end.
  explicit Cluster(ClusterOptions options);
  ~Cluster();

  void run_until(TimePoint t);
  TimePoint now() const;

  // Faults.
  void kill_learner(std::size_t learner);           // SIGKILL: connections reset
  void start_learner(std::size_t learner);          // a new incarnation under the same id
  void freeze_learner(std::size_t learner, bool frozen);  // SIGSTOP / SIGCONT: silent, connections stay open
  void partition_learner(std::size_t learner, bool cut_off);  // frames are held, nobody is told
  void kill_syncer(std::uint32_t shard = 0);
  void start_syncer(std::uint32_t shard = 0);       // without state
  void poison(std::size_t learner);                 // its parameters become NaN at the next step
  void poison_huge(std::size_t learner);            // finite, and larger than any sum can be
  void stop_syncer(Seconds give_up_after_s, std::uint32_t shard = 0);  // SIGTERM
  void freeze_syncer(bool frozen, std::uint32_t shard = 0);
  void set_line(std::size_t learner, const LineFault& line);
  void cut_connections(std::size_t learner, std::uint32_t shard = 0);  // both to this shard are reset
  void jump_clock(std::size_t learner, Seconds by);  // forward
  void jump_syncer_clock(Seconds by, std::uint32_t shard = 0);
  void plant(Plant plant);
  // Called inside run_until() when its time has come.
  void at(TimePoint time, std::function<void()> what);

  // Views.
  SyncerCore* syncer(std::uint32_t shard = 0);      // null while dead
  LearnerCore* learner(std::size_t learner);        // null while dead
  const std::vector<MergeRecord>& merges() const;   // of all shards, in order of time
  const std::vector<float>& parameters(std::size_t learner, std::size_t tensor) const;
  // The syncer's weights, by tensor; empty unless every fragment has some.
  Tensors global_parameters() const;
  std::uint64_t steps(std::size_t learner) const;   // of the current life
  Seconds longest_hold(std::size_t learner) const;  // lockstep: longest wait at a boundary
  bool syncer_stopped(std::uint32_t shard = 0) const;
  const std::vector<std::string>& log_lines() const;
  const std::vector<std::string>& records() const;  // of all shards, in order of time
  std::uint64_t peak_payload_bytes() const;         // of any shard
  // Share of a learner's tokens that was merged, over all its lives, averaged over fragments.
  double merged_fraction(const std::string& learner_id) const;

  // Violated invariants, one sentence each; empty is good.
  std::vector<std::string> check() const;
  const std::vector<Violation>& violations() const;
  // Messages delivered, timers and steps so far; the same by kind; a hash over all of them with their bytes.
  std::uint64_t events() const;
  std::map<std::string, std::uint64_t> events_by_kind() const;
  std::uint64_t event_hash() const;
  bool rejected(std::size_t learner) const;  // for good; it must be started again
  // How long with working links due_merged and no_starvation let a fragment, or a learner's work on it, wait.
  Seconds patience() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A small layout: `matrices` of rows x cols and as many biases.
Layout small_layout(int matrices = 3, std::int64_t rows = 4, std::int64_t cols = 5);

}  // namespace diloco::sim
