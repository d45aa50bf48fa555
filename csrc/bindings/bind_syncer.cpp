// diloco._C.Syncer over the syncer shell, the whole command-line program, and the status query.
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "bindings.h"
#include "diloco/syncer/status_query.h"
#include "diloco/syncer/syncer.h"

namespace diloco::bindings {
namespace {

class PySyncer {
 public:
  explicit PySyncer(SyncerOptions options) : pid_(getpid()) {
    const py::gil_scoped_release release;
    syncer_ = std::make_unique<Syncer>(std::move(options));
  }
  ~PySyncer() {
    if (forked()) {  // the threads are the parent's, there is nothing to join
      [[maybe_unused]] const auto* leaked = syncer_.release();
      return;
    }
    const py::gil_scoped_release release;
    syncer_.reset();
  }
  bool forked() const { return getpid() != pid_; }
  Syncer& get() {
    if (forked()) throw std::logic_error("diloco.Syncer belongs to the process that made it, not to a fork of it");
    return *syncer_;
  }

 private:
  std::unique_ptr<Syncer> syncer_;
  pid_t pid_;
};

std::unique_ptr<PySyncer> make_syncer(const std::map<std::string, std::string>& settings, std::string bind,
                                      bool insecure, unsigned merge_threads, std::string event_log,
                                      std::string endpoint_file, double shutdown_s) {
  SyncerOptions options;
  for (const auto& [name, value] : settings) options.settings.set(name, value);
  options.settings.validate();
  options.bind = std::move(bind);
  options.insecure = insecure;
  options.merge_threads = merge_threads;
  options.event_log = std::move(event_log);
  options.endpoint_file = std::move(endpoint_file);
  options.shutdown_s = shutdown_s;
  return std::make_unique<PySyncer>(std::move(options));
}

void stop(PySyncer& self, double shutdown_s) {
  if (!self.forked()) self.get().stop(shutdown_s);  // a child's exit handlers end up here
}

using Weights = std::vector<std::tuple<std::string, at::Tensor, std::vector<std::string>>>;

Weights weights(PySyncer& self) {
  Weights out;
  const Layout layout = self.get().layout();
  const auto values = self.get().weights();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const TensorSpec& spec = layout.tensors.at(i);
    at::Tensor tensor = at::empty(spec.shape, at::TensorOptions().dtype(at::kFloat));
    if (!values[i].empty()) std::memcpy(tensor.data_ptr(), values[i].data(), values[i].size() * sizeof(float));
    out.emplace_back(spec.name, std::move(tensor), spec.aliases);
  }
  return out;
}

int run_program(std::vector<std::string> arguments) {
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return run_syncer_program(static_cast<int>(arguments.size()), argv.data());
}

}  // namespace

void bind_syncer(py::module_& m) {
  py::class_<PySyncer>(m, "Syncer")
      .def(py::init(&make_syncer), py::arg("settings"), py::arg("bind"), py::arg("insecure"), py::arg("merge_threads"),
           py::arg("event_log"), py::arg("endpoint_file"), py::arg("shutdown_s"))
      .def("endpoint", [](PySyncer& self) { return self.get().endpoint(); })
      .def("status_json", [](PySyncer& self) { return self.get().status_json(); }, GilFree())
      .def("stop", &stop, py::arg("shutdown_s"), GilFree())
      .def("running", [](PySyncer& self) { return self.get().running(); })
      .def("weights", &weights, GilFree());
  m.def("run_syncer_program", &run_program, py::arg("arguments"), GilFree());
  m.def("query_status", &query_status, py::arg("endpoint"), py::arg("timeout_s"), GilFree());
}

}  // namespace diloco::bindings
