// The learner as a pure state machine: handle(event, now) -> actions. It decides what to stage, what to adopt and with
// which formula, what to send; the shell (learner/learner.h) moves the numbers. Not thread-safe: the shell guards it
// with a mutex (the training thread and the I/O thread both feed it; no call computes for long).
//
// The syncer may be several shards. There is one connection to each, with channels, session, epoch and retries of its
// own; a fragment's messages go over its shard's. While one shard is away its fragments wait and all others go on (in
// lockstep training stands still once one of them is due). Plan, layout and settings come with the first WELCOME, and
// every other shard's must agree with them.
//
// Boundary order: count, stage, adopt, report. One boundary =
//   handle(Boundary) -> Stage...        execute, then
//   handle(StagesDone) -> Adopt..., or `holding()` in lockstep: wait and handle(Recheck) until it is false
//   execute the Adopts, then handle(AdoptsDone).
//
// As the leader of an island it only counts at Boundary, and stages and adopts what the plan of the last exchange says:
//   handle(Boundary), handle(IslandPlanned) -> Stage... on all ranks, handle(StagesDone) -> Adopt... on all ranks,
//   handle(AdoptsDone); then orders() and report() go into the next exchange.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "diloco/base/settings.h"
#include "diloco/base/types.h"
#include "diloco/core/island.h"
#include "diloco/core/syncer_core.h"  // Log, Tick
#include "diloco/wire/frame.h"
#include "diloco/wire/messages.h"

namespace diloco {

// ---- events ----
// `shard`: whose connection it is, 0 with one shard.
struct ChannelUp {
  Channel channel = Channel::kControl;
  std::uint32_t shard = 0;
};
struct ChannelDown {
  Channel channel = Channel::kControl;
  std::string why;
  std::uint32_t shard = 0;
};
struct ChannelFrame {
  Channel channel = Channel::kControl;
  Header header;
  std::span<const std::byte> payload;
  std::uint32_t shard = 0;
};
struct Boundary {  // one real optimizer step has been made with this many tokens
  std::uint64_t tokens = 1;
  double lr = 0.0;  // of the inner optimizer; 0 = not known
};
struct IslandPlanned {  // leader of an island: what all ranks do now
  std::shared_ptr<const IslandPlan> plan;
};
struct Grow {  // the model has these tensors, too, from now on; the anchors are their values now. One shard, no island
  std::vector<TensorSpec> tensors;
};
struct StagesDone {};
struct Recheck {};  // lockstep, while holding()
struct AdoptsDone {};
struct JoinAdopt {};  // before the first step: adopt whatever has arrived (no step is counted); ends with AdoptsDone
struct CloseEvent {
  Seconds flush_s = 0.0;
  std::uint64_t tokens = 0;  // of the last step, where they come late (islands)
};
using LearnerEvent = std::variant<ChannelUp, ChannelDown, ChannelFrame, Boundary, IslandPlanned, Grow, StagesDone, Recheck,
                                  AdoptsDone, JoinAdopt, Tick, CloseEvent>;

// ---- actions ----
struct ConnectChannel {
  Channel channel = Channel::kControl;
  std::uint32_t shard = 0;
};
struct DropChannel {
  Channel channel = Channel::kControl;
  std::uint32_t shard = 0;
};
struct SendOn {
  Channel channel = Channel::kControl;
  OutFrame frame;
  std::uint32_t shard = 0;
};
struct Stage {  // out <- encode(anchor - local), payload layout of a contribution of the fragment
  FragmentId fragment = 0;
  BufferPtr out;
};
struct AdoptFragment {  // training thread: local <- formula(next, local, anchor, sent); anchor <- next
  FragmentId fragment = 0;
  Version version;
  AdoptFormula formula = AdoptFormula::kRebase;
  float blend_alpha = 0.0f;
  ConstBufferPtr image;        // payload layout of an image; null: next = anchor (re-adoption)
  ConstBufferPtr sent;         // rebase: contribution payload that was merged, or null
  bool reset_inner_state = false;
};
struct Discard {  // ledger: tokens [from, to) on the fragment will never be merged (kInFlight: may still be)
  FragmentId fragment = 0;
  std::uint64_t from = 0, to = 0;
  DiscardReason reason = DiscardReason::kOverwritten;
};
struct Progress {  // ledger: tokens so far on every fragment
  std::uint64_t tokens = 0;
};
struct Rejected {  // a shard refused this learner for good; the shell raises it at the next call
  Reject reject;
};
// give_up_after_s passed without one of the shards. One is enough: without it part of the model is never synchronised.
struct GaveUp {
  std::string text;
};
struct Closed {};
using LearnerAction = std::variant<ConnectChannel, DropChannel, SendOn, Stage, AdoptFragment, Discard, Progress,
                                   Rejected, GaveUp, Closed, Log>;

// Processes that train one copy of the model together.
struct IslandOptions {
  std::uint32_t ranks = 1;
  std::uint32_t parts = 1;  // of the model, each on a connection of its own
  Part part;                // the leader's, by tensor of its layout (which is the unsharded one); empty if parts = 1
};

struct LearnerCoreOptions {
  std::string learner_id, run_id, host, software;
  std::uint64_t pid = 0;
  Incarnation incarnation = 0;
  Layout layout;
  std::map<std::string, std::string> insisted_settings;
  std::string endpoint_text;         // for messages
  std::uint32_t shards = 1;          // of the syncer
  Seconds give_up_after_s = 0.0;     // 0 = never
  std::uint64_t staging_bytes = 0;   // 0 = no bound but the schedule
  std::optional<IslandOptions> island;  // with one shard
  std::function<std::uint64_t()> random;  // jitter of the back-off
  // Copies bytes [offset, offset + out.size()) of the anchor payload of `fragment` (called inside handle()).
  std::function<void(FragmentId fragment, std::uint64_t offset, std::span<std::byte> out)> read_anchor;
};

struct LearnerStats {
  // "connecting": no shard has been reached yet. "joining": some have. "training": all are connected. "away": some are
  // no longer. "rejected", "closed".
  std::string state;
  std::vector<std::uint32_t> shards_away;   // not connected
  std::uint64_t epoch = 0;                  // the highest of any shard
  std::uint64_t steps = 0, tokens = 0;
  Clock clock = 0;
  std::uint64_t adoptions = 0, contributions_sent = 0, contributions_merged = 0, reconnects = 0;
  // Summed over fragments; absent: of tensors that were added later, from before that.
  std::uint64_t tokens_merged = 0, tokens_outstanding = 0, tokens_absent = 0;
  std::map<std::string, std::uint64_t> discarded;           // reason -> tokens, summed over fragments
  std::uint64_t staged_bytes = 0, sent_image_bytes = 0, arriving_bytes = 0;
  std::vector<Version> versions;
  Clock run_clock = 0;           // how far the run was at the last WELCOME: largest clock of a learner,
  std::uint64_t run_tokens = 0;  // and tokens of all learners
};

class LearnerCore {
 public:
  explicit LearnerCore(LearnerCoreOptions options);
  ~LearnerCore();
  std::vector<LearnerAction> handle(const LearnerEvent& event, TimePoint now);
  TimePoint next_deadline() const;

  bool holding() const;          // lockstep: the training thread must wait
  bool joined() const;           // WELCOMEd by every shard, and every fragment adopted or (not in islands) ready to adopt
  std::string holding_for() const;
  const Plan* plan() const;      // null before the first WELCOME
  // The run's once WELCOMEd: same tensors, maybe in another order, without those that were added and the run does not have.
  const Layout& layout() const;
  const Settings& settings() const;
  const PayloadLayout& payload(FragmentId fragment, PayloadKind kind) const;
  LearnerStats stats() const;

  bool busy() const;  // leader of an island: something is to be staged or adopted now
  // Leader of an island, after AdoptsDone: what goes into the next exchange. What orders() says is kept as it is until the
  // IslandPlanned that contains it. `plan_known`: every rank has been given the WELCOME.
  IslandOrders orders(bool plan_known);
  IslandReport report() const;
  // Body of the last WELCOME; empty before the first.
  const std::string& welcome() const;
  // Image of the version that report() called arrived, for the replicas; null if it is another.
  ConstBufferPtr arrived(FragmentId fragment, const Version& version) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco
