// Payload element types over one megabyte of f32, which is one chunk.
#include <benchmark/benchmark.h>

#include "diloco/codec/codec.h"

namespace diloco {
namespace {

constexpr std::uint64_t kElements = (1 << 20) / sizeof(float);

void encode_elements(benchmark::State& state, Codec codec) {
  const std::vector<float> in(kElements, 0.1F);
  std::vector<std::byte> out(codec_bytes(codec, kElements));
  for (auto _ : state) {
    encode(codec, in.data(), kElements, out.data());
    benchmark::DoNotOptimize(out.data());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * kElements * sizeof(float)));
}
BENCHMARK_CAPTURE(encode_elements, f32, Codec::kF32);
BENCHMARK_CAPTURE(encode_elements, bf16, Codec::kBf16);

void decode_elements(benchmark::State& state, Codec codec) {
  const std::vector<std::byte> in(codec_bytes(codec, kElements));
  std::vector<float> out(kElements);
  for (auto _ : state) {
    decode(codec, in.data(), kElements, out.data());
    benchmark::DoNotOptimize(out.data());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * kElements * sizeof(float)));
}
BENCHMARK_CAPTURE(decode_elements, f32, Codec::kF32);
BENCHMARK_CAPTURE(decode_elements, bf16, Codec::kBf16);

}  // namespace
}  // namespace diloco
