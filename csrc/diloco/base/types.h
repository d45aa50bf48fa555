// Words every layer shares: ids, versions, time, and the byte buffers that travel between threads.
//
// Pure values; nothing here owns a thread, a socket or a clock. Times are seconds on a monotonic clock whose
// origin does not matter: the caller passes `now`, so tests and the virtual cluster can invent it.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace diloco {

using Seconds = double;
using TimePoint = double;

using FragmentId = std::uint32_t;
using SessionId = std::uint64_t;    // one connection's life; drawn by the syncer, 0 = none yet
using Incarnation = std::uint64_t;  // one life of a learner; drawn at random by the learner, never 0
using PeerId = std::uint64_t;       // one connection of a transport; meaningful to that transport only
using JobId = std::uint64_t;        // one piece of work handed to a worker thread

// Version of one fragment: `epoch` counts lives of the syncer, `n` counts outer steps on the fragment. Ordered
// lexicographically. The default value, epoch 0, means "never received".
struct Version {
  std::uint64_t epoch = 0;
  std::uint64_t n = 0;
  auto operator<=>(const Version&) const = default;
  bool none() const { return epoch == 0; }
};

std::string to_string(const Version& version);  // "3.17"

// Fixed-size byte array, 64-byte aligned, zero-filled unless it is a pool's (base/buffer_pool.h). Shared between threads by shared_ptr: written by one
// owner, read-only from the moment it is handed on.
class Buffer {
 public:
  static std::shared_ptr<Buffer> make(std::size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  float* f32() { return reinterpret_cast<float*>(data_); }
  const float* f32() const { return reinterpret_cast<const float*>(data_); }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  friend class BufferPool;
  explicit Buffer(std::size_t bytes);
  void* raw_;  // what the allocator gave; data_ is the first aligned byte in it
  std::byte* data_;
  std::size_t size_;
  std::size_t capacity_;  // above size_ only in a pool's
};
using BufferPtr = std::shared_ptr<Buffer>;
using ConstBufferPtr = std::shared_ptr<const Buffer>;

// Part of a shared buffer; keeps the buffer alive.
struct Slice {
  ConstBufferPtr buffer;
  std::size_t offset = 0;
  std::size_t size = 0;
  std::span<const std::byte> bytes() const {
    return buffer ? buffer->bytes().subspan(offset, size) : std::span<const std::byte>{};
  }
};

}  // namespace diloco
