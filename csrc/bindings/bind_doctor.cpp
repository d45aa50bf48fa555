// What `diloco doctor` asks the native side: a running syncer, and what a model and settings take.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diloco/core/memory_budget.h"
#include "diloco/syncer/link_probe.h"

namespace diloco::bindings {
namespace {

using TextMap = std::map<std::string, std::string>;

Settings settings_of(const TextMap& given) {
  Settings settings;
  for (const auto& [name, value] : given) settings.set(name, value);
  settings.validate();
  return settings;
}

// Every setting, canonical, with those given; ConfigError if they do not fit together.
TextMap complete_settings(const TextMap& given) { return settings_of(given).to_map(); }

struct Budgets {
  LearnerBudget learner;
  SyncerBudget syncer;
};

Budgets memory_budget(const std::vector<PySpec>& tensors, const TextMap& given, std::uint64_t staging_bytes,
                      std::size_t learners) {
  const Settings settings = settings_of(given);
  const Layout layout = layout_of(tensors);
  const Plan plan = make_plan(layout, settings.fragmenter, settings.num_fragments);
  return {learner_budget(layout, plan, settings, staging_bytes), syncer_budget(layout, plan, settings, learners)};
}

// Tensors of the run, or nothing if it has none yet.
std::optional<std::vector<PySpec>> run_layout(const std::string& endpoint, double timeout_s) {
  const auto run = ask_run(endpoint, timeout_s);
  if (!run) return std::nullopt;
  return specs_of(run->layout);
}

// "" or what a syncer of this run would refuse the learner's model for.
std::string layout_difference(const std::vector<PySpec>& learners, const std::vector<PySpec>& runs) {
  const Layout ours = layout_of(learners);
  check_layout(ours);
  return first_difference(ours, layout_of(runs));
}

// Settings that a TOML file gives. ConfigError with file and line.
TextMap settings_from_file(const std::string& path) {
  Settings settings;
  apply_toml_file(settings, path);
  TextMap found;
  for (const auto& name : settings.given) found[name] = settings.get(name);
  return found;
}

}  // namespace

void bind_doctor(py::module_& m) {
  py::class_<LinkProbe>(m, "LinkProbe")
      .def_readonly("round_trip_s", &LinkProbe::round_trip_s)
      .def_readonly("up_bytes_per_s", &LinkProbe::up_bytes_per_s)
      .def_readonly("down_bytes_per_s", &LinkProbe::down_bytes_per_s)
      .def_readonly("up_bytes", &LinkProbe::up_bytes)
      .def_readonly("down_bytes", &LinkProbe::down_bytes)
      .def_readonly("waited_s", &LinkProbe::waited_s);
  py::class_<LearnerBudget>(m, "LearnerBudget")
      .def_readonly("anchors", &LearnerBudget::anchors)
      .def_readonly("copies", &LearnerBudget::copies)
      .def_readonly("copies_most", &LearnerBudget::copies_most)
      .def_readonly("arriving", &LearnerBudget::arriving)
      .def_readonly("wire", &LearnerBudget::wire)
      .def_readonly("scratch", &LearnerBudget::scratch)
      .def("usual", &LearnerBudget::usual)
      .def("most", &LearnerBudget::most);
  py::class_<SyncerBudget>(m, "SyncerBudget")
      .def_readonly("weights", &SyncerBudget::weights)
      .def_readonly("merging", &SyncerBudget::merging)
      .def_readonly("least", &SyncerBudget::least)
      .def_readonly("comfortable", &SyncerBudget::comfortable)
      .def_readonly("retained", &SyncerBudget::retained);
  m.def("memory_budget", [](const std::vector<PySpec>& tensors, const TextMap& settings, std::uint64_t staging_bytes,
                            std::size_t learners) {
    Budgets both = memory_budget(tensors, settings, staging_bytes, learners);
    return std::make_pair(both.learner, both.syncer);
  }, py::arg("tensors"), py::arg("settings"), py::arg("staging_bytes"), py::arg("learners"));
  m.def("probe_link", &probe_link, py::arg("endpoint"), py::arg("timeout_s"), GilFree());
  m.def("run_layout", &run_layout, py::arg("endpoint"), py::arg("timeout_s"), GilFree());
  m.def("ask_protocol", [](const std::string& endpoint, double timeout_s) {
    const ProtocolAnswer answer = ask_protocol(endpoint, timeout_s);
    return std::make_tuple(answer.protocol, answer.reject.code, answer.reject.text);
  }, py::arg("endpoint"), py::arg("timeout_s"), GilFree());
  m.def("layout_difference", &layout_difference, py::arg("learners"), py::arg("runs"));
  m.def("complete_settings", &complete_settings, py::arg("given"));
  m.def("settings_from_file", &settings_from_file, py::arg("path"));
}

}  // namespace diloco::bindings
