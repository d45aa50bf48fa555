// The invariants' books, private to sim/invariants*.cpp: RunBooks are of the learners and fragments of the whole run,
// ShardInvariants::Impl of one shard of the syncer.
//   invariants.cpp           nodes and lives, what a learner counts, which bytes are whose
//   invariants_ledger.cpp    tokens: every one once
//   invariants_sessions.cpp  sessions, liveness, credit, pulls, what is armed
//   invariants_rounds.cpp    due, opened, closed, merged, published
//   invariants_values.cpp    the numbers, recomputed
//   invariants_progress.cpp  nothing and nobody is left waiting
#pragma once

#include <array>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "diloco/sim/invariants.h"

namespace diloco::sim {

using Interval = std::array<std::uint64_t, 2>;  // tokens [from, to)

constexpr double kTimeSlack = 1e-6;  // s: sums of times are not exact

// A moving average; below 0 as long as it has no value.
inline void average(Seconds& so_far, Seconds value) { so_far = so_far < 0.0 ? value : so_far + 0.3 * (value - so_far); }

// A copy of a displacement as it was staged, or sent.
struct Copy {
  std::uint64_t from = 0, to = 0, steps = 0;
  Clock clock = 0;
  Version base;
  std::uint64_t hash = 0;
  TimePoint arrived = 0.0;  // complete, on the syncer's clock
  bool given_up = false;    // its learner has said MISS since
};

// One life of a learner on one fragment.
struct Share {
  Version adopted;
  Version merged_in;                  // version its last merged work went into; none after a loss of state
  TimePoint contributed_at = -1.0;
  std::array<Copy, 4> staged;         // the last ones, by turns
  std::size_t next_staged = 0;
  std::deque<Copy> sent;
  std::optional<Copy> mailbox;        // complete at the syncer, screened, not merged yet
  std::vector<std::pair<Version, Copy>> merged;  // copies in published versions that it has not adopted yet
  std::uint64_t dropped_to = 0;       // local work on tokens before it was thrown away
  struct Span {
    std::uint64_t from = 0, to = 0;
    std::size_t merge = 0;            // index of the merge; kDiscarded
  };
  static constexpr std::size_t kDiscarded = ~std::size_t{0};
  std::vector<Span> settled;          // merged or discarded, in order
  std::vector<Interval> open;         // declared: in flight, or gone down with a syncer
};

struct LifeBooks {
  std::size_t learner = 0;
  std::string id;
  Incarnation incarnation = 0;
  bool alive = true;
  bool poisoned = false;               // has held NaN or huge values
  std::vector<std::uint64_t> tokens;   // after step s; [0] = 0
  Clock clock = 0;
  std::vector<Share> shares;           // by fragment
  std::uint64_t steps() const { return tokens.size() - 1; }
};

struct CreditBooks {
  std::uint64_t sent = 0, granted = 0, acknowledged = 0, received = 0;
};

struct SessionBooks {
  SessionId id = 0;
  PeerId control = 0;
  LifeBooks* life = nullptr;
  bool laned = false;
  // Pace, as the syncer was told.
  Clock clock = 0;
  std::uint64_t steps = 0, tokens = 0;
  TimePoint last_step = 0.0, heard = 0.0;
  bool heard_once = false;  // since its WELCOME
  double step_s = -1.0;                  // moving average; < 0: none yet
  std::vector<Version> adopted;          // as reported
  // By fragment: a contribution is on order; the open round waits for it; the last ARM has it.
  std::vector<bool> ordered, waited_for, armed;
  std::optional<Begin> arriving;         // upload under way
  std::uint64_t arriving_total = 0;
  CreditBooks up, down;
  std::map<FragmentId, std::uint64_t> image_ends;  // byte of the downlink at which the last image ends
};

struct FragmentBooks {
  std::uint32_t shard = 0;               // whose it is, by the plan
  Version newest;                        // published in this life of its shard
  Version newest_before;                 // when the event began
  std::shared_ptr<const FragmentState> state;  // as the core shows it
  std::uint64_t theta_hash = 0;
  bool replaced = false;                 // in this event, with a reason
  Clock due = 0;
  Clock clock = 0;                       // published last in this life of its shard
  struct Published {
    std::uint64_t hash = 0;              // of the image
    Clock clock = 0;                     // of its round
  };
  std::map<Version, Published> images;   // over all lives
  std::map<Incarnation, std::uint64_t> contained;  // in the newest version: whose work up to where
  TimePoint merged_at = -1.0;            // on the cluster's clock
  // Of the anchor that is being taken over.
  Clock anchor_clock = 0;
  std::uint64_t anchor_image_hash = 0;

  struct OpenRound {
    std::uint64_t id = 0;
    Clock clock = 0;
    TimePoint opened = 0.0;
    bool disturbed = false;              // times say nothing
    // Since when K contributions are complete, and the moving average of the time that took, with this round's.
    std::optional<TimePoint> quorum_at;
    Seconds quorum_average = 0.0;
  };
  std::optional<OpenRound> round;
  struct Closing {
    TimePoint at = 0.0;
    JobId job = 0;
    std::size_t outstanding = 0;         // asked, live, not stalled, not delivered
    std::vector<std::pair<LifeBooks*, Copy>> members;
    std::vector<double> weights;         // normalised
    bool ok = false, recorded = false, persisted = false;
    std::size_t worst = 0;               // member to drop if not ok
    std::uint64_t image_hash = 0, theta_hash = 0;
    Version version;                     // as recorded
  };
  std::optional<Closing> closing;
};

// xi_step (step time of the K-th fastest learner) and xi_sync from here on, on the syncer's clock.
struct PaceChange {
  TimePoint at = 0.0;
  Seconds step_s = 0.0, sync_s = 0.0;
};

struct Introduction {  // HELLO of a connection: what the learner counted then
  Incarnation incarnation = 0;
  std::uint64_t steps = 0, tokens = 0, credit = 0;
  Clock clock = 0;
  std::vector<Version> adopted;
};

struct RunBooks {
  explicit RunBooks(const ClusterOptions& options);
  const ClusterOptions& options;
  const Settings& settings;
  std::vector<Violation> violations;
  std::uint64_t event = 0;
  TimePoint now = 0.0;              // the cluster's

  std::unordered_map<Incarnation, std::unique_ptr<LifeBooks>> lives;
  std::vector<LifeBooks*> current;  // by learner
  std::vector<FragmentBooks> fragments;  // of all shards; empty until one has a plan
  std::size_t merge_count = 0;
  bool huge_values = false;         // some learner had them once

  void fail(const char* invariant, std::string text);
  LifeBooks* life(Incarnation incarnation);
  Share& share(LifeBooks& life, FragmentId fragment);
  void check_taken_off(const LifeBooks& life, Share& share, const AdoptFragment& adopt);

  // invariants_ledger.cpp
  void settle(LifeBooks& life, FragmentId fragment, std::uint64_t from, std::uint64_t to, std::size_t merge);
  void unsettle(std::size_t index, const MergeRecord& merge);
  void check_gaps();
  std::uint64_t merged_to(LifeBooks& life, FragmentId fragment) const;
  void check_table(FragmentId fragment, const MergedTable& table);
  std::vector<std::tuple<LifeBooks*, FragmentId, std::size_t>> gaps;  // to be checked at the end of the event
  std::set<std::pair<Incarnation, FragmentId>> went_down;             // some merge of theirs was void once

  // invariants_values.cpp
  Tensors anchor_before, local_before;

  // invariants_progress.cpp
  void check_progress();
  void set_well(TimePoint& since, bool well);
  Seconds patience() const;
  std::vector<TimePoint> well_since;        // by learner; infinity = not well
  std::vector<TimePoint> shard_well_since;  // by shard
  TimePoint quorum_well_since = 0.0;
  Seconds patience_s = -1.0;
};

struct ShardInvariants::Impl {
  Impl(RunBooks& run, std::uint32_t shard);
  RunBooks& run;
  const std::uint32_t shard;
  const ClusterOptions& options = run.options;
  const Settings& settings = run.settings;
  const TimePoint& now = run.now;
  TimePoint syncer_now = 0.0;  // the shard's own

  std::unordered_map<Incarnation, std::unique_ptr<LifeBooks>>& lives = run.lives;
  std::vector<FragmentBooks>& fragments = run.fragments;
  std::vector<FragmentId> own;                 // by the plan
  std::map<SessionId, SessionBooks> sessions;  // live ones of this life of the shard
  std::map<PeerId, Introduction> hellos;
  std::map<PeerId, SessionId> lanes;
  std::set<Incarnation> tombs;                 // sent away in this life of the shard
  std::uint64_t highest_epoch = 0, epoch = 0;
  std::size_t open_rounds = 0;

  bool on_arrival() const { return settings.trigger == Trigger::kArrival; }  // every contribution is a round of its own
  std::uint32_t quorum() const { return on_arrival() ? 1 : settings.min_quorum; }
  void fail(const char* invariant, std::string text) { run.fail(invariant, std::move(text)); }
  LifeBooks* life(Incarnation incarnation) { return run.life(incarnation); }
  Share& share(LifeBooks& life, FragmentId fragment) { return run.share(life, fragment); }
  // False, and a violation, if the fragment is another shard's.
  bool check_own(FragmentId fragment, const char* what);

  // invariants_sessions.cpp
  void open_session(PeerId peer, const Header& header);
  void close_session(Incarnation incarnation, const std::string& why);
  SessionBooks* session(SessionId id);
  bool stalled(const SessionBooks& session) const;
  bool sets_pace(const SessionBooks& session) const;
  std::optional<Clock> quorum_clock() const;
  Seconds quorum_step_s() const;
  void check_grant(const SessionBooks& session, const Header& header);
  void on_pull(SessionBooks& session, const Header& header, const Pull& pull);
  void on_step(SessionBooks& session, const Step& step);
  void on_image(SessionBooks& session, const OutFrame& frame);
  void check_armed(const SyncerCore& syncer);
  void check_silence();
  void check_memory();
  void note_pace();
  std::vector<PaceChange> paces;
  SessionId armed_turn = 0, silence_turn = 0;
  std::vector<std::pair<std::weak_ptr<const Buffer>, std::uint64_t>> payloads;  // contributions held, maybe
  std::set<std::tuple<FragmentId, Version>> tables_seen;
  struct ScreenJob {
    LifeBooks* life = nullptr;
    FragmentId fragment = 0;
    Copy copy;
  };
  std::map<JobId, ScreenJob> screening;
  SessionBooks* frame_from = nullptr;      // the session whose frame is being handled
  std::optional<ScreenJob> just_screened;  // in this event
  std::optional<Copy> replaced_by_it;

  // invariants_rounds.cpp
  void on_open(const nlohmann::json& line);
  void on_merge(const nlohmann::json& line, const MergeRecord& merge);
  void on_published(const nlohmann::json& line);
  void on_init(const nlohmann::json& line);
  void on_plan(const nlohmann::json& line);
  void on_epoch(const nlohmann::json& line);
  void on_refuse(const nlohmann::json& line);
  void take_members(FragmentBooks::Closing& closing, FragmentId p);
  void check_close(FragmentId fragment, const nlohmann::json& line);
  void check_window(FragmentId fragment, double window_s, bool capped);
  std::size_t asked(FragmentId fragment) const;
  void note_quorum(FragmentId fragment);
  void note_quorums();
  void publish(FragmentId fragment, Version version, std::uint64_t image_hash, Clock clock);
  void check_order(const SyncerCore& syncer);
  std::vector<std::pair<FragmentId, Clock>> opened;  // in this event, and when they were due
  void check_untouched(const SyncerCore& syncer);
  Clock due_after(FragmentId fragment, Clock opened) const;
  Clock phase(FragmentId fragment) const;
  std::map<std::uint64_t, FragmentId> reached;   // round -> fragment: got their quorum in this event
  double quorum_s = -1.0, sync_s = -1.0;         // moving averages; < 0: none yet
  std::map<FragmentId, TimePoint> undelivered;   // published, at no learner yet: when it was closed
  std::size_t turn = 0;
  bool stopped = false;

  // invariants_values.cpp
  void check_merge(const MergeJob& job, const MergeResult& result, FragmentId fragment);
};

}  // namespace diloco::sim
