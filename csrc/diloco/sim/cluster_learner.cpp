// The learner nodes: inner steps, boundaries, and the parameters that the core only decides about.
#include <algorithm>
#include <limits>

#include "diloco/codec/codec.h"
#include "diloco/kernels/kernels.h"
#include "diloco/sim/cluster_impl.h"

namespace diloco::sim {

void Cluster::Impl::first_parameters(std::size_t i) {
  LearnerNode& node = nodes[i];
  Stream random(draw(options.seed, Purpose::kParameters, i, node.life));
  node.local.clear();
  for (const auto& tensor : options.layout.tensors) {
    std::vector<float> values(tensor.numel());
    for (auto& value : values) value = static_cast<float>(random.uniform(-0.5, 0.5));
    node.local.push_back(std::move(values));
  }
  if (options.training.begin) options.training.begin(i, node.local);
  node.anchor = node.local;
}

void Cluster::Impl::start_learner(std::size_t i) {
  kill_learner(i);
  LearnerNode& node = nodes[i];
  ++node.life;
  node.incarnation = draw(options.seed, Purpose::kIncarnation, i, node.life) | 1;
  node.steps = 0;
  node.holding = node.frozen = node.rejected = false;
  node.poison = LearnerNode::Poison::kNone;
  node.clock_ahead = 0.0;
  node.held.clear();
  node.alarm = {};
  node.peers.assign(2 * options.shards, 0);
  first_parameters(i);
  LearnerCoreOptions core;
  core.learner_id = node.spec.id;
  core.host = "sim";
  core.pid = i + 1;
  core.incarnation = node.incarnation;
  core.layout = options.layout;
  core.endpoint_text = "sim";
  core.shards = options.shards;
  core.staging_bytes = options.settings.staging_bytes;
  core.random = Stream(draw(options.seed, Purpose::kLearnerCore, i, node.life));
  core.read_anchor = [this, i](FragmentId p, std::uint64_t offset, std::span<std::byte> out) {
    const PayloadLayout& layout = nodes[i].core->payload(p, PayloadKind::kAnchor);
    std::vector<std::byte> bytes(layout.bytes);
    for (const auto& segment : layout.segments) {
      encode(Codec::kF32, nodes[i].anchor[segment.tensor].data(), segment.numel, bytes.data() + segment.byte_offset);
    }
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
  };
  node.core = std::make_unique<LearnerCore>(std::move(core));
  invariants.learner_starts(i, node.incarnation);
  update_well(i);
  feed_learner(i, Tick{});
  push_step(i);
}

void Cluster::Impl::kill_learner(std::size_t i) {
  LearnerNode& node = nodes[i];
  if (!node.core) return;
  node.core.reset();
  ++node.life;
  invariants.learner_dies(i);
  update_well(i);
  for (const PeerId peer : std::vector(node.peers)) close_connection(peer, true, false);
  node.held.clear();
}

// The time a process did not run is left out of its clock (base/core_clock.h).
void Cluster::Impl::freeze_learner(std::size_t i, bool frozen) {
  LearnerNode& node = nodes[i];
  if (frozen == node.frozen) return;
  node.frozen = frozen;
  update_well(i);
  if (frozen) {
    node.frozen_at = now;
    return;
  }
  node.clock_ahead -= now - node.frozen_at;
  if (!node.cut_off) release(node.held);
  call_at(now, [this, i, life = node.life] {
    if (life == nodes[i].life) feed_learner(i, Tick{});
  });
}

void Cluster::Impl::push_step(std::size_t i) {
  const LearnerNode& node = nodes[i];
  const double jitter = 2.0 * unit(draw(options.seed, Purpose::kStepTime, i, node.life, node.steps)) - 1.0;
  push(now + node.spec.step_s * (1.0 + node.spec.jitter * jitter),
       {EventKind::kStep, static_cast<std::uint32_t>(i), 0, node.life, 0, Channel::kControl, {}, {}});
}

void Cluster::Impl::step(std::size_t i) {
  LearnerNode& node = nodes[i];
  std::uint64_t tokens = train(i);
  ++node.steps;
  node.tokens += tokens;
  invariants.made_step(i, tokens);
  if (plant == Plant::kLyingLearner && !planted) {
    planted = true;
    tokens += 1;
  }
  feed_learner(i, Boundary{tokens});
  feed_learner(i, StagesDone{});
  finish_boundary(i);
}

std::uint64_t Cluster::Impl::train(std::size_t i) {
  LearnerNode& node = nodes[i];
  std::uint64_t tokens = node.spec.tokens_per_step;
  if (node.spec.token_jitter > 0) {
    tokens += draw(options.seed, Purpose::kTokens, i, node.life, node.steps) % (node.spec.token_jitter + 1);
  }
  if (options.training.step) tokens = options.training.step(i, node.local);
  else walk(i);
  if (node.poison != LearnerNode::Poison::kNone) {
    const float bad = node.poison == LearnerNode::Poison::kNan ? std::numeric_limits<float>::quiet_NaN() : 3e38f;
    for (auto& tensor : node.local) std::fill(tensor.begin(), tensor.end(), bad);
    invariants.poisoned(i, node.poison == LearnerNode::Poison::kHuge);
    node.poison = LearnerNode::Poison::kNone;
  }
  return tokens;
}

void Cluster::Impl::walk(std::size_t i) {
  LearnerNode& node = nodes[i];
  Stream random(draw(options.seed, Purpose::kWalk, i, node.life, node.steps));
  const auto move = [&](float& value) {
    value -= static_cast<float>(options.learning_rate * (value - node.spec.target + random.uniform(-0.5, 0.5)));
  };
  for (auto& tensor : node.local) {
    if (!options.light) std::for_each(tensor.begin(), tensor.end(), move);
    else if (!tensor.empty()) move(tensor[node.steps % tensor.size()]);
  }
}

void Cluster::Impl::finish_boundary(std::size_t i) {
  LearnerNode& node = nodes[i];
  if (!node.core) return;
  if (node.core->holding()) {
    if (options.settings.mode == Mode::kDecoupled) {
      invariants.fail("never_waits", node.spec.id + " holds at a boundary for " + node.core->holding_for());
    }
    if (!node.holding) node.hold_since = now;
    node.holding = true;
    feed_learner(i, AdoptsDone{});  // of rounds that were late
    return;
  }
  if (node.holding) node.longest_hold = std::max(node.longest_hold, now - node.hold_since);
  node.holding = false;
  feed_learner(i, AdoptsDone{});
  push_step(i);
}

void Cluster::Impl::feed_learner(std::size_t i, const LearnerEvent& event) {
  LearnerNode& node = nodes[i];
  if (!node.core) return;
  auto actions = node.core->handle(event, learner_now(node));
  bool staged = false;
  for (auto& action : actions) staged = run(i, action) || staged;
  if (staged && std::holds_alternative<Recheck>(event)) feed_learner(i, StagesDone{});
  if (!node.core) return;
  invariants.after_learner();
  set_alarm(node.alarm, seen_from_outside(node.core->next_deadline(), node.clock_ahead), EventKind::kLearnerTick,
            static_cast<std::uint32_t>(i), 0, node.life);
  const bool outside = std::holds_alternative<ChannelFrame>(event) || std::holds_alternative<Tick>(event);
  if (node.holding && outside) {
    feed_learner(i, Recheck{});
    finish_boundary(i);
  }
}

bool Cluster::Impl::run(std::size_t i, LearnerAction& action) {
  LearnerNode& node = nodes[i];
  if (auto* send = std::get_if<SendOn>(&action)) {
    invariants.shard(send->shard).from_learner(i, send->frame);
    send_up(node.peers[line_of(send->shard, send->channel)], std::move(send->frame));
  } else if (auto* staging = std::get_if<Stage>(&action)) {
    stage(i, *staging);
    return true;
  } else if (auto* adopt = std::get_if<AdoptFragment>(&action)) {
    apply(i, *adopt);
  } else if (auto* progress = std::get_if<Progress>(&action)) {
    invariants.progress(i, progress->tokens);
  } else if (auto* discard = std::get_if<Discard>(&action)) {
    invariants.discarded(i, *discard);
  } else if (auto* connect = std::get_if<ConnectChannel>(&action)) {
    const auto attempt = ++node.attempts[line_of(connect->shard, connect->channel)];
    push(now + node.link.delay_s,
         {EventKind::kConnect, static_cast<std::uint32_t>(i), connect->shard, node.life, attempt, connect->channel, {}, {}});
  } else if (auto* drop = std::get_if<DropChannel>(&action)) {
    const std::size_t place = line_of(drop->shard, drop->channel);
    ++node.attempts[place];
    close_connection(node.peers[place], true, false);
  } else if (auto* text = std::get_if<Log>(&action)) {
    if (options.keep_lines) logs.push_back(node.spec.id + ": " + text->text);
  } else if (auto* rejected = std::get_if<Rejected>(&action)) {
    node.rejected = true;
    update_well(i);
    if (options.keep_lines) logs.push_back(node.spec.id + ": rejected: " + rejected->reject.text);
  }
  return false;
}

void Cluster::Impl::stage(std::size_t i, const Stage& stage) {
  LearnerNode& node = nodes[i];
  const PayloadLayout& layout = node.core->payload(stage.fragment, PayloadKind::kContribution);
  for (const auto& segment : layout.segments) {
    auto* out = stage.out->data() + segment.byte_offset;
    const auto* anchor = node.anchor[segment.tensor].data();
    const auto* local = node.local[segment.tensor].data();
    if (segment.codec == Codec::kBf16) kernels::fragment_diff_bf16(anchor, local, segment.numel, out);
    else kernels::fragment_diff_f32(anchor, local, segment.numel, out);
  }
  invariants.staged(i, stage, layout, node.anchor, node.local);
}

void Cluster::Impl::apply(std::size_t i, const AdoptFragment& adopt) {
  LearnerNode& node = nodes[i];
  const PayloadLayout& image = node.core->payload(adopt.fragment, PayloadKind::kImage);
  const PayloadLayout& contribution = node.core->payload(adopt.fragment, PayloadKind::kContribution);
  invariants.before_adoption(image, node.anchor, node.local);
  std::vector<float> next, sent;
  for (std::size_t s = 0; s < image.segments.size(); ++s) {
    const Segment& in = image.segments[s];
    const Segment& out = contribution.segments[s];
    const auto n = in.numel;
    next = node.anchor[in.tensor];
    sent.resize(n);
    if (adopt.image) decode(in.codec, adopt.image->data() + in.byte_offset, n, next.data());
    if (adopt.sent) decode(out.codec, adopt.sent->data() + out.byte_offset, n, sent.data());
    float* anchor = node.anchor[in.tensor].data();
    float* local = node.local[in.tensor].data();
    switch (adopt.formula) {
      case AdoptFormula::kOverwrite: kernels::adopt_overwrite(next.data(), anchor, local, n); break;
      case AdoptFormula::kBlend: kernels::adopt_blend(next.data(), adopt.blend_alpha, anchor, local, n); break;
      case AdoptFormula::kRebase:
        kernels::adopt_rebase(next.data(), adopt.sent ? sent.data() : nullptr, anchor, local, n);
        break;
    }
  }
  invariants.adopted(i, adopt, image, contribution, node.anchor, node.local);
}

}  // namespace diloco::sim
