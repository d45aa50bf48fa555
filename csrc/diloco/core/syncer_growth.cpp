// Tensors that learners add to the model while they train: a new head, thawed layers. The run takes them once two learners
// that are here have added the same ones (or the only one there is): they get fragments behind those there are, and whoever
// has them takes part in these. A learner that has not added them, or others, goes on in the fragments it knows. One shard,
// learners of one process.
#include <algorithm>
#include <string_view>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {
namespace {

std::string names_of(const std::vector<TensorSpec>& tensors) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : tensors) names.push_back(tensor.name);
  return name_list(names);
}

}  // namespace

// How far the learner's model is the run's.
SyncerCore::Impl::Fit SyncerCore::Impl::fit(const Hello& hello) const {
  Fit fit;
  std::unordered_map<std::string_view, const TensorSpec*> theirs;
  for (const TensorSpec& tensor : hello.layout.tensors) theirs.emplace(tensor.name, &tensor);
  Layout run, own;  // the run's first tensors, and what the learner has under their names
  for (const Extent& extent : extents) {
    for (std::size_t i = run.tensors.size(); i < extent.tensors; ++i) {
      run.tensors.push_back(layout->tensors[i]);
      if (const auto same = theirs.find(run.tensors.back().name); same != theirs.end()) own.tensors.push_back(*same->second);
    }
    if (!first_difference(own, run).empty()) break;
    fit.tensors = extent.tensors;
    fit.fragments = extent.fragments;
  }
  std::unordered_set<std::string_view> known;
  for (std::size_t i = 0; i < fit.tensors; ++i) known.insert(layout->tensors[i].name);
  std::size_t begin = 0, end = 0;
  for (std::size_t stage = 0; stage <= hello.grown_from.size() && fit.beyond.empty(); ++stage) {
    begin = std::exchange(end, stage < hello.grown_from.size() ? hello.grown_from[stage] : hello.layout.tensors.size());
    for (std::size_t i = begin; i < end; ++i) {
      if (!known.contains(hello.layout.tensors[i].name)) fit.beyond.push_back(hello.layout.tensors[i]);
    }
  }
  // What it began with must be in the run; what it added later need not.
  const bool may_add = begin > 0 && options.shards == 1 && hello.ranks == 1;
  if (fit.tensors == 0 || (!fit.beyond.empty() && !may_add)) {
    fit.difference = first_difference(hello.layout, *layout);
  }
  std::sort(fit.beyond.begin(), fit.beyond.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  return fit;
}

// How many of the fragments that HELLO reports on are the run's: none, if they are those of another plan. A learner may know
// fewer (the run has grown) or more (the syncer came back without state, and has not grown again yet).
std::uint32_t SyncerCore::Impl::known_fragments(const Hello& hello, const Fit& fit) const {
  const auto reported = static_cast<std::uint32_t>(hello.adopted.size());
  if (reported > fit.fragments) return hello.grown_from.empty() ? 0 : fit.fragments;
  const bool stage = std::any_of(extents.begin(), extents.end(),
                                 [&](const Extent& extent) { return extent.fragments == reported; });
  return stage ? reported : 0;
}

void SyncerCore::Impl::say_fit(const std::string& learner, const Fit& fit) {
  const bool behind = fit.fragments < plan.size();
  if (behind) {
    const std::vector<TensorSpec> rest(layout->tensors.begin() + static_cast<std::ptrdiff_t>(fit.tensors),
                                       layout->tensors.end());
    log(LogLevel::kWarning, fmt::format("learner '{}' does not have {}, added to the run while it trained: it takes part in {} "
                                        "of {} fragments until it adds the same", learner, names_of(rest), fit.fragments,
                                        plan.size()));
  }
  if (fit.beyond.empty()) return;
  log(LogLevel::kWarning, fmt::format("learner '{}' has added {}, which the run does not have{}: trained by this learner alone{}",
                                      learner, names_of(fit.beyond), behind ? " (others were added to it)" : "",
                                      behind ? "" : " until another one adds the same"));
}

// Nobody else is here, or has been lately: who is only reconnecting has a say.
bool SyncerCore::Impl::alone(const Session& session) const {
  constexpr Seconds kLatelyS = 60.0;
  if (epoch > 1 && now < started + kLatelyS) return false;  // those of an earlier life may be on their way
  return std::none_of(accounts.begin(), accounts.end(), [&](const auto& entry) {
    const Account& other = entry.second;
    return other.learner != session.account->learner && !superseded.contains(entry.first) && !other.tombstoned &&
           now < other.last_contact + kLatelyS;
  });
}

// The sessions that brought it about are told so by their next WELCOME, `greeted` by the one that is being made.
bool SyncerCore::Impl::grow_if_agreed(SessionId greeted) {
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || session.beyond.empty() || session.fragments() < plan.size()) continue;
    std::vector<SessionId> agreed;
    for (const auto& [other, one] : sessions) {
      if (one.control != 0 && one.fragments() == plan.size() && one.beyond == session.beyond) agreed.push_back(other);
    }
    const bool was_in_the_run = std::any_of(agreed.begin(), agreed.end(), [this](SessionId one) {
      return sessions.at(one).beyond_adopted;
    });
    if (agreed.size() < 2 && !was_in_the_run && !alone(session)) continue;
    const std::vector<TensorSpec> tensors = session.beyond;
    const bool taken = grow(tensors);
    for (const SessionId one : agreed) {
      sessions.at(one).beyond.clear();
      if (!taken || one == greeted) continue;
      send(sessions.at(one).control, MessageType::kRehello, &sessions.at(one), {});
      end_session(one, "the run has grown", true);
    }
    return taken;
  }
  return false;
}

// False if its rounds could not end in the memory there is.
bool SyncerCore::Impl::grow(const std::vector<TensorSpec>& tensors) {
  const Layout layout_before = *layout;
  const Plan plan_before = plan;
  layout->tensors.insert(layout->tensors.end(), tensors.begin(), tensors.end());
  plan = grow_plan(plan, *layout, settings.fragmenter);
  fill_slots();
  // Rounds of what was added may stay open while too few are here that have it: the others need their memory beside it.
  std::uint64_t needed = settings.min_quorum * largest_contribution();
  for (FragmentId p = plan.cycle(); p < plan.size(); ++p) {
    needed += settings.min_quorum * slots[p].contribution.bytes;
  }
  auto text = memory_short(live_sessions());
  if (text.empty() && needed > options.payload_memory_bytes) {
    text = fmt::format("it needs {} bytes for contributions, payload_memory_bytes are {}", needed, options.payload_memory_bytes);
  }
  if (!text.empty()) {
    log(LogLevel::kError, fmt::format("the run cannot take {}: {}", names_of(tensors), text));
    layout = layout_before;
    plan = plan_before;
    slots.resize(plan.size());
    return false;
  }
  extents.push_back({layout->tensors.size(), plan.size()});
  Clock clock = 0;  // of whoever is furthest; an account may be that of a life which has told nothing yet
  for (const auto& [id, session] : sessions) clock = std::max(clock, session.clock);
  for (auto& [incarnation, account] : accounts) {
    clock = std::max(clock, account.clock);
    fit_to_plan(account, account.clock);
  }
  for (FragmentId p = plan_before.size(); p < plan.size(); ++p) {
    slots[p].clock = clock;  // its first weights take everybody there
    slots[p].due = next_due_clock(p, clock);
  }
  for (auto& [incarnation, merged_to] : settled) merged_to.resize(plan.size(), 0);
  for (auto& [incarnation, life] : past) life.merged_in.resize(plan.size());
  for (auto& [id, session] : sessions) fit_to_plan(session);
  log(LogLevel::kInfo, fmt::format("the run has grown by {}, in {} fragment(s)", names_of(tensors),
                                   plan.size() - plan_before.size()));
  announce_layout();
  return true;
}

// A quorum of it: in lockstep a round waits for everybody who has it, and for nobody else.
std::uint32_t SyncerCore::Impl::quorum_of(FragmentId p) const {
  return settings.mode == Mode::kLockstep && added(p) ? 1 : settings.min_quorum;
}

// Of what was added: learners that have it and make steps are a quorum.
bool SyncerCore::Impl::enough_have(FragmentId p) const {
  if (!added(p)) return true;
  const auto having = std::count_if(sessions.begin(), sessions.end(), [this, p](const auto& entry) {
    const Session& session = entry.second;
    return session.control != 0 && session.has(p) && (settings.mode == Mode::kLockstep || !stalled(session));
  });
  return static_cast<std::uint32_t>(having) >= quorum_of(p);
}

// Those of fragments that have none yet.
void SyncerCore::Impl::fill_slots() {
  for (FragmentId p = static_cast<FragmentId>(slots.size()); p < plan.size(); ++p) {
    FragmentSlot& slot = slots.emplace_back();
    slot.contribution = payload_layout(*layout, plan, p, PayloadKind::kContribution, settings);
    slot.anchor = payload_layout(*layout, plan, p, PayloadKind::kAnchor, settings);
    slot.image_layout = payload_layout(*layout, plan, p, PayloadKind::kImage, settings);
    slot.use_rda = rda_segments(*layout, slot.contribution, settings);
    slot.due = first_due_clock(p);
  }
}

// What is kept by fragment becomes as long as the plan; `clock`: the learner's.
void SyncerCore::Impl::fit_to_plan(Account& account, Clock clock) const {
  account.merged_to.resize(plan.size(), 0);
  account.merged_in.resize(plan.size());
  account.mailbox.resize(plan.size());
  account.adopted.resize(plan.size());
  for (FragmentId p = static_cast<FragmentId>(account.due.size()); p < plan.size(); ++p) {
    account.due.push_back(clock == 0 ? first_due_clock(p) : next_due_clock(p, clock));
  }
}

void SyncerCore::Impl::fit_to_plan(Session& session) const {
  session.adopted.resize(plan.size());
  session.pulled.resize(plan.size());
  session.pulled_from.resize(plan.size());
  session.missed.resize(plan.size(), 0);
  session.sent.resize(plan.size());
}

}  // namespace diloco
