#include "diloco/sim/cluster.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <random>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"

namespace diloco::sim {

namespace {

struct Connection {
  std::size_t learner = 0;
  Incarnation incarnation = 0;
  Channel channel = Channel::kControl;
  PeerId peer = 0;
  bool open = true;          // frames from the learner count
  bool readable = true;      // frames to the learner still arrive
  TimePoint up_free = 0.0, down_free = 0.0;  // bandwidth: when the line is free again
};

struct Node {
  LearnerSpec spec;
  std::unique_ptr<LearnerCore> core;
  Incarnation incarnation = 0;
  std::uint64_t life = 0;
  Tensors local, anchor;
  std::map<Channel, PeerId> peers;
  bool frozen = false, cut_off = false, poisoned = false;
  bool holding = false;
  TimePoint hold_since = 0.0;
  Seconds longest_hold = 0.0;
  TimePoint wake_at = -1.0;
  std::uint64_t steps = 0;
  std::vector<std::function<void()>> held_frames;  // while frozen or partitioned
};

struct Account {
  std::string learner;
  std::uint64_t tokens = 0;
  bool alive = true;
  std::map<FragmentId, std::vector<std::array<std::uint64_t, 2>>> discarded, in_flight;
};

bool covered(std::vector<std::array<std::uint64_t, 2>> spans, std::uint64_t from, std::uint64_t to) {
  std::sort(spans.begin(), spans.end());
  for (const auto& [begin, end] : spans) {
    if (begin <= from) from = std::max(from, end);
  }
  return from >= to;
}

}  // namespace

struct Cluster::Impl {
  explicit Impl(ClusterOptions given) : options(std::move(given)), random(options.seed) {
    nodes.resize(options.learners.size());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      nodes[i].spec = options.learners[i];
      at(options.learners[i].start_s, [this, i] { start_learner(i); });
    }
    start_syncer();
  }

  struct Later {
    TimePoint time;
    std::uint64_t order;
    std::function<void()> what;
    bool operator>(const Later& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };

  void at(TimePoint time, std::function<void()> what) { queue.push({std::max(time, now), order++, std::move(what)}); }

  void run_until(TimePoint t) {
    while (!queue.empty() && queue.top().time <= t) {
      const Later next = queue.top();
      queue.pop();
      now = next.time;
      next.what();
    }
    now = std::max(now, t);
  }

  // ---- syncer ----
  void start_syncer() {
    SyncerCoreOptions core;
    core.settings = options.settings;
    core.payload_memory_bytes = options.payload_memory_bytes;
    core.epoch_floor = epoch_floor;
    core.random = [this] { return random(); };
    syncer = std::make_unique<SyncerCore>(std::move(core));
    ++syncer_life;
    stopped = false;
    feed_syncer(Tick{});
  }

  void kill_syncer() {
    syncer.reset();
    for (auto& [peer, connection] : connections) close_connection(peer, false, true);
  }

  void feed_syncer(const SyncerEvent& event) {
    if (!syncer) return;
    auto actions = syncer->handle(event, now);
    for (auto& action : actions) run(action);
    if (!syncer) return;
    peak_payload = std::max(peak_payload, syncer->payload_bytes_held());
    const TimePoint deadline = syncer->next_deadline();
    if (deadline < 1e200 && deadline != syncer_wake) {
      syncer_wake = deadline;
      at(deadline, [this, life = syncer_life] {
        if (life == syncer_life) feed_syncer(Tick{});
      });
    }
  }

  void run(SyncerAction& action) {
    const auto life = syncer_life;
    const auto later = [this, life](Seconds delay, SyncerEvent event) {
      at(now + delay, [this, life, event = std::move(event)] {
        if (life == syncer_life) feed_syncer(event);
      });
    };
    if (auto* send = std::get_if<SendTo>(&action)) {
      send_down(send->peer, std::move(send->frame));
    } else if (auto* cut = std::get_if<CutPeer>(&action)) {
      close_connection(cut->peer, false, true, false);
    } else if (auto* screen_job = std::get_if<RunScreen>(&action)) {
      later(1e-4, ScreenDone{screen_job->job, screen(screen_job->layout, screen_job->payload->data())});
    } else if (auto* init = std::get_if<RunInit>(&action)) {
      later(1e-4, InitDone{init->job, run_init(init->init)});
    } else if (auto* merge = std::get_if<RunMerge>(&action)) {
      later(options.merge_s, MergeDone{merge->job, run_merge(merge->merge)});
    } else if (auto* persist = std::get_if<Persist>(&action)) {
      later(0.0, Persisted{persist->fragment, persist->state->version});
    } else if (auto* text = std::get_if<Log>(&action)) {
      logs.push_back(text->text);
    } else if (auto* record = std::get_if<Record>(&action)) {
      on_record(record->line);
    } else if (std::holds_alternative<Stopped>(action)) {
      stopped = true;
    }
  }

  void on_record(const std::string& line) {
    records.push_back(line);
    const auto json = nlohmann::json::parse(line);
    if (json["event"] == "epoch") epoch_floor = json["epoch"];
    if (json["event"] == "merge") {
      MergeRecord merge;
      merge.fragment = json["fragment"];
      merge.version = {json["version"][0], json["version"][1]};
      merge.at = now;
      merge.syncer_life = syncer_life;
      merge.reason = json["reason"];
      for (const auto& member : json["members"]) {
        merge.members.push_back({member["learner"], std::stoull(member["incarnation"].get<std::string>(), nullptr, 16),
                                 member["from"], member["to"], member["weight"]});
      }
      merges.push_back(std::move(merge));
    } else if (json["event"] == "init" && json["from"] != "recovered") {
      // Weights from a fresh learner: earlier merges are void, unless a recovery in the same life brings them back.
      for (auto& merge : merges) {
        if (merge.fragment == json["fragment"] && merge.lost_in_life == 0) merge.lost_in_life = syncer_life;
      }
    } else if (json["event"] == "recover") {
      const Version from{json["from_version"][0], json["from_version"][1]};
      for (auto& merge : merges) {
        if (merge.fragment != json["fragment"]) continue;
        if (merge.lost_in_life == syncer_life) merge.lost_in_life = 0;
        if (merge.version > from && merge.lost_in_life == 0) merge.lost_in_life = syncer_life;
      }
    }
  }

  // ---- learners ----
  void start_learner(std::size_t i) {
    Node& node = nodes[i];
    node.incarnation = random() | 1;
    ++node.life;
    node.steps = 0;
    node.holding = node.frozen = false;
    node.held_frames.clear();
    node.wake_at = -1.0;
    node.local.clear();
    for (const auto& tensor : options.layout.tensors) {
      std::vector<float> values(tensor.numel());
      for (auto& value : values) value = static_cast<float>(static_cast<double>(random() % 1000) / 1000.0 - 0.5);
      node.local.push_back(values);
    }
    if (options.training.begin) options.training.begin(i, node.local);
    node.anchor = node.local;
    LearnerCoreOptions core;
    core.learner_id = node.spec.id;
    core.host = "sim";
    core.pid = i + 1;
    core.incarnation = node.incarnation;
    core.layout = options.layout;
    core.endpoint_text = "sim";
    core.random = [this] { return random(); };
    core.read_anchor = [this, i](FragmentId p, std::uint64_t offset, std::span<std::byte> out) {
      const PayloadLayout& layout = nodes[i].core->payload(p, PayloadKind::kAnchor);
      std::vector<std::byte> bytes(layout.bytes);
      for (const auto& segment : layout.segments) {
        encode(Codec::kF32, nodes[i].anchor[segment.tensor].data(), segment.numel, bytes.data() + segment.byte_offset);
      }
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
    };
    node.core = std::make_unique<LearnerCore>(std::move(core));
    accounts[node.incarnation] = {node.spec.id, 0, true, {}, {}};
    feed_learner(i, Tick{});
    at(now + step_time(node), [this, i, life = node.life] { step(i, life); });
  }

  Seconds step_time(const Node& node) {
    const double unit = static_cast<double>(random() % 10001) / 5000.0 - 1.0;
    return node.spec.step_s * (1.0 + node.spec.jitter * unit);
  }

  void step(std::size_t i, std::uint64_t life) {
    Node& node = nodes[i];
    if (life != node.life || !node.core) return;
    if (node.frozen) {
      node.held_frames.push_back([this, i, life] { step(i, life); });
      return;
    }
    const std::uint64_t tokens = train(i);
    ++node.steps;
    accounts[node.incarnation].tokens += tokens;
    feed_learner(i, Boundary{tokens});
    feed_learner(i, StagesDone{});
    finish_boundary(i);
  }

  std::uint64_t train(std::size_t i) {
    Node& node = nodes[i];
    std::uint64_t tokens = node.spec.tokens_per_step;
    if (options.training.step) tokens = options.training.step(i, node.local);
    else walk(node);
    if (std::exchange(node.poisoned, false)) {
      for (auto& tensor : node.local) std::fill(tensor.begin(), tensor.end(), std::numeric_limits<float>::quiet_NaN());
    }
    return tokens;
  }

  void walk(Node& node) {
    for (auto& tensor : node.local) {
      for (auto& value : tensor) {
        const double noise = static_cast<double>(random() % 1000) / 1000.0 - 0.5;
        value -= static_cast<float>(options.learning_rate * (value - node.spec.target + noise));
      }
    }
  }

  void finish_boundary(std::size_t i) {
    Node& node = nodes[i];
    if (node.core->holding()) {
      if (!node.holding) node.hold_since = now;
      node.holding = true;
      return;
    }
    if (node.holding) node.longest_hold = std::max(node.longest_hold, now - node.hold_since);
    node.holding = false;
    feed_learner(i, AdoptsDone{});
    at(now + step_time(node), [this, i, life = node.life] { step(i, life); });
  }

  void feed_learner(std::size_t i, const LearnerEvent& event) {
    Node& node = nodes[i];
    if (!node.core) return;
    auto actions = node.core->handle(event, now);
    bool staged = false;
    for (auto& action : actions) staged = run(i, action) || staged;
    if (staged && std::holds_alternative<Recheck>(event)) feed_learner(i, StagesDone{});
    if (!node.core) return;
    const TimePoint deadline = node.core->next_deadline();
    if (deadline < 1e200 && deadline != node.wake_at) {
      node.wake_at = deadline;
      at(deadline, [this, i, life = node.life] {
        if (life == nodes[i].life && !nodes[i].frozen) feed_learner(i, Tick{});
      });
    }
    const bool outside = std::holds_alternative<ChannelFrame>(event) || std::holds_alternative<Tick>(event);
    if (node.holding && outside) {
      feed_learner(i, Recheck{});
      finish_boundary(i);
    }
  }

  bool run(std::size_t i, LearnerAction& action) {
    Node& node = nodes[i];
    if (auto* connect = std::get_if<ConnectChannel>(&action)) {
      const Channel channel = connect->channel;
      at(now + options.delay_s, [this, i, channel, life = node.life] { on_connect(i, channel, life); });
    } else if (auto* drop = std::get_if<DropChannel>(&action)) {
      if (const auto it = node.peers.find(drop->channel); it != node.peers.end()) {
        close_connection(it->second, true, false);
      }
    } else if (auto* send = std::get_if<SendOn>(&action)) {
      if (const auto it = node.peers.find(send->channel); it != node.peers.end()) send_up(it->second, std::move(send->frame));
    } else if (auto* stage = std::get_if<Stage>(&action)) {
      for (const auto& segment : node.core->payload(stage->fragment, PayloadKind::kContribution).segments) {
        auto* out = stage->out->data() + segment.byte_offset;
        const auto* anchor = node.anchor[segment.tensor].data();
        const auto* local = node.local[segment.tensor].data();
        if (segment.codec == Codec::kBf16) kernels::fragment_diff_bf16(anchor, local, segment.numel, out);
        else kernels::fragment_diff_f32(anchor, local, segment.numel, out);
      }
      return true;
    } else if (auto* adopt = std::get_if<AdoptFragment>(&action)) {
      apply(node, *adopt);
    } else if (auto* discard = std::get_if<Discard>(&action)) {
      Account& account = accounts[node.incarnation];
      auto& list = discard->reason == DiscardReason::kInFlight ? account.in_flight : account.discarded;
      list[discard->fragment].push_back({discard->from, discard->to});
    } else if (auto* text = std::get_if<Log>(&action)) {
      logs.push_back(node.spec.id + ": " + text->text);
    } else if (auto* rejected = std::get_if<Rejected>(&action)) {
      logs.push_back(node.spec.id + ": rejected: " + rejected->reject.text);
    }
    return false;
  }

  void apply(Node& node, const AdoptFragment& adopt) {
    const auto& images = node.core->payload(adopt.fragment, PayloadKind::kImage).segments;
    const auto& sents = node.core->payload(adopt.fragment, PayloadKind::kContribution).segments;
    for (std::size_t s = 0; s < images.size(); ++s) {
      const auto tensor = images[s].tensor;
      const auto n = images[s].numel;
      std::vector<float> next(node.anchor[tensor]), sent(n);
      if (adopt.image) decode(images[s].codec, adopt.image->data() + images[s].byte_offset, n, next.data());
      if (adopt.sent) decode(sents[s].codec, adopt.sent->data() + sents[s].byte_offset, n, sent.data());
      float* anchor = node.anchor[tensor].data();
      float* local = node.local[tensor].data();
      switch (adopt.formula) {
        case AdoptFormula::kOverwrite: kernels::adopt_overwrite(next.data(), anchor, local, n); break;
        case AdoptFormula::kBlend: kernels::adopt_blend(next.data(), adopt.blend_alpha, anchor, local, n); break;
        case AdoptFormula::kRebase:
          kernels::adopt_rebase(next.data(), adopt.sent ? sent.data() : nullptr, anchor, local, n);
          break;
      }
    }
  }

  // ---- network ----
  void on_connect(std::size_t i, Channel channel, std::uint64_t life) {
    Node& node = nodes[i];
    if (life != node.life || !node.core) return;
    if (!syncer || stopped) {
      feed_learner(i, ChannelDown{channel, "connection refused"});
      return;
    }
    const PeerId peer = next_peer++;
    connections[peer] = {i, node.incarnation, channel, peer, true, true, now, now};
    node.peers[channel] = peer;
    feed_learner(i, ChannelUp{channel});
  }

  // By the syncer's cut what was sent before still arrives; by a reset or the learner nothing does.
  void close_connection(PeerId peer, bool tell_syncer, bool tell_learner, bool reset = true) {
    auto it = connections.find(peer);
    if (it == connections.end() || !it->second.open) return;
    Connection& connection = it->second;
    connection.open = false;
    if (reset || tell_syncer) connection.readable = false;
    Node& node = nodes[connection.learner];
    if (const auto at_node = node.peers.find(connection.channel); at_node != node.peers.end() && at_node->second == peer) {
      node.peers.erase(at_node);
    }
    if (tell_syncer) {
      at(now + options.delay_s, [this, peer, life = syncer_life] {
        if (life == syncer_life) feed_syncer(PeerGoneEvent{peer, "closed"});
      });
    }
    if (tell_learner) {
      const auto i = connection.learner;
      const auto channel = connection.channel;
      deliver(i, [this, i, channel, peer, life = node.life] {
        connections.at(peer).readable = false;
        if (life == nodes[i].life) feed_learner(i, ChannelDown{channel, "closed"});
      }, arrival(connection.down_free, 0));
    }
  }

  void deliver(std::size_t i, std::function<void()> what, TimePoint when) {
    at(when, [this, i, what = std::move(what)]() mutable {
      Node& node = nodes[i];
      if (node.frozen || node.cut_off) node.held_frames.push_back(std::move(what));
      else what();
    });
  }

  TimePoint arrival(TimePoint& free, std::size_t bytes) {
    if (options.bytes_per_s > 0.0) free = std::max(free, now) + static_cast<double>(bytes) / options.bytes_per_s;
    else free = std::max(free, now);
    return free + options.delay_s;
  }

  static std::vector<std::byte> payload_of(const OutFrame& frame) {
    if (!frame.body.empty()) {
      const auto* data = reinterpret_cast<const std::byte*>(frame.body.data());
      return {data, data + frame.body.size()};
    }
    const auto bytes = frame.slice.bytes();
    return {bytes.begin(), bytes.end()};
  }

  void send_up(PeerId peer, OutFrame frame) {
    Connection& connection = connections.at(peer);
    if (!connection.open) return;
    auto payload = payload_of(frame);
    const auto when = arrival(connection.up_free, payload.size() + kHeaderBytes);
    const auto i = connection.learner;
    auto what = [this, peer, header = frame.header, payload = std::move(payload), life = syncer_life] {
      if (life == syncer_life && connections.at(peer).open) feed_syncer(FrameEvent{peer, header, payload});
    };
    if (nodes[i].cut_off) nodes[i].held_frames.push_back(std::move(what));
    else at(when, std::move(what));
  }

  void send_down(PeerId peer, OutFrame frame) {
    const auto it = connections.find(peer);
    if (it == connections.end() || !it->second.open) return;
    Connection& connection = it->second;
    auto payload = payload_of(frame);
    const auto when = arrival(connection.down_free, payload.size() + kHeaderBytes);
    const auto i = connection.learner;
    deliver(i, [this, i, peer, header = frame.header, payload = std::move(payload), life = nodes[i].life] {
      if (life != nodes[i].life) return;
      const Connection& now_connection = connections.at(peer);
      if (now_connection.readable) feed_learner(i, ChannelFrame{now_connection.channel, header, payload});
    }, when);
  }

  void release(Node& node) {
    if (node.frozen || node.cut_off) return;
    auto held = std::exchange(node.held_frames, {});
    for (auto& what : held) at(now, std::move(what));
  }

  void kill_learner(std::size_t i) {
    Node& node = nodes[i];
    node.core.reset();
    ++node.life;
    accounts[node.incarnation].alive = false;
    const auto peers = node.peers;
    for (const auto& [channel, peer] : peers) close_connection(peer, true, false);
    node.held_frames.clear();
  }

  ClusterOptions options;
  std::mt19937_64 random;
  TimePoint now = 0.0;
  std::uint64_t order = 0;
  std::priority_queue<Later, std::vector<Later>, std::greater<>> queue;
  std::unique_ptr<SyncerCore> syncer;
  std::uint64_t syncer_life = 0;
  std::uint64_t epoch_floor = 0;  // as the event log on disk tells the next life
  TimePoint syncer_wake = -1.0;
  bool stopped = false;
  std::vector<Node> nodes;
  std::map<PeerId, Connection> connections;
  PeerId next_peer = 1;
  std::map<Incarnation, Account> accounts;
  std::vector<MergeRecord> merges;
  std::vector<std::string> logs, records;
  std::uint64_t peak_payload = 0;
};

Cluster::Cluster(ClusterOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Cluster::~Cluster() = default;
void Cluster::run_until(TimePoint t) { impl_->run_until(t); }
TimePoint Cluster::now() const { return impl_->now; }
void Cluster::kill_learner(std::size_t i) { impl_->kill_learner(i); }
void Cluster::start_learner(std::size_t i) { impl_->start_learner(i); }
void Cluster::freeze_learner(std::size_t i, bool frozen) {
  impl_->nodes[i].frozen = frozen;
  impl_->release(impl_->nodes[i]);
  if (!frozen) impl_->at(impl_->now, [this, i] { impl_->feed_learner(i, Tick{}); });
}
void Cluster::partition_learner(std::size_t i, bool cut_off) {
  impl_->nodes[i].cut_off = cut_off;
  impl_->release(impl_->nodes[i]);
}
std::string Cluster::account_text(const std::string& id, FragmentId p) const {
  std::string text;
  for (const auto& [incarnation, account] : impl_->accounts) {
    if (account.learner != id) continue;
    text += fmt::format("{:016x}: {} tokens\n", incarnation, account.tokens);
    for (const auto& merge : impl_->merges) {
      for (const auto& member : merge.members) {
        if (member.incarnation != incarnation || merge.fragment != p) continue;
        text += fmt::format("  merged [{}, {}) in {} at {:.2f} by life {}{}\n", member.from, member.to,
                            to_string(merge.version), merge.at, merge.syncer_life, merge.lost_in_life ? ", lost" : "");
      }
    }
    const auto list = [&](const char* what, const auto& spans) {
      if (const auto it = spans.find(p); it != spans.end()) {
        for (const auto& [from, to] : it->second) text += fmt::format("  {} [{}, {})\n", what, from, to);
      }
    };
    list("discarded", account.discarded);
    list("in flight", account.in_flight);
  }
  return text;
}
void Cluster::kill_syncer() { impl_->kill_syncer(); }
void Cluster::start_syncer() { impl_->start_syncer(); }
void Cluster::poison(std::size_t i) { impl_->nodes[i].poisoned = true; }
void Cluster::stop_syncer(Seconds give_up_after_s) { impl_->feed_syncer(ShutdownEvent{give_up_after_s}); }
SyncerCore* Cluster::syncer() { return impl_->syncer.get(); }
LearnerCore* Cluster::learner(std::size_t i) { return impl_->nodes[i].core.get(); }
const std::vector<MergeRecord>& Cluster::merges() const { return impl_->merges; }
const std::vector<float>& Cluster::parameters(std::size_t i, std::size_t tensor) const {
  return impl_->nodes[i].local.at(tensor);
}
Tensors Cluster::global_parameters() const {
  Tensors tensors(impl_->options.layout.tensors.size());
  if (!impl_->syncer) return {};
  const Plan& plan = impl_->syncer->plan();
  for (FragmentId p = 0; p < plan.size(); ++p) {
    const auto state = impl_->syncer->fragment(p);
    if (!state) return {};
    const float* values = state->theta->f32();
    for (const auto tensor : plan.fragments[p].tensors) {
      const auto numel = impl_->options.layout.tensors[tensor].numel();
      tensors[tensor].assign(values, values + numel);
      values += numel;
    }
  }
  return plan.size() > 0 ? tensors : Tensors{};
}
std::uint64_t Cluster::steps(std::size_t i) const { return impl_->nodes[i].steps; }
Seconds Cluster::longest_hold(std::size_t i) const { return impl_->nodes[i].longest_hold; }
bool Cluster::syncer_stopped() const { return impl_->stopped; }
const std::vector<std::string>& Cluster::log_lines() const { return impl_->logs; }
const std::vector<std::string>& Cluster::records() const { return impl_->records; }
std::uint64_t Cluster::peak_payload_bytes() const { return impl_->peak_payload; }

double Cluster::merged_fraction(const std::string& id) const {
  double merged = 0.0, made = 0.0;
  for (const auto& merge : impl_->merges) {
    for (const auto& member : merge.members) {
      if (member.learner == id) merged += static_cast<double>(member.to - member.from);
    }
  }
  const auto fragments = impl_->syncer ? impl_->syncer->plan().size() : 1u;
  for (const auto& [incarnation, account] : impl_->accounts) {
    if (account.learner == id) made += static_cast<double>(account.tokens) * fragments;
  }
  return made > 0.0 ? merged / made : 0.0;
}

std::vector<std::string> Cluster::check() const {
  std::vector<std::string> violations;
  std::map<std::pair<Incarnation, FragmentId>, std::vector<std::array<std::uint64_t, 2>>> intervals, lost;
  // Of one life: a syncer that restarts when no learner is left to tell begins anew.
  std::map<std::pair<std::uint64_t, FragmentId>, Version> last;
  for (const auto& merge : impl_->merges) {
    if (merge.members.size() < impl_->options.settings.min_quorum) {
      violations.push_back(fmt::format("fragment {} version {} merged {} < K members", merge.fragment,
                                       to_string(merge.version), merge.members.size()));
    }
    Version& newest = last[{merge.syncer_life, merge.fragment}];
    if (merge.version <= newest) {
      violations.push_back(fmt::format("fragment {}: version {} does not increase", merge.fragment, to_string(merge.version)));
    }
    newest = merge.version;
    for (const auto& member : merge.members) {
      const std::pair key{member.incarnation, merge.fragment};
      (merge.lost_in_life ? lost : intervals)[key].push_back({member.from, member.to});
    }
  }
  for (const auto& [incarnation, account] : impl_->accounts) {
    for (const auto& [fragment, list] : account.discarded) {
      auto& all = intervals[{incarnation, fragment}];
      all.insert(all.end(), list.begin(), list.end());
    }
  }
  for (auto& [key, list] : intervals) {
    std::sort(list.begin(), list.end());
    const Account& account = impl_->accounts.at(key.first);
    std::uint64_t at = 0;
    for (const auto& [from, to] : list) {
      if (from < at) violations.push_back(fmt::format("{} fragment {}: tokens [{}, {}) are counted twice", account.learner, key.second, from, std::min(at, to)));
      // A gap is work that only the syncer can still merge, or that went down with it; both are on record.
      std::vector<std::array<std::uint64_t, 2>> declared = lost[key];
      if (const auto sent = account.in_flight.find(key.second); sent != account.in_flight.end()) {
        declared.insert(declared.end(), sent->second.begin(), sent->second.end());
      }
      if (from > at && !covered(declared, at, from)) violations.push_back(fmt::format("{} fragment {}: tokens [{}, {}) are unaccounted for", account.learner, key.second, at, from));
      at = std::max(at, to);
    }
    if (at > account.tokens) violations.push_back(fmt::format("{} fragment {}: {} tokens counted, {} made", account.learner, key.second, at, account.tokens));
  }
  if (impl_->peak_payload > impl_->options.payload_memory_bytes) {
    violations.push_back(fmt::format("{} payload bytes held, the bound is {}", impl_->peak_payload,
                                     impl_->options.payload_memory_bytes));
  }
  return violations;
}

Layout small_layout(int matrices, std::int64_t rows, std::int64_t cols) {
  Layout layout;
  for (int i = 0; i < matrices; ++i) {
    layout.tensors.push_back({fmt::format("layer.{}.weight", i), {rows, cols}, Dtype::kF32, {}});
    layout.tensors.push_back({fmt::format("layer.{}.bias", i), {rows}, Dtype::kF32, {}});
  }
  return layout;
}

}  // namespace diloco::sim
