#include "diloco/kernels/streaming.h"

#include <algorithm>

#include "diloco/kernels/kernels.h"

namespace diloco::kernels {

void stream(const void* in, std::uint64_t bytes, void* out) {
  if (bytes == 0) return;
  const auto* from = static_cast<const std::byte*>(in);
  auto* to = static_cast<std::byte*>(out);
  const std::uint64_t off = reinterpret_cast<std::uintptr_t>(to) % kStreamAlignment;
  const std::uint64_t head = std::min<std::uint64_t>(bytes, off == 0 ? 0 : kStreamAlignment - off);
  const std::uint64_t middle = (bytes - head) / kStreamAlignment * kStreamAlignment;
  std::memcpy(to, from, head);
  stream_aligned(from + head, middle, to + head);
  std::memcpy(to + head + middle, from + head + middle, bytes - head - middle);
  flush_streams();
}

}  // namespace diloco::kernels
