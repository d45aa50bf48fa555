// Payload memory: how many contributions may be on their way, held or merged at once. An open round is promised what its
// quorum still lacks, and whatever comes beyond a quorum leaves room for the quorum of the largest fragment; so a round that
// is open can be filled, and when none is open one can be opened.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/core/syncer_impl.h"

namespace diloco {

// Of a round of the largest fragment.
std::uint64_t SyncerCore::Impl::quorum_bytes() const {
  std::uint64_t largest = 0;
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (owns(p)) largest = std::max(largest, slots[p].contribution.bytes);
  }
  return settings.min_quorum * largest;
}

// One contribution to every fragment.
std::uint64_t SyncerCore::Impl::model_bytes() const {
  std::uint64_t bytes = 0;
  for (FragmentId p = 0; p < slots.size(); ++p) bytes += owns(p) ? slots[p].contribution.bytes : 0;
  return bytes;
}

// "" if rounds of so many learners can end in the memory there is; in lockstep, where all rounds wait for everybody, if it
// has room for everybody's contributions to all fragments.
std::string SyncerCore::Impl::memory_short(std::size_t learners) const {
  const std::uint64_t all = learners * model_bytes();
  const std::string have = fmt::format("this syncer may hold {} (payload_memory_bytes, by default half of its machine's "
                                       "memory)", options.payload_memory_bytes);
  if (settings.mode == Mode::kLockstep && all > options.payload_memory_bytes) {
    return fmt::format("in lockstep the contributions of {} learners to all fragments are held, {} bytes; {}: raise that, or "
                       "start fewer learners", learners, all, have);
  }
  if (quorum_bytes() > options.payload_memory_bytes) {
    return fmt::format("min_quorum = {} contributions to the largest fragment are {} bytes; {}: raise that, or num_fragments",
                       settings.min_quorum, quorum_bytes(), have);
  }
  return {};
}

// Reservations of live sessions, what lies in mailboxes, what is being screened or merged.
std::uint64_t SyncerCore::Impl::payload_bytes_held() const {
  std::uint64_t bytes = 0;
  for (const auto& [id, session] : sessions) {
    if (session.control != 0) bytes += session.reserved;
  }
  for_each_held([&](const Contribution& held) { bytes += held.bytes(); });
  return bytes;
}

// Contributions that a quorum of fragment p lacks, those on their way not counted.
std::size_t SyncerCore::Impl::quorum_lacks(FragmentId p) const {
  std::size_t there = 0;
  for (const auto& [incarnation, account] : accounts) there += account.mailbox[p].has_value();
  for (const auto& [id, session] : sessions) {
    there += session.control != 0 && session.pulled[p] && !session.account->mailbox[p];
  }
  for (const auto& [job, info] : jobs) {  // who is being screened is not asked meanwhile
    there += info.fragment == p && info.contribution.payload && !accounts.at(info.contribution.incarnation).mailbox[p];
  }
  return settings.min_quorum - std::min<std::size_t>(there, settings.min_quorum);
}

SyncerCore::Impl::Promised SyncerCore::Impl::promised() const {
  Promised out;
  for (const auto& [number, round] : rounds) {
    if (round.phase != RoundPhase::kCollecting) continue;
    const std::uint64_t bytes = slots[round.fragment].contribution.bytes;
    out.quorums += settings.min_quorum * bytes;
    out.lacking += quorum_lacks(round.fragment) * bytes;
  }
  return out;
}

// Of each learner and fragment one may lie here and one may come to replace it; and a quorum is kept free.
bool SyncerCore::Impl::payload_memory_scarce() const {
  return 2 * live_sessions() * model_bytes() + quorum_bytes() > options.payload_memory_bytes;
}

bool SyncerCore::Impl::payload_fits(const Session& session, FragmentId p) const {
  // In lockstep, where everybody is waited for, who was admitted has its place.
  if (settings.mode == Mode::kLockstep) return true;
  const std::uint64_t needed = payload_bytes_held() + slots[p].contribution.bytes;
  if (needed > options.payload_memory_bytes) return false;
  if (settings.trigger == Trigger::kArrival || !payload_memory_scarce()) return true;
  if (!session.account->mailbox[p] && quorum_lacks(p) > 0) return true;  // it was promised
  const auto [quorums, lacking] = promised();
  const std::uint64_t spare = quorum_bytes() - std::min(quorum_bytes(), quorums);
  return needed + lacking + spare <= options.payload_memory_bytes;
}

bool SyncerCore::Impl::round_fits(FragmentId p) const {
  if (settings.mode == Mode::kLockstep) return true;
  const std::uint64_t needed = quorum_lacks(p) * slots[p].contribution.bytes;
  return payload_bytes_held() + promised().lacking + needed <= options.payload_memory_bytes;
}

}  // namespace diloco
