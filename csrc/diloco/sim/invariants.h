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

class Invariants {
 public:
  explicit Invariants(const ClusterOptions& options);
  ~Invariants();

  const std::vector<Violation>& violations() const;
  void fail(const char* invariant, std::string text);

  void begin_event(std::uint64_t number, TimePoint now);

  // ---- nodes ----
  void syncer_starts();
  void syncer_dies();
  void learner_starts(std::size_t learner, Incarnation incarnation);
  void learner_dies(std::size_t learner);
  // Whether a learner (kSyncer: the syncer) runs with a working link, as far as the faults are concerned.
  static constexpr std::size_t kSyncer = ~std::size_t{0};
  void set_well(std::size_t node, bool well);
  // The syncer did not run until now, or its clock jumped: deadlines it met late are no mistakes of its.
  void syncer_disturbed();
  // Huge values that are finite reach the weights, and through them everybody.
  void poisoned(std::size_t learner, bool huge);

  // ---- the syncer; `now` is its own clock ----
  void at_syncer(PeerId peer, Channel channel, const Header& header, Bytes payload, TimePoint now);
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
  void merge_voided(std::size_t index, const MergeRecord& merge);
  void merge_restored(std::size_t index, const MergeRecord& merge);
  void after_syncer(const SyncerCore& syncer);

  // ---- learners ----
  void at_learner(std::size_t learner, const Header& header, Bytes payload);
  void from_learner(std::size_t learner, const OutFrame& frame);
  void made_step(std::size_t learner, std::uint64_t tokens);
  void progress(std::size_t learner, std::uint64_t tokens);
  void staged(std::size_t learner, const Stage& stage, const PayloadLayout& layout, const Tensors& anchor,
              const Tensors& local);
  void before_adoption(const PayloadLayout& layout, const Tensors& anchor, const Tensors& local);
  void adopted(std::size_t learner, const AdoptFragment& adopt, const PayloadLayout& image,
               const PayloadLayout& contribution, const Tensors& anchor, const Tensors& local);
  void discarded(std::size_t learner, const Discard& discard);
  void after_learner(std::size_t learner, const LearnerCore& core);

  // The wait that due_merged and no_starvation allow.
  Seconds patience() const;

 private:
  void check_adoption(const AdoptFragment& adopt, const PayloadLayout& image, const PayloadLayout& contribution,
                      const Tensors& anchor, const Tensors& local);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco::sim
