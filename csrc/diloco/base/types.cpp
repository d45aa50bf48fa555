#include "diloco/base/types.h"

#include <cstdlib>
#include <limits>
#include <new>

namespace diloco {
namespace {

constexpr std::size_t kAlignment = 64;

}  // namespace

std::string to_string(const Version& version) {
  return std::to_string(version.epoch) + "." + std::to_string(version.n);
}

std::shared_ptr<Buffer> Buffer::make(std::size_t bytes) { return std::shared_ptr<Buffer>(new Buffer(bytes)); }

// calloc rather than aligned_alloc and memset: big blocks then come as untouched zero pages, so the I/O thread can
// allocate a whole fragment without writing to it.
Buffer::Buffer(std::size_t bytes) : raw_(nullptr), data_(nullptr), size_(bytes), capacity_(bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) throw std::bad_alloc();
  raw_ = std::calloc(bytes + kAlignment, 1);
  if (raw_ == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<std::uintptr_t>(raw_);
  data_ = static_cast<std::byte*>(raw_) + (kAlignment - address % kAlignment) % kAlignment;
}

Buffer::~Buffer() { std::free(raw_); }

}  // namespace diloco
