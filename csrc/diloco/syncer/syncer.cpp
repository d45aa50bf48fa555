#include "diloco/syncer/syncer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <variant>

#include "diloco/base/core_clock.h"
#include "diloco/base/errors.h"
#include "diloco/base/log_line.h"
#include "diloco/core/credit.h"
#include "diloco/syncer/event_log.h"
#include "diloco/syncer/report.h"
#include "diloco/syncer/workers.h"

namespace diloco {
namespace {

constexpr Seconds kStopSlack = 1.0;       // past the time stop() allows, the loop ends whatever the core says
constexpr std::uint64_t kControlBytes = 16 << 20;  // unsent beside chunks: a WELCOME is about as long as a HELLO

std::string checked_bind(const SyncerOptions& options) {
  const std::string canonical = parse_endpoint(options.bind);
  if (!options.insecure && !is_loopback_endpoint(canonical)) {
    throw ConfigError(fmt::format(
        "bind '{}' can be reached from other machines, and connections carry no keys yet: bind a loopback address such "
        "as 127.0.0.1:29400 (and reach it through an SSH tunnel), or say --insecure (insecure=True) if everybody who "
        "can reach that port is trusted",
        options.bind));
  }
  return canonical;
}

Settings checked_settings(Settings settings) {
  settings.validate();
  return settings;
}

}  // namespace

struct Syncer::Impl {
  Impl(SyncerOptions given, std::unique_ptr<ServerTransport> given_transport)
      : options(std::move(given)), event_log(options.event_log), workers(options.merge_threads) {
    const Settings& settings = options.settings;
    const std::string bind = checked_bind(options);
    TransportLimits limits;
    limits.chunk_bytes = settings.chunk_bytes;
    limits.max_peers = 2 * settings.max_learners + 64;  // two channels each, and a few that only look
    limits.max_unsent_bytes = sender_window(settings.credit_window_bytes) + kControlBytes;
    transport = given_transport ? std::move(given_transport) : make_zmq_server(limits);
    endpoint = transport->bind(bind);

    std::random_device device;
    random.seed((std::uint64_t{device()} << 32) ^ device());
    SyncerCoreOptions core_options;
    core_options.settings = settings;
    core_options.payload_memory_bytes =
        settings.payload_memory_bytes ? settings.payload_memory_bytes : machine_memory_bytes() / 2;
    core_options.epoch_floor = options.event_log.empty() ? 0 : highest_epoch(options.event_log);
    core_options.random = [this] { return random(); };
    core = std::make_unique<SyncerCore>(std::move(core_options));
    if (!options.endpoint_file.empty()) write_endpoint_file(options.endpoint_file, endpoint);
    io = std::thread([this] { run(); });
  }

  // ---- the I/O thread ----

  void run() {
    say_loopback_name();
    handle(Tick{});
    std::vector<TransportEvent> events;
    bool tick_served = true;
    const Seconds slack = options.settings.heartbeat_timeout_s / 4;
    while (!stopped) {
      const Seconds wait = clock.begin_wait(core->next_deadline(), tick_served, slack);
      events.clear();
      guarded("poll", [&] { transport->poll(wait, &events); });
      clock.works(slack);
      for (TransportEvent& event : events) take(event);
      take_posted();
      tick_served = clock.now() >= core->next_deadline();
      if (tick_served) handle(Tick{});
      if (monotonic_now() > force_stop_at && !stopped) {
        log(LogLevel::kError, "stopped by force: the rounds did not end in the stated time; please report this");
        finish();
      }
    }
    guarded("close", [&] { transport->close(); });
    workers.stop();
    const std::lock_guard lock(mutex);
    ended = true;
    for (auto& task : posted) task();
    posted.clear();
    ended_changed.notify_all();
  }

  // A name that a line in /etc/hosts leads to this machine itself: nobody else gets there, and nothing else would say so.
  void say_loopback_name() {
    const std::string bind = parse_endpoint(options.bind), host = bind.substr(6, bind.rfind(':') - 6);  // after tcp://
    const bool address = host.find_first_not_of("0123456789.") == std::string::npos;
    if (address || host == "localhost" || !is_loopback_endpoint(bind)) return;
    log(LogLevel::kWarning, fmt::format("bind '{}' leads to a loopback address, {} (a line in /etc/hosts?): learners on other "
                                        "machines do not get there; bind an address of this machine, or 0.0.0.0, with "
                                        "--insecure", options.bind, endpoint));
  }

  void take(TransportEvent& event) {
    if (auto* frame = std::get_if<InFrame>(&event)) {
      handle(FrameEvent{frame->peer, frame->header, frame->payload});
    } else if (auto* gone = std::get_if<PeerGone>(&event)) {
      handle(PeerGoneEvent{gone->peer, gone->why});
    }
  }

  void take_posted() {
    std::vector<SyncerEvent> done;
    std::deque<std::function<void()>> tasks;
    {
      const std::lock_guard lock(mutex);
      done.swap(results);
      tasks.swap(posted);
    }
    for (SyncerEvent& event : done) handle(std::move(event));
    for (auto& task : tasks) task();
  }

  // Feeds one event, and those that executing its actions brings about.
  void handle(SyncerEvent first) {
    std::deque<SyncerEvent> queue;
    queue.push_back(std::move(first));
    while (!queue.empty()) {
      const SyncerEvent event = std::move(queue.front());
      queue.pop_front();
      guarded("event", [&] {
        for (SyncerAction& action : core->handle(event, clock.now())) {
          guarded("action", [&] { std::visit([&](auto& a) { execute(a, queue); }, action); });
        }
      });
    }
  }

  void execute(SendTo& action, std::deque<SyncerEvent>&) {
    if (action.frame.header.type == MessageType::kStatusReply) {
      action.frame.body = complete_status(action.frame.body, transport->counters());
    }
    // If the peer is gone, the transport's own event tells, and why.
    static_cast<void>(transport->send(action.peer, std::move(action.frame)));
  }
  void execute(CutPeer& action, std::deque<SyncerEvent>&) { transport->cut(action.peer, action.why); }
  void execute(RunScreen& action, std::deque<SyncerEvent>&) {
    workers.submit(Workers::Priority::kScreen, [this, work = std::move(action)] {
      ScreenDone done{work.job, {}};
      guarded("screen", [&] { done.result = screen(work.layout, work.payload->data()); });
      answer(std::move(done));
    });
  }
  void execute(RunMerge& action, std::deque<SyncerEvent>&) {
    // What one version gives back is what the next one needs.
    buffers.keep_at_least(state_bytes(action.merge));
    workers.submit(Workers::Priority::kMerge, [this, work = std::make_shared<RunMerge>(std::move(action))] {
      MergeDone done{work->job, {}};
      const auto parallel = [this](std::size_t count, const auto& body) { workers.parallel(count, body); };
      guarded("merge", [&] { done.result = run_merge(work->merge, buffers, parallel); });
      answer(std::move(done));
    });
  }
  void execute(RunInit& action, std::deque<SyncerEvent>&) {
    workers.submit(Workers::Priority::kMerge, [this, work = std::move(action)] {
      InitDone done{work.job, {}};
      guarded("init", [&] { done.result = run_init(work.init, buffers); });
      answer(std::move(done));
    });
  }
  // The store is a no-op: what is asked to be durable counts as durable at once.
  void execute(Persist& action, std::deque<SyncerEvent>& queue) {
    queue.push_back(Persisted{action.fragment, action.state->version});
  }
  void execute(Record& action, std::deque<SyncerEvent>&) {
    if (!std::exchange(start_recorded, true)) action.line = with_wall_time(action.line);
    if (!event_log.append(action.line) && event_log.failures() == 1) {
      log(LogLevel::kError, fmt::format("event log '{}' cannot be written: {}; lines are being lost and the audit will "
                                        "not add up; free space or move the file",
                                        options.event_log, event_log.last_error()));
    }
  }
  void execute(Log& action, std::deque<SyncerEvent>&) { log(action.level, action.text); }
  void execute(Stopped&, std::deque<SyncerEvent>&) { finish(); }

  void finish() {
    if (stopped) return;
    stopped = true;
    if (event_log.failures() > 0) {
      log(LogLevel::kError, fmt::format("{} lines of the event log were lost", event_log.failures()));
    }
  }

  // ---- any thread ----

  void answer(SyncerEvent result) {
    const std::lock_guard lock(mutex);
    results.push_back(std::move(result));
    if (!ended) transport->wake();
  }

  // Runs `task` on the I/O thread, or here once that thread has ended.
  void post(std::function<void()> task) {
    const std::lock_guard lock(mutex);
    if (ended) return task();
    posted.push_back(std::move(task));
    transport->wake();
  }

  template <class F>
  auto ask(F function) {
    auto task = std::make_shared<std::packaged_task<decltype(function())()>>(std::move(function));
    auto answer = task->get_future();
    post([task] { (*task)(); });
    return answer.get();
  }

  void log(LogLevel level, const std::string& text) {
    try {
      if (options.log) {
        options.log(level, text);
      } else if (level >= LogLevel::kInfo) {
        write_stderr(log_line(level_name(level), "syncer", text));
      }
    } catch (...) {
      // A broken log callback must not stop the run.
    }
  }

  // A bug of ours in one event must not take the run down: say so and go on with the next one.
  template <class F>
  void guarded(const char* where, F&& function) {
    try {
      function();
    } catch (const std::exception& error) {
      report_bug(where, error.what());
    } catch (...) {
      report_bug(where, "unknown exception");
    }
  }

  void report_bug(const char* where, const char* what) {
    const std::uint64_t count = ++bugs;
    if (count > 10 && count % 1000 != 0) return;
    log(LogLevel::kError, fmt::format("internal error in {}: {}; please report this ({} so far)", where, what, count));
  }

  const SyncerOptions options;
  const pid_t pid = ::getpid();
  CoreClock clock;  // I/O thread until `ended`
  EventLog event_log;
  std::unique_ptr<ServerTransport> transport;  // I/O thread, but for wake(), until `ended`
  std::unique_ptr<SyncerCore> core;            // I/O thread until `ended`, then whoever holds `mutex`
  std::string endpoint;
  std::mt19937_64 random;
  bool start_recorded = false, stopped = false;                       // I/O thread
  TimePoint force_stop_at = std::numeric_limits<double>::infinity();  // I/O thread
  std::atomic<std::uint64_t> bugs{0};

  std::mutex mutex;  // guards the next four
  std::vector<SyncerEvent> results;
  std::deque<std::function<void()>> posted;
  bool ended = false;
  std::condition_variable ended_changed;

  std::mutex join_mutex;
  BufferPool buffers;  // of the states that merges make
  Workers workers;     // after what its jobs use
  std::thread io;
};

Syncer::Syncer(SyncerOptions options, std::unique_ptr<ServerTransport> transport) {
  options.settings = checked_settings(std::move(options.settings));
  impl_ = std::make_unique<Impl>(std::move(options), std::move(transport));
}

Syncer::~Syncer() {
  // After fork() the threads do not exist in the child; joining or closing anything there would hang.
  if (::getpid() != impl_->pid) {
    static_cast<void>(impl_.release());
    return;
  }
  stop(0.0);
}

std::string Syncer::endpoint() const { return impl_->endpoint; }

std::string Syncer::status_json() {
  return impl_->ask([this] {
    return complete_status(impl_->core->status_json(impl_->clock.now()), impl_->transport->counters());
  });
}

void Syncer::stop(Seconds shutdown_s) {
  Impl& impl = *impl_;
  impl.post([&impl, shutdown_s] {
    if (impl.stopped) return;
    impl.force_stop_at = std::min(impl.force_stop_at, monotonic_now() + shutdown_s + kStopSlack);
    impl.handle(ShutdownEvent{shutdown_s});
  });
  {
    std::unique_lock lock(impl.mutex);
    impl.ended_changed.wait(lock, [&impl] { return impl.ended; });
  }
  const std::lock_guard lock(impl.join_mutex);
  if (impl.io.joinable()) impl.io.join();
}

bool Syncer::running() const {
  const std::lock_guard lock(impl_->mutex);
  return !impl_->ended;
}

std::vector<std::vector<float>> Syncer::weights() {
  struct Held {
    Layout layout;
    Plan plan;
    std::vector<std::shared_ptr<const FragmentState>> fragments;
  };
  // The I/O thread only takes references; published states never change, so copying happens here.
  const Held held = impl_->ask([this] {
    Held h{impl_->core->layout(), impl_->core->plan(), {}};
    for (FragmentId p = 0; p < h.plan.size(); ++p) h.fragments.push_back(impl_->core->fragment(p));
    return h;
  });
  std::vector<std::vector<float>> result(held.layout.tensors.size());
  for (FragmentId p = 0; p < held.plan.size(); ++p) {
    if (!held.fragments[p]) return {};
    const float* next = held.fragments[p]->theta->f32();
    for (const std::uint32_t tensor : held.plan.fragments[p].tensors) {
      const std::uint64_t n = held.layout.tensors[tensor].numel();
      result[tensor].assign(next, next + n);
      next += n;
    }
  }
  return result;
}

Layout Syncer::layout() {
  return impl_->ask([this] { return impl_->core->layout(); });
}

}  // namespace diloco
