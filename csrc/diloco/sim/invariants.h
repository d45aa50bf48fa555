// What must hold after every event of a simulation, whatever the network and the faults do. Told what passes between the
// nodes and what the nodes do; keeps its own books from that and calls no decision of the cores, so that a mistake in
// there cannot excuse itself. docs/simulate.md has the list of names.
//
// Costs a constant number of operations an event (amortised). Single-threaded, driven by the cluster.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "diloco/core/learner_core.h"
#include "diloco/core/syncer_core.h"
#include "diloco/sim/cluster.h"

namespace diloco::sim {

struct RunBooks;

// What one shard of the syncer does, and what passes on its connections. The shard's `now` is its own clock.
class ShardInvariants {
 public:
  ShardInvariants(RunBooks& run, std::uint32_t shard);
  ~ShardInvariants();

  void starts();
  void dies();
  // Whether it runs, as far as the faults are concerned.
  void set_well(bool well);
  // It did not run until now, or its clock jumped: deadlines it met late are no mistakes of its.
  void disturbed();

  void at_syncer(PeerId peer, const Header& header, Bytes payload, TimePoint now);
  void peer_gone(PeerId peer);
  void screen_done(JobId job);
  void merge_done(JobId job);
  void before_actions(TimePoint now);
  void from_syncer(PeerId peer, const OutFrame& frame);
  void runs_screen(const RunScreen& screen);
  void runs_init(const InitResult& result);
  void runs_merge(const RunMerge& merge, const MergeResult& result, const SyncerCore& syncer);
  void persists(const Persist& persist);
  void record(const nlohmann::json& line, const MergeRecord* merge);
  void after_syncer(const SyncerCore& syncer);

  void at_learner(std::size_t learner, const Header& header, Bytes payload);
  void from_learner(std::size_t learner, const OutFrame& frame);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The shards, and what the lives of the learners have done to the fragments of all of them.
class Invariants {
 public:
  explicit Invariants(const ClusterOptions& options);
  ~Invariants();

  const std::vector<Violation>& violations() const;
  void fail(const char* invariant, std::string text);
  void begin_event(std::uint64_t number, TimePoint now);
  ShardInvariants& shard(std::uint32_t shard) { return *shards_[shard]; }

  void learner_starts(std::size_t learner, Incarnation incarnation);
  void learner_dies(std::size_t learner);
  // Whether a learner runs with a working link, as far as the faults are concerned.
  void set_well(std::size_t learner, bool well);
  // Huge values that are finite reach the weights, and through them everybody.
  void poisoned(std::size_t learner, bool huge);
  void made_step(std::size_t learner, std::uint64_t tokens);
  void progress(std::size_t learner, std::uint64_t tokens);
  void staged(std::size_t learner, const Stage& stage, const PayloadLayout& layout, const Tensors& anchor,
              const Tensors& local);
  void before_adoption(const PayloadLayout& layout, const Tensors& anchor, const Tensors& local);
  void adopted(std::size_t learner, const AdoptFragment& adopt, const PayloadLayout& image,
               const PayloadLayout& contribution, const Tensors& anchor, const Tensors& local);
  void discarded(std::size_t learner, const Discard& discard);
  void after_learner();
  void merge_voided(std::size_t index, const MergeRecord& merge);
  void merge_restored(std::size_t index, const MergeRecord& merge);

  // The wait that due_merged and no_starvation allow.
  Seconds patience() const;

 private:
  void check_adoption(const AdoptFragment& adopt, const PayloadLayout& image, const PayloadLayout& contribution,
                      const Tensors& anchor, const Tensors& local);
  std::unique_ptr<RunBooks> run_;
  std::vector<std::unique_ptr<ShardInvariants>> shards_;
};

}  // namespace diloco::sim
