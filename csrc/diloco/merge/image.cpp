#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "diloco/base/errors.h"
#include "diloco/merge/merge.h"

namespace diloco {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

Image make_image(ConstBufferPtr bytes, std::uint64_t chunk_bytes) {
  if (chunk_bytes == 0) throw ConfigError("chunk_bytes: expected at least 1, got 0");
  Image image;
  const std::span<const std::byte> all = bytes->bytes();
  for (std::uint64_t begin = 0; begin < all.size(); begin += chunk_bytes) {
    image.checksums.push_back(checksum(all.subspan(begin, std::min<std::uint64_t>(chunk_bytes, all.size() - begin))));
  }
  image.bytes = std::move(bytes);
  image.chunk_bytes = chunk_bytes;
  return image;
}

}  // namespace diloco
