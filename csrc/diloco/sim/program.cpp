#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "diloco/base/errors.h"
#include "diloco/sim/simulate.h"

namespace diloco::sim {

namespace {

struct Arguments {
  SimulateOptions simulate;
  std::string mode = "none";
  std::string json, scenario;
  bool shrink = false, lines = false;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) throw ConfigError("cannot read " + path);
  return text.str();
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << "\n";
  if (!file.flush()) throw ConfigError("cannot write " + path);
}

void describe(CLI::App& app, Arguments& arguments) {
  app.add_option("--events", arguments.simulate.events, "Events to run, at least [default 1000000]")->type_name("N");
  app.add_option("--seed", arguments.simulate.seed, "First seed; scenarios have this one, the next, ... [default 1]")->type_name("S");
  app.add_option("--mode", arguments.mode, "none: fast, tensors hardly move; small: every merge is recomputed [default none]")
      ->type_name("none|small")
      ->check(CLI::IsMember({"none", "small"}));
  app.add_option("--json", arguments.json, "Write the report here; - for stdout [default none]")->type_name("FILE");
  app.add_option("--scenario", arguments.scenario, "Run this scenario instead of random ones")->type_name("FILE");
  app.add_flag("--stop-early", arguments.simulate.stop_early, "End with the first scenario that violates something");
  app.add_flag("--lines", arguments.lines,
               "With --scenario: print the log, the syncer's event log, and its status at the end");
  app.add_flag("--shrink", arguments.shrink, "Print the smallest scenario found with the same first violation");
}

// A line every few seconds when the run takes long enough.
std::function<void(std::uint64_t)> progress_line(std::uint64_t events) {
  using Clock = std::chrono::steady_clock;
  return [events, began = Clock::now(), told = Clock::now()](std::uint64_t done) mutable {
    const auto now = Clock::now();
    if (now - told < std::chrono::seconds(10) || done >= events) return;
    told = now;
    const double spent = std::chrono::duration<double>(now - began).count();
    std::fprintf(stderr, "%s\n", fmt::format("{} of {} events, {:.0f} s left", done, events,
                                             spent * static_cast<double>(events - done) / static_cast<double>(done)).c_str());
  };
}

void print(const SimulateReport& report) {
  std::printf("%s\n", fmt::format("{} events in {} scenarios from seed {}, {} merges, {:.0f} events/s per core, {:.0f}% steps "
                                  "and heartbeats", report.events, report.scenarios, report.seed, report.merges,
                                  report.events_per_s_per_core(), 100.0 * report.share_of_steps_and_heartbeats()).c_str());
  for (const auto& [seed, violation] : report.violations) {
    std::printf("%s\n", fmt::format("VIOLATED {} with seed {} at event {} ({:.3f} s): {}", violation.invariant, seed,
                                    violation.event, violation.at, violation.text).c_str());
  }
  if (report.violations.empty()) std::printf("no invariant was violated\n");
}

int run(Arguments& arguments) {
  if (!arguments.json.empty() && arguments.json != "-") write_file(arguments.json, "");  // refused before the run
  arguments.simulate.values = arguments.mode == "small";
  arguments.simulate.progress = progress_line(arguments.simulate.events);
  if (arguments.lines && !arguments.scenario.empty()) {
    for (const auto& line : run_scenario(scenario_from_json(read_file(arguments.scenario)), 0, true).lines) {
      std::printf("%s\n", line.c_str());
    }
  }
  const SimulateReport report = arguments.scenario.empty() ? simulate(arguments.simulate)
                                                           : replay(scenario_from_json(read_file(arguments.scenario)));
  if (arguments.json == "-") std::printf("%s\n", to_json(report).c_str());
  else print(report);
  if (!arguments.json.empty() && arguments.json != "-") write_file(arguments.json, to_json(report));
  if (report.violations.empty()) return 0;
  if (arguments.shrink) {
    const std::uint64_t seed = report.violations.front().seed;
    const Scenario small = shrink(arguments.scenario.empty() ? random_scenario(seed, arguments.simulate.values)
                                                             : scenario_from_json(read_file(arguments.scenario)));
    const Outcome outcome = run_scenario(small);
    std::printf("%s\n", fmt::format("# {} events until: {}\n{}", outcome.events,
                                    outcome.violations.empty() ? "nothing" : outcome.violations.front().text,
                                    to_json(small)).c_str());
  }
  return 1;
}

}  // namespace

int run_simulate_program(int argc, char** argv) {
  CLI::App app{"Runs the cores of learners and syncer under a virtual clock, a simulated network and faults, and checks after "
               "every event what must always hold."};
  Arguments arguments;
  try {
    describe(app, arguments);
    app.parse(argc, argv);
    return run(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "diloco-simulate: error: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "diloco-simulate: error: %s\n", error.what());
    return 1;
  }
}

}  // namespace diloco::sim
