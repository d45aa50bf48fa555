// A boundary of an island's rank. Decoupled: the exchange of the ranks runs behind the next step, and a boundary carries out
// the plan of the one before; its result is waited for only if a rank is more than a step behind. In lockstep, and while
// joining, exchanges follow each other until nothing is left to do at this boundary.
#include <algorithm>
#include <exception>
#include <utility>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/learner/learner_impl.h"

namespace diloco {
namespace {

constexpr Seconds kNewsS = 0.002;  // a rank that holds looks again: the others' transfers end without a word to it
constexpr Seconds kWaitedS = 0.0001;  // from here on an exchange was waited for

}  // namespace

void Learner::Impl::start_exchange(std::uint64_t tokens, bool more, bool bare) {
  std::vector<std::int64_t> numbers;
  std::string blob;
  {
    const std::lock_guard lock(mutex);
    IslandReport report;
    if (part) {
      if (plan_known) report = part->report();
      numbers = encode_exchange(report, nullptr);
    } else {
      IslandOrders orders = core->orders(plan_known && !bare);
      if (plan_known) report = core->report();
      orders.fragments.resize(report.ready.size());
      orders.more = more;
      orders.failed = refused || gave_up;
      if (orders.failed) {
        blob = (refused ? "R" : "G") + failure;
      } else if (orders.session != 0 && orders.session != welcome_sent) {
        blob = core->welcome();
        welcome_sent = orders.session;
      }
      numbers = encode_exchange(report, &orders);
    }
  }
  options.island->group->start(std::move(numbers), tokens, std::move(blob));
  exchanging = true;
}

std::shared_ptr<const IslandPlan> Learner::Impl::end_exchange(const std::function<void()>& interrupted) {
  const TimePoint start = monotonic_now();
  const RankGroup::Result result = seen ? *std::exchange(seen, std::nullopt) : options.island->group->wait(interrupted);
  exchanging = false;
  const Seconds took = monotonic_now() - start;
  ++waits.exchanges;
  waits.waited += took > kWaitedS;
  waits.total_s += took;
  waits.longest_s = std::max(waits.longest_s, took);

  auto plan_now = std::make_shared<IslandPlan>(decode_exchange(result.minimum, result.tokens));
  const IslandOrders& orders = plan_now->orders;
  if (orders.failed) {
    const std::string why = result.blob.substr(std::min<std::size_t>(1, result.blob.size()));
    if (result.blob.starts_with("R")) throw ConfigError(why);
    throw TransportError(why);
  }
  const std::lock_guard lock(mutex);
  incarnation = orders.incarnation;
  if (!result.blob.empty()) {
    if (part) feed_part(PartWelcome{result.blob});
    plan_known = true;
  }
  return plan_now;
}

void Learner::Impl::carry_out(const std::shared_ptr<const IslandPlan>& plan_now, bool step, double lr,
                              BoundaryResult* result) {
  {
    const std::lock_guard lock(mutex);
    if (step) {
      counted_tokens += plan_now->tokens;
      result->tokens += plan_now->tokens;
    }
    if (part) {
      feed_part(PartPlanned{plan_now, step});
    } else {
      if (step) feed(Boundary{plan_now->tokens, lr});
      feed(IslandPlanned{plan_now});
    }
  }
  stage_all();
  share_images(*plan_now);
  {
    const std::lock_guard lock(mutex);
    feed_any(StagesDone{});
  }
  const std::uint32_t adopted = adopt_all();
  result->adopted += adopted;
  const std::lock_guard lock(mutex);
  adopted_count += adopted;
  feed_any(AdoptsDone{});
  wake_if_needed();
}

// A version that has arrived at every rank with a connection goes to the replicas. All ranks see this in the same plan.
void Learner::Impl::share_images(const IslandPlan& plan_now) {
  if (!options.island->group->has_replicas()) return;
  shared.resize(plan_now.arrived.size());
  for (FragmentId p = 0; p < plan_now.arrived.size(); ++p) {
    const Version version = plan_now.arrived[p];
    if (version <= shared[p]) continue;
    shared[p] = version;
    BufferPtr bytes;
    std::function<void()> finished;
    const std::lock_guard lock(mutex);
    if (options.island->rank.replica) {
      bytes = Buffer::make(payload(p, PayloadKind::kImage).bytes);
      finished = [this, p, version, bytes] {
        const std::lock_guard in_thread(mutex);
        feed_part(ReplicaImage{p, version, bytes});
      };
    } else {
      // Read only here; the type is that of what the replicas write to.
      bytes = std::const_pointer_cast<Buffer>(core ? core->arrived(p, version) : part->arrived(p, version));
    }
    options.island->group->share(std::move(bytes), std::move(finished));
  }
}

void Learner::Impl::wait_for_news(Seconds at_most) {
  std::unique_lock lock(mutex);
  const std::uint64_t seen = io_events;
  changed.wait_for(lock, std::chrono::duration<double>(at_most), [&] { return io_events != seen; });
}

bool Learner::Impl::island_join(Seconds timeout_s, const std::function<void()>& interrupted) {
  const TimePoint deadline = monotonic_now() + timeout_s;
  BoundaryResult ignored;
  std::uint64_t uncounted = 0;
  if (exchanging) {
    const auto plan_now = end_exchange(interrupted);
    if (core) uncounted = plan_now->tokens;  // the next step's boundary counts them
    carry_out(plan_now, false, 0.0, &ignored);
  }
  bool joined = false;
  while (true) {
    bool more = true;
    if (core) {
      const std::lock_guard lock(mutex);
      joined = core->joined() && plan_known;
      more = !joined && !first_attempt_failed && monotonic_now() < deadline;
    }
    start_exchange(0, more, false);
    const auto plan_now = end_exchange(interrupted);
    carry_out(plan_now, false, 0.0, &ignored);
    if (!plan_now->orders.more) break;
    if (core) wait_for_news(kNewsS);
  }
  if (part) {
    const std::lock_guard lock(mutex);
    joined = plan_known && part->connected();
  }
  waits = {};  // of boundaries only
  if (!lockstep()) start_exchange(uncounted, false, false);
  return joined;
}

// A WELCOME of a syncer that has come back brings the settings anew, on the I/O thread.
bool Learner::Impl::lockstep() {
  const std::lock_guard lock(mutex);
  return settings().mode == Mode::kLockstep;
}

void Learner::Impl::island_boundary(const Boundary& event, const std::function<void()>& interrupted,
                                    BoundaryResult* result) {
  {
    const std::lock_guard lock(mutex);
    if (closed) throw std::logic_error("boundary(): this learner is closed; create a new one to train on");
  }
  if (exchanging) {
    const auto plan_now = end_exchange(interrupted);
    carry_out(plan_now, true, event.lr, result);
  }
  if (!lockstep()) {
    start_exchange(event.tokens, false, false);
  } else {
    // First the tokens: what is staged at this step stands for them too.
    start_exchange(event.tokens, true, true);
    carry_out(end_exchange(interrupted), true, event.lr, result);
    for (bool first = true;; first = false) {
      bool more = first;
      if (core) {
        const std::lock_guard lock(mutex);
        feed(Recheck{});
        more = first || core->holding() || core->busy();
      }
      start_exchange(0, more, false);
      const auto plan_now = end_exchange(interrupted);
      carry_out(plan_now, false, 0.0, result);
      if (!plan_now->orders.more) break;
      if (!core || first) continue;
      deliver_logs();
      wait_for_news(kNewsS);
    }
  }
  result->reset_inner_state.swap(pending_resets);
  pending_resets.clear();
}

// Tokens of the last step, which no boundary has counted.
std::uint64_t Learner::Impl::last_tokens(Seconds flush_s) {
  const TimePoint deadline = monotonic_now() + flush_s;
  while (exchanging && !seen && !options.island->group->done() && monotonic_now() < deadline) wait_for_news(kNewsS);
  if (!exchanging || (!seen && !options.island->group->done())) return 0;
  try {
    return end_exchange({})->tokens;
  } catch (const std::exception&) {
    return 0;  // a rank is gone; this one is leaving too
  }
}

std::uint64_t Learner::Impl::tokens_under_way(const std::function<void()>& interrupted) {
  {
    const std::lock_guard lock(mutex);
    if (closed) return 0;
  }
  if (!exchanging) return 0;
  if (!seen) seen = options.island->group->wait(interrupted);
  return seen->tokens;
}

}  // namespace diloco
