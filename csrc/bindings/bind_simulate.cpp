// diloco._C.simulate and its companions: random simulations of the virtual cluster, as JSON texts.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diloco/sim/simulate.h"

namespace diloco::bindings {
namespace {

std::string simulate(std::uint64_t events, std::uint64_t seed, bool values) {
  sim::SimulateOptions options;
  options.events = events;
  options.seed = seed;
  options.values = values;
  return sim::to_json(sim::simulate(options));
}

std::string replay(const std::string& scenario) { return sim::to_json(sim::replay(sim::scenario_from_json(scenario))); }

std::string shrink(const std::string& scenario) { return sim::to_json(sim::shrink(sim::scenario_from_json(scenario))); }

std::string random_scenario(std::uint64_t seed, bool values) { return sim::to_json(sim::random_scenario(seed, values)); }

}  // namespace

void bind_simulate(py::module_& m) {
  m.def("simulate", &simulate, py::arg("events"), py::arg("seed"), py::arg("values"), GilFree());
  m.def("replay_scenario", &replay, py::arg("scenario"), GilFree());
  m.def("shrink_scenario", &shrink, py::arg("scenario"), GilFree());
  m.def("random_scenario", &random_scenario, py::arg("seed"), py::arg("values"), GilFree());
}

}  // namespace diloco::bindings
