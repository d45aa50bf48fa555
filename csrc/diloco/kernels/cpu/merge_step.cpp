#include <cstring>

#include "diloco/kernels/kernels.h"
#include "diloco/kernels/lanes.h"
#include "diloco/kernels/streaming.h"
#include "diloco/kernels/sum_members.h"

namespace diloco::kernels {
namespace {

// Elements between two looks at memory: enough for the stores of a whole line of each output, few enough to stay in registers
// and L1, so that the reads of the next ones overlap with the stores of these.
constexpr std::uint64_t kPiece = 64;

constexpr std::uint32_t kF32Exponent = 0x7f800000u;
constexpr std::uint16_t kBf16Exponent = 0x7f80u;

struct Piece {
  alignas(64) float gradient[kPiece], theta[kPiece], momentum[kPiece];
  alignas(64) std::uint16_t bf16[kPiece];
};

// The largest exponents so far: all ones in one of them means Inf or NaN.
struct Worst {
  std::uint32_t f32 = 0;
  std::uint16_t bf16 = 0;
  DILOCO_INLINE bool finite() const { return f32 != kF32Exponent && bf16 != kBf16Exponent; }
};

DILOCO_INLINE std::uint32_t larger(std::uint32_t worst, float value) {
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(value) & kF32Exponent;
  return exponent > worst ? exponent : worst;
}

template <bool kMomentum, bool kBf16>
DILOCO_INLINE void step(const StepIn& in, std::uint64_t at, Piece& piece, Worst& worst, std::uint64_t n) {
  const float lr = in.lr, mu = in.mu;
  std::uint32_t f32 = worst.f32;
  for (std::uint64_t i = 0; i < n; ++i) {
    float direction = piece.gradient[i];
    if (kMomentum) {
      const float momentum = mu * in.momentum[at + i] + direction;
      direction = direction + mu * momentum;
      piece.momentum[i] = momentum;
      f32 = larger(f32, momentum);
    }
    const float theta = in.theta[at + i] - lr * direction;
    piece.theta[i] = theta;
    if (!kBf16) f32 = larger(f32, theta);
  }
  worst.f32 = f32;
  if (!kBf16) return;
  std::uint16_t largest = worst.bf16;
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint16_t bits = bf16_bits(piece.theta[i]);
    const auto exponent = static_cast<std::uint16_t>(bits & kBf16Exponent);
    largest = exponent > largest ? exponent : largest;
    piece.bf16[i] = bits;
  }
  worst.bf16 = largest;
}

DILOCO_INLINE void put(const void* from, std::uint64_t bytes, void* to, bool streams) {
  if (streams) stream_aligned(from, bytes, to);
  else std::memcpy(to, from, bytes);
}

template <bool kMomentum, bool kBf16>
DILOCO_INLINE StepSums run(const StepIn& in, const StepOut& out, std::uint64_t n) {
  constexpr std::uint64_t kElement = kBf16 ? 2 : 4;
  const bool theta = out.streams && can_stream(out.theta), image = out.streams && can_stream(out.image);
  const bool momentum = out.streams && can_stream(out.momentum);
  Piece piece;
  Worst worst;
  Lanes lanes;
  const auto gradient = [&piece](std::uint64_t i) { return piece.gradient[i]; };
  for (std::uint64_t at = 0; at < n; at += kPiece) {
    const std::uint64_t left = n - at;
    if (left >= kPiece) {  // a constant number of elements, for the vectoriser
      sum_members(in.members, in.count, in.at + at, piece.gradient, kPiece);
      lanes.add(kPiece, gradient);
      step<kMomentum, kBf16>(in, at, piece, worst, kPiece);
      put(piece.theta, kPiece * 4, out.theta + at, theta);
      if (kMomentum) put(piece.momentum, kPiece * 4, out.momentum + at, momentum);
      put(kBf16 ? static_cast<const void*>(piece.bf16) : piece.theta, kPiece * kElement, out.image + at * kElement, image);
    } else {
      sum_members(in.members, in.count, in.at + at, piece.gradient, left);
      lanes.add(left, gradient);
      step<kMomentum, kBf16>(in, at, piece, worst, left);
      std::memcpy(out.theta + at, piece.theta, left * 4);
      if (kMomentum) std::memcpy(out.momentum + at, piece.momentum, left * 4);
      std::memcpy(out.image + at * kElement, kBf16 ? static_cast<const void*>(piece.bf16) : piece.theta, left * kElement);
    }
  }
  if (out.streams) flush_streams();
  return {lanes.total(), worst.finite()};
}

}  // namespace

DILOCO_CLONES
StepSums merge_step(const StepIn& in, const StepOut& out, std::uint64_t n) {
  if (in.momentum != nullptr) return out.bf16 ? run<true, true>(in, out, n) : run<true, false>(in, out, n);
  return out.bf16 ? run<false, true>(in, out, n) : run<false, false>(in, out, n);
}

}  // namespace diloco::kernels
