// The next state of a fragment while it is being computed, block by block, in any order and on any threads; nothing of the
// previous state is touched. Private to merge/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "diloco/base/buffer_pool.h"
#include "diloco/base/parallel.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/merge.h"
#include "diloco/merge/segment_merge.h"

namespace diloco {

class NextState {
 public:
  NextState(const MergeJob& job, BufferPool& pool);

  // All weights are zero: no outer step, so that momentum does not move what nobody contributed to.
  void keep_previous();

  // A tensor, or a part of it: elements [begin, end) of segment `index`, `begin` a multiple of kernels::kBlock, `end` too or
  // the tensor's. Thread-safe for parts that have nothing in common.
  struct Part {
    std::size_t index = 0;
    std::uint64_t begin = 0, end = 0;
  };
  // RDA's first pass. Its sum lies in the tensor's part of the new theta, which is not there yet.
  void sum_directions(const Part& part, const RdaMerge& rda);
  double squares_of_directions(std::size_t index) const;
  // Merge (gain * the sum of directions, or without a gain the mean), outer step, image and checks.
  void finish(const Part& part, const Terms& mean, std::optional<float> gain);

  bool finite() const { return finite_; }
  MergeResult result(const Parallel& parallel);

 private:
  struct Scratch;
  float* theta_of(std::size_t index) { return state_->theta->f32() + job_.in.segments[index].element_offset; }
  void finish_in_one_pass(std::size_t index, std::uint64_t begin, std::uint64_t count, std::span<const kernels::WeightedPayload> terms);
  void finish_block(std::size_t index, std::uint64_t begin, std::uint64_t count, Scratch& scratch);

  const MergeJob& job_;
  std::shared_ptr<FragmentState> state_;
  BufferPtr image_;
  const bool streams_;  // past the caches: the fragment is larger than they are
  std::vector<std::size_t> first_block_;  // per segment, and the number of all
  std::vector<double> direction_squares_, delta_squares_;  // per block
  std::atomic<bool> finite_ = true;
};

}  // namespace diloco
