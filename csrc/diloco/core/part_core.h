// A rank of an island behind its leader, as a pure state machine. It holds one part of the model, or is a replica of a rank
// that does. It decides nothing: plans say what to stage and adopt, PULLs which copy to send. Not thread-safe: the shell
// guards it with a mutex (the training thread and the I/O thread both feed it).
//
// One boundary = handle(PartPlanned) -> Stage..., execute, handle(StagesDone) -> Adopt..., execute, handle(AdoptsDone);
// then report() goes into the next exchange. Stage, adopt, send use the payloads of the part (fragment/part.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "diloco/core/learner_core.h"

namespace diloco {

struct PartOptions {
  std::uint32_t part = 0, parts = 1;   // `part` of the rank, or of the one it is a replica of
  bool replica = false;                // has no connection
  Layout layout;                       // unsharded, in this process's order
  Part held;                           // by tensor of `layout`; empty if parts = 1
  // Copies bytes [offset, offset + out.size()) of the anchor payload of the part.
  std::function<void(FragmentId fragment, std::uint64_t offset, std::span<std::byte> out)> read_anchor;
  std::function<std::uint64_t()> random;  // jitter of the back-off
};

struct PartWelcome {  // body of the leader's WELCOME
  std::string body;
};
struct PartPlanned {
  std::shared_ptr<const IslandPlan> plan;
  bool step = false;  // one optimizer step has been made since the last one
};
struct ReplicaImage {  // broadcast by the rank this one is a replica of
  FragmentId fragment = 0;
  Version version;
  BufferPtr bytes;
};
using PartEvent = std::variant<ChannelUp, ChannelDown, ChannelFrame, PartWelcome, PartPlanned, StagesDone, AdoptsDone,
                               ReplicaImage, Tick, CloseEvent>;

class PartCore {
 public:
  explicit PartCore(PartOptions options);
  ~PartCore();
  // Actions: ConnectChannel, DropChannel, SendOn (bulk only), Stage, AdoptFragment, Closed, Log. Throws std::logic_error if
  // a plan asks for what this rank cannot have.
  std::vector<LearnerAction> handle(const PartEvent& event, TimePoint now);
  TimePoint next_deadline() const;

  bool connected() const;
  const Plan* plan() const;  // null before the WELCOME
  const Layout& layout() const;
  const Settings& settings() const;
  const PayloadLayout& payload(FragmentId fragment, PayloadKind kind) const;
  IslandReport report();  // what it says is complete stays as it is until the plan that follows
  ConstBufferPtr arrived(FragmentId fragment, const Version& version) const;  // as LearnerCore::arrived
  std::uint64_t staged_bytes() const;
  std::uint64_t steps() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace diloco
