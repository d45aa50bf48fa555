// A learner's I/O thread: owns the sockets, serves the core's deadlines, never touches Python.
#include <pthread.h>
#include <sched.h>

#include <utility>

#include "diloco/base/errors.h"
#include "diloco/learner/learner_impl.h"

namespace diloco {
namespace {

// A batch thread does not preempt whoever is running when it wakes. With fewer cores than busy threads the I/O thread
// would otherwise take the training thread's core in the middle of a boundary. The transport's own threads inherit it.
void yield_to_training() {
#ifdef SCHED_BATCH
  int policy = 0;
  sched_param parameters{};
  if (::pthread_getschedparam(::pthread_self(), &policy, &parameters) == 0 && policy == SCHED_OTHER) {
    ::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &parameters);
  }
#endif
}

}  // namespace

void Learner::Impl::run() {
  yield_to_training();
  deliver(Tick{});
  std::vector<TransportEvent> events;
  bool tick_served = true;
  while (true) {
    Seconds wait = 0;
    bool stop = false;
    std::deque<Outgoing> sends;
    {
      const std::lock_guard lock(mutex);
      sends.swap(outbox);
      stop = stop_io;
      wait = clock.begin_wait(next_deadline(), tick_served, slack());
    }
    for (Outgoing& out : sends) guarded("send", [&] { std::visit([&](auto& a) { perform(a); }, out); });
    if (stop) break;
    events.clear();
    guarded("poll", [&] { transport->poll(wait, &events); });
    {
      const std::lock_guard lock(mutex);
      clock.works(slack());
    }
    for (TransportEvent& event : events) take(event);
    const std::unique_lock lock(mutex);
    counters = transport->counters();
    tick_served = clock.now() >= next_deadline();
    if (tick_served) guarded("tick", [&] { feed_any(Tick{}); });
  }
  guarded("close", [&] { transport->close(); });
  const std::lock_guard lock(mutex);
  counters = transport->counters();
  io_ended = true;
  changed.notify_all();
}

void Learner::Impl::take(TransportEvent& event) {
  if (auto* frame = std::get_if<InFrame>(&event)) {
    deliver(ChannelFrame{frame->channel, frame->header, frame->payload});
  } else if (auto* up = std::get_if<Connected>(&event)) {
    deliver(ChannelUp{up->channel});
  } else if (auto* down = std::get_if<Disconnected>(&event)) {
    deliver(ChannelDown{down->channel, down->why});
  }
}

template <class E>
void Learner::Impl::deliver(const E& event) {
  {
    const std::lock_guard lock(mutex);
    if constexpr (std::is_same_v<E, ChannelUp>) ever_up = true;
    if constexpr (std::is_same_v<E, ChannelDown>) first_attempt_failed = first_attempt_failed || !ever_up;
    guarded("event", [&] { feed_any(event); });
    ++io_events;
  }
  changed.notify_all();
}

void Learner::Impl::perform(const ConnectChannel& action) {
  try {
    transport->connect(action.channel);
  } catch (const TransportError& error) {
    deliver(ChannelDown{action.channel, error.what()});
  }
}

}  // namespace diloco
