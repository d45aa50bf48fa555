// The ranks of an island as threads of one process.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "diloco/base/errors.h"
#include "diloco/learner/rank_group.h"

namespace diloco::testing {

class ThreadGroup {
 public:
  // `part_of[rank]`; the first rank of a part has its connection, the others are its replicas.
  static std::vector<std::shared_ptr<RankGroup>> make(std::vector<std::uint32_t> part_of) {
    auto shared = std::make_shared<Shared>();
    shared->part_of = std::move(part_of);
    std::vector<std::shared_ptr<RankGroup>> out;
    for (std::uint32_t rank = 0; rank < shared->part_of.size(); ++rank) out.push_back(std::make_shared<Member>(shared, rank));
    return out;
  }

 private:
  struct Round {
    std::vector<std::int64_t> minimum;
    std::uint64_t tokens = 0, arrived = 0, taken = 0;
    std::string blob;
  };
  struct Share {
    BufferPtr bytes;
    std::vector<std::pair<BufferPtr, std::function<void()>>> waiting;
  };
  struct Shared {
    std::vector<std::uint32_t> part_of;
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::uint64_t, Round> rounds;
    std::map<std::pair<std::uint32_t, std::uint64_t>, Share> shares;
    bool dead = false;
  };

  class Member : public RankGroup {
   public:
    Member(std::shared_ptr<Shared> shared, std::uint32_t rank) : shared_(std::move(shared)), rank_(rank) {}
    ~Member() override { close(); }
    std::uint32_t rank() const override { return rank_; }
    std::uint32_t size() const override { return static_cast<std::uint32_t>(shared_->part_of.size()); }
    void start(std::vector<std::int64_t> numbers, std::uint64_t tokens, std::string blob) override {
      const std::lock_guard lock(shared_->mutex);
      Round& round = shared_->rounds[++at_];
      if (round.minimum.empty()) round.minimum = numbers;
      if (round.minimum.size() != numbers.size()) throw std::logic_error("ranks exchange different numbers");
      for (std::size_t i = 0; i < numbers.size(); ++i) round.minimum[i] = std::min(round.minimum[i], numbers[i]);
      round.tokens += tokens;
      if (rank_ == 0) round.blob = std::move(blob);
      ++round.arrived;
      shared_->changed.notify_all();
    }
    bool done() const override {
      const std::lock_guard lock(shared_->mutex);
      return shared_->dead || shared_->rounds.at(at_).arrived == size();
    }
    Result wait(const std::function<void()>& interrupted) override {
      std::unique_lock lock(shared_->mutex);
      Round& round = shared_->rounds.at(at_);
      while (round.arrived < size() && !shared_->dead) {
        shared_->changed.wait_for(lock, std::chrono::milliseconds(50));
        if (!interrupted) continue;
        lock.unlock();
        interrupted();
        lock.lock();
      }
      if (round.arrived < size()) throw TransportError("a rank is gone");
      Result result{round.minimum, round.tokens, round.blob};
      if (++round.taken == size()) shared_->rounds.erase(at_);
      return result;
    }
    void share(BufferPtr bytes, std::function<void()> finished) override {
      const std::lock_guard lock(shared_->mutex);
      Share& one = shared_->shares[{shared_->part_of[rank_], ++shares_}];
      if (finished) one.waiting.emplace_back(std::move(bytes), std::move(finished));
      else one.bytes = std::move(bytes);
      if (!one.bytes) return;
      for (auto& [to, done] : one.waiting) {
        std::memcpy(to->data(), one.bytes->data(), to->size());
        const std::lock_guard threads_lock(threads_mutex_);
        threads_.emplace_back(std::move(done));
      }
      one.waiting.clear();
    }
    bool has_replicas() const override { return std::count(shared_->part_of.begin(), shared_->part_of.end(), 0u) > 1; }
    void close() override {
      {
        const std::lock_guard lock(shared_->mutex);
        shared_->dead = true;
        shared_->changed.notify_all();
      }
      const std::lock_guard lock(threads_mutex_);
      for (auto& thread : threads_) thread.join();
      threads_.clear();
    }

   private:
    std::shared_ptr<Shared> shared_;
    const std::uint32_t rank_;
    std::uint64_t at_ = 0, shares_ = 0;
    std::mutex threads_mutex_;
    std::vector<std::thread> threads_;
  };
};

}  // namespace diloco::testing
