// diloco._C.Learner over the learner shell and a TorchParameterStore.
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bindings.h"
#include "diloco/learner/learner.h"
#include "diloco/torch/parameter_store.h"
#include "diloco/torch/rank_group.h"
#include "training_side.h"

namespace diloco::bindings {
namespace {

// One of several processes that are a learner together; the process groups are its own and on the CPU.
struct PyIsland {
  c10::intrusive_ptr<c10d::ProcessGroup> plan, replicas;  // replicas may be null
  bool any_replicas = false;
  Rank rank;
  std::vector<std::vector<std::int64_t>> shapes;  // unsharded, by parameter
  Part held;
};

std::unique_ptr<PyIsland> make_island(c10::intrusive_ptr<c10d::ProcessGroup> plan,
                                      std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> replicas, bool any_replicas,
                                      std::uint32_t part, std::uint32_t parts, bool replica,
                                      std::vector<std::vector<std::int64_t>> shapes,
                                      const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>& held) {
  auto island = std::make_unique<PyIsland>();
  island->plan = std::move(plan);
  if (replicas) island->replicas = std::move(*replicas);
  island->any_replicas = any_replicas;
  island->rank = {part, parts, replica};
  island->shapes = std::move(shapes);
  for (const auto& [offset, shape] : held) island->held.push_back({offset, shape, false});
  return island;
}

// A range per phase in torch's profiler; without one running it costs a look at a thread-local.
class ProfilerRanges final : public PhaseObserver {
 public:
  void begin(const char* name) override {
    if (!at::hasCallbacks()) return;  // nobody profiles: to find that out in the constructor costs more, after a step
    range_.emplace(at::RecordScope::USER_SCOPE);
    if (range_->isActive()) range_->before(name);
  }
  void end() override { range_.reset(); }

 private:
  std::optional<at::RecordFunction> range_;
};

class PyLearner : public Held<Learner> {
 public:
  PyLearner(const std::vector<PyParameter>& parameters, LearnerOptions options, const PyIsland* island) {
    std::vector<NamedParameter> named = named_parameters(parameters);
    options.phases = std::make_shared<ProfilerRanges>();
    options.log = into_log();
    const py::gil_scoped_release release;
    auto store = store_ = std::make_shared<TorchParameterStore>(std::move(named));
    if (island != nullptr) {
      Layout layout = store->layout();
      for (std::size_t i = 0; i < layout.tensors.size(); ++i) layout.tensors[i].shape = island->shapes.at(i);
      options.island = IslandMember{make_rank_group(island->plan, island->replicas, island->any_replicas), island->rank,
                                    std::move(layout), island->held};
    }
    learner_ = std::make_unique<Learner>(std::move(options), std::move(store));
  }

  void grow(const std::vector<PyParameter>& parameters) {
    std::vector<NamedParameter> named = named_parameters(parameters);
    const py::gil_scoped_release release;
    learner_->grow([&] { store_->append(std::move(named)); });
  }

 private:
  std::shared_ptr<TorchParameterStore> store_;  // training thread
};

std::unique_ptr<PyLearner> make_learner(const std::vector<PyParameter>& parameters, std::string syncer,
                                        std::string learner_id, std::string run_id,
                                        std::map<std::string, std::string> settings, double give_up_after_s,
                                        std::uint64_t staging_bytes, std::string ledger_dir, double linger_s,
                                        const PyIsland* island) {
  LearnerOptions options;
  options.syncer = std::move(syncer);
  options.learner_id = std::move(learner_id);
  options.run_id = std::move(run_id);
  options.settings = std::move(settings);
  options.give_up_after_s = give_up_after_s;
  options.staging_bytes = staging_bytes;
  options.ledger_dir = std::move(ledger_dir);
  options.linger_s = linger_s;
  return std::make_unique<PyLearner>(parameters, std::move(options), island);
}

bool join(PyLearner& self, double timeout_s, const py::object& while_waiting) {
  const auto interrupted = callback_with_gil(while_waiting);
  const py::gil_scoped_release release;
  return self.get().join(timeout_s, interrupted);
}

at::Tensor anchor(PyLearner& self, std::uint32_t index, const at::Tensor& like) {
  at::Tensor out = at::empty(like.sizes(), at::TensorOptions().dtype(at::kFloat));
  self.get().read_anchor(index, static_cast<float*>(out.data_ptr()));
  return out;
}

// Fragments adopted, parameters whose inner state must be reset, whether log lines wait to be taken, tokens counted.
std::tuple<std::uint32_t, std::vector<std::uint32_t>, bool, std::uint64_t> boundary(PyLearner& self, std::uint64_t tokens,
                                                                                    double lr,
                                                                                    const py::object& while_waiting) {
  RECORD_USER_SCOPE("diloco::boundary");  // what a profiler shows
  const auto interrupted = callback_with_gil(while_waiting);
  const py::gil_scoped_release release;
  BoundaryResult result = self.get().boundary({tokens, lr}, interrupted);
  return {result.adopted, std::move(result.reset_inner_state), !self.log().empty(), result.tokens};
}

std::uint64_t tokens_under_way(PyLearner& self, const py::object& while_waiting) {
  const auto interrupted = callback_with_gil(while_waiting);
  const py::gil_scoped_release release;
  return self.get().tokens_under_way(interrupted);
}

py::dict stats_dict(PyLearner& self) {
  LearnerStats stats;
  TransportCounters counters;
  ExchangeWaits waits;
  PhaseSeconds phases;
  {
    const py::gil_scoped_release release;
    stats = self.get().stats();
    counters = self.get().counters();
    waits = self.get().exchange_waits();
    phases = self.get().phase_seconds();
  }
  py::dict out = to_dict(stats);
  out["bytes_in"] = counters.bytes_in;
  out["bytes_out"] = counters.bytes_out;
  out["malformed_frames"] = counters.malformed;
  out["rank_exchanges"] = waits.exchanges;
  out["rank_waits"] = waits.waited;
  out["rank_waits_s"] = waits.total_s;
  out["rank_waits_longest_s"] = waits.longest_s;
  out["stage_s"] = phases.stage_s;
  out["adopt_s"] = phases.adopt_s;
  out["hold_s"] = phases.hold_s;
  return out;
}

}  // namespace

py::dict to_dict(const LearnerStats& stats) {
  py::list versions;
  for (const Version& version : stats.versions) versions.append(py::make_tuple(version.epoch, version.n));
  py::dict out;
  out["state"] = stats.state;
  out["epoch"] = stats.epoch;
  out["steps"] = stats.steps;
  out["tokens"] = stats.tokens;
  out["clock"] = stats.clock;
  out["run_clock"] = stats.run_clock;
  out["run_tokens"] = stats.run_tokens;
  out["adoptions"] = stats.adoptions;
  out["contributions_sent"] = stats.contributions_sent;
  out["contributions_merged"] = stats.contributions_merged;
  out["reconnects"] = stats.reconnects;
  out["tokens_merged"] = stats.tokens_merged;
  out["tokens_outstanding"] = stats.tokens_outstanding;
  out["tokens_absent"] = stats.tokens_absent;
  out["discarded"] = stats.discarded;
  out["staged_bytes"] = stats.staged_bytes;
  out["sent_image_bytes"] = stats.sent_image_bytes;
  out["arriving_bytes"] = stats.arriving_bytes;
  out["versions"] = versions;
  return out;
}

void bind_learner(py::module_& m) {
  py::class_<PyIsland>(m, "Island")
      .def(py::init(&make_island), py::arg("plan"), py::arg("replicas"), py::arg("any_replicas"), py::arg("part"),
           py::arg("parts"), py::arg("replica"), py::arg("shapes"), py::arg("held"));
  py::class_<PyLearner>(m, "Learner")
      .def(py::init(&make_learner), py::arg("parameters"), py::arg("syncer"), py::arg("learner_id"), py::arg("run_id"),
           py::arg("settings"), py::arg("give_up_after_s"), py::arg("staging_bytes"), py::arg("ledger_dir"),
           py::arg("linger_s"), py::arg("island"))
      .def("join", &join, py::arg("timeout_s"), py::arg("while_waiting"))
      .def("boundary", &boundary, py::arg("tokens"), py::arg("lr"), py::arg("while_waiting"))
      .def("grow", &PyLearner::grow, py::arg("parameters"))
      .def("beyond_run", [](PyLearner& self) { return self.get().beyond_run(); })
      .def("tokens_under_way", &tokens_under_way, py::arg("while_waiting"))
      .def("close", [](PyLearner& self, double flush_s) { self.get().close(flush_s); }, py::arg("flush_s"), GilFree())
      .def("stats", &stats_dict)
      .def("learner_id", [](PyLearner& self) { return self.get().learner_id(); })
      .def("incarnation", [](PyLearner& self) { return self.get().incarnation(); })
      .def("anchor", &anchor, py::arg("index"), py::arg("like"), GilFree())
      .def("describe", [](PyLearner& self) { return self.get().describe(); }, GilFree())
      .def("take_log", [](PyLearner& self) { return self.log().take(); });
}

}  // namespace diloco::bindings
