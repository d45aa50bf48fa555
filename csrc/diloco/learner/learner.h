// The learner shell: joins LearnerCore, a transport and a parameter store. One I/O thread owns the sockets; the
// training thread calls boundary(). Nothing in boundary() waits for the network, except in lockstep mode.
//
// Failures of the I/O thread are kept and thrown at the training thread's next call: ConfigError for a REJECT,
// TransportError for give_up_after_s. Losing the syncer is a state in stats(), not an error.
// After fork() the child's calls throw std::logic_error; the child never touches the sockets.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/learner/parameter_store.h"
#include "diloco/learner/phases.h"
#include "diloco/learner/rank_group.h"
#include "diloco/transport/transport.h"

namespace diloco {

// One of several processes that train one copy of the model together. All of them make a Learner, call join(), boundary()
// at every step and close(), in step with each other. Rank 0 leads: it has the learner's core and account.
struct IslandMember {
  std::shared_ptr<RankGroup> group;
  Rank rank;
  Layout layout;  // unsharded, in the order of the store's tensors, which have the shapes of `held`
  Part held;      // by tensor; empty if the island has one part
};

struct LearnerOptions {
  std::string syncer;                // "host:port"
  std::string learner_id;            // "" = random, with a notice
  std::string run_id;
  std::map<std::string, std::string> settings;  // insisted on
  Seconds give_up_after_s = 0.0;     // 0 = never
  std::uint64_t staging_bytes = 0;   // 0 = what the schedule asks for
  std::string ledger_dir;            // "" = no ledger file
  Seconds linger_s = 2.0;            // close(): bound on sending what is queued
  std::optional<IslandMember> island;
  std::function<void(LogLevel, const std::string&)> log;  // called on the training thread only (from boundary() etc.)
  std::shared_ptr<PhaseObserver> phases;                  // may be null
};

struct BoundaryResult {
  std::vector<std::uint32_t> reset_inner_state;  // tensors (index in the store's layout) whose inner state must be reset
  std::uint32_t adopted = 0;                     // fragments adopted
  std::uint64_t tokens = 0;                      // counted at this boundary: in an island those of all ranks, of the last step
};

// Of an island's rank: how long boundaries waited for the other ranks. They wait if the exchange that began one step ago
// has not ended, because a rank is more than a step behind; in lockstep always.
struct ExchangeWaits {
  std::uint64_t exchanges = 0, waited = 0;
  Seconds total_s = 0.0, longest_s = 0.0;
};

class Learner {
 public:
  // Copies the parameters into the anchor store and starts the I/O thread. `transport`: null = ZeroMQ to options.syncer.
  Learner(LearnerOptions options, std::shared_ptr<ParameterStore> store,
          std::unique_ptr<ClientTransport> transport = nullptr);
  ~Learner();  // close(0)
  Learner(const Learner&) = delete;

  // Waits until the syncer's weights have arrived and adopts them, at most `timeout_s`; true if they did. Returns early
  // with false when the syncer is unreachable. Throws ConfigError when refused. `interrupted` as for boundary().
  bool join(Seconds timeout_s, const std::function<void()>& interrupted = {});
  // After one real optimizer step. `interrupted` is polled while lockstep holds (may throw).
  BoundaryResult boundary(const Boundary& event, const std::function<void()>& interrupted = {});
  // `append` puts tensors behind those the store has: they are part of the model from now on, and are synchronised once the
  // run has them (core/syncer_growth.cpp). Training thread, between boundaries. Throws ConfigError for an island, and what
  // `append` throws; then nothing has changed.
  void grow(const std::function<void()>& append);
  // Waits (bounded) until everything sent so far has reached the syncer and tells it goodbye. Idempotent.
  void close(Seconds flush_s);
  bool closed() const;

  LearnerStats stats() const;  // ranks behind a leader count steps, tokens, adoptions and bytes only
  // Tokens of the island's last step if no boundary has counted them yet. Waits until all ranks have made that step.
  std::uint64_t tokens_under_way(const std::function<void()>& interrupted = {});
  ExchangeWaits exchange_waits() const;
  PhaseSeconds phase_seconds() const;  // any thread
  std::string learner_id() const;
  Incarnation incarnation() const;
  // The tensor (index in the store's layout) as last received from the syncer, or as it was at construction. f32,
  // logical order, numel values. Any thread.
  void read_anchor(std::uint32_t tensor, float* out) const;
  // Tensors (index in the store's layout) that were added and the run does not have: this learner trains them alone.
  std::vector<std::uint32_t> beyond_run() const;
  std::string describe() const;  // one paragraph: memory budget, plan, settings
  TransportCounters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco
