#include "diloco/learner/learner.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <variant>

#include "diloco/base/core_clock.h"
#include "diloco/base/errors.h"
#include "diloco/base/log_line.h"
#include "diloco/base/version.h"
#include "diloco/learner/ledger_file.h"
#include "diloco/learner/mover.h"

namespace diloco {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr std::size_t kLogsKept = 1000;
// A learner learns the run's chunk size only with WELCOME; this is the most it takes from a syncer.
constexpr std::uint64_t kLargestChunk = 64ull << 20;
constexpr std::size_t kLongestId = 64;

std::uint64_t random_u64() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) ^ device();
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown-host";
  return name;
}

std::string checked_id(const std::string& given, const std::string& host) {
  if (given.empty()) return fmt::format("{}-{:08x}", host.substr(0, kLongestId - 9), random_u64() & 0xffffffff);
  if (given.size() > kLongestId) {
    throw ConfigError(fmt::format("learner_id: expected 1 to {} bytes of text, got {} bytes ('{}')", kLongestId,
                                  given.size(), given));
  }
  return given;
}

}  // namespace

struct Learner::Impl {
  Impl(LearnerOptions given, std::shared_ptr<ParameterStore> store, std::unique_ptr<ClientTransport> given_transport)
      : options(std::move(given)), host(host_name()), id(checked_id(options.learner_id, host)), mover(std::move(store)) {
    while (incarnation == 0) incarnation = random_u64();
    random.seed(random_u64());
    TransportLimits limits;
    limits.chunk_bytes = kLargestChunk;
    limits.linger_s = options.linger_s;
    transport = given_transport ? std::move(given_transport) : make_zmq_client(parse_endpoint(options.syncer), limits);
    if (!options.ledger_dir.empty()) {
      ledger = LedgerFile::create(options.ledger_dir, id, incarnation, static_cast<std::uint64_t>(pid));
    }
    core = std::make_unique<LearnerCore>(core_options());
    if (options.learner_id.empty()) {
      keep_log(Log{LogLevel::kInfo, fmt::format("no learner_id was given: this learner is '{}'", id)});
    }
    io = std::thread([this] { run(); });
  }

  LearnerCoreOptions core_options() {
    LearnerCoreOptions result;
    result.learner_id = id;
    result.run_id = options.run_id;
    result.host = host;
    result.software = std::string("diloco ") + kVersion;
    result.pid = static_cast<std::uint64_t>(pid);
    result.incarnation = incarnation;
    result.layout = mover.store().layout();
    result.insisted_settings = options.settings;
    result.endpoint_text = options.syncer;
    result.give_up_after_s = options.give_up_after_s;
    result.staging_bytes = options.staging_bytes;
    result.random = [this] { return random(); };
    result.read_anchor = [this](FragmentId fragment, std::uint64_t offset, std::span<std::byte> out) {
      mover.read_anchor(core->layout(), core->payload(fragment, PayloadKind::kAnchor), offset, out);
    };
    return result;
  }

  // ---- feeding the core; `mutex` is held ----

  void feed(const LearnerEvent& event) {
    for (LearnerAction& action : core->handle(event, clock.now())) {
      std::visit([&](auto& a) { route(a); }, action);
    }
    if (core->plan() != nullptr && core->plan()->size() != known_fragments) {
      known_fragments = core->plan()->size();
      if (ledger) ledger->set_fragments(known_fragments);
    }
  }

  // Sockets belong to the I/O thread; the queue keeps the core's order whichever thread fed it.
  void route(ConnectChannel& action) { outbox.emplace_back(action); }
  void route(DropChannel& action) { outbox.emplace_back(action); }
  void route(SendOn& action) { outbox.emplace_back(std::move(action)); }
  void route(Stage& action) { stages.push_back(Staging{std::move(action), pieces_of(action.fragment, PayloadKind::kContribution)}); }
  void route(AdoptFragment& action) {
    Adoption adoption;
    adoption.image = pieces_of(action.fragment, PayloadKind::kImage);
    if (action.sent) adoption.sent = pieces_of(action.fragment, PayloadKind::kContribution);
    adoption.action = std::move(action);
    adoptions.push_back(std::move(adoption));
  }
  void route(Discard& action) {
    if (ledger) ledger->discard(action.fragment, action.from, action.to, action.reason);
  }
  void route(Progress& action) {
    if (ledger) ledger->progress(action.tokens);
  }
  void route(Rejected& action) {
    refused = true;
    failure = fmt::format("the syncer at {} refused learner '{}' ({}): {}", options.syncer, id, action.reject.code,
                          action.reject.text);
  }
  void route(GaveUp& action) {
    gave_up = true;
    failure = action.text;
  }
  void route(Closed&) { core_closed = true; }
  void route(Log& action) { keep_log(action); }

  // A range in `pieces`, not a copy: nothing is allocated once the vector has its size.
  struct Range {
    std::size_t first = 0, count = 0;
  };
  Range pieces_of(FragmentId fragment, PayloadKind kind) {
    const std::size_t first = pieces.size();
    mover.append_pieces(core->layout(), core->payload(fragment, kind), &pieces);
    return {first, pieces.size() - first};
  }
  Pieces at(const Range& range) const { return Pieces(pieces).subspan(range.first, range.count); }

  void wake_if_needed() {
    if (!outbox.empty() && !io_ended) transport->wake();
  }

  void throw_if_failed() const {
    if (refused) throw ConfigError(failure);
    if (gave_up) throw TransportError(failure);
  }

  // ---- the training thread ----

  // Outside the mutex: only this thread touches stages, adoptions and pieces until it feeds the core again.
  void stage_all() {
    for (const Staging& staging : stages) mover.stage(at(staging.pieces), staging.action.out->data());
    stages.clear();
  }

  std::uint32_t adopt_all() {
    const auto count = static_cast<std::uint32_t>(adoptions.size());
    for (const Adoption& adoption : adoptions) {
      mover.adopt(adoption.action, at(adoption.image), at(adoption.sent));
      if (!adoption.action.reset_inner_state) continue;
      for (const Piece& piece : at(adoption.image)) pending_resets.push_back(piece.tensor);
    }
    adoptions.clear();
    pieces.clear();
    return count;
  }

  // Lockstep only. Returns when the due fragments are here; `interrupted` may throw.
  void hold(std::unique_lock<std::mutex>& lock, const std::function<void()>& interrupted) {
    while (core->holding()) {
      // Whoever joined after a staging clock stages while it waits.
      if (!stages.empty()) {
        lock.unlock();
        stage_all();
        lock.lock();
        feed(StagesDone{});
        continue;
      }
      throw_if_failed();
      wake_if_needed();
      const std::uint64_t seen = io_events;
      changed.wait_for(lock, kSlice, [&] { return io_events != seen; });
      if (interrupted) {
        lock.unlock();
        interrupted();
        lock.lock();
      }
      feed(Recheck{});
    }
  }

  void boundary(std::uint64_t tokens, const std::function<void()>& interrupted, BoundaryResult* result) {
    {
      const std::lock_guard lock(mutex);
      if (closed) throw std::logic_error("boundary(): this learner is closed; create a new one to train on");
      throw_if_failed();
      feed(Boundary{tokens});
    }
    stage_all();
    std::exception_ptr interruption;
    {
      std::unique_lock lock(mutex);
      feed(StagesDone{});
      try {
        hold(lock, interrupted);
      } catch (...) {
        // What the core handed out is adopted before the caller hears of it, so both sides agree on the versions.
        interruption = std::current_exception();
      }
      if (interruption && !lock.owns_lock()) lock.lock();
    }
    result->adopted = adopt_all();
    bool wake = false;
    {
      const std::lock_guard lock(mutex);
      feed(AdoptsDone{});
      wake = !outbox.empty() && !io_ended;
    }
    // Not under the mutex: an I/O thread that wakes up to a mutex taken costs this thread its core twice.
    if (wake) transport->wake();
    if (interruption) std::rethrow_exception(interruption);
    result->reset_inner_state.swap(pending_resets);
    pending_resets.clear();
  }

  bool join(Seconds timeout_s) {
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
    }
  }

  // ---- the I/O thread ----

  // A batch thread does not preempt whoever is running when it wakes. With fewer cores than busy threads the I/O thread
  // would otherwise take the training thread's core in the middle of a boundary. The transport's own threads inherit it.
  static void yield_to_training() {
#ifdef SCHED_BATCH
    int policy = 0;
    sched_param parameters{};
    if (::pthread_getschedparam(::pthread_self(), &policy, &parameters) == 0 && policy == SCHED_OTHER) {
      ::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &parameters);
    }
#endif
  }

  void run() {
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
        wait = clock.begin_wait(core->next_deadline(), tick_served, slack());
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
      tick_served = clock.now() >= core->next_deadline();
      if (tick_served) guarded("tick", [&] { feed(Tick{}); });
    }
    guarded("close", [&] { transport->close(); });
    const std::lock_guard lock(mutex);
    counters = transport->counters();
    io_ended = true;
    changed.notify_all();
  }

  Seconds slack() const { return core->settings().heartbeat_timeout_s / 4; }

  void take(TransportEvent& event) {
    if (auto* frame = std::get_if<InFrame>(&event)) {
      deliver(ChannelFrame{frame->channel, frame->header, frame->payload});
    } else if (auto* up = std::get_if<Connected>(&event)) {
      deliver(ChannelUp{up->channel});
    } else if (auto* down = std::get_if<Disconnected>(&event)) {
      deliver(ChannelDown{down->channel, down->why});
    }
  }

  void deliver(const LearnerEvent& event) {
    {
      const std::lock_guard lock(mutex);
      if (std::holds_alternative<ChannelUp>(event)) ever_up = true;
      if (std::holds_alternative<ChannelDown>(event) && !ever_up) first_attempt_failed = true;
      guarded("event", [&] { feed(event); });
      ++io_events;
    }
    changed.notify_all();
  }

  void perform(const ConnectChannel& action) {
    try {
      transport->connect(action.channel);
    } catch (const TransportError& error) {
      deliver(ChannelDown{action.channel, error.what()});
    }
  }
  void perform(const DropChannel& action) { transport->disconnect(action.channel); }
  // A channel that is gone has its own event; the frame's loss needs no other.
  void perform(SendOn& action) { static_cast<void>(transport->send(action.channel, std::move(action.frame))); }

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

  // ---- logs, time, closing ----

  void keep_log(const Log& action) {
    if (!options.log) {
      if (action.level >= LogLevel::kInfo) write_stderr(log_line(level_name(action.level), id, action.text));
      return;
    }
    if (logs.size() >= kLogsKept) logs.pop_front();
    logs.push_back(action);
  }

  // The callback may be Python: it is called on the caller's thread and without the mutex.
  void deliver_logs() {
    if (!options.log) return;
    std::deque<Log> taken;
    {
      const std::lock_guard lock(mutex);
      if (logs.empty()) return;
      taken.swap(logs);
    }
    for (const Log& line : taken) options.log(line.level, line.text);
  }

  void close(Seconds flush_s) {
    {
      std::unique_lock lock(mutex);
      if (closed) return;
      closed = true;
      guarded("close", [&] { feed(CloseEvent{flush_s}); });
      wake_if_needed();
      changed.wait_for(lock, std::chrono::duration<double>(flush_s), [&] { return core_closed; });
      stop_io = true;
      if (!io_ended) transport->wake();
    }
    io.join();
    if (ledger) ledger->close();
  }

  void check_process(const char* call) const {
    if (::getpid() == pid) return;
    throw std::logic_error(fmt::format(
        "{}: this learner was created in process {} and cannot be used in its child {}: threads and sockets do not "
        "survive fork(); create the learner after forking, or leave it to the parent",
        call, pid, ::getpid()));
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

  // Filled under the mutex by the training thread's own feed(), then read by that thread alone.
  std::vector<Staging> stages;
  std::vector<Adoption> adoptions;
  std::vector<Piece> pieces;

  mutable std::mutex mutex;  // guards all that follows but `io`
  std::condition_variable changed;
  CoreClock clock;
  std::unique_ptr<LearnerCore> core;
  std::mt19937_64 random;
  std::unique_ptr<LedgerFile> ledger;
  std::deque<Outgoing> outbox;
  std::deque<Log> logs;
  TransportCounters counters;
  std::string failure, bug;
  std::uint64_t io_events = 0, bugs = 0, known_fragments = 0;
  bool refused = false, gave_up = false, core_closed = false, closed = false;
  bool ever_up = false, first_attempt_failed = false, stop_io = false, io_ended = false;

  std::thread io;
};

Learner::Learner(LearnerOptions options, std::shared_ptr<ParameterStore> store,
                 std::unique_ptr<ClientTransport> transport)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(store), std::move(transport))) {}

Learner::~Learner() {
  // In a forked child the thread does not exist and the sockets are the parent's: leave everything alone.
  if (::getpid() != impl_->pid) {
    static_cast<void>(impl_.release());
    return;
  }
  impl_->close(0.0);
}

bool Learner::join(Seconds timeout_s) {
  impl_->check_process("join()");
  impl_->deliver_logs();
  const bool joined = impl_->join(timeout_s);
  impl_->deliver_logs();
  return joined;
}

BoundaryResult Learner::boundary(std::uint64_t tokens, const std::function<void()>& interrupted) {
  impl_->check_process("boundary()");
  impl_->deliver_logs();
  BoundaryResult result;
  impl_->boundary(tokens, interrupted, &result);
  return result;
}

void Learner::close(Seconds flush_s) {
  if (::getpid() != impl_->pid) return;  // a forked child's exit handlers end up here
  impl_->close(flush_s);
  impl_->deliver_logs();
}

bool Learner::closed() const {
  if (::getpid() != impl_->pid) return true;
  const std::lock_guard lock(impl_->mutex);
  return impl_->closed;
}

LearnerStats Learner::stats() const {
  impl_->check_process("stats()");
  impl_->deliver_logs();
  const std::lock_guard lock(impl_->mutex);
  return impl_->core->stats();
}

std::string Learner::learner_id() const { return impl_->id; }

Incarnation Learner::incarnation() const { return impl_->incarnation; }

void Learner::read_anchor(std::uint32_t tensor, float* out) const { impl_->mover.copy_anchor(tensor, out); }

std::string Learner::describe() const {
  impl_->check_process("describe()");
  const std::lock_guard lock(impl_->mutex);
  const Layout& layout = impl_->mover.store().layout();
  const double mib = 1.0 / (1 << 20);
  std::string text = fmt::format("learner '{}' of the syncer at {}: {} tensors, {} parameters; anchors {:.1f} MiB of "
                                 "host memory",
                                 impl_->id, impl_->options.syncer, layout.tensors.size(), layout.numel(),
                                 static_cast<double>(impl_->mover.anchor_bytes()) * mib);
  if (impl_->core->plan() == nullptr) return text + "; the plan comes with the syncer's welcome";
  const LearnerStats stats = impl_->core->stats();
  const Settings& settings = impl_->core->settings();
  return text + fmt::format(", staged {:.1f} MiB, sent images {:.1f} MiB, arriving {:.1f} MiB; {} fragments, one sync of "
                            "each per {} steps, {} steps under way; mode {}, merge {}, adopt {}, wire {}",
                            static_cast<double>(stats.staged_bytes) * mib,
                            static_cast<double>(stats.sent_image_bytes) * mib,
                            static_cast<double>(stats.arriving_bytes) * mib, impl_->core->plan()->size(),
                            settings.sync_every, settings.overlap_steps, settings.get("mode"), settings.get("merge"),
                            settings.get("adopt"), settings.get("wire_dtype"));
}

TransportCounters Learner::counters() const {
  impl_->check_process("counters()");
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace diloco
