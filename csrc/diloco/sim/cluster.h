// Virtual cluster: the production cores under a virtual clock and a scripted network, in one process, deterministic by
// seed. Learners are arrays that walk towards a target, so that merges and adoptions move real numbers.
//
// Single-threaded. Invariants are checked by check(): token intervals partition, nothing is merged twice, never below
// K, versions strictly increase, memory stays in its bound, nobody with a working link is starved.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/core/syncer_core.h"

namespace diloco::sim {

struct LearnerSpec {
  std::string id;
  Seconds step_s = 1.0;
  Seconds start_s = 0.0;
  std::uint64_t tokens_per_step = 100;
  float target = 1.0f;  // where its data pulls every parameter
  double jitter = 0.0;  // step time varies by +- this share
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
  Seconds delay_s = 0.01;           // one way
  double bytes_per_s = 0.0;         // per connection and direction; 0 = unlimited
  Seconds merge_s = 0.01;
  std::uint64_t seed = 1;
  std::uint64_t payload_memory_bytes = 1ull << 30;
  double learning_rate = 0.05;
  Training training;  // empty: arrays that walk towards LearnerSpec::target
};

struct MergeRecord {
  FragmentId fragment = 0;
  Version version;
  TimePoint at = 0.0;
  std::uint64_t syncer_life = 0;
  std::string reason;
  struct Member {
    std::string learner;
    Incarnation incarnation = 0;
    std::uint64_t from = 0, to = 0;
    double weight = 0.0;
  };
  std::uint64_t lost_in_life = 0;  // 0, or the life of the syncer that went on without this version
  std::vector<Member> members;
};

class Cluster {
 public:
  explicit Cluster(ClusterOptions options);
  ~Cluster();

  void run_until(TimePoint t);
  TimePoint now() const;

  // Faults.
  void kill_learner(std::size_t learner);           // SIGKILL: connections reset
  void start_learner(std::size_t learner);          // a new incarnation under the same id
  void freeze_learner(std::size_t learner, bool frozen);  // SIGSTOP / SIGCONT: silent, connections stay open
  void partition_learner(std::size_t learner, bool cut_off);  // frames are held, nobody is told
  void kill_syncer();
  void start_syncer();                              // without state
  void poison(std::size_t learner);                 // its parameters become NaN at the next step
  void stop_syncer(Seconds give_up_after_s);        // SIGTERM

  // Views.
  SyncerCore* syncer();                             // null while dead
  LearnerCore* learner(std::size_t learner);        // null while dead
  const std::vector<MergeRecord>& merges() const;
  const std::vector<float>& parameters(std::size_t learner, std::size_t tensor) const;
  // The syncer's weights, by tensor; empty until every fragment has some.
  Tensors global_parameters() const;
  std::uint64_t steps(std::size_t learner) const;   // of the current life
  Seconds longest_hold(std::size_t learner) const;  // lockstep: longest wait at a boundary
  bool syncer_stopped() const;
  const std::vector<std::string>& log_lines() const;
  const std::vector<std::string>& records() const;
  std::uint64_t peak_payload_bytes() const;
  // Share of a learner's tokens that was merged, over all its lives, averaged over fragments.
  double merged_fraction(const std::string& learner_id) const;

  // Every interval of a learner on a fragment, for reports of failures.
  std::string account_text(const std::string& learner_id, FragmentId fragment) const;
  // Violated invariants, one sentence each; empty is good.
  std::vector<std::string> check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A small layout: `matrices` of rows x cols and as many biases.
Layout small_layout(int matrices = 3, std::int64_t rows = 4, std::int64_t cols = 5);

}  // namespace diloco::sim
