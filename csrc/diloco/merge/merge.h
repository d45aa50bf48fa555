// One round's arithmetic, from payloads to the next version: screen, merge (weighted mean or RDA per tensor), outer
// step, outgoing image. Pure functions of their arguments, called on worker threads.
//
// Results depend on the members' order (learner-id order) only, never on arrival, threads or instruction set: sums over a
// tensor are sums over its blocks (kernels/kernels.h), added in order whoever made them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "diloco/base/buffer_pool.h"
#include "diloco/base/parallel.h"
#include "diloco/base/settings.h"
#include "diloco/base/types.h"
#include "diloco/fragment/plan.h"
#include "diloco/outer/outer.h"

namespace diloco {

// Bytes ready to be sent in chunks, with the checksum of every chunk (xxh3-64, computed once for all receivers).
struct Image {
  ConstBufferPtr bytes;
  std::uint64_t chunk_bytes = 0;
  std::vector<std::uint64_t> checksums;
};
// No bytes, no chunks. Throws ConfigError if chunk_bytes is 0.
Image make_image(ConstBufferPtr bytes, std::uint64_t chunk_bytes, const Parallel& parallel = serially);
std::uint64_t checksum(std::span<const std::byte> bytes);

// The syncer's copy of one fragment. Immutable once published.
struct FragmentState {
  Version version;
  BufferPtr theta;        // f32, dense
  BufferPtr outer_state;  // f32, outer_state_floats arrays of numel one after the other; null for sgd
  std::uint64_t outer_steps = 0;  // made with this outer state
};

struct ScreenResult {
  bool finite = false;
  std::vector<double> norms;  // l2 per segment, in f64 (fixed-order block sums)
};
ScreenResult screen(const PayloadLayout& layout, const std::byte* payload);

// w = c_tokens^2 / c_steps (tokens_per_step), c_tokens, or 1; c_steps = 0 gives 0. Times 1/(1 + lambda*staleness).
double contribution_weight(Weights kind, std::uint64_t c_tokens, std::uint64_t c_steps, double discount,
                           std::uint64_t staleness);

struct MergeMember {
  std::string learner;          // for reports only
  ConstBufferPtr payload;       // contribution payload; displacement anchor - local
  double weight = 0.0;          // raw; normalised over the members. 0 (or not finite): contributes nothing
  std::vector<double> norms;    // from screen(); per segment
  // anchor = syncer, of a member that is behind: the image (layout MergeJob::out) of the version it started from. Its
  // displacement is then taken against the previous theta instead: payload + (theta - image).
  ConstBufferPtr base_image;
};

struct MergeJob {
  PayloadLayout in;             // of the contributions
  PayloadLayout out;            // of the image
  std::vector<bool> use_rda;    // per segment
  OuterOptions outer;
  std::shared_ptr<const FragmentState> previous;
  Version next_version;
  std::uint64_t chunk_bytes = 1 << 20;
  std::vector<MergeMember> members;  // in learner-id order, at least one
};

// Of the state and the image that come of it.
std::uint64_t state_bytes(const MergeJob& job);

struct MergeResult {
  bool ok = false;                            // false: the next state would not be finite; nothing was replaced
  std::size_t largest_member = 0;             // valid if !ok: index of the member with the largest norm
  std::shared_ptr<const FragmentState> next;  // valid if ok
  Image image;                                // valid if ok
  double delta_norm = 0.0;                    // l2 of the merged outer gradient
};
// If every weight is 0 there is no outer step: theta and outer state are copied bit for bit, momentum does not move.
// Not ok if theta, the outer state or the image (bf16 rounds large values to Inf) would not be finite.
// Throws ConfigError if sizes in the job contradict each other. State and image come from the pool.
MergeResult run_merge(const MergeJob& job, BufferPool& pool, const Parallel& parallel);
MergeResult run_merge(const MergeJob& job);  // on the caller's thread, without a pool

// Which tensors use RDA: the first rule of settings.merge_overrides that matches a name (aliases included), else
// settings.merge for tensors of at least two dimensions and the mean for the rest. Throws ConfigError if the rules
// cannot be read.
std::vector<bool> rda_segments(const Layout& layout, const PayloadLayout& payload, const Settings& settings);
// Texts of the rules of settings.merge_overrides that match no tensor.
std::vector<std::string> unmatched_rules(const Layout& layout, const Settings& settings);

}  // namespace diloco
