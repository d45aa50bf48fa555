// Lives of learners. A learner that is killed and started again is a new incarnation; the earlier one may still come
// back (it was only frozen) and is then treated as if it had never been away. So nothing that decides about it is ever
// forgotten, and as little as possible is kept.
#include <algorithm>

#include "diloco/core/syncer_impl.h"

namespace diloco {

const Life* SyncerCore::Impl::life_of(Incarnation incarnation) const {
  if (const auto it = accounts.find(incarnation); it != accounts.end()) return &it->second;
  const auto it = past.find(incarnation);
  return it == past.end() ? nullptr : &it->second;
}

// The account of an incarnation that is being admitted: new, or as it was left. Those of the learner's other lives are
// superseded.
Account& SyncerCore::Impl::account_for(Incarnation incarnation, const Hello& hello) {
  for (const auto& [other, account] : accounts) {
    if (account.learner == hello.learner_id) superseded.insert(other);
  }
  superseded.erase(incarnation);
  Account& account = accounts[incarnation];
  if (const auto row = settled.find(incarnation); row != settled.end()) {
    account.merged_to = std::move(row->second);
    settled.erase(row);
    if (auto life = past.extract(incarnation)) static_cast<Life&>(account) = std::move(life.mapped());
    else account.in_table = true;
  }
  account.learner = hello.learner_id;
  account.incarnation = incarnation;
  account.host = hello.host;
  account.pid = hello.pid;
  account.last_contact = now;
  account.tokens = std::max(account.tokens, hello.tokens);
  account.steps = std::max(account.steps, hello.steps);
  fit_to_plan(account, hello.clock);
  return account;
}

// Incarnations with a session, or with a contribution that is held.
std::set<Incarnation> SyncerCore::Impl::incarnations_in_use() const {
  std::set<Incarnation> used;
  for (const auto& [id, session] : sessions) used.insert(session.account->incarnation);
  for_each_held([&](const Contribution& held) { used.insert(held.incarnation); });
  return used;
}

// A life that may not come back. What is held of it will never be merged.
void SyncerCore::Impl::bury(Account& account, std::string why) {
  account.tombstoned = true;
  account.tombstone = std::move(why);
  for (auto& held : account.mailbox) held.reset();
  for (auto& [number, round] : rounds) round.pulled.erase(account.learner);  // its next life is asked again
}

// Lives with a successor shrink to what must be remembered, once nothing of theirs is held.
void SyncerCore::Impl::settle_superseded() {
  if (superseded.empty()) return;
  const std::set<Incarnation> used = incarnations_in_use();
  std::erase_if(superseded, [&](Incarnation incarnation) {
    const auto it = accounts.find(incarnation);
    if (it == accounts.end()) return true;
    if (used.contains(incarnation)) return false;
    settled[incarnation] = std::move(it->second.merged_to);
    past[incarnation] = std::move(static_cast<Life&>(it->second));
    accounts.erase(it);
    return true;
  });
}

// Weights taken over contain this incarnation's work up to `to`.
void SyncerCore::Impl::settle(Incarnation incarnation, FragmentId p, std::uint64_t to) {
  if (const auto it = accounts.find(incarnation); it != accounts.end()) {
    it->second.in_table = true;
    it->second.merged_to[p] = to;
    return;
  }
  if (const auto it = past.find(incarnation); it != past.end()) it->second.in_table = true;
  auto& merged_to = settled[incarnation];
  merged_to.resize(plan.size(), 0);
  merged_to[p] = to;
}

// Incarnations to remember once this table, and those of the anchors being decoded, are taken over.
std::size_t SyncerCore::Impl::incarnations_with(const MergedTable& table) const {
  std::vector<Incarnation> fresh;
  const auto add = [&](const MergedTable& rows) {
    for (const auto& [incarnation, to] : rows) {
      if (!accounts.contains(incarnation) && !settled.contains(incarnation)) fresh.push_back(incarnation);
    }
  };
  add(table);
  for (const auto& slot : slots) {
    if (slot.init_begin) add(slot.init_begin->merged);
  }
  std::sort(fresh.begin(), fresh.end());
  const auto end = std::unique(fresh.begin(), fresh.end());
  return incarnations() + static_cast<std::size_t>(end - fresh.begin());
}

// Forgets incarnations that are gone without a trace in the weights, once there are too many. What they processed
// leaves the ledger with them.
bool SyncerCore::Impl::room_for_newcomer() {
  if (incarnations() < kMaxIncarnations) return true;
  std::erase_if(past, [&](const auto& entry) {
    if (entry.second.left_a_trace()) return false;
    settled.erase(entry.first);
    return true;
  });
  const std::set<Incarnation> used = incarnations_in_use();
  std::erase_if(accounts, [&](const auto& entry) {
    return !entry.second.left_a_trace() && !used.contains(entry.first);
  });
  return incarnations() < kMaxIncarnations;
}

}  // namespace diloco
