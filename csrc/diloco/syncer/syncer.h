// The syncer shell: joins SyncerCore, a transport, worker threads and a clock. The native program, `diloco syncer` and
// diloco.Syncer in Python are this same class.
//
// Threads: one I/O thread owns core and transport; `merge_threads` workers run screens and merges. Public methods may
// be called from any thread; none of them calls Python.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "diloco/base/settings.h"
#include "diloco/core/syncer_core.h"
#include "diloco/transport/transport.h"

namespace diloco {

struct SyncerOptions {
  Settings settings;
  std::string bind = "127.0.0.1:0";  // kernel-chosen port; endpoint() tells
  bool insecure = false;             // allow a bind off loopback without keys
  unsigned merge_threads = 1;
  std::string event_log;             // file, appended; "" = none
  std::string endpoint_file;         // written with the real endpoint once bound; "" = none
  Seconds shutdown_s = 10.0;         // how long stop() lets open rounds finish
  // Given every log line (level, text), on the I/O thread; null = stderr in one line format.
  std::function<void(LogLevel, const std::string&)> log;
};

class Syncer {
 public:
  // Binds at once. Throws ConfigError / TransportError.
  explicit Syncer(SyncerOptions options, std::unique_ptr<ServerTransport> transport = nullptr);
  ~Syncer();  // stop(0)
  Syncer(const Syncer&) = delete;

  std::string endpoint() const;
  std::string status_json();          // asks the I/O thread; always answers
  void stop(Seconds shutdown_s);      // finish open rounds or give up; idempotent; joins all threads
  bool running() const;
  // Dense f32 copy of the global weights, per tensor of layout(), or empty while not initialised.
  std::vector<std::vector<float>> weights();
  Layout layout();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The whole command-line program, shared by the native binary and `diloco syncer`. Blocks until SIGTERM/SIGINT.
// Returns the exit status: 0 after SIGTERM, 2 for bad arguments, 1 for trouble at start (port in use).
int run_syncer_program(int argc, char** argv);

}  // namespace diloco
