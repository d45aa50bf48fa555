// one_round, schedule, quorum, mailbox, weights, all_present, grace_window, grace_deadline, version_order,
// persisted_first, untouched_bit_equal, own_shard: the life of a round, from the event log and from what is sent.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/sim/invariants_impl.h"

namespace diloco::sim {

namespace {

Incarnation incarnation_of(const nlohmann::json& line) {
  return std::stoull(line["incarnation"].get_ref<const std::string&>(), nullptr, 16);
}

Version version_of(const nlohmann::json& line) { return {line["version"][0], line["version"][1]}; }

double weight_of(const Settings& settings, const Copy& copy, Version newest) {
  const auto tokens = static_cast<double>(copy.to - copy.from), steps = static_cast<double>(copy.steps);
  const double work = settings.weights == Weights::kEqual    ? 1.0
                      : settings.weights == Weights::kTokens ? tokens
                                                             : tokens * tokens / steps;
  const double behind = copy.base.epoch == newest.epoch ? static_cast<double>(newest.n - copy.base.n) : 0.0;
  return work / (1.0 + settings.staleness_discount * behind);
}

bool close_to(double a, double b, double relative = 1e-9) { return std::abs(a - b) <= relative * std::max({1e-9, std::abs(a), std::abs(b)}); }

}  // namespace

// ---- due ----

// The clock in 1..H at which fragment p is due first; P fragments share the period evenly.
Clock ShardInvariants::Impl::phase(FragmentId p) const {
  const double share = static_cast<double>(settings.sync_every) * (p + 1) / static_cast<double>(fragments.size());
  return static_cast<Clock>(std::ceil(share - 1e-9));
}

// At its phase again, at least half a period later.
Clock ShardInvariants::Impl::due_after(FragmentId p, Clock opened) const {
  const Clock earliest = opened + (settings.sync_every + 1) / 2;
  Clock due = phase(p);
  if (due < earliest) due += (earliest - due + settings.sync_every - 1) / settings.sync_every * settings.sync_every;
  return due;
}

void ShardInvariants::Impl::on_open(const nlohmann::json& line) {
  const FragmentId p = line["fragment"];
  FragmentBooks& books = fragments.at(p);
  const Clock at = line["clock"];
  if (books.round) fail("one_round", fmt::format("a round of fragment {} opens while one is open", p));
  if (books.newest.none()) fail("one_round", fmt::format("a round of fragment {} opens before it has weights", p));
  if (settings.mode == Mode::kDecoupled && !on_arrival()) {
    const auto clock = quorum_clock();
    if (!clock || at != *clock || books.due > at) {
      fail("schedule", fmt::format("fragment {} opens at clock {}; the {}-th largest clock is {}, due is {}", p, at,
                                   settings.min_quorum, clock ? std::to_string(*clock) : "not there", books.due));
    }
    opened.emplace_back(p, books.due);
    books.due = due_after(p, at);
  }
  if (settings.max_inflight > 0 && open_rounds >= settings.max_inflight && !on_arrival()) {
    fail("schedule", fmt::format("{} rounds are open, max_inflight is {}", open_rounds + 1, settings.max_inflight));
  }
  if (line["quorum"] != quorum()) fail("quorum", fmt::format("a round of fragment {} opens with another K", p));
  ++open_rounds;
  books.round = FragmentBooks::OpenRound{line["round"], at, syncer_now, false, std::nullopt, 0.0};
  for (auto& [id, session] : sessions) session.waited_for[p] = session.ordered[p];
}

// Earliest due first.
void ShardInvariants::Impl::check_order(const SyncerCore& syncer) {
  for (const auto& [p, due] : opened) {
    for (const FragmentId other : own) {
      const FragmentBooks& earlier = fragments[other];
      if (earlier.round || earlier.due >= due || !syncer.fragment(other)) continue;
      fail("schedule", fmt::format("fragment {} opens, due at {}, before fragment {}, due at {}", p, due, other, earlier.due));
    }
  }
  opened.clear();
}

// ---- closed ----

// What lies in the mailboxes, in the order of ids; on arrival what came first.
void ShardInvariants::Impl::take_members(FragmentBooks::Closing& closing, FragmentId p) {
  for (const auto& [incarnation, life] : lives) {
    if (p < life->shares.size() && life->shares[p].mailbox) closing.members.emplace_back(life.get(), *life->shares[p].mailbox);
  }
  std::sort(closing.members.begin(), closing.members.end(), [this](const auto& a, const auto& b) {
    if (on_arrival()) {
      return std::tie(a.second.arrived, a.first->incarnation) < std::tie(b.second.arrived, b.first->incarnation);
    }
    return std::tie(a.first->id, a.first->incarnation) < std::tie(b.first->id, b.first->incarnation);
  });
  if (on_arrival() && closing.members.size() > 1) closing.members.resize(1);
  for (const auto& [life, copy] : closing.members) life->shares[p].mailbox.reset();
}

void ShardInvariants::runs_merge(const RunMerge& merge, const MergeResult& result, const SyncerCore& syncer) {
  Impl& at = *impl_;
  FragmentId p = 0;
  while (p < at.fragments.size() && syncer.fragment(p) != merge.merge.previous) ++p;
  if (p == at.fragments.size()) return at.fail("merge_value", "a merge starts from weights that are not the syncer's");
  FragmentBooks& books = at.fragments[p];
  if (!books.round || books.closing) return at.fail("one_round", fmt::format("fragment {} is merged without a round", p));
  auto& closing = books.closing.emplace();
  closing.at = at.syncer_now;
  closing.job = merge.job;
  closing.outstanding = at.asked(p);
  at.note_quorum(p);
  at.take_members(closing, p);
  const auto& members = merge.merge.members;
  if (members.size() < at.quorum()) {
    at.fail("quorum", fmt::format("fragment {} is merged from {} contributions, K is {}", p, members.size(), at.quorum()));
  }
  bool same = members.size() == closing.members.size();
  for (std::size_t i = 0; same && i < members.size(); ++i) {
    same = members[i].learner == closing.members[i].first->id &&
           checksum(members[i].payload->bytes()) == closing.members[i].second.hash;
  }
  if (!same) {
    at.fail("mailbox", fmt::format("fragment {} is merged from {} contributions which are not the {} newest complete ones", p,
                                   members.size(), closing.members.size()));
  }
  double sum = 0.0;
  for (std::size_t i = 0; i < closing.members.size(); ++i) {
    const auto& [life, copy] = closing.members[i];
    const double weight = weight_of(at.settings, copy, books.newest);
    sum += weight;
    closing.weights.push_back(weight);
    if (same && !close_to(weight, members[i].weight)) {
      at.fail("weights", fmt::format("{} has weight {} on fragment {}; {} tokens in {} steps make it {}", life->id,
                                     members[i].weight, p, copy.to - copy.from, copy.steps, weight));
    }
    // anchor = syncer: the change is against the present weights, by way of those it started from.
    const bool shifted = same && members[i].base_image;
    const auto base = books.images.find(copy.base);
    if (base != books.images.end() && at.settings.anchor == Anchor::kSyncer &&
        (shifted ? checksum(members[i].base_image->bytes()) != base->second.hash : copy.base != books.newest)) {
      at.fail("base_known", fmt::format("{} is merged into fragment {} from other weights than version {}", life->id, p,
                                        to_string(copy.base)));
    }
    if (copy.base.epoch != at.epoch || base == books.images.end()) {
      at.fail("base_known", fmt::format("{} is merged into fragment {} against version {} in epoch {}", life->id, p,
                                        to_string(copy.base), at.epoch));
    }
  }
  for (auto& weight : closing.weights) weight = sum > 0.0 ? weight / sum : 0.0;
  closing.ok = result.ok;
  closing.worst = result.largest_member;
  if (result.ok) {
    closing.image_hash = checksum(result.image.bytes->bytes());
    closing.theta_hash = checksum(result.next->theta->bytes());
  }
  at.check_merge(merge.merge, result, p);
}

// If the sum was not finite its members lie in their mailboxes again, without the largest. If the epoch has changed since
// the round closed, they are refused.
void ShardInvariants::merge_done(JobId job) {
  for (const FragmentId p : impl_->own) {
    FragmentBooks& books = impl_->fragments[p];
    if (!books.closing || books.closing->job != job) continue;
    const bool outdated = books.closing->members.front().second.base.epoch != impl_->epoch;
    if (books.closing->ok && !outdated) continue;
    for (std::size_t i = 0; i < books.closing->members.size() && !outdated; ++i) {
      auto& [life, copy] = books.closing->members[i];
      auto& mailbox = life->shares[p].mailbox;
      if (i != books.closing->worst && !mailbox && !impl_->tombs.contains(life->incarnation)) mailbox = copy;
    }
    books.closing.reset();
    if (impl_->on_arrival()) {
      books.round.reset();
      --impl_->open_rounds;
      continue;
    }
    for (auto& [id, session] : impl_->sessions) session.waited_for[p] = session.ordered[p];
    books.round->quorum_at.reset();
  }
}

void ShardInvariants::Impl::on_merge(const nlohmann::json& line, const MergeRecord& merge) {
  const FragmentId p = merge.fragment;
  FragmentBooks& books = fragments.at(p);
  const std::size_t index = run.merge_count++;
  for (const auto& member : merge.members) {
    LifeBooks* of = life(member.incarnation);
    if (!of) {
      fail("mailbox", fmt::format("fragment {}: incarnation {:016x} is merged, which was never there", p, member.incarnation));
      continue;
    }
    if (tombs.contains(of->incarnation) && !books.closing) {
      fail("tombstone", fmt::format("{} is merged after it was sent away", of->id));
    }
    run.settle(*of, p, member.from, member.to, index);
    Share& books_of = share(*of, p);
    books_of.merged_in = merge.version;
    books_of.contributed_at = now;
  }
  if (!books.closing || !books.closing->ok || books.closing->recorded) {
    return fail("one_round", fmt::format("fragment {} is recorded as merged and was not", p));
  }
  auto& closing = *books.closing;
  closing.recorded = true;
  closing.version = merge.version;
  if (merge.version != Version{epoch, books.newest.n + 1}) {
    fail("version_order", fmt::format("fragment {} becomes version {} after {}, in epoch {}", p, to_string(merge.version),
                                      to_string(books.newest), epoch));
  }
  const auto& told = line["members"];
  if (told.size() != closing.members.size()) {
    fail("mailbox", fmt::format("fragment {}: {} members are recorded, {} were merged", p, told.size(), closing.members.size()));
  }
  for (std::size_t i = 0; i < std::min(told.size(), closing.members.size()); ++i) {
    const auto& [of, copy] = closing.members[i];
    const MergeRecord::Member& member = merge.members[i];
    if (member.incarnation != of->incarnation || member.from != copy.from || member.to != copy.to ||
        told[i]["steps"] != copy.steps || told[i]["clock"] != copy.clock) {
      fail("mailbox", fmt::format("fragment {}: {} is recorded for tokens [{}, {}); merged were [{}, {}) of {}", p,
                                  member.learner, member.from, member.to, copy.from, copy.to, of->id));
    }
    if (!close_to(member.weight, closing.weights[i])) {
      fail("weights", fmt::format("fragment {}: {} is recorded with weight {}; it is {}", p, of->id, member.weight,
                                  closing.weights[i]));
    }
  }
  for (const auto& [of, copy] : closing.members) share(*of, p).merged.emplace_back(merge.version, copy);
  books.merged_at = now;
  check_close(p, line);
}

// Why it was closed then, and not earlier or later.
void ShardInvariants::Impl::check_close(FragmentId p, const nlohmann::json& line) {
  const FragmentBooks& books = fragments[p];
  const auto& closing = *books.closing;
  const std::string& reason = line["reason"].get_ref<const std::string&>();
  if (on_arrival()) {
    if (reason != "arrival") fail("all_present", fmt::format("a round of fragment {} closes as '{}' on arrival", p, reason));
    return;
  }
  const double quorum_s = line["quorum_s"], wait_s = line["wait_s"], window_s = line["grace_s"];
  if (!books.round->quorum_at || std::abs(books.round->opened + quorum_s - *books.round->quorum_at) > kTimeSlack ||
      std::abs(*books.round->quorum_at + wait_s - closing.at) > kTimeSlack) {
    return fail("grace_deadline", fmt::format("fragment {}: opened at {:.6f}, quorum said to be {:.6f} s later and grace "
                                              "{:.6f} s; the quorum was there at {:.6f}, closed it was at {:.6f}", p,
                                              books.round->opened, quorum_s, wait_s, books.round->quorum_at.value_or(0.0),
                                              closing.at));
  }
  if ((reason == "all_present") != (closing.outstanding == 0)) {
    fail("all_present", fmt::format("a round of fragment {} closes as '{}' while {} are still asked", p, reason,
                                    closing.outstanding));
  }
  if (settings.mode == Mode::kLockstep) return;
  const bool timed = reason == "grace_elapsed" || reason == "cap";
  if (reason != "all_present" && timed == (settings.grace == Grace::kNone)) {
    fail("grace_deadline", fmt::format("a round of fragment {} closes as '{}' with another kind of grace", p, reason));
  }
  if (timed && wait_s < window_s - kTimeSlack) {
    fail("grace_deadline", fmt::format("a round of fragment {} closes as '{}' after {:.6f} s of {:.6f} s", p, reason, wait_s,
                                       window_s));
  }
  if (!books.round->disturbed && wait_s > window_s + kTimeSlack) {
    fail("grace_deadline", fmt::format("a round of fragment {} waits {:.6f} s beyond its quorum, its grace is {:.6f} s", p,
                                       wait_s, window_s));
  }
  check_window(p, window_s, reason == "cap");
}

// Live learners the round still waits for.
std::size_t ShardInvariants::Impl::asked(FragmentId p) const {
  std::size_t count = 0;
  for (const auto& [id, session] : sessions) {
    count += session.waited_for[p] && (settings.mode == Mode::kLockstep || !stalled(session));
  }
  return count;
}

// K contributions, not counting what was there when the round opened unless nobody is asked any more.
void ShardInvariants::Impl::note_quorum(FragmentId p) {
  auto& round = fragments[p].round;
  if (!round || round->quorum_at) return;
  std::size_t complete = 0, fresh = 0;
  for (const auto& [incarnation, life] : lives) {
    if (p >= life->shares.size() || !life->shares[p].mailbox) continue;
    ++complete;
    fresh += settings.mode == Mode::kLockstep || life->shares[p].mailbox->arrived > round->opened;
  }
  if (complete < quorum()) return;
  if (!on_arrival() && fresh < quorum() && asked(p) > 0) return;
  round->quorum_at = syncer_now;
  reached[round->id] = p;
}

// At the end of an event: the moving average goes by round.
void ShardInvariants::Impl::note_quorums() {
  for (const FragmentId p : own) {
    if (fragments[p].round && !fragments[p].round->quorum_at && !fragments[p].closing) note_quorum(p);
  }
  for (const auto& [id, p] : reached) {
    auto& round = *fragments[p].round;
    average(quorum_s, *round.quorum_at - round.opened);
    round.quorum_average = quorum_s;
  }
  reached.clear();
}

void ShardInvariants::Impl::check_window(FragmentId p, double window_s, bool capped) {
  const auto& round = *fragments[p].round;
  const auto wrong = [&](const std::string& why) {
    fail("grace_window", fmt::format("the grace window of fragment {} is {:.6f} s{}; {}", p, window_s, capped ? " (cap)" : "",
                                     why));
  };
  if (settings.grace != Grace::kAdaptive) {
    const double fixed = settings.grace == Grace::kFixed ? settings.grace_s : 0.0;
    if (std::abs(window_s - fixed) > kTimeSlack || capped) wrong(fmt::format("it is fixed to {:.6f} s", fixed));
    return;
  }
  // The pace at that time: several values if it changed just then.
  const TimePoint at = *round.quorum_at;
  auto change = std::upper_bound(paces.begin(), paces.end(), at + kTimeSlack,
                                 [](TimePoint value, const PaceChange& pace) { return value < pace.at; });
  std::string expected;
  for (bool last = false; !last && change != paces.begin();) {
    --change;
    last = change->at < at - kTimeSlack;
    const Seconds step = change->step_s, cap = settings.grace_cap_s > 0.0 ? settings.grace_cap_s : step;
    const Seconds slack = settings.overlap_steps * step - (round.quorum_average + change->sync_s);
    const Seconds window = step > 0.0 ? std::min(settings.grace_gamma * std::max(0.0, slack), cap) : cap;
    if (std::abs(window - window_s) <= kTimeSlack) return;
    expected += fmt::format(" {:.6f} s (step {:.6f}, quorum {:.6f}, sync {:.6f})", window, step, round.quorum_average,
                            change->sync_s);
  }
  if (!expected.empty()) wrong("it should be" + expected);
}

// ---- published ----

void ShardInvariants::persists(const Persist& persist) {
  if (!impl_->check_own(persist.fragment, "persists")) return;
  FragmentBooks& books = impl_->fragments[persist.fragment];
  if (!books.closing) return impl_->fail("persisted_first", "a version is persisted that no round has made");
  books.closing->persisted = checksum(persist.state->theta->bytes()) == books.closing->theta_hash;
}

void ShardInvariants::Impl::publish(FragmentId p, Version version, std::uint64_t image_hash, Clock clock) {
  FragmentBooks& books = fragments.at(p);
  if (on_arrival()) clock = 0;  // there everybody counts its own steps
  const auto [at, fresh] = books.images.try_emplace(version, FragmentBooks::Published{image_hash, clock});
  if (!fresh && at->second.hash != image_hash) {
    fail("version_order", fmt::format("fragment {} version {} is published twice with different weights", p,
                                      to_string(version)));
  }
  if (version < books.newest) {
    fail("version_order", fmt::format("fragment {} version {} is published after {}", p, to_string(version),
                                      to_string(books.newest)));
  }
  books.newest = version;
  books.clock = clock;
  books.replaced = true;
  books.contained.clear();
  for (const auto& [incarnation, life] : lives) {
    if (const std::uint64_t to = run.merged_to(*life, p); to > 0) books.contained[incarnation] = to;
  }
}

void ShardInvariants::Impl::on_published(const nlohmann::json& line) {
  const FragmentId p = line["fragment"];
  FragmentBooks& books = fragments.at(p);
  if (!books.closing || !books.closing->recorded || !books.closing->persisted) {
    fail("persisted_first", fmt::format("fragment {} is published before it is merged, recorded and persisted", p));
  } else {
    if (version_of(line) == books.newest) fail("version_order", fmt::format("fragment {} is published without a new version", p));
    publish(p, version_of(line), books.closing->image_hash, books.round->clock);
    undelivered[p] = books.closing->at;
    --open_rounds;
  }
  books.round.reset();
  books.closing.reset();
}

void ShardInvariants::runs_init(const InitResult& result) {
  Impl& at = *impl_;
  SessionBooks* from = at.frame_from;
  if (!from || !from->arriving || from->arriving->kind != PayloadKind::kAnchor) {
    return at.fail("payload_intact", "weights are taken over that nobody has sent");
  }
  FragmentBooks& books = at.fragments.at(from->arriving->fragment);
  books.anchor_clock = from->arriving->clock;
  books.anchor_image_hash = result.finite ? checksum(result.image.bytes->bytes()) : 0;
  from->arriving.reset();
}

void ShardInvariants::Impl::on_init(const nlohmann::json& line) {
  const FragmentId p = line["fragment"];
  FragmentBooks& books = fragments.at(p);
  if (books.round) fail("one_round", fmt::format("fragment {} gets first weights while a round is open", p));
  publish(p, version_of(line), books.anchor_image_hash, std::max(books.clock, books.anchor_clock));
  if (books.anchor_clock > 0) books.due = std::max(books.due, due_after(p, books.anchor_clock));
}

// A new life, or somebody has seen a later one: everything is named anew, and stays as it is.
void ShardInvariants::Impl::on_epoch(const nlohmann::json& line) {
  epoch = line["epoch"];
  if (epoch <= highest_epoch) fail("version_order", fmt::format("epoch {} is used again", epoch));
  highest_epoch = std::max(highest_epoch, epoch);
  for (const FragmentId p : own) {
    FragmentBooks& books = fragments[p];
    if (books.newest.none()) continue;
    if (!books.state) {
      books.newest = {};
      continue;
    }
    const auto [hash, clock] = books.images.at(books.newest);
    publish(p, {epoch, books.newest.n}, hash, clock);
  }
}

void ShardInvariants::Impl::on_refuse(const nlohmann::json& line) {
  LifeBooks* of = life(incarnation_of(line));
  if (!of) return;
  const FragmentId p = line["fragment"];
  const std::uint64_t from = line["from"], to = line["to"];
  if (line["reason"] == "nonfinite" && !of->poisoned && !run.huge_values) {
    fail("finite", fmt::format("fragment {} of {} is refused as not finite; its parameters were finite all the time", p,
                               of->id));
  }
  auto& mailbox = share(*of, p).mailbox;
  if (just_screened && just_screened->life == of && just_screened->fragment == p && just_screened->copy.from == from &&
      just_screened->copy.to == to) {
    mailbox = replaced_by_it;
    just_screened.reset();
  } else if (mailbox && mailbox->from == from && mailbox->to == to) {
    mailbox.reset();
  }
}

void ShardInvariants::record(const nlohmann::json& line, const MergeRecord* merge) {
  Impl& at = *impl_;
  const std::string& event = line["event"].get_ref<const std::string&>();
  const bool of_round = event == "open" || event == "merge" || event == "published" || event == "init";
  if (of_round && !at.check_own(line["fragment"], event.c_str())) return;
  if (event == "open") at.on_open(line);
  else if (event == "merge") at.on_merge(line, *merge);
  else if (event == "published") at.on_published(line);
  else if (event == "refuse") at.on_refuse(line);
  else if (event == "init") at.on_init(line);
  else if (event == "epoch") at.on_epoch(line);
  else if (event == "leave") at.close_session(incarnation_of(line), line["why"]);
  else if (event == "plan") at.on_plan(line);
  else if (event == "stop") at.stopped = true;
}

// The same of every shard and in every life.
void ShardInvariants::Impl::on_plan(const nlohmann::json& line) {
  const auto& plan = line["fragments"];
  if (fragments.empty()) {
    fragments.resize(plan.size());
    for (FragmentId p = 0; p < plan.size(); ++p) fragments[p].shard = plan[p]["shard"];
  }
  if (plan.size() != fragments.size()) return fail("own_shard", fmt::format("shard {} has a plan of its own", shard));
  own.clear();
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    if (plan[p]["shard"] != fragments[p].shard) fail("own_shard", fmt::format("shard {} has a plan of its own", shard));
    if (fragments[p].shard != shard) continue;
    own.push_back(p);
    fragments[p].due = phase(p);
  }
}

// Weights change by an outer step on their fragment and in no other way.
void ShardInvariants::Impl::check_untouched(const SyncerCore& syncer) {
  for (FragmentId p = 0; p < fragments.size(); ++p) {
    FragmentBooks& books = fragments[p];
    auto state = syncer.fragment(p);
    if (books.shard != shard) {
      if (state) check_own(p, "has weights of");
      continue;
    }
    if (state == books.state && p != turn) continue;
    if (!state) {
      books.state.reset();
      books.newest = {};
      continue;
    }
    const std::uint64_t hash = checksum(state->theta->bytes());
    if (!books.replaced && hash != books.theta_hash) {
      fail("untouched_bit_equal", fmt::format("the weights of fragment {} have changed without a merge", p));
    }
    if (state->version != books.newest) {
      fail("version_order", fmt::format("fragment {} is at version {}; published is {}", p, to_string(state->version),
                                        to_string(books.newest)));
    }
    books.theta_hash = hash;
    books.state = std::move(state);
  }
  if (!fragments.empty()) turn = (turn + 1) % fragments.size();
}

}  // namespace diloco::sim
