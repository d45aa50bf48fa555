// The parts of diloco._C, one function and one source each. GIL rule: every method that may wait releases it with
// GilFree, destructors that join threads release it too, and no C++ thread ever takes it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <tuple>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/fragment/layout.h"

namespace diloco::bindings {

namespace py = pybind11;
// What Python sees of a learner core's statistics.
py::dict to_dict(const LearnerStats& stats);
// A tensor as Python names it: name, shape, dtype, aliases.
using PySpec = std::tuple<std::string, std::vector<std::int64_t>, std::string, std::vector<std::string>>;
Layout layout_of(const std::vector<PySpec>& tensors);  // ConfigError for a dtype that does not travel
std::vector<PySpec> specs_of(const Layout& layout);
using GilFree = py::call_guard<py::gil_scoped_release>;

void bind_settings(py::module_& m);
void bind_plan(py::module_& m);
void bind_doctor(py::module_& m);
void bind_learner(py::module_& m);
void bind_collective(py::module_& m);
void bind_syncer(py::module_& m);
void bind_cluster(py::module_& m);
void bind_simulate(py::module_& m);
void bind_bench(py::module_& m);

}  // namespace diloco::bindings
