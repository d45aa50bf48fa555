// Stores past the caches, 16 bytes at a time: they fill a line's write buffer as well as 64 do, and every x86-64 has them.
// Elsewhere plain stores. After the last one, before others may look: flush_streams(). For kernels/ only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "diloco/kernels/clones.h"

namespace diloco::kernels {

constexpr std::uint64_t kStreamAlignment = 16;

DILOCO_INLINE bool can_stream(const void* out) { return reinterpret_cast<std::uintptr_t>(out) % kStreamAlignment == 0; }

// `out` aligned to kStreamAlignment, `bytes` a multiple of it.
DILOCO_INLINE void stream_aligned(const void* in, std::uint64_t bytes, void* out) {
#if defined(__SSE2__)
  for (std::uint64_t i = 0; i < bytes; i += 16) {
    const auto* from = reinterpret_cast<const __m128i*>(static_cast<const std::byte*>(in) + i);
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<std::byte*>(out) + i), _mm_loadu_si128(from));
  }
#else
  std::memcpy(out, in, bytes);
#endif
}

DILOCO_INLINE void flush_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace diloco::kernels
