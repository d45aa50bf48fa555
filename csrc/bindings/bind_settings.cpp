// Settings: the table everything is generated from, and the checks behind keyword arguments and the environment.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diloco/base/presets.h"
#include "diloco/base/settings.h"

namespace diloco::bindings {
namespace {

using TextMap = std::map<std::string, std::string>;

// Canonical text of the given settings. Each is checked alone: a learner names only some of a run's settings, and which
// of them fit together is known where all are, in the syncer.
TextMap check_settings(const TextMap& given) {
  Settings settings;
  for (const auto& [name, value] : given) settings.set(name, value);
  TextMap canonical;
  for (const auto& [name, value] : given) canonical[name] = settings.get(name);
  return canonical;
}

// Settings named by DILOCO_* variables of `environment`, by setting name.
TextMap settings_from_environment(const TextMap& environment, const std::vector<std::string>& also_allowed) {
  Settings settings;
  apply_environment(settings, environment, also_allowed);
  TextMap found;
  for (const auto& info : settings_table()) {
    std::string variable = "DILOCO_";
    for (const char c : info.name) variable += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    if (environment.contains(variable)) found[info.name] = settings.get(info.name);
  }
  return found;
}

}  // namespace

void bind_settings(py::module_& m) {
  py::class_<SettingInfo>(m, "SettingInfo")
      .def_readonly("name", &SettingInfo::name)
      .def_readonly("type", &SettingInfo::type)
      .def_readonly("unit", &SettingInfo::unit)
      .def_readonly("default_value", &SettingInfo::default_value)
      .def_readonly("choices", &SettingInfo::choices)
      .def_readonly("help", &SettingInfo::help)
      .def_readonly("range", &SettingInfo::range);
  py::class_<PresetInfo>(m, "PresetInfo")
      .def_readonly("name", &PresetInfo::name)
      .def_readonly("source", &PresetInfo::source)
      .def_readonly("reason", &PresetInfo::reason)
      .def_readonly("values", &PresetInfo::values);
  m.def("presets", [] { return presets(); });
  m.def("settings_table", [] { return settings_table(); });
  m.def("check_settings", &check_settings, py::arg("given"));
  m.def("settings_from_environment", &settings_from_environment, py::arg("environment"), py::arg("also_allowed"));
  m.def("suggest", &suggest, py::arg("wrong"), py::arg("known"));
}

}  // namespace diloco::bindings
