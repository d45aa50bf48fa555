// Payload memory: how many contributions may be on their way, held or merged at once. An open round is promised what its
// quorum still lacks, and whatever comes beyond a quorum leaves room for the quorum of the largest fragment; so a round that
// is open can be filled, and when none is open one can be opened.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/core/syncer_impl.h"

namespace diloco {

std::uint64_t SyncerCore::Impl::largest_contribution() const {
  std::uint64_t largest = 0;
  for (FragmentId p = 0; p < slots.size(); ++p) largest = std::max(largest, owns(p) ? slots[p].contribution.bytes : 0);
  return largest;
}

// "" if rounds of so many learners can end in the memory there is. In lockstep a round waits for everybody.
std::string SyncerCore::Impl::memory_short(std::size_t learners) const {
  const bool lockstep = settings.mode == Mode::kLockstep;
  const std::uint64_t of = lockstep ? std::max<std::uint64_t>(learners, settings.min_quorum) : settings.min_quorum;
  if (of * largest_contribution() <= options.payload_memory_bytes) return {};
  return fmt::format("a round needs {} contributions ({}) to a fragment at once, of up to {} bytes each; this syncer may hold "
                     "{} bytes (payload_memory_bytes, by default half of its machine's memory): raise that or num_fragments",
                     of, lockstep ? "lockstep: of everybody who is here" : "min_quorum", largest_contribution(),
                     options.payload_memory_bytes);
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

// Contributions that a quorum of fragment p lacks, those on their way count as there.
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

// Not: two contributions of each learner to each fragment, one that lies here and one that may replace it, and a quorum
// besides. What learners that are gone have left is merged with the next round of its fragment.
bool SyncerCore::Impl::payload_memory_scarce() const {
  std::uint64_t model = 0;
  for (FragmentId p = 0; p < slots.size(); ++p) model += owns(p) ? slots[p].contribution.bytes : 0;
  return 2 * live_sessions() * model + settings.min_quorum * largest_contribution() > options.payload_memory_bytes;
}

bool SyncerCore::Impl::payload_fits(const Session& session, FragmentId p) const {
  if (settings.mode == Mode::kLockstep) return true;  // round_fits has seen to it
  const std::uint64_t needed = payload_bytes_held() + slots[p].contribution.bytes;
  if (needed > options.payload_memory_bytes) return false;
  if (settings.trigger == Trigger::kArrival || !payload_memory_scarce()) return true;
  if (!session.account->mailbox[p] && quorum_lacks(p) > 0) return true;  // it was promised
  const auto [quorums, lacking] = promised();
  const std::uint64_t quorum = settings.min_quorum * largest_contribution();
  return needed + lacking + (quorum - std::min(quorum, quorums)) <= options.payload_memory_bytes;
}

// In lockstep everybody contributes to every open round; the earliest one always may open.
bool SyncerCore::Impl::round_fits(FragmentId p) const {
  const std::uint64_t bytes = slots[p].contribution.bytes;
  if (settings.mode == Mode::kDecoupled) {
    return payload_bytes_held() + promised().lacking + quorum_lacks(p) * bytes <= options.payload_memory_bytes;
  }
  std::uint64_t open = bytes;
  for (const auto& [number, round] : rounds) open += slots[round.fragment].contribution.bytes;
  return rounds.empty() || live_sessions() * open <= options.payload_memory_bytes;
}

}  // namespace diloco
