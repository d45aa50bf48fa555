// What a rank of a run without a syncer does with numbers, apart from when: stage, merge, outer step, adoption.
//
//   stage ─► rows go to all ranks (collective.cpp) ─► merge ─► adopt
//
// Two bodies. In host memory: the syncer's own functions, screening included (merge/, outer/, learner/mover), whatever
// device the parameters are on. On the device of the parameters: the dispatcher's operators diloco::* and nothing that
// would make the host wait for the device. Both give the same bits as a syncer. Training thread only; no GIL needed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "diloco/core/learner_core.h"
#include "diloco/torch/collective_plan.h"
#include "diloco/torch/parameter_store.h"

namespace diloco {

// One fragment of the global weights as a state keeps it, f32. `outer`: the arrays of the outer optimizer one after the
// other; undefined if it has none.
struct SavedFragment {
  at::Tensor theta, outer;
  std::uint64_t n = 0, outer_steps = 0;
};

// What the host learns of a merge; in device memory nothing, see device_numbers.cpp.
struct Merged {
  std::vector<Work> works;   // by rank
  std::vector<int> refused;  // ranks whose contribution was not finite, or would have made the weights infinite
  std::optional<int> twin;   // a rank whose contribution is that of the rank before it
};

class CollectiveNumbers {
 public:
  virtual ~CollectiveNumbers() = default;

  // This rank's weights of the fragment as bytes, to be replaced by rank 0's, and what follows: they are the first
  // global weights, in the parameters too. Throws ConfigError if they are not finite.
  virtual at::Tensor weights(FragmentId fragment) = 0;
  virtual void begin(FragmentId fragment, const at::Tensor& weights) = 0;

  // Stages this rank's message, anchor - local as it is now and the work it stands for. Returns a row for every rank's
  // message, this rank's filled; merge() takes the others' from there, adopt() ends with them.
  virtual std::vector<at::Tensor> stage(FragmentId fragment, const Work& work) = 0;
  // The same with a message as it was staged in an earlier life, on the CPU.
  virtual std::vector<at::Tensor> stage_again(FragmentId fragment, const at::Tensor& message) = 0;
  // The next global weights from the messages of all ranks, in the order of ranks. The parameters stay as they are.
  virtual Merged merge(FragmentId fragment) = 0;
  // The parameters take the global weights over. `keep_sent`: rebase counts this rank's message as merged.
  virtual void adopt(FragmentId fragment, AdoptFormula formula, bool keep_sent) = 0;
  // The parameters are the global weights again, as last adopted. Not between merge() and adopt().
  virtual void restore(FragmentId fragment) = 0;

  virtual Version version(FragmentId fragment) const = 0;
  virtual SavedFragment save(FragmentId fragment) const = 0;
  // Replaces the global weights and puts them into the parameters. The sizes have been checked.
  virtual void load(FragmentId fragment, const SavedFragment& saved) = 0;

  virtual void read_anchor(std::uint32_t tensor, float* out) = 0;
  virtual const char* place() const = 0;  // "in host memory", "on cuda:0"
};

std::unique_ptr<CollectiveNumbers> host_numbers(const CollectivePlan& plan, std::vector<NamedParameter> parameters);
// Throws ConfigError if the parameters are on several devices, or this build has no kernels for theirs.
std::unique_ptr<CollectiveNumbers> device_numbers(const CollectivePlan& plan, std::vector<NamedParameter> parameters);

}  // namespace diloco
