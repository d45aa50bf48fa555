#include "diloco/base/buffer_pool.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace diloco {
namespace {

constexpr std::size_t kUnused = 8;  // at most so large a part of a buffer

}  // namespace

BufferPtr BufferPool::make(std::size_t bytes) {
  auto buffer = take(bytes);
  if (!buffer) buffer.reset(new Buffer(bytes));
  buffer->size_ = bytes;
  return {buffer.release(), [weak = std::weak_ptr(state_)](Buffer* back) {
            std::unique_ptr<Buffer> owned(back);
            const auto state = weak.lock();
            if (!state) return;
            const std::size_t capacity = owned->capacity_;
            const std::lock_guard lock(state->mutex);
            if (capacity > state->most - state->idle_bytes) return;
            try {
              state->idle.emplace(capacity, std::move(owned));
              state->idle_bytes += capacity;
            } catch (const std::bad_alloc&) {
            }
          }};
}

std::unique_ptr<Buffer> BufferPool::take(std::size_t bytes) {
  const std::lock_guard lock(state_->mutex);
  auto& idle = state_->idle;
  const auto out = [&](auto place) {
    state_->idle_bytes -= place->first;
    auto buffer = std::move(place->second);
    idle.erase(place);
    return buffer;
  };
  const auto fits = idle.lower_bound(bytes);
  if (fits != idle.end() && fits->first - bytes <= fits->first / kUnused) return out(fits);
  // Nobody asks for these sizes at the moment: a fresh one takes their place, so that there is never more than without a pool.
  for (std::size_t freed = 0; freed < bytes && !idle.empty();) {
    const auto largest = std::prev(idle.end());
    freed += largest->first;
    out(largest);
  }
  return nullptr;
}

void BufferPool::keep_at_least(std::size_t idle_bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->most = std::max(state_->most, idle_bytes);
}

std::size_t BufferPool::idle_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->idle_bytes;
}

}  // namespace diloco
