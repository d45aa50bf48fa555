// Bodies of the control messages. MessagePack maps except STEP, which is fixed binary. decode_* return nullopt with a
// reason; they refuse counts larger than the bytes can hold before allocating, sizes that overflow, unknown enum
// values, missing or mistyped keys; unknown extra keys are ignored.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "diloco/base/types.h"
#include "diloco/fragment/layout.h"
#include "diloco/fragment/part.h"
#include "diloco/fragment/plan.h"
#include "diloco/fragment/schedule.h"

namespace diloco {

enum class Role : std::uint8_t { kLearner = 0, kOperator = 1, kMonitor = 2 };  // operator, monitor: reserved

// Discarded-interval reasons; the ledger's columns beside merged and outstanding. kInFlight is not a discard: it marks
// an interval that was sent and then overwritten locally, so only the syncer can still merge it. Nor is kAbsent: those
// tokens were processed before the fragment's tensors were in the model, so it never had any work of theirs.
enum class DiscardReason : std::uint8_t {
  kOverwritten = 0, kBlended, kCarryLimit, kLost, kStale, kNonfinite, kRefused, kInFlight, kAbsent
};
const char* reason_name(DiscardReason reason);

constexpr std::uint32_t kMaxParts = 1 << 12;  // of one island

struct Hello {
  std::string learner_id;  // 1..64 bytes of text
  std::string run_id;      // may be empty
  std::string host;
  std::uint64_t pid = 0;
  Role role = Role::kLearner;
  std::string software;                          // "diloco 0.1.0"
  std::uint64_t highest_epoch = 0;               // of anything this learner has seen
  Layout layout;
  // Sizes (in tensors, ascending) that the layout had before tensors were added to it while training; empty: never. Not on
  // the wire then.
  std::vector<std::uint32_t> grown_from;
  std::vector<Version> adopted;                  // per fragment of the plan it knows; empty at first
  std::vector<std::uint64_t> merged_to;          // per fragment, as far as the learner knows; same length
  std::map<std::string, std::string> settings;   // algorithm settings the learner insists on
  std::uint64_t tokens = 0, steps = 0;           // x so far
  Clock clock = 0;
  std::uint64_t downlink_credit = 0;             // bytes the syncer may send before the first CREDIT
  // An island: processes that train one copy of the model together. Its leader says HELLO for all; part 0 is the leader's.
  // Not on the wire for a learner of one process.
  std::uint32_t ranks = 1;                       // processes
  std::uint32_t parts = 1;                       // of the model, each on a bulk connection of its own; at most `ranks`
  Part part;                                     // by tensor of `layout`; empty if parts = 1
};

// Body of LANE for the parts of an island but the leader's: what the rank holds, by tensor of its leader's HELLO.
struct Lane {
  Part part;
};

struct Welcome {
  std::uint64_t lane_token = 0;
  // The run's, as far as this learner's model has it: its first tensors. Indices in `plan` are into this one.
  Layout layout;
  Plan plan;
  std::vector<std::uint32_t> grown_from;     // sizes the layout had before each growth; tells plan.began_with. As in HELLO
  std::map<std::string, std::string> settings;
  std::vector<Version> versions;             // per fragment; none = not there yet, or another shard's
  std::vector<std::uint64_t> merged_to;      // per fragment, of this incarnation
  // (fragment, to) of every contribution of this incarnation that is still held here: all others that were sent in
  // earlier sessions of this syncer will never be merged.
  std::vector<std::pair<FragmentId, std::uint64_t>> held;
  // How far the run is, for whoever places a schedule by it: largest clock of a learner, tokens of all lives.
  Clock run_clock = 0;
  std::uint64_t run_tokens = 0;
};

struct Reject {
  std::string code;  // "layout", "run_id", "protocol", "settings", "duplicate_id", "superseded", "role", "full",
                     // "learner_id", "ejected", "malformed", "shard", "memory"
  std::string text;  // one or two sentences: expected, got, what to do
};

struct Adopted {
  FragmentId fragment = 0;
  Version version;
};
// A learner's counters after a boundary. Fixed layout: clock, steps, tokens, n, then n adoptions.
struct Step {
  Clock clock = 0;
  std::uint64_t steps = 0;
  std::uint64_t tokens = 0;  // x: tokens since the start of this incarnation
  std::vector<Adopted> adopted;
};

struct Heartbeat {
  bool probe = false;  // "answer at once"
  // Learner -> syncer only: totals so far, summed over fragments.
  std::map<std::string, std::uint64_t> discarded;
  double lr = 0.0;  // of its inner optimizer; 0 = not known
};

struct Arm {
  std::vector<FragmentId> fragments;
};

struct Pull {
  PayloadKind kind = PayloadKind::kContribution;  // or kAnchor
  FragmentId fragment = 0;
  std::uint64_t round = 0;
  Clock clock = 0;              // at which the round opened
  std::uint64_t merged_to = 0;  // of this incarnation on the fragment
  std::uint64_t held_to = 0;    // `to` of the contribution already in the mailbox, 0 = none
  // To a part of an island: which copy. Steps its leader's copy was made after; of an anchor, the version.
  std::uint64_t step = 0;
  Version base;
};

// Incarnations one run may have over its life: rows of a merged table, and what the syncer remembers. A row has at most
// 19 bytes, so the largest table fits a BEGIN.
constexpr std::size_t kMaxIncarnations = 1 << 16;

using MergedTable = std::vector<std::pair<Incarnation, std::uint64_t>>;

struct Begin {
  PayloadKind kind = PayloadKind::kContribution;
  FragmentId fragment = 0;
  std::uint64_t round = 0;  // of the pull being answered, or of the round that made the image
  Version base;             // contribution: version its displacement is against; anchor, image: version of the bytes
  // Contribution: token interval [from, to) and the inner steps in it.
  std::uint64_t from = 0, to = 0, c_steps = 0;
  std::uint64_t step = 0;       // contribution: of an island: steps of this life so far; all parts must agree
  Clock clock = 0;          // learner's clock at staging; image: clock of the round
  MergedTable merged;       // anchor, image: merged_to of every incarnation contained in the bytes
};

struct Verdict {
  FragmentId fragment = 0;
  std::uint64_t from = 0, to = 0;
  DiscardReason reason = DiscardReason::kRefused;
  bool readopt = false;  // overwrite from the anchor and reset the inner optimizer state of the fragment
  std::string text;
};

struct Goodbye {
  std::string reason;
};

std::string encode(const Hello&);
std::string encode(const Lane&);
std::string encode(const Welcome&);
std::string encode(const Reject&);
std::string encode(const Step&);
std::string encode(const Heartbeat&);
std::string encode(const Arm&);
std::string encode(const Pull&);
std::string encode(const Begin&);
std::string encode(const Verdict&);
std::string encode(const Goodbye&);

using Bytes = std::span<const std::byte>;
std::optional<Hello> decode_hello(Bytes, std::string* why);
std::optional<Lane> decode_lane(Bytes, std::string* why);
std::optional<Welcome> decode_welcome(Bytes, std::string* why);
std::optional<Reject> decode_reject(Bytes, std::string* why);
std::optional<Step> decode_step(Bytes, std::string* why);
std::optional<Heartbeat> decode_heartbeat(Bytes, std::string* why);
std::optional<Arm> decode_arm(Bytes, std::string* why);
std::optional<Pull> decode_pull(Bytes, std::string* why);
std::optional<Begin> decode_begin(Bytes, std::string* why);
std::optional<Verdict> decode_verdict(Bytes, std::string* why);
std::optional<Goodbye> decode_goodbye(Bytes, std::string* why);

}  // namespace diloco
