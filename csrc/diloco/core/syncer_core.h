// The syncer as a pure state machine: handle(event, now) -> actions. No thread, socket, file, clock or random source
// of its own. The shell (syncer/syncer.h) and the virtual cluster (sim/) link this same class.
//
// A round reads open -> pull -> collect -> quorum and grace -> merge -> outer step -> persist -> publish.
// A core is one shard of the syncer: it makes the plan of all fragments and serves those that the plan gives to its
// shard. Clocks, rounds, versions, epochs and sessions of other shards are none of its concern.
// Design: docs/concepts.md. Not thread-safe: one owner.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "diloco/base/log_level.h"
#include "diloco/base/settings.h"
#include "diloco/base/types.h"
#include "diloco/merge/init_fragment.h"
#include "diloco/merge/merge.h"
#include "diloco/wire/frame.h"
#include "diloco/wire/messages.h"

namespace diloco {

// ---- events ----
struct FrameEvent {  // a frame from a peer; payload valid during handle() only
  PeerId peer = 0;
  Header header;
  std::span<const std::byte> payload;
};
struct PeerGoneEvent {
  PeerId peer = 0;
  std::string why;
};
struct ScreenDone {
  JobId job = 0;
  ScreenResult result;
};
struct MergeDone {
  JobId job = 0;
  MergeResult result;
};
struct InitDone {
  JobId job = 0;
  InitResult result;
};
struct Persisted {
  FragmentId fragment = 0;
  Version version;
};
struct Tick {};
struct ShutdownEvent {  // finish the open rounds or give up after this long
  Seconds give_up_after_s = 10.0;
};
using SyncerEvent =
    std::variant<FrameEvent, PeerGoneEvent, ScreenDone, MergeDone, InitDone, Persisted, Tick, ShutdownEvent>;

// ---- actions ----
struct SendTo {
  PeerId peer = 0;
  OutFrame frame;
};
struct CutPeer {
  PeerId peer = 0;
  std::string why;
};
struct RunScreen {
  JobId job = 0;
  PayloadLayout layout;
  ConstBufferPtr payload;
};
struct RunInit {  // decode an uploaded anchor into the first state of a fragment: run_init(init)
  JobId job = 0;
  InitJob init;
};
struct RunMerge {
  JobId job = 0;
  MergeJob merge;
};
struct Persist {  // before Publish; answered by Persisted. The store is a no-op until durable storage exists.
  FragmentId fragment = 0;
  std::shared_ptr<const FragmentState> state;
};
struct Log {
  LogLevel level = LogLevel::kInfo;
  std::string text;
};
struct Record {  // one line of the event log, JSON
  std::string line;
};
struct Stopped {  // shutdown is complete; text says how
  std::string text;
};
using SyncerAction = std::variant<SendTo, CutPeer, RunScreen, RunInit, RunMerge, Persist, Log, Record, Stopped>;

struct SyncerCoreOptions {
  Settings settings;
  std::uint32_t shard = 0, shards = 1;        // this one, of so many
  std::uint64_t payload_memory_bytes = 1ull << 30;
  std::uint64_t epoch_floor = 0;              // highest epoch an earlier life is known to have used; 0 = none known
  std::function<std::uint64_t()> random;      // session ids and lane tokens
};

class SyncerCore {
 public:
  explicit SyncerCore(SyncerCoreOptions options);
  ~SyncerCore();
  std::vector<SyncerAction> handle(const SyncerEvent& event, TimePoint now);
  // When a Tick is wanted at the latest; +infinity if nothing waits on time.
  TimePoint next_deadline() const;
  // Everything `diloco status` shows, as JSON text.
  std::string status_json(TimePoint now) const;

  // For tests, the virtual cluster and the embedding program.
  // Null until initialised, and if it is another shard's.
  std::shared_ptr<const FragmentState> fragment(FragmentId fragment) const;
  const Plan& plan() const;  // of all shards
  const Layout& layout() const;
  std::uint64_t epoch() const;
  std::uint64_t rounds_merged() const;
  std::uint64_t payload_bytes_held() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco
