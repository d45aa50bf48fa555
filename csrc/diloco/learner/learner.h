// The learner shell: joins LearnerCore, a transport and a parameter store. One I/O thread owns the sockets; the
// training thread calls boundary(). Nothing in boundary() waits for the network, except in lockstep mode.
//
// Failures of the I/O thread are kept and thrown at the training thread's next call: ConfigError for a REJECT,
// TransportError for give_up_after_s. Losing the syncer is a state in stats(), not an error.
// After fork() the child's calls throw std::logic_error; the child never touches the sockets.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/learner/parameter_store.h"
#include "diloco/learner/phases.h"
#include "diloco/transport/transport.h"

namespace diloco {

struct LearnerOptions {
  std::string syncer;                // "host:port"
  std::string learner_id;            // "" = random, with a notice
  std::string run_id;
  std::map<std::string, std::string> settings;  // insisted on
  Seconds give_up_after_s = 0.0;     // 0 = never
  std::uint64_t staging_bytes = 0;   // 0 = what the schedule asks for
  std::string ledger_dir;            // "" = no ledger file
  Seconds linger_s = 2.0;            // close(): bound on sending what is queued
  std::function<void(LogLevel, const std::string&)> log;  // called on the training thread only (from boundary() etc.)
  std::shared_ptr<PhaseObserver> phases;                  // may be null
};

struct BoundaryResult {
  std::vector<std::uint32_t> reset_inner_state;  // tensors (index in the store's layout) whose inner state must be reset
  std::uint32_t adopted = 0;                     // fragments adopted
};

class Learner {
 public:
  // Copies the parameters into the anchor store and starts the I/O thread. `transport`: null = ZeroMQ to options.syncer.
  Learner(LearnerOptions options, std::shared_ptr<ParameterStore> store,
          std::unique_ptr<ClientTransport> transport = nullptr);
  ~Learner();  // close(0)
  Learner(const Learner&) = delete;

  // Waits until the syncer's weights have arrived and adopts them, at most `timeout_s`; true if they did. Returns early
  // with false when the syncer is unreachable. Throws ConfigError when refused.
  bool join(Seconds timeout_s);
  // After one real optimizer step. `interrupted` is polled while lockstep holds (may throw).
  BoundaryResult boundary(const Boundary& event, const std::function<void()>& interrupted = {});
  // Waits (bounded) until everything sent so far has reached the syncer and tells it goodbye. Idempotent.
  void close(Seconds flush_s);
  bool closed() const;

  LearnerStats stats() const;
  PhaseSeconds phase_seconds() const;  // any thread
  std::string learner_id() const;
  Incarnation incarnation() const;
  // The tensor (index in the store's layout) as last received from the syncer, or as it was at construction. f32,
  // logical order, numel values. Any thread.
  void read_anchor(std::uint32_t tensor, float* out) const;
  std::string describe() const;  // one paragraph: memory budget, plan, settings
  TransportCounters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco
