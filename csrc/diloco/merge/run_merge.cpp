#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "diloco/base/errors.h"
#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/merge.h"
#include "diloco/merge/segment_merge.h"

namespace diloco {
namespace {

void expect(bool ok, const char* what, std::uint64_t expected, std::uint64_t got) {
  if (!ok) throw ConfigError(fmt::format("merge: {}: expected {}, got {}", what, expected, got));
}

void check_job(const MergeJob& job) {
  const std::size_t segments = job.in.segments.size();
  const std::uint64_t bytes = job.in.numel * sizeof(float);
  if (!job.previous || !job.previous->theta) throw ConfigError("merge: the fragment has no previous state");
  expect(job.out.segments.size() == segments, "segments of the image", segments, job.out.segments.size());
  expect(job.use_rda.size() == segments, "length of use_rda", segments, job.use_rda.size());
  expect(job.previous->theta->size() == bytes, "bytes of theta", bytes, job.previous->theta->size());
  for (std::size_t i = 0; i < segments; ++i) {
    expect(job.out.segments[i].numel == job.in.segments[i].numel, "elements of an image segment",
           job.in.segments[i].numel, job.out.segments[i].numel);
  }
  for (const MergeMember& member : job.members) {
    const std::size_t size = member.payload ? member.payload->size() : 0;
    expect(size >= job.in.bytes, "bytes of a payload", job.in.bytes, size);
    expect(member.norms.size() == segments, "norms of a payload", segments, member.norms.size());
    if (member.base_image) {
      expect(member.base_image->size() >= job.out.bytes, "bytes of a base image", job.out.bytes, member.base_image->size());
    }
  }
  const std::uint64_t state = outer_state_floats(job.outer) * bytes;
  const std::size_t got = job.previous->outer_state ? job.previous->outer_state->size() : 0;
  expect(state == 0 || got == state, "bytes of outer state", state, got);
}

bool has_weight(const MergeMember& member) { return std::isfinite(member.weight) && member.weight > 0.0; }

// Total norm; a member whose norm is no number is the first one to drop.
double total_norm(const MergeMember& member) {
  double squared = 0.0;
  for (const double norm : member.norms) squared += norm * norm;
  return std::isnan(squared) ? std::numeric_limits<double>::infinity() : std::sqrt(squared);
}

std::size_t largest_member(const MergeJob& job) {
  std::size_t largest = 0;
  double most = -1.0;
  for (std::size_t i = 0; i < job.members.size(); ++i) {
    if (!has_weight(job.members[i])) continue;
    const double norm = total_norm(job.members[i]);
    if (norm > most) {
      most = norm;
      largest = i;
    }
  }
  return largest;
}

// One tensor of a member's contribution: as it came, or, with a base image, against the previous theta instead
// (Decoupled DiLoCo, App. D.2): out <- payload + (theta - image), in f32.
SegmentMember anchored(const MergeJob& job, const MergeMember& member, std::size_t index, double weight,
                       std::vector<float>* out) {
  const Segment& segment = job.in.segments[index];
  const std::byte* payload = member.payload->data() + segment.byte_offset;
  if (!member.base_image) return {segment.codec, payload, weight, member.norms[index]};
  out->resize(segment.numel);
  decode(segment.codec, payload, segment.numel, out->data());
  const Segment& image = job.out.segments[index];
  const auto* theta = reinterpret_cast<const std::byte*>(job.previous->theta->f32() + segment.element_offset);
  kernels::scaled_accumulate(theta, false, 1.0f, false, out->data(), segment.numel);
  kernels::scaled_accumulate(member.base_image->data() + image.byte_offset, image.codec == Codec::kBf16, -1.0f, false,
                             out->data(), segment.numel);
  return {Codec::kF32, reinterpret_cast<const std::byte*>(out->data()), weight,
          std::sqrt(kernels::norm_squared_f32(out->data(), segment.numel))};
}

// The next state while it is being computed, one block of one tensor after the other; nothing of the previous state is
// touched.
class NextState {
 public:
  explicit NextState(const MergeJob& job) : job_(job), state_(std::make_shared<FragmentState>()) {
    state_->version = job.next_version;
    state_->outer_steps = job.previous->outer_steps + 1;
    state_->theta = Buffer::make(job.in.numel * sizeof(float));
    if (const std::uint64_t floats = outer_state_floats(job.outer)) {
      state_->outer_state = Buffer::make(floats * job.in.numel * sizeof(float));
    }
    image_ = Buffer::make(job.out.bytes);
  }

  // All weights are zero: no outer step, so that momentum does not move what nobody contributed to.
  void keep_previous() {
    copy(job_.previous->theta, state_->theta);
    copy(job_.previous->outer_state, state_->outer_state);
    state_->outer_steps = job_.previous->outer_steps;
    encode_payload(job_.out, state_->theta->f32(), image_->data());
  }

  // False if something is not finite any more.
  bool merge_segment(std::size_t index, SegmentMembers members) {
    const Segment& segment = job_.in.segments[index];
    // The new theta of this tensor is not there yet: its place holds the sum of directions until then.
    float* sum = state_->theta->f32() + segment.element_offset;
    const std::optional<float> gain =
        job_.use_rda[index] ? rda_direction(members, segment.numel, sum) : std::nullopt;
    for (std::uint64_t begin = 0; begin < segment.numel; begin += kernels::kBlock) {
      const std::uint64_t count = std::min(kernels::kBlock, segment.numel - begin);
      if (gain) {
        kernels::scale(sum + begin, *gain, gradient_.data(), count);
      } else {
        mean_merge(members, begin, count, gradient_.data());
      }
      if (!finish_block(index, begin, count)) return false;
    }
    return true;
  }

  MergeResult result() {
    MergeResult result;
    result.ok = true;
    result.image = make_image(image_, job_.chunk_bytes);
    result.next = state_;
    result.delta_norm = std::sqrt(delta_squared_);
    return result;
  }

 private:
  static void copy(const BufferPtr& from, const BufferPtr& to) {
    if (from && to) std::copy_n(from->data(), from->size(), to->data());
  }

  // Outer step, image and checks of one block while it is in the cache.
  bool finish_block(std::size_t index, std::uint64_t begin, std::uint64_t count) {
    const std::uint64_t at = job_.in.segments[index].element_offset + begin;
    float* theta = state_->theta->f32() + at;
    OuterState<const float> before{nullptr, job_.in.numel};
    OuterState<float> after{nullptr, job_.in.numel};
    if (state_->outer_state) {
      before.values = job_.previous->outer_state->f32() + at;
      after.values = state_->outer_state->f32() + at;
    }
    outer_step(job_.outer, job_.previous->outer_steps, gradient_.data(), job_.previous->theta->f32() + at, before, theta,
               after, count);
    const Segment& out = job_.out.segments[index];
    std::byte* image = image_->data() + out.byte_offset + codec_bytes(out.codec, begin);
    encode(out.codec, theta, count, image);
    delta_squared_ += kernels::norm_squared_f32(gradient_.data(), count);
    // The image covers theta, and more: a large f32 can round to Inf in bf16.
    bool finite = kernels::all_finite(image, out.codec == Codec::kBf16, count);
    for (std::uint64_t i = 0; i < outer_state_floats(job_.outer); ++i) {
      finite = finite && kernels::all_finite(reinterpret_cast<const std::byte*>(after.values + i * after.stride), false, count);
    }
    return finite;
  }

  const MergeJob& job_;
  std::shared_ptr<FragmentState> state_;
  BufferPtr image_;
  double delta_squared_ = 0.0;
  alignas(64) std::array<float, kernels::kBlock> gradient_;
};

}  // namespace

MergeResult run_merge(const MergeJob& job) {
  check_job(job);
  double total = 0.0;
  for (const MergeMember& member : job.members) total += has_weight(member) ? member.weight : 0.0;
  NextState next(job);
  if (total == 0.0) {
    next.keep_previous();
    return next.result();
  }
  std::vector<SegmentMember> members;
  std::vector<std::vector<float>> shifted(job.members.size());  // a tensor of each member with a base image
  for (std::size_t index = 0; index < job.in.segments.size(); ++index) {
    members.clear();
    for (std::size_t m = 0; m < job.members.size(); ++m) {
      if (!has_weight(job.members[m])) continue;
      members.push_back(anchored(job, job.members[m], index, job.members[m].weight / total, &shifted[m]));
    }
    if (!next.merge_segment(index, members)) {
      MergeResult failed;
      failed.largest_member = largest_member(job);
      return failed;
    }
  }
  return next.result();
}

}  // namespace diloco
