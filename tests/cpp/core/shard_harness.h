// Several syncer shards and learners of all of them, as bare cores in one process: a virtual clock, messages that take a
// fixed time, connections that end with either side. Learners are arrays that walk towards a target.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "diloco/core/learner_core.h"
#include "diloco/core/syncer_core.h"
#include "diloco/learner/mover.h"
#include "learner/array_store.h"

namespace diloco::test {

struct Merged {
  std::uint32_t shard = 0;
  FragmentId fragment = 0;
  Version version;
  TimePoint at = 0.0;
  std::uint64_t lost_in = 0;  // 0, or the life of its shard that went on without it
  struct Member {
    std::string learner;
    std::uint64_t incarnation = 0, from = 0, to = 0;
  };
  std::vector<Member> members;
};

class ShardHarness {
 public:
  static constexpr Seconds kDelay = 0.01, kStep = 1.0;
  static constexpr std::uint64_t kTokens = 10;

  ShardHarness(Settings given, std::uint32_t shards, std::size_t learners, std::uint64_t seed = 7)
      : settings(std::move(given)), shards_(shards), learners_(learners), random_(seed) {
    for (int i = 0; i < 6; ++i) shapes.push_back({"layer." + std::to_string(i), {4 + i, 5}});
  }

  // Before the first run_until(): what a shard or learner is told otherwise than by the defaults here.
  std::function<void(std::uint32_t shard, SyncerCoreOptions& options)> change_shard;
  std::function<void(std::size_t learner, LearnerCoreOptions& options)> change_learner;
  // What happens to a frame on its way; to_syncer says in which direction.
  std::function<void(bool to_syncer, std::uint32_t shard, Header& header, std::string& body)> tamper;
  std::vector<testing::NamedShape> shapes;
  Settings settings;

  void start() {
    for (std::uint32_t s = 0; s < shards_.size(); ++s) start_shard(s);
    for (std::size_t i = 0; i < learners_.size(); ++i) start_learner(i);
  }

  void run_until(TimePoint t) {
    while (!queue_.empty() && queue_.top().time <= t) {
      const Later next = queue_.top();
      queue_.pop();
      now_ = next.time;
      next.what();
    }
    now_ = t;
  }

  void start_shard(std::uint32_t s) {
    SyncerCoreOptions options;
    options.settings = settings;
    options.shard = s;
    options.shards = static_cast<std::uint32_t>(shards_.size());
    options.random = [this] { return random_(); };
    if (change_shard) change_shard(s, options);
    shards_[s].core = std::make_unique<SyncerCore>(std::move(options));
    ++shards_[s].life;
    feed_shard(s, Tick{});
  }

  void kill_shard(std::uint32_t s) {
    shards_[s].core.reset();
    for (auto& [peer, line] : lines_) {
      if (line.shard == s) cut(peer, false, true);
    }
  }

  void start_learner(std::size_t i) {
    Node& node = learners_[i];
    ++node.life;
    node.incarnation = random_() | 1;
    node.holding = false;
    auto named = shapes;
    if (i % 2 == 1) std::reverse(named.begin(), named.end());  // registered in another order
    node.store = std::make_shared<testing::ArrayStore>(named);
    node.mover = std::make_unique<Mover>(node.store);
    LearnerCoreOptions options;
    options.learner_id = "learner-" + std::to_string(i);
    options.incarnation = node.incarnation;
    options.layout = node.store->layout();
    options.endpoint_text = "harness";
    options.shards = static_cast<std::uint32_t>(shards_.size());
    options.random = [this] { return random_(); };
    options.read_anchor = [&node](FragmentId p, std::uint64_t offset, std::span<std::byte> out) {
      node.mover->read_anchor(node.core->layout(), node.core->payload(p, PayloadKind::kAnchor), offset, out);
    };
    if (change_learner) change_learner(i, options);
    node.core = std::make_unique<LearnerCore>(std::move(options));
    feed_learner(i, Tick{});
    at(now_ + kStep * (1.0 + 0.1 * static_cast<double>(i)), [this, i, life = node.life] { step(i, life); });
  }

  void kill_learner(std::size_t i) {
    learners_[i].core.reset();
    ++learners_[i].life;
    for (auto& [peer, line] : lines_) {
      if (line.learner == i) cut(peer, true, false);
    }
  }

  // Between two boundaries: false if it is in one.
  bool grow(std::size_t i, const std::vector<testing::NamedShape>& added) {
    Node& node = learners_[i];
    if (node.holding) return false;
    node.store->append(added);
    const auto known = static_cast<std::ptrdiff_t>(node.mover->grow());
    const auto& tensors = node.store->layout().tensors;
    feed_learner(i, Grow{{tensors.begin() + known, tensors.end()}});
    return true;
  }

  void feed_learner(std::size_t i, const LearnerEvent& event) {
    Node& node = learners_[i];
    if (!node.core) return;
    bool staged = false;
    for (auto& action : node.core->handle(event, now_)) staged = run(i, action) || staged;
    if (staged && std::holds_alternative<Recheck>(event)) feed_learner(i, StagesDone{});
    const TimePoint deadline = node.core->next_deadline();
    if (deadline < 1e200 && deadline != node.wake) {
      node.wake = deadline;
      at(deadline, [this, i, life = node.life] {
        if (life == learners_[i].life) feed_learner(i, Tick{});
      });
    }
    const bool outside = std::holds_alternative<ChannelFrame>(event) || std::holds_alternative<Tick>(event);
    if (node.holding && outside) {
      feed_learner(i, Recheck{});
      finish_boundary(i);
    }
  }

  SyncerCore& shard(std::uint32_t s) { return *shards_[s].core; }
  LearnerCore& learner(std::size_t i) { return *learners_[i].core; }
  bool held(std::size_t i) const { return learners_[i].holding; }
  const std::vector<Merged>& merges() const { return merges_; }
  const std::vector<std::string>& log() const { return log_; }
  // Rejected and GaveUp, as "learner-0: text".
  const std::vector<std::string>& ends() const { return ends_; }
  bool closed(std::size_t i) const { return learners_[i].closed; }
  bool shard_lives(std::uint32_t s) const { return shards_[s].core != nullptr; }
  bool learner_lives(std::size_t i) const { return learners_[i].core != nullptr; }
  std::size_t shards() const { return shards_.size(); }
  std::size_t learners() const { return learners_.size(); }
  nlohmann::json status(std::uint32_t s) { return nlohmann::json::parse(shard(s).status_json(now_)); }

  std::size_t merged_since(TimePoint since, FragmentId fragment, const std::string& learner = {}) const {
    std::size_t count = 0;
    for (const auto& merge : merges_) {
      if (merge.fragment != fragment || merge.at < since) continue;
      for (const auto& member : merge.members) count += learner.empty() || member.learner == learner;
    }
    return count;
  }
  std::size_t lines_with(const std::string& text) const {
    return static_cast<std::size_t>(std::count_if(log_.begin(), log_.end(), [&](const std::string& line) {
      return line.find(text) != std::string::npos;
    }));
  }
  // Every merge by the fragment's own shard, and no token twice.
  void expect_sound(const Plan& plan) const {
    auto counted = discarded_;
    for (const auto& merge : merges_) {
      EXPECT_EQ(plan.fragments.at(merge.fragment).shard, merge.shard) << "fragment " << merge.fragment;
      if (merge.lost_in != 0) continue;
      for (const auto& member : merge.members) {
        counted[{member.incarnation, merge.fragment}].push_back({member.from, member.to});
      }
    }
    for (auto& [key, spans] : counted) {
      std::sort(spans.begin(), spans.end());
      std::uint64_t end = 0;
      for (const auto& [from, to] : spans) {
        EXPECT_GE(from, end) << "fragment " << key.second << ": tokens counted twice";
        end = to;
      }
    }
  }

 private:
  struct Later {
    TimePoint time;
    std::uint64_t order;
    std::function<void()> what;
    bool operator>(const Later& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };
  struct Shard {
    std::unique_ptr<SyncerCore> core;
    std::uint64_t life = 0;
    TimePoint wake = -1.0;
  };
  struct Node {
    std::shared_ptr<testing::ArrayStore> store;
    std::unique_ptr<Mover> mover;
    std::unique_ptr<LearnerCore> core;
    std::uint64_t life = 0;
    Incarnation incarnation = 0;
    bool holding = false, closed = false;
    TimePoint wake = -1.0;
  };
  struct Line {  // a connection
    std::size_t learner = 0;
    std::uint32_t shard = 0;
    Channel channel = Channel::kControl;
    bool to_syncer = true, to_learner = true;  // still delivers
  };

  void at(TimePoint time, std::function<void()> what) {
    queue_.push({std::max(time, now_), order_++, std::move(what)});
  }

  // ---- shards ----
  void feed_shard(std::uint32_t s, const SyncerEvent& event) {
    Shard& shard = shards_[s];
    if (!shard.core) return;
    for (auto& action : shard.core->handle(event, now_)) run(s, action);
    const TimePoint deadline = shard.core->next_deadline();
    if (deadline < 1e200 && deadline != shard.wake) {
      shard.wake = deadline;
      feed_later(s, deadline, Tick{});
    }
  }
  void feed_later(std::uint32_t s, TimePoint time, SyncerEvent event) {
    at(time, [this, s, life = shards_[s].life, event = std::move(event)] {
      if (life == shards_[s].life) feed_shard(s, event);
    });
  }
  void run(std::uint32_t s, SyncerAction& action) {
    if (auto* send = std::get_if<SendTo>(&action)) down(send->peer, send->frame);
    if (auto* gone = std::get_if<CutPeer>(&action)) cut(gone->peer, false, true);
    if (auto* job = std::get_if<RunScreen>(&action)) {
      feed_later(s, now_, ScreenDone{job->job, screen(job->layout, job->payload->data())});
    }
    if (auto* job = std::get_if<RunInit>(&action)) feed_later(s, now_, InitDone{job->job, run_init(job->init)});
    if (auto* job = std::get_if<RunMerge>(&action)) feed_later(s, now_, MergeDone{job->job, run_merge(job->merge)});
    if (auto* state = std::get_if<Persist>(&action)) {
      feed_later(s, now_, Persisted{state->fragment, state->state->version});
    }
    if (auto* line = std::get_if<Log>(&action)) log_.push_back("shard " + std::to_string(s) + ": " + line->text);
    if (auto* record = std::get_if<Record>(&action)) on_record(s, nlohmann::json::parse(record->line));
  }
  void on_record(std::uint32_t s, const nlohmann::json& line) {
    if (line["event"] == "merge") {
      Merged merge{s, line["fragment"], {line["version"][0], line["version"][1]}, now_, 0, {}};
      for (const auto& member : line["members"]) {
        merge.members.push_back({member["learner"], std::stoull(member["incarnation"].get<std::string>(), nullptr, 16),
                                 member["from"], member["to"]});
      }
      merges_.push_back(std::move(merge));
    } else if (line["event"] == "recover") {
      const Version from{line["from_version"][0], line["from_version"][1]};
      const std::uint64_t life = shards_[s].life;
      for (auto& merge : merges_) {
        if (merge.fragment != line["fragment"]) continue;
        if (merge.lost_in == life) merge.lost_in = 0;
        if (merge.version > from && merge.lost_in == 0) merge.lost_in = life;
      }
    } else if (line["event"] == "init" && line["from"] != "recovered") {  // void, unless this life recovers them yet
      for (auto& merge : merges_) {
        if (merge.fragment == line["fragment"] && merge.lost_in == 0) merge.lost_in = shards_[s].life;
      }
    }
  }

  // ---- learners ----
  void step(std::size_t i, std::uint64_t life) {
    Node& node = learners_[i];
    if (life != node.life || !node.core || node.closed) return;
    for (auto& tensor : node.store->values) {
      for (auto& value : tensor) value += 0.1f * (static_cast<float>(1 + i) - value);
    }
    feed_learner(i, Boundary{kTokens});
    feed_learner(i, StagesDone{});
    finish_boundary(i);
  }
  void finish_boundary(std::size_t i) {
    Node& node = learners_[i];
    node.holding = node.core->holding();
    if (node.holding) return;
    feed_learner(i, AdoptsDone{});
    at(now_ + kStep * (1.0 + 0.1 * static_cast<double>(i)), [this, i, life = node.life] { step(i, life); });
  }
  std::vector<Piece> pieces(const Node& node, FragmentId p, PayloadKind kind) const {
    std::vector<Piece> out;
    node.mover->append_pieces(node.core->layout(), node.core->payload(p, kind), &out);
    return out;
  }
  // True for a Stage.
  bool run(std::size_t i, LearnerAction& action) {
    Node& node = learners_[i];
    const std::string id = "learner-" + std::to_string(i) + ": ";
    if (auto* connect = std::get_if<ConnectChannel>(&action)) {
      at(now_ + kDelay, [this, i, life = node.life, to = *connect] {
        if (life == learners_[i].life) connected(i, to.channel, to.shard);
      });
    }
    if (auto* drop = std::get_if<DropChannel>(&action)) {
      if (const PeerId peer = line_of(i, drop->channel, drop->shard)) cut(peer, true, false);
    }
    if (auto* send = std::get_if<SendOn>(&action)) {
      if (const PeerId peer = line_of(i, send->channel, send->shard)) up(peer, send->frame);
    }
    if (auto* stage = std::get_if<Stage>(&action)) {
      node.mover->stage(pieces(node, stage->fragment, PayloadKind::kContribution), stage->out->data());
      return true;
    }
    if (auto* adopt = std::get_if<AdoptFragment>(&action)) {
      node.mover->adopt(*adopt, pieces(node, adopt->fragment, PayloadKind::kImage),
                        pieces(node, adopt->fragment, PayloadKind::kContribution));
    }
    if (auto* discard = std::get_if<Discard>(&action); discard && discard->reason != DiscardReason::kInFlight) {
      discarded_[{node.incarnation, discard->fragment}].push_back({discard->from, discard->to});
    }
    if (auto* line = std::get_if<Log>(&action)) log_.push_back(id + line->text);
    if (auto* rejected = std::get_if<Rejected>(&action)) ends_.push_back(id + rejected->reject.text);
    if (auto* gave_up = std::get_if<GaveUp>(&action)) ends_.push_back(id + gave_up->text);
    if (std::holds_alternative<Closed>(action)) node.closed = true;
    return false;
  }

  // ---- network ----
  PeerId line_of(std::size_t i, Channel channel, std::uint32_t s) const {
    for (const auto& [peer, line] : lines_) {
      if (line.learner == i && line.channel == channel && line.shard == s && line.to_syncer) return peer;
    }
    return 0;
  }
  void connected(std::size_t i, Channel channel, std::uint32_t s) {
    if (!shards_[s].core) return feed_learner(i, ChannelDown{channel, "connection refused", s});
    lines_[next_peer_++] = {i, s, channel};
    feed_learner(i, ChannelUp{channel, s});
  }
  void cut(PeerId peer, bool by_learner, bool by_syncer) {
    Line& line = lines_.at(peer);
    if (!line.to_syncer) return;
    line.to_syncer = false;
    if (by_learner) {
      line.to_learner = false;
      feed_later(line.shard, now_ + kDelay, PeerGoneEvent{peer, "closed"});
    }
    if (by_syncer) {  // after what was sent before
      at(now_ + kDelay, [this, peer, life = learners_[line.learner].life] {
        Line& ended = lines_.at(peer);
        if (!std::exchange(ended.to_learner, false) || life != learners_[ended.learner].life) return;
        feed_learner(ended.learner, ChannelDown{ended.channel, "closed", ended.shard});
      });
    }
  }
  static std::string bytes_of(const OutFrame& frame) {
    if (!frame.body.empty()) return frame.body;
    const auto bytes = frame.slice.bytes();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  void up(PeerId peer, const OutFrame& frame) {
    const std::uint32_t s = lines_.at(peer).shard;
    at(now_ + kDelay, [this, peer, s, header = frame.header, body = bytes_of(frame), life = shards_[s].life]() mutable {
      if (life != shards_[s].life || !lines_.at(peer).to_syncer) return;
      if (tamper) tamper(true, s, header, body);
      feed_shard(s, FrameEvent{peer, header, std::as_bytes(std::span(body))});
    });
  }
  void down(PeerId peer, const OutFrame& frame) {
    const auto it = lines_.find(peer);
    if (it == lines_.end() || !it->second.to_syncer) return;
    at(now_ + kDelay, [this, peer, header = frame.header, body = bytes_of(frame),
                       life = learners_[it->second.learner].life]() mutable {
      const Line line = lines_.at(peer);
      if (life != learners_[line.learner].life || !line.to_learner) return;
      if (tamper) tamper(false, line.shard, header, body);
      feed_learner(line.learner, ChannelFrame{line.channel, header, std::as_bytes(std::span(body)), line.shard});
    });
  }

  std::vector<Shard> shards_;
  std::vector<Node> learners_;
  std::mt19937_64 random_;
  TimePoint now_ = 0.0;
  std::uint64_t order_ = 0;
  std::priority_queue<Later, std::vector<Later>, std::greater<>> queue_;
  std::map<PeerId, Line> lines_;
  PeerId next_peer_ = 1;
  std::vector<Merged> merges_;
  std::map<std::pair<std::uint64_t, FragmentId>, std::vector<std::array<std::uint64_t, 2>>> discarded_;
  std::vector<std::string> log_, ends_;
};

inline Settings short_run() {
  Settings settings;
  settings.sync_every = 6;
  settings.num_fragments = 6;
  return settings;
}

}  // namespace diloco::test
