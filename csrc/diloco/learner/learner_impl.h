// The two threads of a learner and what they share. The training thread runs boundary() and join() (training_thread.cpp),
// the I/O thread owns the sockets (io_thread.cpp); both feed the one core under the mutex (learner.cpp).
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "diloco/base/core_clock.h"
#include "diloco/base/log_line.h"
#include "diloco/core/part_core.h"
#include "diloco/learner/learner.h"
#include "diloco/learner/ledger_file.h"
#include "diloco/learner/mover.h"

namespace diloco {

struct Learner::Impl {
  static constexpr auto kSlice = std::chrono::milliseconds(50);

  Impl(LearnerOptions given, std::shared_ptr<ParameterStore> store, std::unique_ptr<ClientTransport> given_transport);
  LearnerCoreOptions core_options();
  PartOptions part_options();
  std::function<void(FragmentId, std::uint64_t, std::span<std::byte>)> read_anchor();

  // ---- feeding the core (learner.cpp); `mutex` is held ----

  void feed(const LearnerEvent& event);
  void feed_part(const PartEvent& event);
  void execute(std::vector<LearnerAction> actions);
  // Whichever core this process has.
  template <class E>
  void feed_any(const E& event) {
    if (part) feed_part(event);
    else feed(event);
  }
  const Plan* plan() const { return part ? part->plan() : core->plan(); }
  const Layout& layout() const { return part ? part->layout() : core->layout(); }
  const Settings& settings() const { return part ? part->settings() : core->settings(); }
  const PayloadLayout& payload(FragmentId fragment, PayloadKind kind) const {
    return part ? part->payload(fragment, kind) : core->payload(fragment, kind);
  }
  TimePoint next_deadline() const { return part ? part->next_deadline() : core->next_deadline(); }
  // Sockets belong to the I/O thread; the queue keeps the core's order whichever thread fed it.
  void route(ConnectChannel& action) { outbox.emplace_back(action); }
  void route(DropChannel& action) { outbox.emplace_back(action); }
  void route(SendOn& action) { outbox.emplace_back(std::move(action)); }
  void route(Stage& action);
  void route(AdoptFragment& action);
  void route(Discard& action);
  void route(Progress& action);
  void route(Rejected& action);
  void route(GaveUp& action);
  void route(Closed&) { core_closed = true; }
  void route(Log& action) { keep_log(action); }

  // A range in `pieces`, not a copy: nothing is allocated once the vector has its size.
  struct Range {
    std::size_t first = 0, count = 0;
  };
  Range pieces_of(FragmentId fragment, PayloadKind kind);
  Pieces at(const Range& range) const { return Pieces(pieces).subspan(range.first, range.count); }

  void throw_if_failed() const;
  void keep_log(const Log& action);

  // ---- the training thread (training_thread.cpp) ----

  void boundary(const Boundary& event, const std::function<void()>& interrupted, BoundaryResult* result);
  bool join(Seconds timeout_s, const std::function<void()>& interrupted);
  void grow(const std::function<void()>& append);
  void close(Seconds flush_s);
  // The callback may be Python: it is called on the caller's thread and without the mutex.
  void deliver_logs();
  void check_process(const char* call) const;
  // Outside the mutex: only this thread touches stages, adoptions and pieces until it feeds the core again.
  void stage_all();
  std::uint32_t adopt_all();
  // Lockstep only. Returns when the due fragments are here, with the number adopted meanwhile; `interrupted` may throw.
  std::uint32_t hold(std::unique_lock<std::mutex>& lock, const std::function<void()>& interrupted);
  void wake_if_needed();

  // ---- islands, also the training thread (island_boundary.cpp) ----

  void island_boundary(const Boundary& event, const std::function<void()>& interrupted, BoundaryResult* result);
  bool island_join(Seconds timeout_s, const std::function<void()>& interrupted);
  bool lockstep();
  std::uint64_t last_tokens(Seconds flush_s);
  std::uint64_t tokens_under_way(const std::function<void()>& interrupted);
  // `bare`: orders nothing, because this step has not been counted yet.
  void start_exchange(std::uint64_t tokens, bool more, bool bare);
  std::shared_ptr<const IslandPlan> end_exchange(const std::function<void()>& interrupted);
  void carry_out(const std::shared_ptr<const IslandPlan>& plan, bool step, double lr, BoundaryResult* result);
  void share_images(const IslandPlan& plan);
  void wait_for_news(Seconds at_most);

  // ---- the I/O thread (io_thread.cpp) ----

  void run();
  void take(TransportEvent& event);
  template <class E>
  void deliver(const E& event);
  void perform(const ConnectChannel& action);
  void perform(const DropChannel& action) { transport->disconnect(action.channel); }
  // A channel that is gone has its own event; the frame's loss needs no other.
  void perform(SendOn& action) { static_cast<void>(transport->send(action.channel, std::move(action.frame))); }
  Seconds slack() const { return settings().heartbeat_timeout_s / 4; }

  // A bug of ours in one event must not end the training process: say so and go on with the next one.
  template <class F>
  void guarded(const char* where, F&& function) {
    try {
      function();
      return;
    } catch (const std::exception& error) {
      bug = fmt::format("internal error in {}: {}; please report this", where, error.what());
    } catch (...) {
      bug = fmt::format("internal error in {}; please report this", where);
    }
    if (++bugs <= 10 || bugs % 1000 == 0) write_stderr(log_line("ERROR", id, bug));
  }

  struct Staging {
    Stage action;
    Range pieces;
  };
  struct Adoption {
    AdoptFragment action;
    Range image, sent;
  };
  using Outgoing = std::variant<ConnectChannel, DropChannel, SendOn>;

  const LearnerOptions options;
  const pid_t pid = ::getpid();
  const std::string host, id;
  Incarnation incarnation = 0;
  Mover mover;
  std::unique_ptr<ClientTransport> transport;  // I/O thread, but for wake()

  // Training thread.
  std::vector<std::uint32_t> pending_resets;
  PhaseClock phases;

  // Training thread, of an island's rank.
  bool exchanging = false;                 // an exchange has been started and not ended
  std::optional<RankGroup::Result> seen;   // its result, if that was looked at before the boundary that ends it
  bool plan_known = false;                 // to every rank
  SessionId welcome_sent = 0;              // session whose WELCOME the other ranks have
  std::vector<Version> shared;             // newest version given to the replicas, per fragment
  ExchangeWaits waits;

  // Filled under the mutex by the training thread's own feed(), then read by that thread alone.
  std::vector<Staging> stages;
  std::vector<Adoption> adoptions;
  std::vector<Piece> pieces;

  mutable std::mutex mutex;  // guards all that follows but `io`
  std::condition_variable changed;
  CoreClock clock;
  std::unique_ptr<LearnerCore> core;  // a learner's, or the leader's of an island
  std::unique_ptr<PartCore> part;     // a rank's behind the leader
  std::mt19937_64 random;
  std::unique_ptr<LedgerFile> ledger;
  std::deque<Outgoing> outbox;
  std::deque<Log> logs;
  TransportCounters counters;
  std::string failure, bug;
  std::uint64_t io_events = 0, bugs = 0, known_fragments = 0, adopted_count = 0, counted_tokens = 0;
  bool refused = false, gave_up = false, core_closed = false, closed = false;
  bool ever_up = false, first_attempt_failed = false, stop_io = false, io_ended = false;

  std::thread io;
};

}  // namespace diloco
