// What will happen when, in order of time and, at the same time, of scheduling. The events lie in slots that are used again,
// so that a run allocates nothing for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "diloco/core/syncer_core.h"

namespace diloco::sim {

enum class EventKind : std::uint8_t {
  kFrameUp,      // a message reaches the syncer; counted by its message type
  kFrameDown,    // a message reaches a learner; the same
  kConnect,      // a learner's attempt to connect reaches the syncer
  kClosedUp,     // the syncer hears that a connection is over
  kClosedDown,   // a learner hears it
  kStep,         // a learner has made an inner step
  kLearnerTick,  // a deadline of the learner core
  kSyncerTick,
  kScreen,       // a worker of the syncer is done
  kInit,
  kMerge,
  kPersist,
  kCall,         // of the caller: faults; not counted
};

struct Event {
  EventKind kind = EventKind::kCall;
  std::uint32_t node = 0;   // learner
  std::uint32_t shard = 0;  // of the syncer: the node itself, or the other end of the connection
  std::uint64_t life = 0;  // of the node the event is for; of another life it is void
  PeerId peer = 0;         // frames, closings; the number of the attempt for kConnect
  Channel channel = Channel::kControl;
  OutFrame frame;
  std::variant<std::monostate, ScreenDone, InitDone, MergeDone, Persisted, std::function<void()>> work;
};

class EventQueue {
 public:
  void push(TimePoint time, Event event) {
    std::uint32_t slot = 0;
    if (free_.empty()) {
      slot = static_cast<std::uint32_t>(slots_.size());
      slots_.push_back(std::move(event));
    } else {
      slot = free_.back();
      free_.pop_back();
      slots_[slot] = std::move(event);
    }
    heap_.push_back({time, order_++, slot});
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  bool empty() const { return heap_.empty(); }
  TimePoint next_time() const { return heap_.front().time; }
  Event pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const std::uint32_t slot = heap_.back().slot;
    heap_.pop_back();
    free_.push_back(slot);
    return std::move(slots_[slot]);
  }
  // Moves events in time; equal times keep their order. Costs a walk over all of them.
  template <class F>
  void retime(F&& new_time) {
    for (auto& entry : heap_) entry.time = new_time(slots_[entry.slot], entry.time);
    std::make_heap(heap_.begin(), heap_.end(), later);
  }

 private:
  struct Entry {
    TimePoint time;
    std::uint64_t order;
    std::uint32_t slot;
  };
  static bool later(const Entry& a, const Entry& b) {
    return a.time != b.time ? a.time > b.time : a.order > b.order;
  }
  std::vector<Entry> heap_;
  std::vector<Event> slots_;
  std::vector<std::uint32_t> free_;
  std::uint64_t order_ = 0;
};

}  // namespace diloco::sim
