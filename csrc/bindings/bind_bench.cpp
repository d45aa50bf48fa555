// The workloads of `diloco bench`, each timed alone by Python, which makes them in turn with its own.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/bench/workload.h"
#include "diloco/syncer/workers.h"

namespace diloco::bindings {
namespace {

class Workloads {
 public:
  explicit Workloads(unsigned threads) : workers_(threads) {}

  void add_memory(std::uint64_t megabytes) { add(bench::memory_workloads(megabytes, parallel())); }
  void add_merge(std::uint64_t elements, std::uint64_t tensor, unsigned members, bool bf16) {
    add(bench::merge_workloads({elements, tensor, members, bf16}, parallel()));
  }
  std::map<std::string, std::uint64_t> bytes() const {
    std::map<std::string, std::uint64_t> out;
    for (const auto& workload : workloads_) out[workload.name] = workload.bytes;
    return out;
  }
  double run(const std::string& name) {
    for (const auto& workload : workloads_) {
      if (workload.name != name) continue;
      const TimePoint start = monotonic_now();
      workload.run();
      return monotonic_now() - start;
    }
    throw ConfigError("no workload '" + name + "'");
  }

 private:
  Parallel parallel() {
    return [this](std::size_t count, const std::function<void(std::size_t)>& body) { workers_.parallel(count, body); };
  }
  void add(std::vector<bench::Workload> more) {
    workloads_.insert(workloads_.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  }

  Workers workers_;
  std::vector<bench::Workload> workloads_;
};

}  // namespace

void bind_bench(py::module_& m) {
  py::class_<Workloads>(m, "Workloads")
      .def(py::init<unsigned>(), py::arg("threads"))
      .def("add_memory", &Workloads::add_memory, py::arg("megabytes"), GilFree())
      .def("add_merge", &Workloads::add_merge, py::arg("elements"), py::arg("tensor"), py::arg("members"), py::arg("bf16"), GilFree())
      .def("bytes", &Workloads::bytes)
      .def("run", &Workloads::run, py::arg("name"), GilFree());
}

}  // namespace diloco::bindings
