// What a learner does on the caller's thread: boundaries, joining, closing.
#include <unistd.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/learner/learner_impl.h"

namespace diloco {

void Learner::Impl::stage_all() {
  if (stages.empty()) return;
  const PhaseClock::Range range(phases, Phase::kStage);
  for (const Staging& staging : stages) mover.stage(at(staging.pieces), staging.action.out->data());
  stages.clear();
}

std::uint32_t Learner::Impl::adopt_all() {
  const auto count = static_cast<std::uint32_t>(adoptions.size());
  if (count > 0) {
    const PhaseClock::Range range(phases, Phase::kAdopt);
    for (const Adoption& adoption : adoptions) {
      mover.adopt(adoption.action, at(adoption.image), at(adoption.sent));
      if (!adoption.action.reset_inner_state) continue;
      for (const Piece& piece : at(adoption.image)) pending_resets.push_back(piece.tensor);
    }
  }
  adoptions.clear();
  pieces.clear();
  return count;
}

std::uint32_t Learner::Impl::hold(std::unique_lock<std::mutex>& lock, const std::function<void()>& interrupted) {
  std::uint32_t adopted = 0;
  while (core->holding()) {
    // Whoever joined after a staging clock stages while it waits.
    if (!stages.empty()) {
      lock.unlock();
      stage_all();
      lock.lock();
      feed(StagesDone{});
      continue;
    }
    if (!adoptions.empty()) {
      lock.unlock();
      adopted += adopt_all();
      lock.lock();
      feed(AdoptsDone{});
      feed(Recheck{});
      continue;
    }
    throw_if_failed();
    wake_if_needed();
    const std::uint64_t seen = io_events;
    {
      const PhaseClock::Range range(phases, Phase::kHold);
      changed.wait_for(lock, kSlice, [&] { return io_events != seen; });
    }
    lock.unlock();
    deliver_logs();
    if (interrupted) interrupted();
    lock.lock();
    feed(Recheck{});
  }
  return adopted;
}

void Learner::Impl::boundary(const Boundary& event, const std::function<void()>& interrupted, BoundaryResult* result) {
  {
    const std::lock_guard lock(mutex);
    if (closed) throw std::logic_error("boundary(): this learner is closed; create a new one to train on");
    throw_if_failed();
    feed(event);
  }
  stage_all();
  std::exception_ptr interruption;
  {
    std::unique_lock lock(mutex);
    feed(StagesDone{});
    try {
      result->adopted = hold(lock, interrupted);
    } catch (...) {
      // What the core handed out is adopted before the caller hears of it, so both sides agree on the versions.
      interruption = std::current_exception();
    }
    if (interruption && !lock.owns_lock()) lock.lock();
  }
  result->adopted += adopt_all();
  result->tokens = event.tokens;
  {
    const std::lock_guard lock(mutex);
    feed(AdoptsDone{});
    wake_if_needed();
  }
  if (interruption) std::rethrow_exception(interruption);
  result->reset_inner_state.swap(pending_resets);
  pending_resets.clear();
}

bool Learner::Impl::join(Seconds timeout_s, const std::function<void()>& interrupted) {
  const TimePoint deadline = monotonic_now() + timeout_s;
  while (true) {
    bool complete = false;
    std::uint64_t seen = 0;
    {
      const std::lock_guard lock(mutex);
      throw_if_failed();
      seen = io_events;
      complete = core->joined();
      feed(JoinAdopt{});
    }
    adopt_all();
    std::unique_lock lock(mutex);
    feed(AdoptsDone{});
    wake_if_needed();
    if (complete) return true;
    if (first_attempt_failed) return false;
    const Seconds left = deadline - monotonic_now();
    if (left <= 0) return false;
    changed.wait_for(lock, std::min<std::chrono::duration<double>>(kSlice, std::chrono::duration<double>(left)),
                     [&] { return io_events != seen; });
    lock.unlock();
    if (interrupted) interrupted();
  }
}

void Learner::Impl::grow(const std::function<void()>& append) {
  if (options.island) throw ConfigError("the ranks of an island cannot add parameters to what is synchronised");
  const std::lock_guard lock(mutex);
  if (closed) throw std::logic_error("grow(): this learner is closed");
  append();
  const std::vector<TensorSpec>& tensors = mover.store().layout().tensors;
  const std::size_t known = mover.grow();
  feed(Grow{{tensors.begin() + static_cast<std::ptrdiff_t>(known), tensors.end()}});
  wake_if_needed();
}

void Learner::Impl::deliver_logs() {
  if (!options.log) return;
  std::deque<Log> taken;
  {
    const std::lock_guard lock(mutex);
    if (logs.empty()) return;
    taken.swap(logs);
  }
  for (const Log& line : taken) options.log(line.level, line.text);
}

void Learner::Impl::close(Seconds flush_s) {
  const std::uint64_t tokens = options.island ? last_tokens(flush_s) : 0;
  {
    std::unique_lock lock(mutex);
    if (closed) return;
    closed = true;
    counted_tokens += tokens;
    guarded("close", [&] { feed_any(CloseEvent{flush_s, tokens}); });
    wake_if_needed();
    changed.wait_for(lock, std::chrono::duration<double>(flush_s), [&] { return core_closed; });
    stop_io = true;
    if (!io_ended) transport->wake();
  }
  io.join();
  if (options.island) options.island->group->close();
  if (ledger) ledger->close();
}

void Learner::Impl::check_process(const char* call) const {
  if (::getpid() == pid) return;
  throw std::logic_error(fmt::format(
      "{}: this learner was created in process {} and cannot be used in its child {}: threads and sockets do not "
      "survive fork(); create the learner after forking, or leave it to the parent",
      call, pid, ::getpid()));
}

void Learner::Impl::wake_if_needed() {
  if (!outbox.empty() && !io_ended) transport->wake();
}

}  // namespace diloco
