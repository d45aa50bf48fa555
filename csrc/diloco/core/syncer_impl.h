// The syncer core's state, private to core/syncer_*.cpp. Each source holds one step of a round:
//   syncer_core.cpp       dispatch, deadlines, time-driven duties
//   syncer_sessions.cpp   HELLO, WELCOME, REJECT, liveness, duplicate ids
//   syncer_init.cpp       where the first weights come from: a learner's anchor
//   syncer_growth.cpp     tensors that learners add to the model while they train
//   syncer_island.cpp     lanes of a session, the parts of an island
//   syncer_uplink.cpp     PULL, transfers from learners, screening, the mailbox
//   syncer_memory.cpp     room for contributions
//   syncer_rounds.cpp     due clocks, opening, quorum and grace, merge
//   syncer_publish.cpp    persist, publish, transfers to learners
//   syncer_lives.cpp      lives of learners: what is kept of one that is over, and what comes back of it
//   syncer_status.cpp     what `diloco status` shows
//   syncer_probe.cpp      what `diloco doctor` measures
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>

#include "diloco/core/liveness.h"
#include "diloco/core/outbox.h"
#include "diloco/core/probe_turns.h"
#include "diloco/core/reassembly.h"
#include "diloco/core/reminder.h"
#include "diloco/core/syncer_core.h"
#include "diloco/fragment/part.h"
#include "diloco/quorum/ema.h"
#include "diloco/quorum/quorum.h"

namespace diloco {

constexpr TimePoint kNever = 1e300;

struct Contribution {
  std::string learner;
  Incarnation incarnation = 0;
  Begin begin;
  ConstBufferPtr payload;
  std::vector<double> norms;
  TimePoint arrived = 0.0;
  bool given_up = false;  // its learner has said MISS: no newer copy of its work contains this one
  std::uint64_t bytes() const { return payload ? payload->size() : 0; }
};

// What one life (incarnation) of a learner leaves behind, beside merged_to: all that decides how it is treated if it
// comes back after all, and its part of the ledger. Kept for every life, so it is small.
struct Life {
  std::string learner;
  std::vector<Version> merged_in;        // per fragment: version its last contribution went into
  std::uint64_t tokens = 0, steps = 0;
  Clock clock = 0;
  std::uint32_t fragments = 0;           // the plan's first ones, that its model has
  std::uint64_t merged_tokens = 0;       // summed over fragments
  std::map<std::string, std::uint64_t> discarded;  // as reported
  std::uint32_t bad_payloads = 0;
  bool in_table = false;                 // merged_to came with a merged table: never forgotten
  bool tombstoned = false;
  Clock bad_until = 0;                   // learner's clock when the last bad one was refused
  std::string tombstone;                 // why
  bool left_a_trace() const { return merged_tokens > 0 || in_table || tombstoned || bad_payloads > 0; }
};

// A learner's newest life, and earlier ones as long as something of theirs is held.
struct Account : Life {
  Incarnation incarnation = 0;
  std::string host;
  std::uint64_t pid = 0;
  std::vector<std::uint64_t> merged_to;  // per fragment: nothing before it is merged again
  std::vector<std::optional<Contribution>> mailbox;  // per fragment: complete and screened
  std::vector<Clock> due;                // per fragment, trigger = arrival: its clock at the next pull
  TimePoint last_contact = 0.0;
  std::vector<Version> adopted;          // last known
  unsigned unheard = 0;                  // sessions that ended for silence without a word after the WELCOME
};

// Parts of one upload of an island, put together as they arrive.
struct Gathering {
  Begin begin;               // of part 0
  BufferPtr whole;           // payload of the unsharded fragment; null if nobody wants it
  std::uint32_t left = 0;    // parts not complete
  std::vector<bool> begun;   // by part
  bool given_up = false;     // a part did not come or did not agree; the others' bytes are dropped
};

// One bulk connection. A learner of one process has one, an island one for each part of the model.
struct BulkLane {
  PeerId peer = 0;  // 0 until LANE
  Reassembly uplink;
  ReceiverCredit uplink_credit;
  Outbox downlink;
  Liveness liveness;         // of parts after the first; that of the first is the control connection's
  Part part;                 // what the rank holds, by tensor of the run's layout; empty: everything
  std::vector<bool> owned;   // by tensor: taken from this part
  std::shared_ptr<Gathering> filling;  // what the transfer under way is a part of; null: nobody wants it
};

// One connection's life of a learner: control and bulk channels.
struct Session {
  SessionId id = 0;
  PeerId control = 0;
  std::uint64_t lane_token = 0;
  std::vector<BulkLane> lanes;             // by part
  std::uint32_t ranks = 1;                 // processes of the learner
  std::vector<std::uint32_t> tensors;      // by tensor of HELLO's layout: its index in the run's
  bool whole = false;                      // every lane is there: the learner can contribute and be sent to
  std::vector<TensorSpec> beyond;          // what it has added next, and the run does not have; by name
  bool beyond_adopted = false;             // it has a version of that: an earlier life of the syncer had it
  std::map<std::pair<FragmentId, PayloadKind>, std::shared_ptr<Gathering>> gathering;
  // Islands: newest version sent of each fragment. The next one is sent when this one has been adopted, so that all ranks
  // adopt the same.
  std::vector<Version> sent;
  std::set<FragmentId> held_back;          // a newer one waits for that
  Account* account = nullptr;
  Liveness liveness;

  // Pace.
  Clock clock = 0;
  std::uint64_t steps = 0, tokens = 0;
  TimePoint last_step = 0.0;
  Ema step_s{0.3}, tokens_per_s{0.2};
  double lr = 0.0;           // 0 = not known
  unsigned lr_apart = 0;     // heartbeats in a row with a learning rate far from everybody else's

  // Per fragment of the plan, whether its model has it or not.
  std::vector<Version> adopted;
  std::vector<std::optional<std::uint64_t>> pulled;  // round of the outstanding PULL (trigger = arrival: 0)
  std::vector<Version> pulled_from;                  // version the answer to it may be a change against
  std::vector<unsigned> missed;                      // rounds in a row that closed without the answer
  std::set<FragmentId> armed;

  std::uint64_t reserved = 0;  // payload memory of outstanding pulls and the transfers under way
  std::map<FragmentId, std::uint64_t> delivered_at_byte;  // first lane: downlink byte at which the fragment's last image ends

  bool island() const { return ranks > 1; }
  std::uint32_t fragments() const { return account->fragments; }
  bool has(FragmentId fragment) const { return fragment < fragments(); }
  std::size_t lanes_bound() const {
    return static_cast<std::size_t>(
        std::count_if(lanes.begin(), lanes.end(), [](const BulkLane& lane) { return lane.peer != 0; }));
  }
  ReceiverCredit& uplink_credit() { return lanes.front().uplink_credit; }
};

struct PendingHello {  // a newcomer with the id of a live learner, while the old session is probed
  PeerId peer = 0;
  Header header;
  Hello hello;
  SessionId probed = 0;
  TimePoint deadline = 0.0;
};

enum class RoundPhase { kCollecting, kMerging, kPersisting };

struct Round {
  std::uint64_t id = 0;
  FragmentId fragment = 0;
  Clock clock = 0;
  TimePoint opened = 0.0;
  std::uint32_t quorum = 1;
  RoundPhase phase = RoundPhase::kCollecting;
  std::optional<TimePoint> quorum_at, deadline;
  bool capped = false;
  Incarnation only = 0;          // trigger = arrival: whose contribution made it, who is answered
  std::set<SessionId> waiting;   // pulled and not delivered
  std::set<std::string> pulled;  // learner ids, for reports
  TimePoint closed_at = 0.0;
  std::string reason;
  std::vector<Contribution> members;  // while merging
  std::vector<double> weights;
  MergeResult result;
};

struct FragmentSlot {
  std::shared_ptr<const FragmentState> state;
  Image image;                                   // of state, for joiners
  std::shared_ptr<const std::string> begin;      // encoded Begin of the image
  std::map<Version, ConstBufferPtr> retained;    // anchor = syncer: images of earlier versions somebody works from
  Clock clock = 0;                               // of the round that made it
  std::uint64_t round = 0;
  Clock due = 0;
  TimePoint due_since = 0.0;                     // since when T_K >= due without an open round; 0 = not due
  std::uint64_t open_round = 0;                  // 0 = none
  Clock opened_at = 0;                           // clock of the last opening
  Version origin;                                // holder's version the first state came from
  Version gave_way;                              // version of first weights that a holder's have replaced
  bool merged_here = false;                      // an outer step was made in this epoch
  SessionId init_from = 0;                       // session asked for its anchor
  JobId init_job = 0;
  std::optional<Begin> init_begin;
  std::string init_learner;
  PayloadLayout contribution, anchor, image_layout;
  std::vector<bool> use_rda;
};

struct JobInfo {
  FragmentId fragment = 0;
  std::uint64_t round = 0;
  Contribution contribution;  // screen
};

struct SyncerCore::Impl {
  explicit Impl(SyncerCoreOptions options);

  // syncer_core.cpp
  bool owns(FragmentId fragment) const;  // the plan gives it to this shard; false for numbers not in the plan
  std::uint32_t owned_fragments(std::uint32_t of_first) const;
  std::uint32_t owned_fragments() const { return owned_fragments(plan.size()); }
  std::uint32_t fragments_without_weights() const;
  std::vector<SyncerAction> handle(const SyncerEvent& event, TimePoint now);
  void on_frame(const FrameEvent& frame);
  void on_tick();
  void say_waiting();
  void say_gains();
  TimePoint next_deadline() const;
  void log(LogLevel level, std::string text) { actions.push_back(Log{level, std::move(text)}); }
  template <class J> void record(J&& line);
  void send(PeerId peer, MessageType type, const Session* session, std::string body, FragmentId fragment = 0,
            std::uint64_t offset = 0);

  // syncer_sessions.cpp
  void on_hello(PeerId peer, const Header& header, Bytes payload);
  void admit(PeerId peer, const Header& header, const Hello& hello);
  void reject(PeerId peer, const std::string& code, const std::string& text);
  void violation(Session& session, const std::string& text);
  void end_session(SessionId id, const std::string& why, bool cut);
  void on_peer_gone(PeerId peer, const std::string& why);
  void on_heartbeat(Session& session, const Heartbeat& heartbeat);
  void check_lr(Session& session);
  void on_step(Session& session, const Step& step);
  void resolve_pending(SessionId probed, bool alive);
  void bump_epoch(std::uint64_t at_least);
  void set_layout(const Layout& layout);
  void announce_layout();
  Session* session_of(PeerId peer);
  std::size_t live_sessions() const;
  bool stalled(const Session& session) const;
  std::string settings_difference(const std::map<std::string, std::string>& wanted) const;

  // syncer_growth.cpp
  struct Fit {
    std::size_t tensors = 0;         // the run's first ones, that the model has
    std::uint32_t fragments = 0;     // and the fragments they make up
    std::vector<TensorSpec> beyond;  // what it has added next
    std::string difference;          // not empty: it is another model
  };
  Fit fit(const Hello& hello) const;
  std::uint32_t known_fragments(const Hello& hello, const Fit& fit) const;
  void say_fit(const std::string& learner, const Fit& fit);
  bool alone(const Session& session) const;
  bool grow_if_agreed(SessionId greeted);
  bool grow(const std::vector<TensorSpec>& tensors);
  bool added(FragmentId fragment) const { return fragment >= plan.cycle(); }
  std::uint32_t quorum_of(FragmentId fragment) const;
  bool enough_have(FragmentId fragment) const;
  void fill_slots();
  void fit_to_plan(Account& account, Clock clock) const;
  void fit_to_plan(Session& session) const;

  // syncer_init.cpp
  Version before_this_life(FragmentId p, Version held) const;
  void elect_anchors();
  void on_anchor(Session& session, const Begin& begin, BufferPtr bytes);
  void on_init_done(const InitDone& done);
  void maybe_recover(Session& session);

  // syncer_lives.cpp
  const Life* life_of(Incarnation incarnation) const;
  Account& account_for(Incarnation incarnation, const Hello& hello);
  std::set<Incarnation> incarnations_in_use() const;
  void bury(Account& account, std::string why);
  void settle_superseded();
  void settle(Incarnation incarnation, FragmentId fragment, std::uint64_t to);
  std::size_t incarnations() const { return accounts.size() + settled.size(); }
  std::size_t incarnations_with(const MergedTable& table) const;
  bool room_for_newcomer();

  // syncer_island.cpp
  void on_lane(PeerId peer, const Header& header, Bytes payload);
  BulkLane* lane_of(Session& session, PeerId peer);
  void bind_part(Session& session, BulkLane& lane, const Part& part);
  void complete_lanes(Session& session);
  PartMap map_of(const BulkLane& lane, const PayloadLayout& payload) const;
  void gather(Session& session, BulkLane& lane, const Header& header, const Begin& begin, bool keep);
  std::optional<std::pair<Begin, BufferPtr>> gathered(Session& session, BulkLane& lane);
  void give_up_gathering(Session& session, FragmentId p, PayloadKind kind, const std::string& why);
  void serve_lanes(Session& session, std::string* silent);

  // syncer_uplink.cpp
  void on_begin(Session& session, BulkLane& lane, const Header& header, const Begin& begin);
  void on_miss(Session& session, const BulkLane& lane, FragmentId p);
  void on_chunk(Session& session, BulkLane& lane, const Header& header, Bytes payload);
  void on_transfer(Session& session, BulkLane& lane, Reassembly::Outcome outcome);
  void on_screen_done(const ScreenDone& done);
  bool eligible(const Session& session, FragmentId fragment, Clock clock) const;
  void pull_contributors();
  void pull_due();
  bool pull(Session& session, FragmentId fragment, std::uint64_t round, Clock clock);
  bool too_stale(const Version& base, FragmentId fragment) const;
  void refuse(const std::string& learner, Incarnation incarnation, const Begin& begin, DiscardReason reason,
              bool readopt, const std::string& text);
  void refuse_held(Account& account, FragmentId fragment, const std::string& text);
  void update_armed(std::optional<Clock> clock, Seconds step);
  Clock steps_between_syncs(const Session& session) const;

  // syncer_memory.cpp
  std::string memory_short(std::size_t learners) const;
  std::uint64_t largest_contribution() const;
  std::size_t quorum_lacks(FragmentId fragment) const;
  struct Promised {
    std::uint64_t quorums = 0, lacking = 0;  // bytes of the quorums of open rounds, and of what they lack
  };
  Promised promised() const;
  bool payload_memory_scarce() const;
  bool payload_fits(const Session& session, FragmentId fragment) const;
  bool round_fits(FragmentId fragment) const;
  std::uint64_t payload_bytes_held() const;
  // Every contribution held here: in mailboxes, being screened, being merged.
  template <class F>
  void for_each_held(F&& visit) const {
    for (const auto& [incarnation, account] : accounts) {
      for (const auto& held : account.mailbox) {
        if (held) visit(*held);
      }
    }
    for (const auto& [job, info] : jobs) {
      if (info.contribution.payload) visit(info.contribution);
    }
    for (const auto& [number, round] : rounds) {
      for (const auto& member : round.members) visit(member);
    }
  }

  // syncer_rounds.cpp
  Round& add_round(FragmentId fragment, Clock clock, TimePoint opened);
  void record_opening(const Round& round, const std::set<std::string>& pulled);
  std::size_t under_way() const;
  void open_rounds(std::optional<Clock> clock, Seconds step);
  void open_on_arrival();
  LogLevel pace_level() const;
  void say_pace();
  void count_missed(const Round& round);
  void check_rounds();
  void close_round(Round& round, const std::string& reason);
  void collect_again(Round& round);
  void on_merge_done(const MergeDone& done);
  RoundView view_of(const Round& round) const;
  std::vector<LearnerPace> pace() const;
  std::optional<Clock> clock_now() const;
  Seconds xi_step() const;
  Clock first_due_clock(FragmentId fragment) const;
  Clock next_due_clock(FragmentId fragment, Clock opened_at) const;

  // syncer_publish.cpp
  void on_persisted(const Persisted& persisted);
  void publish(FragmentId fragment, std::uint64_t round, Clock clock, Incarnation only = 0);
  void prune_retained(FragmentId fragment);
  std::uint64_t retained_bytes() const;
  void queue_image(Session& session, FragmentId fragment);
  void pump(Session& session);
  void send_held_back(Session& session, FragmentId fragment);
  void note_delivery(Session& session, std::uint64_t received);
  MergedTable merged_table(FragmentId fragment) const;

  std::string status_json() const;
  std::string waiting_text() const;

  // syncer_probe.cpp
  void on_probe(const FrameEvent& frame);
  std::string run_outline() const;
  std::string probe_disturbs() const;

  SyncerCoreOptions options;
  const Settings& settings;
  TimePoint now = 0.0;
  TimePoint started = -1.0;
  std::vector<SyncerAction> actions;

  std::uint64_t epoch = 0;
  std::optional<Layout> layout;
  Plan plan;
  struct Extent {
    std::size_t tensors = 0;
    std::uint32_t fragments = 0;
  };
  std::vector<Extent> extents;              // of layout and plan: as the run began, and after each growth
  std::vector<FragmentSlot> slots;          // by number in the plan; those of other shards stay empty
  std::map<SessionId, Session> sessions;
  std::unordered_map<PeerId, SessionId> peer_session;
  std::map<Incarnation, Account> accounts;
  std::set<Incarnation> superseded;         // accounts of lives with a successor, until nothing of theirs is held
  // Of all other incarnations: per fragment, merged_to. Their number grows with every kill, so a row is small.
  std::map<Incarnation, std::vector<std::uint64_t>> settled;
  std::map<Incarnation, Life> past;         // of those of them that said HELLO here; a merged table names the others
  std::map<PeerId, PendingHello> pending_hellos;
  ProbeTurns probes;
  std::map<std::uint64_t, Round> rounds;
  std::unordered_map<JobId, JobInfo> jobs;
  JobId next_job = 1;
  std::uint64_t next_round = 1;
  std::uint64_t rounds_merged = 0;
  std::optional<TimePoint> elect_at;        // wait for more holders until then
  Ema xi_quorum{0.3}, xi_sync{0.3}, round_s{0.3}, due_gap{0.2};
  std::map<FragmentId, TimePoint> undelivered;  // published, not yet at any learner: closed_at
  std::optional<TimePoint> shutdown_at;
  bool stopped = false;
  Reminder stuck;  // that nothing can be merged
  bool same_data_warned = false;
  bool slow_warned = false;                 // syncs have become rarer than sync_every asks for
  std::vector<SessionId> dead;              // ended during this handle(); erased at its end
};

}  // namespace diloco
