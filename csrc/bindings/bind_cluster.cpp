// diloco._C.VirtualCluster: the virtual cluster with learners of Python's own. A learner's tensors are views of the
// cluster's arrays, so the production kernels stage from and adopt into what its optimizer steps.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bindings.h"
#include "diloco/sim/cluster.h"

namespace diloco::bindings {
namespace {

using sim::Cluster;
using PyTensorSpec = std::tuple<std::string, std::vector<std::int64_t>, std::vector<std::string>>;
using PyLearnerSpec = std::tuple<std::string, double, double, std::uint64_t, double, double>;
using PyMember = std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t, double>;

at::TensorOptions f32() { return at::TensorOptions().dtype(at::kFloat); }

// Python's callbacks are borrowed for the length of a call. Kept any longer they would close a circle of references,
// from the cluster to a model and over its tensors back to the cluster, that no collector sees.
struct Callbacks {
  py::handle begin, step;
};

class PyCluster {
 public:
  explicit PyCluster(sim::ClusterOptions options, bool with_training) : layout_(options.layout) {
    learners_ = options.learners.size();
    tokens_.reserve(learners_);
    for (const auto& learner : options.learners) tokens_.push_back(learner.tokens_per_step);
    if (with_training) {
      options.training.begin = [this](std::size_t learner, sim::Tensors& local) { begin(learner, local); };
      options.training.step = [this](std::size_t learner, sim::Tensors&) { return step(learner); };
    }
    cluster_ = std::make_shared<Cluster>(std::move(options));
  }
  ~PyCluster() {
    const py::gil_scoped_release release;
    cluster_.reset();  // lives on while a tensor is a view of it
  }

  Cluster& get() { return *cluster_; }
  std::size_t index(std::size_t learner) const {
    if (learner < learners_) return learner;
    throw py::index_error("learner " + std::to_string(learner) + " of " + std::to_string(learners_));
  }

  void run_until(double t, const py::object& begin, const py::object& step) {
    const Borrowed borrowed(callbacks_, begin, step);
    const py::gil_scoped_release release;
    // In slices, so that Ctrl-C is heard when nothing calls Python.
    const double slice = std::max(0.0, t - cluster_->now()) / 64.0;
    do {
      cluster_->run_until(std::min(t, cluster_->now() + slice));
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    } while (cluster_->now() < t && slice > 0.0);
    cluster_->run_until(t);
  }

  void start_learner(std::size_t learner, const py::object& begin) {
    const Borrowed borrowed(callbacks_, begin, py::none());
    const py::gil_scoped_release release;
    cluster_->start_learner(index(learner));
  }

  std::vector<at::Tensor> parameters(std::size_t learner) {
    std::vector<at::Tensor> out;
    if (!cluster_->learner(index(learner))) return out;
    for (std::size_t i = 0; i < layout_.tensors.size(); ++i) {
      out.push_back(copy_of(cluster_->parameters(learner, i), layout_.tensors[i].shape));
    }
    return out;
  }

  std::vector<at::Tensor> global_parameters() {
    std::vector<at::Tensor> out;
    const auto tensors = cluster_->global_parameters();
    for (std::size_t i = 0; i < tensors.size(); ++i) out.push_back(copy_of(tensors[i], layout_.tensors[i].shape));
    return out;
  }

 private:
  class Borrowed {
   public:
    Borrowed(Callbacks& place, const py::object& begin, const py::object& step)
        : place_(place), before_(std::exchange(place, {begin, step})) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() { place_ = before_; }

   private:
    Callbacks& place_;
    Callbacks before_;
  };

  static at::Tensor copy_of(const std::vector<float>& values, const std::vector<std::int64_t>& shape) {
    at::Tensor out = at::empty(shape, f32());
    if (!values.empty()) std::memcpy(out.data_ptr(), values.data(), values.size() * sizeof(float));
    return out;
  }

  void begin(std::size_t learner, sim::Tensors& local) {
    const py::gil_scoped_acquire gil;
    if (!callbacks_.begin || callbacks_.begin.is_none()) return;
    std::vector<at::Tensor> views;
    for (std::size_t i = 0; i < local.size(); ++i) {
      views.push_back(at::from_blob(local[i].data(), layout_.tensors[i].shape, [keep = cluster_](void*) {}, f32()));
    }
    callbacks_.begin(learner, views);
  }

  std::uint64_t step(std::size_t learner) {
    const py::gil_scoped_acquire gil;
    if (!callbacks_.step || callbacks_.step.is_none()) return tokens_[learner];
    const py::object tokens = callbacks_.step(learner);
    return tokens.is_none() ? tokens_[learner] : tokens.cast<std::uint64_t>();
  }

  Layout layout_;
  std::size_t learners_ = 0;
  std::vector<std::uint64_t> tokens_;
  Callbacks callbacks_;
  std::shared_ptr<Cluster> cluster_;
};

std::unique_ptr<PyCluster> make_cluster(const std::map<std::string, std::string>& settings,
                                        const std::vector<PyTensorSpec>& layout,
                                        const std::vector<PyLearnerSpec>& learners, std::uint64_t seed, double delay_s,
                                        double bytes_per_s, double merge_s, std::uint64_t payload_memory_bytes,
                                        double learning_rate, bool with_training) {
  sim::ClusterOptions options;
  for (const auto& [name, value] : settings) options.settings.set(name, value);
  options.settings.validate();
  for (const auto& [name, shape, aliases] : layout) {
    options.layout.tensors.push_back({name, shape, Dtype::kF32, aliases});
  }
  check_layout(options.layout);
  for (const auto& [id, step_s, start_s, tokens, jitter, target] : learners) {
    options.learners.push_back({id, step_s, start_s, tokens, static_cast<float>(target), jitter, 0, {}});
  }
  options.seed = seed;
  options.delay_s = delay_s;
  options.bytes_per_s = bytes_per_s;
  options.merge_s = merge_s;
  options.payload_memory_bytes = payload_memory_bytes;
  options.learning_rate = learning_rate;
  return std::make_unique<PyCluster>(std::move(options), with_training);
}

// fragment, (epoch, n), at, syncer_life, reason, lost_in_life, members.
py::list merges(PyCluster& self) {
  py::list out;
  for (const sim::MergeRecord& merge : self.get().merges()) {
    std::vector<PyMember> members;
    for (const auto& m : merge.members) members.emplace_back(m.learner, m.incarnation, m.from, m.to, m.weight);
    out.append(py::make_tuple(merge.fragment, py::make_tuple(merge.version.epoch, merge.version.n), merge.at,
                              merge.syncer_life, merge.reason, merge.lost_in_life, members));
  }
  return out;
}

std::vector<std::string> records(PyCluster& self, std::size_t from) {
  const auto& all = self.get().records();
  return {all.begin() + static_cast<std::ptrdiff_t>(std::min(from, all.size())), all.end()};
}

// Of the current life; None while dead.
py::object stats(PyCluster& self, std::size_t learner) {
  const LearnerCore* core = self.get().learner(self.index(learner));
  return core ? to_dict(core->stats()) : py::object(py::none());
}

// (tensor indices, elements) of each fragment; empty while the syncer is dead or knows no layout.
std::vector<std::pair<std::vector<std::uint32_t>, std::uint64_t>> fragments(PyCluster& self) {
  std::vector<std::pair<std::vector<std::uint32_t>, std::uint64_t>> out;
  if (const SyncerCore* syncer = self.get().syncer()) {
    const Plan& plan = syncer->plan();
    for (std::size_t p = 0; p < plan.size(); ++p) {
      const auto& tensors = plan.fragments[p].tensors;
      out.emplace_back(std::vector<std::uint32_t>(tensors.begin(), tensors.end()), plan.fragments[p].numel);
    }
  }
  return out;
}

}  // namespace

void bind_cluster(py::module_& m) {
  const auto on_learner = [](void (Cluster::*method)(std::size_t)) {
    return [method](PyCluster& self, std::size_t learner) { (self.get().*method)(self.index(learner)); };
  };
  const auto on_learner_switch = [](void (Cluster::*method)(std::size_t, bool)) {
    return [method](PyCluster& self, std::size_t learner, bool on) { (self.get().*method)(self.index(learner), on); };
  };
  py::class_<PyCluster>(m, "VirtualCluster")
      .def(py::init(&make_cluster), py::arg("settings"), py::arg("layout"), py::arg("learners"), py::arg("seed"),
           py::arg("delay_s"), py::arg("bytes_per_s"), py::arg("merge_s"), py::arg("payload_memory_bytes"),
           py::arg("learning_rate"), py::arg("with_training"))
      .def("run_until", &PyCluster::run_until, py::arg("t"), py::arg("begin"), py::arg("step"))
      .def("now", [](PyCluster& self) { return self.get().now(); })
      .def("kill_learner", on_learner(&Cluster::kill_learner), py::arg("learner"))
      .def("start_learner", &PyCluster::start_learner, py::arg("learner"), py::arg("begin"))
      .def("freeze_learner", on_learner_switch(&Cluster::freeze_learner), py::arg("learner"), py::arg("frozen"))
      .def("partition_learner", on_learner_switch(&Cluster::partition_learner), py::arg("learner"), py::arg("cut_off"))
      .def("poison", on_learner(&Cluster::poison), py::arg("learner"))
      .def("kill_syncer", [](PyCluster& self) { self.get().kill_syncer(); })
      .def("start_syncer", [](PyCluster& self) { self.get().start_syncer(); })
      .def("stop_syncer", [](PyCluster& self, double s) { self.get().stop_syncer(s); }, py::arg("give_up_after_s"))
      .def("syncer_alive", [](PyCluster& self) { return self.get().syncer() != nullptr; })
      .def("learner_alive",
           [](PyCluster& self, std::size_t learner) { return self.get().learner(self.index(learner)) != nullptr; },
           py::arg("learner"))
      .def("status_json",
           [](PyCluster& self) {
             SyncerCore* syncer = self.get().syncer();
             return syncer ? syncer->status_json(self.get().now()) : std::string();
           })
      .def("merges", &merges)
      .def("records", &records, py::arg("start"))
      .def("log_lines", [](PyCluster& self) { return self.get().log_lines(); })
      .def("steps", [](PyCluster& self, std::size_t learner) { return self.get().steps(self.index(learner)); },
           py::arg("learner"))
      .def("longest_hold",
           [](PyCluster& self, std::size_t learner) { return self.get().longest_hold(self.index(learner)); },
           py::arg("learner"))
      .def("peak_payload_bytes", [](PyCluster& self) { return self.get().peak_payload_bytes(); })
      .def("merged_fraction", [](PyCluster& self, const std::string& id) { return self.get().merged_fraction(id); },
           py::arg("learner_id"))
      .def("check", [](PyCluster& self) { return self.get().check(); })
      .def("stats", &stats, py::arg("learner"))
      .def("fragments", &fragments)
      .def("parameters", &PyCluster::parameters, py::arg("learner"))
      .def("global_parameters", &PyCluster::global_parameters);
}

}  // namespace diloco::bindings
