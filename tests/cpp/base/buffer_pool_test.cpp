#include "diloco/base/buffer_pool.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace diloco {
namespace {

TEST(BufferPool, GivesAgainWhatCameBack) {
  BufferPool pool(1 << 20);
  BufferPtr first = pool.make(1000);
  EXPECT_EQ(first->size(), 1000u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first->data()) % 64, 0u);
  const std::byte* const at = first->data();
  EXPECT_EQ(pool.idle_bytes(), 0u);
  first = nullptr;
  EXPECT_GE(pool.idle_bytes(), 1000u);
  const BufferPtr again = pool.make(950);  // about the same size
  EXPECT_EQ(again->data(), at);
  EXPECT_EQ(again->size(), 950u);
  EXPECT_EQ(pool.idle_bytes(), 0u);
}

// Nor does it keep what does not fit beside what is made anew: two sizes in turn take no more than without a pool.
TEST(BufferPool, DoesNotGiveALargeOneForASmallOneAndMakesRoomForIt) {
  BufferPool pool(1 << 20);
  pool.make(1000) = nullptr;
  const BufferPtr small = pool.make(100);
  EXPECT_EQ(small->size(), 100u);
  EXPECT_EQ(pool.idle_bytes(), 0u);
  std::vector<BufferPtr> live = {pool.make(1000), pool.make(700)};
  for (int round = 0; round < 6; ++round) {
    const std::size_t which = round % 2;
    BufferPtr next = pool.make(which == 0 ? 1000 : 700);
    EXPECT_LE(pool.idle_bytes(), 1000u) << round;
    live[which] = std::move(next);
    EXPECT_LE(pool.idle_bytes(), 1000u) << round;
  }
}

TEST(BufferPool, KeepsNoMoreThanItMay) {
  BufferPool pool(3000);
  std::vector<BufferPtr> all;
  for (int i = 0; i < 10; ++i) all.push_back(pool.make(1000));
  all.clear();
  EXPECT_EQ(pool.idle_bytes(), 3000u);
  EXPECT_LE(pool.idle_bytes(), 3000u);
  BufferPool none(0);
  none.make(10) = nullptr;
  EXPECT_EQ(none.idle_bytes(), 0u);
}

TEST(BufferPool, BuffersOutliveIt) {
  BufferPtr buffer;
  {
    BufferPool pool(1 << 20);
    buffer = pool.make(64);
  }
  buffer->data()[63] = std::byte{1};
  buffer = nullptr;
}

TEST(BufferPool, ThreadsMayShareIt) {
  BufferPool pool(1 << 16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 500; ++i) {
        const BufferPtr buffer = pool.make(100 + static_cast<std::size_t>(i % 7));
        std::fill_n(buffer->data(), buffer->size(), static_cast<std::byte>(t));
        for (std::size_t k = 0; k < buffer->size(); ++k) ASSERT_EQ(buffer->data()[k], static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace diloco
