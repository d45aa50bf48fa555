// The loops, torch-free: pointers and counts, no allocation. CPU bodies in kernels/cpu; CUDA twins share the stems.
// All built with -O3 -ffp-contract=off so that every instruction set gives the same bits.
//
// `std::byte*` arguments may be unaligned; `float*` arguments are aligned to 4. n = 0 with null pointers is allowed.
// Where not said otherwise arrays do not overlap. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diloco::kernels {

// Elements of one reduction block: sums of blocks, added in order, are what norm_squared returns. So a caller that walks
// a tensor in blocks of this size and adds up gets the same bits as one call.
constexpr std::uint64_t kBlock = 4096;

// bf16 is stored as its upper 16 bits, round to nearest even; NaN stays NaN.
void f32_to_bf16(const float* in, std::uint64_t n, std::byte* out);
void bf16_to_f32(const std::byte* in, std::uint64_t n, float* out);

// out = anchor - local, as f32 or bf16 bytes (displacement form: something to subtract).
void fragment_diff_f32(const float* anchor, const float* local, std::uint64_t n, std::byte* out);
void fragment_diff_bf16(const float* anchor, const float* local, std::uint64_t n, std::byte* out);

// Adoption, one formula: local <- next + beta * (local - ref); then anchor <- next. `next` may be `anchor`.
// overwrite: beta 0. blend: ref = next. rebase: ref = anchor, and `sent` (decoded, may be null) is added once:
// local <- next - ((anchor - local) - sent), in this order, so that sent == anchor - local gives next exactly.
void adopt_overwrite(const float* next, float* anchor, float* local, std::uint64_t n);
void adopt_blend(const float* next, float alpha, float* anchor, float* local, std::uint64_t n);
void adopt_rebase(const float* next, const float* sent, float* anchor, float* local, std::uint64_t n);

// Merge passes over one tensor; payload element type by `bf16`. Blocks of kBlock elements are summed in f64 in order,
// inside a block in 16 lanes, so the bits depend neither on the instruction set nor on threads. f64 squares of f32
// values cannot overflow: the result is finite exactly if all elements are, which `finite` (may be null) reports.
double norm_squared(const std::byte* payload, bool bf16, std::uint64_t n, bool* finite);
double norm_squared_f32(const float* values, std::uint64_t n);
// out <- w_0 v_0 + w_1 v_1 + ... over the payloads' elements [at, at + n), from the left, each product and each sum rounded to
// f32. Zeros without members.
struct WeightedPayload {
  const std::byte* payload = nullptr;
  bool bf16 = false;
  float weight = 0.0f;
};
void weighted_sum(const WeightedPayload* members, std::size_t count, std::uint64_t at, float* out, std::uint64_t n);
// out <- gain * in; out may be in.
void scale(const float* in, float gain, float* out, std::uint64_t n);
// No Inf and no NaN among n values.
bool all_finite(const std::byte* values, bool bf16, std::uint64_t n);

// The rest of a merge on one block of at most kBlock elements, in one pass: g <- weighted_sum(members, at), momentum <-
// mu * momentum_in + g, theta <- theta_in - lr * (g + mu * momentum), image <- theta. With `momentum_in` null there is no
// momentum: theta <- theta_in - lr * g. All roundings are those of the separate steps. A payload may be the f32 values that are
// at out.theta: each is read before it is written. `streams`: theta, momentum and image go past the caches where their
// addresses allow it.
struct StepIn {
  const WeightedPayload* members = nullptr;
  std::size_t count = 0;
  std::uint64_t at = 0;
  const float* theta = nullptr;
  const float* momentum = nullptr;
  float lr = 0.0f, mu = 0.0f;
};
struct StepOut {
  float* theta = nullptr;
  float* momentum = nullptr;
  std::byte* image = nullptr;
  bool bf16 = false;  // the image
  bool streams = false;
};
struct StepSums {
  double squares = 0.0;  // of g, as norm_squared_f32() gives it
  bool finite = false;   // image and momentum
};
StepSums merge_step(const StepIn& in, const StepOut& out, std::uint64_t n);

// Copies past the caches where the machine can: a store that does not read its line first is a third cheaper, and nobody
// is about to read what it wrote. Visible to other threads like any other store. Any alignment.
void stream(const void* in, std::uint64_t bytes, void* out);

}  // namespace diloco::kernels
