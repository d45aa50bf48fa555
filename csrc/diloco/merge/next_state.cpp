#include "diloco/merge/next_state.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "diloco/codec/codec.h"

namespace diloco {
namespace {

using kernels::kBlock;

constexpr std::uint64_t kStreamFrom = 1 << 20;  // elements

void copy(const BufferPtr& from, const BufferPtr& to) {
  if (from && to) std::copy_n(from->data(), from->size(), to->data());
}

}  // namespace

// One block in several passes; what goes past the caches is made here first.
struct NextState::Scratch {
  alignas(64) std::array<float, kBlock> gradient;
  alignas(64) std::array<float, kBlock> theta;
  alignas(64) std::array<float, 2 * kBlock> state;
  alignas(64) std::array<std::byte, 4 * kBlock> image;
};

NextState::NextState(const MergeJob& job, BufferPool& pool)
    : job_(job), state_(std::make_shared<FragmentState>()), streams_(job.in.numel >= kStreamFrom) {
  state_->version = job.next_version;
  state_->outer_steps = job.previous->outer_steps + 1;
  state_->theta = pool.make(job.in.numel * sizeof(float));
  if (const std::uint64_t floats = outer_state_floats(job.outer)) {
    state_->outer_state = pool.make(floats * job.in.numel * sizeof(float));
  }
  image_ = pool.make(job.out.bytes);
  clear_padding(job.out, image_->data());
  std::size_t blocks = 0;
  for (const Segment& segment : job.in.segments) {
    first_block_.push_back(blocks);
    blocks += (segment.numel + kBlock - 1) / kBlock;
  }
  first_block_.push_back(blocks);
  direction_squares_.resize(blocks);
  delta_squares_.resize(blocks);
}

void NextState::keep_previous() {
  copy(job_.previous->theta, state_->theta);
  copy(job_.previous->outer_state, state_->outer_state);
  state_->outer_steps = job_.previous->outer_steps;
  encode_payload(job_.out, state_->theta->f32(), image_->data());
}

void NextState::sum_directions(const Part& part, const RdaMerge& rda) {
  float* const sum = theta_of(part.index);
  for (std::uint64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const std::uint64_t count = std::min(kBlock, part.end - begin);
    direction_squares_[first_block_[part.index] + begin / kBlock] = rda.direction(begin, count, sum + begin);
  }
}

void NextState::finish(const Part& part, const Terms& mean, std::optional<float> gain) {
  const bool one_pass = job_.outer.kind == OuterKind::kSgd || job_.outer.kind == OuterKind::kNesterov;
  const kernels::WeightedPayload directions{reinterpret_cast<const std::byte*>(theta_of(part.index)), false, gain.value_or(0.0f)};
  const std::span<const kernels::WeightedPayload> terms = gain ? std::span(&directions, 1) : std::span(mean);
  Scratch scratch;
  for (std::uint64_t begin = part.begin; begin < part.end && finite(); begin += kBlock) {
    const std::uint64_t count = std::min(kBlock, part.end - begin);
    if (one_pass) {
      finish_in_one_pass(part.index, begin, count, terms);
    } else {
      kernels::weighted_sum(terms.data(), terms.size(), begin, scratch.gradient.data(), count);
      finish_block(part.index, begin, count, scratch);
    }
  }
}

void NextState::finish_in_one_pass(std::size_t index, std::uint64_t begin, std::uint64_t count,
                                   std::span<const kernels::WeightedPayload> terms) {
  const std::uint64_t at = job_.in.segments[index].element_offset + begin;
  const Segment& out = job_.out.segments[index];
  const bool momentum = job_.outer.kind == OuterKind::kNesterov;
  const kernels::StepSums sums = kernels::merge_step(
      {terms.data(), terms.size(), begin, job_.previous->theta->f32() + at,
       momentum ? job_.previous->outer_state->f32() + at : nullptr, job_.outer.lr, job_.outer.momentum},
      {state_->theta->f32() + at, momentum ? state_->outer_state->f32() + at : nullptr,
       image_->data() + out.byte_offset + codec_bytes(out.codec, begin), out.codec == Codec::kBf16, streams_},
      count);
  delta_squares_[first_block_[index] + begin / kBlock] = sums.squares;
  if (!sums.finite) finite_ = false;
}

void NextState::finish_block(std::size_t index, std::uint64_t begin, std::uint64_t count, Scratch& scratch) {
  const std::uint64_t at = job_.in.segments[index].element_offset + begin;
  const Segment& out = job_.out.segments[index];
  const std::uint64_t floats = outer_state_floats(job_.outer), image_bytes = codec_bytes(out.codec, count);
  float* const theta_home = state_->theta->f32() + at;
  float* const state_home = floats > 0 ? state_->outer_state->f32() + at : nullptr;
  std::byte* const image_home = image_->data() + out.byte_offset + codec_bytes(out.codec, begin);

  float* const theta = streams_ ? scratch.theta.data() : theta_home;
  std::byte* const image = streams_ ? scratch.image.data() : image_home;
  OuterState<const float> before{nullptr, job_.in.numel};
  if (floats > 0) before.values = job_.previous->outer_state->f32() + at;
  OuterState<float> after{state_home, job_.in.numel};
  if (streams_) after = {scratch.state.data(), kBlock};

  outer_step(job_.outer, job_.previous->outer_steps, scratch.gradient.data(), job_.previous->theta->f32() + at, before, theta,
             after, count);
  encode(out.codec, theta, count, image);
  delta_squares_[first_block_[index] + begin / kBlock] = kernels::norm_squared_f32(scratch.gradient.data(), count);
  // The image covers theta, and more: a large f32 can round to Inf in bf16.
  bool finite = kernels::all_finite(image, out.codec == Codec::kBf16, count);
  for (std::uint64_t i = 0; i < floats; ++i) {
    finite = finite && kernels::all_finite(reinterpret_cast<const std::byte*>(after.values + i * after.stride), false, count);
  }
  if (!finite) finite_ = false;
  if (!streams_) return;
  kernels::stream(theta, count * sizeof(float), theta_home);
  for (std::uint64_t i = 0; i < floats; ++i) {
    kernels::stream(after.values + i * after.stride, count * sizeof(float), state_home + i * job_.in.numel);
  }
  kernels::stream(image, image_bytes, image_home);
}

double NextState::squares_of_directions(std::size_t index) const {
  double sum = 0.0;
  for (std::size_t block = first_block_[index]; block < first_block_[index + 1]; ++block) sum += direction_squares_[block];
  return sum;
}

MergeResult NextState::result(const Parallel& parallel) {
  MergeResult result;
  result.ok = true;
  result.image = make_image(image_, job_.chunk_bytes, parallel);
  result.next = state_;
  double squared = 0.0;
  for (const double block : delta_squares_) squared += block;
  result.delta_norm = std::sqrt(squared);
  return result;
}

}  // namespace diloco
