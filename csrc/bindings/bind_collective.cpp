// diloco._C.CollectiveLearner: the learner of a run without a syncer, over process groups that Python made.
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <numeric>
#include <utility>

#include "bindings.h"
#include "diloco/torch/collective.h"
#include "training_side.h"

namespace diloco::bindings {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class PyCollectiveLearner : public Held<CollectiveLearner> {
 public:
  PyCollectiveLearner(const std::vector<PyParameter>& parameters, const Group& group, const Group& control,
                      std::map<std::string, std::string> settings, bool on_device)
      : tensors_(static_cast<std::uint32_t>(parameters.size())) {
    auto named = named_parameters(parameters);
    CollectiveOptions options{std::move(settings), on_device, into_log()};
    const py::gil_scoped_release release;
    learner_ = std::make_unique<CollectiveLearner>(std::move(named), Collectives(group), Collectives(control),
                                                   std::move(options));
  }
  std::uint32_t tensors() const { return tensors_; }

 private:
  std::uint32_t tensors_;
};

// As of Learner: fragments adopted, parameters whose inner state must be reset, whether log lines wait to be taken.
std::tuple<std::uint32_t, std::vector<std::uint32_t>, bool, std::uint64_t> boundary(PyCollectiveLearner& self,
                                                                                    std::uint64_t tokens, double lr,
                                                                                    const py::object& while_waiting) {
  RECORD_USER_SCOPE("diloco::boundary");
  const auto interrupted = callback_with_gil(while_waiting);
  const py::gil_scoped_release release;
  const CollectiveResult result = self.get().boundary({tokens, lr}, interrupted);
  std::vector<std::uint32_t> reset(result.reset ? self.tensors() : 0);
  std::iota(reset.begin(), reset.end(), 0u);
  return {result.adopted, std::move(reset), !self.log().empty(), tokens};
}

at::Tensor anchor(PyCollectiveLearner& self, std::uint32_t index, const at::Tensor& like) {
  at::Tensor out = at::empty(like.sizes(), at::TensorOptions().dtype(at::kFloat));
  self.get().read_anchor(index, static_cast<float*>(out.data_ptr()));
  return out;
}

py::dict stats(PyCollectiveLearner& self) {
  const CollectiveStats stats = self.get().stats();
  py::list versions;
  for (const Version& version : stats.versions) versions.append(py::make_tuple(version.epoch, version.n));
  py::dict out;
  out["state"] = stats.state;
  out["steps"] = stats.steps;
  out["tokens"] = stats.tokens;
  out["clock"] = stats.clock;
  out["merges"] = stats.merges;
  out["contributions_sent"] = stats.contributions_sent;
  out["contributions_merged"] = stats.contributions_merged;
  out["tokens_merged"] = stats.tokens_merged;
  out["tokens_outstanding"] = stats.tokens_outstanding;
  out["discarded"] = stats.discarded;
  out["bytes_in"] = stats.bytes_in;
  out["bytes_out"] = stats.bytes_out;
  out["under_way_bytes"] = stats.under_way_bytes;
  out["waited_s"] = stats.waited_s;
  out["versions"] = versions;
  return out;
}

// ---- a state as plain Python values and tensors, which torch.load(weights_only=True) reads ----

py::object or_none(const at::Tensor& tensor) { return tensor.defined() ? py::cast(tensor) : py::none(); }
at::Tensor or_undefined(const py::handle& value) { return value.is_none() ? at::Tensor() : value.cast<at::Tensor>(); }

py::dict save(PyCollectiveLearner& self) {
  CollectiveState state;
  {
    const py::gil_scoped_release release;
    state = self.get().save();
  }
  py::list fragments, accounts;
  for (const SavedFragment& one : state.fragments) {
    py::dict fragment;
    fragment["theta"] = one.theta;
    fragment["outer"] = or_none(one.outer);
    fragment["n"] = one.n;
    fragment["outer_steps"] = one.outer_steps;
    fragments.append(fragment);
  }
  for (const CollectiveState::Account& one : state.accounts) {
    py::dict account;
    account["from"] = one.from;
    account["from_steps"] = one.from_steps;
    account["message"] = or_none(one.message);
    account["sent_from"] = one.sent_from;
    account["sent_to"] = one.sent_to;
    account["steps_at_to"] = one.steps_at_to;
    account["staged_at"] = one.staged_at;
    account["detached"] = one.detached;
    accounts.append(account);
  }
  py::dict out;
  out["clock"] = state.clock;
  out["plan"] = state.plan;
  out["outer_optimizer"] = state.outer_optimizer;
  out["fragments"] = fragments;
  out["rank"] = state.rank;
  out["ranks"] = state.ranks;
  out["tokens"] = state.tokens;
  out["merges"] = state.merges;
  out["contributions_sent"] = state.contributions_sent;
  out["contributions_merged"] = state.contributions_merged;
  out["tokens_merged"] = state.tokens_merged;
  out["discarded"] = state.discarded;
  out["bad_payloads"] = state.bad_payloads;
  out["accounts"] = accounts;
  return out;
}

CollectiveState state_of(const py::dict& given) {
  const auto uint = [](const py::handle& from, const char* key) { return from[key].cast<std::uint64_t>(); };
  CollectiveState state;
  state.clock = uint(given, "clock");
  state.plan = given["plan"].cast<std::vector<std::vector<std::string>>>();
  state.outer_optimizer = given["outer_optimizer"].cast<std::string>();
  state.rank = given["rank"].cast<int>();
  state.ranks = given["ranks"].cast<int>();
  state.tokens = uint(given, "tokens");
  state.merges = uint(given, "merges");
  state.contributions_sent = uint(given, "contributions_sent");
  state.contributions_merged = uint(given, "contributions_merged");
  state.tokens_merged = uint(given, "tokens_merged");
  state.discarded = given["discarded"].cast<std::map<std::string, std::uint64_t>>();
  state.bad_payloads = given["bad_payloads"].cast<std::vector<std::uint64_t>>();
  for (const py::handle one : given["fragments"]) {
    state.fragments.push_back(
        {or_undefined(one["theta"]), or_undefined(one["outer"]), uint(one, "n"), uint(one, "outer_steps")});
  }
  for (const py::handle one : given["accounts"]) {
    state.accounts.push_back({uint(one, "from"), uint(one, "from_steps"), or_undefined(one["message"]),
                              uint(one, "sent_from"), uint(one, "sent_to"), uint(one, "steps_at_to"),
                              uint(one, "staged_at"), one["detached"].cast<bool>()});
  }
  return state;
}

bool load(PyCollectiveLearner& self, const py::dict& given) {
  const CollectiveState state = state_of(given);
  const py::gil_scoped_release release;
  return self.get().load(state);
}

}  // namespace

void bind_collective(py::module_& m) {
  py::class_<PyCollectiveLearner>(m, "CollectiveLearner")
      .def(py::init<const std::vector<PyParameter>&, const Group&, const Group&, std::map<std::string, std::string>, bool>(),
           py::arg("parameters"), py::arg("group"), py::arg("control"), py::arg("settings"), py::arg("on_device"),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>())  // a group may be written in Python
      .def("boundary", &boundary, py::arg("tokens"), py::arg("lr"), py::arg("while_waiting"))
      .def("close", [](PyCollectiveLearner& self, double flush_s) { self.get().close(flush_s); }, py::arg("flush_s"),
           GilFree())
      .def("stats", &stats)
      .def("rank", [](PyCollectiveLearner& self) { return self.get().rank(); })
      .def("ranks", [](PyCollectiveLearner& self) { return self.get().ranks(); })
      .def("anchor", &anchor, py::arg("index"), py::arg("like"), GilFree())
      .def("describe", [](PyCollectiveLearner& self) { return self.get().describe(); }, GilFree())
      .def("save", &save)
      .def("load", &load, py::arg("state"))
      .def("take_log", [](PyCollectiveLearner& self) { return self.log().take(); });
}

}  // namespace diloco::bindings
