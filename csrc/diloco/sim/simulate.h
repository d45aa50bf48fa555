// Random scenarios, one seed after the other, until enough events have happened. What `diloco simulate cluster` and
// `diloco-simulate` run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "diloco/sim/scenario.h"

namespace diloco::sim {

struct SimulateOptions {
  std::uint64_t events = 1'000'000;
  std::uint64_t seed = 1;
  bool values = false;      // mode small: tensors move and every merge is recomputed
  bool stop_early = false;  // after the first scenario with a violation
  std::function<void(std::uint64_t events)> progress;  // called after every scenario with the events so far
};

struct SeedViolation {
  std::uint64_t seed = 0;
  Violation violation;
};

struct SimulateReport {
  std::uint64_t seed = 0, events = 0, scenarios = 0, merges = 0;
  std::vector<SeedViolation> violations;
  double cpu_s = 0.0;
  double simulated_s = 0.0;
  std::map<std::string, std::uint64_t> events_by_kind, faults;
  double events_per_s_per_core() const { return cpu_s > 0.0 ? static_cast<double>(events) / cpu_s : 0.0; }
  // Of all events: inner steps, the messages that report them, heartbeats and the timers behind them.
  double share_of_steps_and_heartbeats() const;
};

SimulateReport simulate(const SimulateOptions& options);
// Runs one scenario, and a second time: the same bytes are one of the invariants.
SimulateReport replay(const Scenario& scenario);
std::string to_json(const SimulateReport& report);

// The program `diloco-simulate`. Exit status 0: nothing was violated; 1: something was, or it failed; 2: bad arguments.
int run_simulate_program(int argc, char** argv);

}  // namespace diloco::sim
