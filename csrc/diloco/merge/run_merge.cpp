#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "diloco/base/errors.h"
#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"
#include "diloco/merge/merge.h"
#include "diloco/merge/next_state.h"
#include "diloco/merge/segment_merge.h"

namespace diloco {
namespace {

using kernels::kBlock;
using Part = NextState::Part;

// Elements one thread does at a time: enough parts for all threads, each as long as that allows, because two threads that
// take turns on short ones cost memory a tenth of its speed. A tensor of no more is done as a whole, both passes of RDA.
std::uint64_t part_size(const MergeJob& job) {
  constexpr std::uint64_t kParts = 16, kLeast = 16, kMost = 64;  // of a fragment; blocks of a part
  return std::clamp(job.in.numel / kParts / kBlock, kLeast, kMost) * kBlock;
}

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

// The members' parts of one tensor.
using Tensor = std::vector<SegmentMember>;

// As they came.
Tensor members_of(const MergeJob& job, std::size_t index, double total) {
  Tensor members;
  for (const MergeMember& member : job.members) {
    if (!has_weight(member)) continue;
    const Segment& segment = job.in.segments[index];
    members.push_back({segment.codec, member.payload->data() + segment.byte_offset, member.weight / total, member.norms[index]});
  }
  return members;
}

std::vector<Part> parts_of(const MergeJob& job, std::size_t index) {
  std::vector<Part> parts;
  const std::uint64_t numel = job.in.segments[index].numel;
  const std::uint64_t size = part_size(job);
  for (std::uint64_t begin = 0; begin < numel; begin += size) parts.push_back({index, begin, std::min(begin + size, numel)});
  return parts;
}

// Those with a base image take their displacement against the previous theta instead (Decoupled DiLoCo, App. D.2):
// payload + (theta - image), in f32. `room`: one array for each, of the tensor's size.
void shift(const MergeJob& job, std::size_t index, const Parallel& parallel, std::vector<std::vector<float>>& room,
           Tensor* members) {
  const Segment& segment = job.in.segments[index];
  const Segment& image = job.out.segments[index];
  std::size_t weighted = 0;
  for (std::size_t m = 0; m < job.members.size(); ++m) {
    if (!has_weight(job.members[m])) continue;
    SegmentMember& member = (*members)[weighted++];
    if (!job.members[m].base_image) continue;
    room[m].resize(segment.numel);
    std::vector<double> squares((segment.numel + kBlock - 1) / kBlock);
    parallel(squares.size(), [&, m](std::size_t block) {
      const std::uint64_t begin = block * kBlock, count = std::min(kBlock, segment.numel - begin);
      const auto* theta = reinterpret_cast<const std::byte*>(job.previous->theta->f32() + segment.element_offset);
      const std::byte* base = job.members[m].base_image->data() + image.byte_offset;
      const kernels::WeightedPayload terms[] = {
          {member.payload, segment.codec == Codec::kBf16, 1.0f}, {theta, false, 1.0f}, {base, image.codec == Codec::kBf16, -1.0f}};
      kernels::weighted_sum(terms, 3, begin, room[m].data() + begin, count);
      squares[block] = kernels::norm_squared_f32(room[m].data() + begin, count);
    });
    member.codec = Codec::kF32;
    member.payload = reinterpret_cast<const std::byte*>(room[m].data());
    member.norm = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
  }
}

struct Work {
  explicit Work(const Tensor& members) : mean(mean_terms(members)), rda(members) {}
  Terms mean;
  RdaMerge rda;
};

// The tensors from `from` on: the small ones side by side, then one large one after the other, each of its passes on all cores.
void merge_tensors(NextState& next, const MergeJob& job, std::size_t from, const std::vector<Tensor>& tensors,
                   const Parallel& parallel) {
  const std::vector<Work> works(tensors.begin(), tensors.end());
  const auto two_passes = [&](std::size_t index) { return job.use_rda[index] && !works[index - from].rda.is_mean(); };
  std::vector<Part> together;
  std::vector<std::size_t> large;
  for (std::size_t index = from; index < from + tensors.size(); ++index) {
    if (two_passes(index) && job.in.segments[index].numel > part_size(job)) {
      large.push_back(index);
      continue;
    }
    for (const Part& part : parts_of(job, index)) together.push_back(part);
  }
  parallel(together.size(), [&](std::size_t i) {
    const Part& part = together[i];
    const Work& work = works[part.index - from];
    std::optional<float> gain;
    if (two_passes(part.index)) {
      next.sum_directions(part, work.rda);
      gain = work.rda.gain(next.squares_of_directions(part.index));
    }
    next.finish(part, work.mean, gain);
  });
  for (const std::size_t index : large) {
    const std::vector<Part> parts = parts_of(job, index);
    const Work& work = works[index - from];
    parallel(parts.size(), [&](std::size_t i) { next.sum_directions(parts[i], work.rda); });
    const std::optional<float> gain = work.rda.gain(next.squares_of_directions(index));
    parallel(parts.size(), [&](std::size_t i) { next.finish(parts[i], work.mean, gain); });
  }
}

}  // namespace

std::uint64_t state_bytes(const MergeJob& job) {
  return (1 + outer_state_floats(job.outer)) * sizeof(float) * job.in.numel + job.out.bytes;
}

MergeResult run_merge(const MergeJob& job, BufferPool& pool, const Parallel& parallel) {
  check_job(job);
  double total = 0.0;
  bool shifted = false;
  for (const MergeMember& member : job.members) {
    total += has_weight(member) ? member.weight : 0.0;
    shifted = shifted || (has_weight(member) && member.base_image);
  }
  NextState next(job, pool);
  if (total == 0.0) {
    next.keep_previous();
    return next.result(parallel);
  }
  std::vector<Tensor> tensors;
  std::vector<std::vector<float>> room(job.members.size());
  for (std::size_t index = 0; index < job.in.segments.size() && next.finite(); ++index) {
    tensors.push_back(members_of(job, index, total));
    if (!shifted) continue;
    // One at a time, so that there is never more than one tensor of each member in memory twice.
    shift(job, index, parallel, room, &tensors.back());
    merge_tensors(next, job, index, tensors, parallel);
    tensors.clear();
  }
  if (!shifted) merge_tensors(next, job, 0, tensors, parallel);
  if (next.finite()) return next.result(parallel);
  MergeResult failed;
  failed.largest_member = largest_member(job);
  return failed;
}

MergeResult run_merge(const MergeJob& job) {
  BufferPool pool(0);
  return run_merge(job, pool, serially);
}

}  // namespace diloco
