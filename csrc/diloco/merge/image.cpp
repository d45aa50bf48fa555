#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "diloco/base/errors.h"
#include "diloco/merge/merge.h"

namespace diloco {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

Image make_image(ConstBufferPtr bytes, std::uint64_t chunk_bytes, const Parallel& parallel) {
  if (chunk_bytes == 0) throw ConfigError("chunk_bytes: expected at least 1, got 0");
  const std::span<const std::byte> all = bytes->bytes();
  Image image;
  image.checksums.resize((all.size() + chunk_bytes - 1) / chunk_bytes);
  parallel(image.checksums.size(), [&](std::size_t i) {
    const std::uint64_t begin = i * chunk_bytes;
    image.checksums[i] = checksum(all.subspan(begin, std::min<std::uint64_t>(chunk_bytes, all.size() - begin)));
  });
  image.bytes = std::move(bytes);
  image.chunk_bytes = chunk_bytes;
  return image;
}

}  // namespace diloco
