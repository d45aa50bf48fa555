#include "diloco/sim/simulate.h"

#include <ctime>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace diloco::sim {

namespace {

constexpr std::uint64_t kTwiceEvery = 64;  // every so many scenarios are run twice

double cpu_now() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void add(SimulateReport& report, const Scenario& scenario, const Outcome& outcome) {
  ++report.scenarios;
  report.events += outcome.events;
  report.merges += outcome.merges;
  report.simulated_s += outcome.ended_s;
  for (const auto& [kind, count] : outcome.events_by_kind) report.events_by_kind[kind] += count;
  for (const auto& [kind, count] : outcome.faults) report.faults[kind] += count;
  for (const auto& violation : outcome.violations) report.violations.push_back({scenario.seed, violation});
}

void run_again(SimulateReport& report, const Scenario& scenario, const Outcome& first) {
  const Outcome second = run_scenario(scenario);
  if (second.hash == first.hash && second.events == first.events) return;
  report.violations.push_back({scenario.seed, {"deterministic", fmt::format("a second run has {} events and hash {:016x}, the "
                                               "first has {} and {:016x}", second.events, second.hash, first.events, first.hash),
                                               first.events, first.ended_s}});
}

}  // namespace

SimulateReport simulate(const SimulateOptions& options) {
  SimulateReport report;
  report.seed = options.seed;
  for (std::uint64_t seed = options.seed; report.events < options.events; ++seed) {
    const Scenario scenario = random_scenario(seed, options.values);
    const double before = cpu_now();
    const Outcome outcome = run_scenario(scenario);
    report.cpu_s += cpu_now() - before;
    add(report, scenario, outcome);
    if ((seed - options.seed) % kTwiceEvery == 0) run_again(report, scenario, outcome);
    if (options.stop_early && !report.violations.empty()) break;
    if (options.progress) options.progress(report.events);
  }
  return report;
}

SimulateReport replay(const Scenario& scenario) {
  SimulateReport report;
  report.seed = scenario.seed;
  const double before = cpu_now();
  const Outcome outcome = run_scenario(scenario);
  report.cpu_s = cpu_now() - before;
  add(report, scenario, outcome);
  run_again(report, scenario, outcome);
  return report;
}

double SimulateReport::share_of_steps_and_heartbeats() const {
  std::uint64_t count = 0;
  for (const char* kind : {"step", "message_STEP", "message_HEARTBEAT", "timer_learner", "timer_syncer"}) {
    if (const auto at = events_by_kind.find(kind); at != events_by_kind.end()) count += at->second;
  }
  return events > 0 ? static_cast<double>(count) / static_cast<double>(events) : 0.0;
}

std::string to_json(const SimulateReport& report) {
  nlohmann::json violations = nlohmann::json::array();
  for (const auto& [seed, violation] : report.violations) {
    violations.push_back({{"seed", seed}, {"invariant", violation.invariant}, {"text", violation.text},
                          {"event", violation.event}, {"at_s", violation.at}});
  }
  return nlohmann::json{{"seed", report.seed}, {"events", report.events}, {"scenarios", report.scenarios},
                        {"merges", report.merges}, {"violations", violations}, {"cpu_s", report.cpu_s},
                        {"simulated_s", report.simulated_s}, {"events_per_s_per_core", report.events_per_s_per_core()},
                        {"share_of_steps_and_heartbeats", report.share_of_steps_and_heartbeats()},
                        {"events_by_kind", report.events_by_kind}, {"faults", report.faults}}.dump(2);
}

}  // namespace diloco::sim
