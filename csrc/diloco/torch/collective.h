// Classic and Streaming DiLoCo inside one job of torch, without a syncer: the ranks of a process group are the learners,
// and every rank is its own syncer. A fragment's contribution is staged on schedule and gathered from all ranks while
// training goes on; overlap_steps later each rank merges what it has gathered, in the order of ranks, makes the same
// outer step and adopts the result. All ranks have the same bits at the same step, and those of lockstep with a syncer.
//
//   boundary: count ─► stage what is due, start sending it ─► wait for what was started tau steps ago, merge, adopt
//
// Every rank calls the constructor, boundary() and load() equally often. A rank that has died, or makes fewer steps, ends
// the others' wait with a TransportError within the group's timeout; nothing goes on after that. One thread, the training
// thread; the GIL need not be held. After fork() the child's calls throw std::logic_error.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "diloco/base/log_level.h"
#include "diloco/torch/collective_numbers.h"
#include "diloco/torch/process_group.h"

namespace diloco {

struct CollectiveOptions {
  std::map<std::string, std::string> settings;  // as given: see collective_settings()
  // The group moves tensors of the parameters' device, and that is where they are merged; else in host memory.
  bool on_device = false;
  std::function<void(LogLevel, const std::string&)> log;
};

struct CollectiveResult {
  std::uint32_t adopted = 0;  // fragments
  bool reset = false;         // this rank's numbers were poison: reset its inner optimizer's state, of all tensors
};

struct CollectiveStats {
  std::string state;  // "training", "failed", "closed"
  std::uint64_t steps = 0, tokens = 0;        // of this rank, in this life
  Clock clock = 0;                            // steps over all lives
  std::uint64_t merges = 0, contributions_sent = 0, contributions_merged = 0;
  std::uint64_t tokens_merged = 0, tokens_outstanding = 0;  // of this rank, summed over fragments
  std::map<std::string, std::uint64_t> discarded;           // reason -> tokens
  std::uint64_t bytes_out = 0, bytes_in = 0;  // messages for, and of, the other ranks
  std::uint64_t under_way_bytes = 0;          // messages of all ranks held now
  Seconds waited_s = 0.0;                     // of boundary() for the others
  std::vector<Version> versions;
};

// One rank's part of a checkpoint. What all ranks share comes first; a rank of another number, or of another number of
// ranks, takes only that.
struct CollectiveState {
  Clock clock = 0;
  std::vector<std::vector<std::string>> plan;  // names of the tensors of each fragment
  std::string outer_optimizer;
  std::vector<SavedFragment> fragments;

  int rank = 0, ranks = 1;
  std::uint64_t tokens = 0, merges = 0, contributions_sent = 0, contributions_merged = 0, tokens_merged = 0;
  std::map<std::string, std::uint64_t> discarded;
  std::vector<std::uint64_t> bad_payloads;  // by rank
  struct Account {
    std::uint64_t from = 0, from_steps = 0;
    // The contribution under way, if any.
    at::Tensor message;
    std::uint64_t sent_from = 0, sent_to = 0, steps_at_to = 0, staged_at = 0;
    bool detached = false;
  };
  std::vector<Account> accounts;
};

class CollectiveLearner {
 public:
  // All ranks agree over `control` (CPU tensors), then take the weights of rank 0. Throws ConfigError, on all ranks, if
  // they do not agree.
  CollectiveLearner(std::vector<NamedParameter> parameters, Collectives group, Collectives control,
                    CollectiveOptions options);
  ~CollectiveLearner();  // close(0)
  CollectiveLearner(const CollectiveLearner&) = delete;

  // After one real optimizer step. `interrupted` is polled while it waits for the other ranks (may throw).
  CollectiveResult boundary(const Boundary& event, const std::function<void()>& interrupted = {});
  // Lets what is under way arrive for at most `flush_s`, for the other ranks' sake; it is not merged here. Idempotent.
  void close(Seconds flush_s);

  CollectiveStats stats() const;
  int rank() const;
  int ranks() const;
  // The tensor as in the global weights last adopted: f32, logical order, numel values.
  void read_anchor(std::uint32_t tensor, float* out) const;
  std::string describe() const;

  // Local; any rank may call it alone. The tensors are the run's own, to be read only.
  CollectiveState save() const;
  // All ranks. True if this rank goes on exactly where `state` was saved: as many ranks, each with its own state; the
  // parameters, which hold the global weights now, are the caller's to restore. False: the global weights, the outer
  // state and the clock are the saved ones, all other work is dropped. Throws ConfigError, on all ranks, if the states
  // have different global weights or are not of this model and plan.
  bool load(const CollectiveState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco
