// The learner core's state, private to core/learner_*.cpp:
//   learner_core.cpp      dispatch, time, statistics, close
//   learner_links.cpp     one connection per shard: HELLO and WELCOME, its loss, frames in
//   learner_transfers.cpp what the frames ask for: uploads, arriving images
//   learner_growth.cpp    tensors that are added to the model while it trains
//   learner_island.cpp    leader of an island: orders for all ranks, and carrying out what was planned
//   learner_versions.cpp  what is said when a syncer is not where it was
//   learner_boundary.cpp  count, stage, adopt, report; the token accounts
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>

#include "diloco/core/learner_core.h"
#include "diloco/core/liveness.h"
#include "diloco/core/outbox.h"
#include "diloco/core/reassembly.h"
#include "diloco/core/reminder.h"

namespace diloco {

// A copy of anchor - local, encoded for the wire, with the interval of tokens it stands for.
struct Staged {
  BufferPtr bytes;
  std::uint64_t from = 0, to = 0, steps = 0;
  Clock clock = 0;
  Version base;
};

struct SentImage {
  Staged staged;
  std::uint64_t steps_at_to = 0;  // the learner's step count at `to`
  std::uint64_t tag = 0;          // of the transfer
  SessionId session = 0;          // in which it was sent
  std::uint64_t round = 0;        // of the PULL it answers
  bool gone = false;              // has left completely
};

struct ReadyImage {
  Version version;
  Clock clock = 0;
  BufferPtr bytes;
  MergedTable merged;
};

// How a version will be adopted.
struct AdoptPlan {
  AdoptFormula formula = AdoptFormula::kRebase;
  std::optional<SentImage> merged;    // the copy whose work it contains
  std::optional<DiscardReason> drop;  // the local work is given up
  bool reset = false;                 // with the inner optimizer's state
  bool back = false;                  // to the anchor; no version
};

// One fragment as this learner sees it. Tokens [0, from) are settled: merged or discarded, except the limbo interval:
// sent before an overwriting adoption threw it away locally, still waiting to be merged by the syncer.
struct LearnerFragment {
  Version adopted;
  MergedTable merged_table;  // contained in the adopted version
  std::uint64_t merged_to = 0;
  std::uint64_t from = 0, from_steps = 0;
  std::uint64_t limbo_from = 0, limbo_to = 0;  // empty if equal
  std::optional<Staged> staged, staging;
  std::vector<BufferPtr> pool;
  std::vector<SentImage> sent;
  std::optional<Pull> pull;      // waiting for a staged copy
  std::optional<ReadyImage> ready;
  // Island: the version reported to the other ranks, and how it will be adopted once all have it. Neither changes between
  // orders() and the plan that contains them.
  std::optional<ReadyImage> pending;
  std::optional<AdoptPlan> ordered;
  std::uint64_t staged_step = 0;  // step at which staging was last ordered
  bool armed = false;
  bool adopting = false;
  bool anchor_wanted = false;    // asked for while it could not be sent
  bool anchor_sending = false;
  std::optional<Clock> expecting;  // lockstep: clock of the round whose weights it will wait for, tau steps later
  std::optional<DiscardReason> readopt;

  bool in_limbo() const { return limbo_from < limbo_to; }
  // Where the newest copy that stands for the work since `start` ends; `start` if none was sent.
  std::uint64_t newest_sent_from(std::uint64_t start) const {
    std::uint64_t end = start;
    for (const auto& image : sent) {
      if (image.staged.from == start) end = std::max(end, image.staged.to);
    }
    return end;
  }
};

// The connection to one shard of the syncer, over all sessions.
struct ShardLink {
  enum class State { kDown, kConnecting, kGreeting, kLaning, kUp };
  std::uint32_t shard = 0;
  State state = State::kDown;
  TimePoint retry_at = 0.0;          // when kDown
  TimePoint attempt_deadline = 0.0;  // when neither down nor up
  TimePoint away_since = 0.0;        // when not up
  unsigned failures = 0;
  bool told_away = false;
  bool ever_joined = false;
  std::uint64_t reconnects = 0;

  SessionId session = 0;             // 0: not WELCOMEd since the last loss
  std::uint32_t fragments = 0;       // of the last WELCOME's plan; a syncer without state may have fewer than are known here
  std::uint64_t lane_token = 0;
  std::uint64_t epoch = 0;           // of this shard, the highest seen
  std::uint64_t session_epoch = 0;   // of the last WELCOME
  Liveness liveness;
  Outbox uplink;
  Reassembly downlink;
  ReceiverCredit downlink_credit;
  std::vector<Adopted> unreported;   // of the shard's fragments
  std::map<std::string, std::uint64_t> discarded;  // of them: reason -> tokens

  bool up() const { return state == State::kUp; }
  bool down() const { return state == State::kDown; }
  bool welcomed() const { return up() || state == State::kLaning; }
};

struct LearnerCore::Impl {
  explicit Impl(LearnerCoreOptions options);
  std::vector<LearnerAction> handle(const LearnerEvent& event, TimePoint now);
  TimePoint next_deadline() const;
  void beat(ShardLink& link);
  void log(LogLevel level, std::string text) { actions.push_back(Log{level, std::move(text)}); }

  // learner_versions.cpp
  void say_versions(const ShardLink& link, const Welcome& welcome);

  // learner_links.cpp
  ShardLink& link_of(FragmentId fragment) { return links[plan->fragments[fragment].shard]; }
  const ShardLink& link_of(FragmentId fragment) const { return links[plan->fragments[fragment].shard]; }
  bool owns(const ShardLink& link, FragmentId fragment) const;    // false for numbers not in the plan
  bool serves(const ShardLink& link, FragmentId fragment) const;  // and knows of it in this session
  std::string name_of(const ShardLink& link) const;
  void on_channel_up(ShardLink& link, Channel channel);
  void lose(ShardLink& link, const std::string& why, bool at_once);
  void refuse(Reject reject);
  void drop(ShardLink& link);
  void leave();
  void on_frame(const ChannelFrame& frame);
  void on_message(ShardLink& link, const ChannelFrame& frame);
  void broken(ShardLink& link, MessageType type, const std::string& text);
  void on_welcome(ShardLink& link, const Header& header, Bytes payload);
  std::string welcome_difference(const ShardLink& link, const Welcome& welcome, const Settings& theirs) const;
  void send(ShardLink& link, Channel channel, MessageType type, std::string body, FragmentId fragment = 0,
            std::uint64_t offset = 0, std::uint64_t total = 0, std::uint64_t transfer = 0);
  void say_hello(ShardLink& link);
  Header header_template(const ShardLink& link) const;

  // learner_transfers.cpp
  void on_pull(ShardLink& link, const Header& header, const Pull& pull);
  void on_begin(ShardLink& link, const Header& header, const Begin& begin);
  void on_transfer(ShardLink& link, Reassembly::Outcome outcome);
  void on_verdict(const Verdict& verdict);
  void answer(FragmentId fragment);
  void miss_if_in_limbo(FragmentId fragment);
  void send_anchor(FragmentId fragment);
  void pump(ShardLink& link);

  // learner_core.cpp
  void on_time();
  void on_time(ShardLink& link);
  void leave_politely();
  bool give_up();
  const char* state() const;

  // learner_boundary.cpp
  void on_boundary(const Boundary& boundary);
  bool wants_staging(FragmentId fragment) const;
  void stage(FragmentId fragment);
  void on_stages_done();
  void on_recheck();
  void adopt_ready();
  AdoptPlan adoption_of(FragmentId fragment, const ReadyImage& image) const;
  void adopt(FragmentId fragment);
  void adopt(FragmentId fragment, const ReadyImage& image, const AdoptPlan& how);
  void readopt(FragmentId fragment);
  void on_adopts_done();
  void report(ShardLink& link);
  bool stages_on_schedule(FragmentId fragment) const;
  bool adopts_on_schedule(const LearnerFragment& fragment) const;
  bool wants_adoption(FragmentId fragment) const;
  bool must_hold(FragmentId fragment) const;
  std::string holding_for() const;
  void say_holding();
  void discard(FragmentId fragment, std::uint64_t from, std::uint64_t to, DiscardReason reason);
  void settle_limbo(FragmentId fragment, std::uint64_t merged_to);
  void shrink_limbo(FragmentId fragment, DiscardReason reason);
  void drop_local_work(FragmentId fragment, DiscardReason reason);
  BufferPtr staging_buffer(LearnerFragment& state, FragmentId fragment);

  // learner_growth.cpp
  void on_grow(const Grow& grow);
  void greet_again(ShardLink& link);
  Layout own_part_of(const Welcome& welcome) const;
  void take_plan(const Welcome& welcome);
  void say_alone(const Welcome& welcome);
  void say_layout(Hello& hello) const;
  bool has_grown() const { return !growths.empty() || !run_grown_from.empty(); }

  // learner_island.cpp
  bool island() const { return options.island.has_value(); }
  void on_island_planned(const IslandPlanned& event);
  void adopt_planned();
  IslandOrders orders(bool plan_known);
  IslandReport report() const;
  void make_payloads();

  LearnerStats stats() const;

  LearnerCoreOptions options;
  struct Growth {
    std::uint32_t from = 0;             // tensors the layout had
    std::uint64_t tokens = 0, steps = 0;  // so far
  };
  std::vector<Growth> growths;
  std::vector<std::uint32_t> run_grown_from;  // sizes of `layout` before each growth of the run
  TimePoint now = 0.0;
  bool started = false;  // `now` has been told
  std::vector<LearnerAction> actions;

  std::vector<ShardLink> links;  // by shard
  std::optional<Reject> rejected;
  bool gave_up = false;

  // From the first WELCOME.
  std::optional<Plan> plan;
  Layout layout;
  Settings settings;
  PayloadLayouts payloads;
  std::vector<LearnerFragment> fragments;

  std::uint64_t next_tag = 1;

  // Leader of an island.
  std::shared_ptr<const IslandPlan> planned;  // being carried out
  std::string welcome_body;

  // Progress.
  std::uint64_t steps = 0, tokens = 0;
  Clock clock = 0;
  double lr = 0.0;
  Clock run_clock = 0;
  std::uint64_t run_tokens = 0;
  bool holding = false;
  Reminder stands_still;  // training, in lockstep
  std::optional<TimePoint> closing;
  bool said_goodbye = false;
  bool closed = false;
  std::uint64_t adoptions = 0, contributions_sent = 0, contributions_merged = 0, tokens_merged = 0;
};

}  // namespace diloco
