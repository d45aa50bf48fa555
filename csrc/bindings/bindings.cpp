// diloco._C: module, versions, and the one place where C++ errors become Python types:
//   ConfigError -> ValueError, TransportError -> ConnectionError, any other std::exception -> RuntimeError.
#include "bindings.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <exception>

#include "diloco/base/errors.h"
#include "diloco/base/version.h"
#include "diloco/transport/transport.h"
#include "diloco/wire/header.h"

namespace diloco::bindings {
namespace {

void translate_errors(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const ConfigError& error) {
    py::set_error(PyExc_ValueError, error.what());
  } catch (const TransportError& error) {
    py::set_error(PyExc_ConnectionError, error.what());
  }
}

// Only a call with a real group shows whether _C and torch were built with the same pybind11.
py::tuple rank_size(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return py::make_tuple(group->getRank(), group->getSize());
}

}  // namespace
}  // namespace diloco::bindings

PYBIND11_MODULE(_C, m) {
  using namespace diloco;
  namespace py = pybind11;
  m.doc() = "Native part of diloco. Use the names of the package `diloco` instead.";
  py::register_exception_translator(&bindings::translate_errors);

  m.attr("__version__") = kVersion;
  m.attr("PROTOCOL_VERSION") = static_cast<int>(kProtocolVersion);
  m.attr("TORCH_VERSION") = TORCH_VERSION;
  m.attr("PYBIND11_INTERNALS_VERSION") = PYBIND11_INTERNALS_VERSION;
  m.attr("ZMQ_VERSION") = zmq_version_text();
  m.def("parse_endpoint", &parse_endpoint, py::arg("text"));
  m.def("rank_size", &bindings::rank_size, py::arg("group"));

  bindings::bind_settings(m);
  bindings::bind_plan(m);
  bindings::bind_doctor(m);
  bindings::bind_learner(m);
  bindings::bind_collective(m);
  bindings::bind_syncer(m);
  bindings::bind_cluster(m);
  bindings::bind_simulate(m);
  bindings::bind_bench(m);
}
