// What `diloco.explain` shows: the plan of a layout, without any learner or syncer.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diloco/base/errors.h"
#include "diloco/fragment/explain.h"

namespace diloco::bindings {
namespace {

Dtype dtype_named(const std::string& name, const std::string& of) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kF64}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw ConfigError("parameter '" + of + "': expected float32, bfloat16, float16 or float64, got " + name);
}

// The explanation and its text.
std::pair<PlanExplained, std::string> explain_plan(const std::vector<PySpec>& tensors,
                                                   const std::map<std::string, std::string>& given) {
  Settings settings;
  for (const auto& [name, value] : given) settings.set(name, value);
  const Layout layout = layout_of(tensors);
  PlanExplained plan = explain(layout, settings);
  std::string text = to_text(plan, settings);
  return {std::move(plan), std::move(text)};
}

}  // namespace

Layout layout_of(const std::vector<PySpec>& tensors) {
  Layout layout;
  for (const auto& [name, shape, dtype, aliases] : tensors) {
    layout.tensors.push_back({name, shape, dtype_named(dtype, name), aliases});
  }
  return layout;
}

std::vector<PySpec> specs_of(const Layout& layout) {
  std::vector<PySpec> specs;
  for (const auto& tensor : layout.tensors) {
    specs.emplace_back(tensor.name, tensor.shape, dtype_name(tensor.dtype), tensor.aliases);
  }
  return specs;
}

void bind_plan(py::module_& m) {
  py::class_<FragmentExplained>(m, "FragmentExplained")
      .def_readonly("fragment", &FragmentExplained::fragment)
      .def_readonly("tensors", &FragmentExplained::tensors)
      .def_readonly("numel", &FragmentExplained::numel)
      .def_readonly("up_bytes", &FragmentExplained::up_bytes)
      .def_readonly("down_bytes", &FragmentExplained::down_bytes)
      .def_readonly("due", &FragmentExplained::due);
  py::class_<PlanExplained>(m, "PlanExplained")
      .def_readonly("fragments", &PlanExplained::fragments)
      .def_readonly("numel", &PlanExplained::numel)
      .def_readonly("peak_up_bytes", &PlanExplained::peak_up_bytes)
      .def_readonly("ideal_peak_up_bytes", &PlanExplained::ideal_peak_up_bytes)
      .def_readonly("oversized", &PlanExplained::oversized);
  m.def("explain_plan", &explain_plan, py::arg("tensors"), py::arg("settings"));
}

}  // namespace diloco::bindings
