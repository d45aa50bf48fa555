// Persist before publish, then the new version to everybody: newest wins, nobody waits for a slow reader.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "diloco/core/syncer_impl.h"
#include "diloco/core/syncer_record.h"

namespace diloco {

void SyncerCore::Impl::on_persisted(const Persisted& persisted) {
  const FragmentId p = persisted.fragment;
  FragmentSlot& slot = slots.at(p);
  const auto it = rounds.find(slot.open_round);
  if (it == rounds.end() || it->second.phase != RoundPhase::kPersisting) return;
  Round& round = it->second;
  if (settings.anchor == Anchor::kSyncer) slot.retained[slot.state->version] = slot.image.bytes;
  slot.state = round.result.next;
  slot.image = round.result.image;
  slot.merged_here = true;
  slot.open_round = 0;
  slot.round = round.id;
  slot.clock = round.clock;
  ++rounds_merged;
  round_s.add(now - round.opened);
  undelivered[p] = round.closed_at;
  record(nlohmann::json{{"event", "published"}, {"round", round.id}, {"fragment", p},
                        {"version", to_json(slot.state->version)}});
  const std::uint64_t id = round.id;
  const Clock clock = round.clock;
  const Incarnation only = round.only;
  rounds.erase(it);
  publish(p, id, clock, only);
  prune_retained(p);
}

// Versions that nobody works from any more: no contribution held or asked for is a change against them, and no learner
// within max_staleness has them.
void SyncerCore::Impl::prune_retained(FragmentId p) {
  FragmentSlot& slot = slots[p];
  if (slot.retained.empty()) return;
  const Version current = slot.state->version;
  Version oldest = current;
  const auto needs = [&](const Version& base) {
    if (base.epoch == epoch) oldest = std::min(oldest, base);
  };
  const std::uint64_t limit = settings.staleness_limit();
  for (const auto& [id, session] : sessions) {
    if (session.control == 0) continue;
    if (session.pulled[p]) needs(session.pulled_from[p]);
    if (session.adopted[p].n + limit >= current.n) needs(session.adopted[p]);
  }
  for_each_held([&](const Contribution& held) {
    if (held.begin.fragment == p) needs(held.begin.base);
  });
  slot.retained.erase(slot.retained.begin(), slot.retained.lower_bound(oldest));
}

std::uint64_t SyncerCore::Impl::retained_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& slot : slots) {
    for (const auto& [version, image] : slot.retained) bytes += image->size();
  }
  return bytes;
}

MergedTable SyncerCore::Impl::merged_table(FragmentId p) const {
  MergedTable table;
  for (const auto& [incarnation, account] : accounts) {
    if (account.merged_to[p] > 0) table.emplace_back(incarnation, account.merged_to[p]);
  }
  for (const auto& [incarnation, merged_to] : settled) {
    if (merged_to[p] > 0) table.emplace_back(incarnation, merged_to[p]);
  }
  return table;
}

// To everybody, or with trigger = arrival to the one whose work made it; the others get it with their own answer.
void SyncerCore::Impl::publish(FragmentId p, std::uint64_t round, Clock clock, Incarnation only) {
  FragmentSlot& slot = slots[p];
  Begin begin;
  begin.kind = PayloadKind::kImage;
  begin.fragment = p;
  begin.round = round;
  begin.base = slot.state->version;
  begin.clock = settings.trigger == Trigger::kArrival ? 0 : clock;  // there everybody counts its own steps
  begin.merged = merged_table(p);
  slot.begin = std::make_shared<const std::string>(encode(begin));
  for (auto& [id, session] : sessions) {
    if (session.control == 0 || !session.whole) continue;
    if (only != 0 && session.account->incarnation != only) continue;
    queue_image(session, p);
    pump(session);
  }
}

void SyncerCore::Impl::queue_image(Session& session, FragmentId p) {
  const FragmentSlot& slot = slots[p];
  if (!session.has(p) || session.adopted[p] >= slot.state->version) return;
  if (session.island()) {
    if (session.sent[p] > session.adopted[p]) {
      session.held_back.insert(p);
      return;
    }
    session.sent[p] = slot.state->version;
  }
  for (BulkLane& lane : session.lanes) {
    Transfer transfer;
    transfer.fragment = p;
    transfer.kind = PayloadKind::kImage;
    transfer.version = slot.state->version;
    transfer.begin = slot.begin;
    transfer.tag = p;
    if (lane.part.empty()) {
      transfer.image = slot.image;
      transfer.total = slot.image_layout.bytes;
    } else {
      auto map = std::make_shared<const PartMap>(map_of(lane, slot.image_layout));
      transfer.total = map->bytes();
      transfer.read = [map, bytes = slot.image.bytes](std::uint64_t offset, std::span<std::byte> out) {
        map->gather(bytes->data(), offset, out);
      };
    }
    lane.downlink.push(std::move(transfer));
  }
}

// An island has adopted what was on its way: whatever came meanwhile follows.
void SyncerCore::Impl::send_held_back(Session& session, FragmentId p) {
  if (!session.whole || !slots[p].state || session.sent[p] > session.adopted[p] || session.held_back.erase(p) == 0) return;
  queue_image(session, p);
  pump(session);
}

void SyncerCore::Impl::pump(Session& session) {
  if (session.control == 0 || !session.whole) return;
  Header header;
  header.session = session.id;
  header.epoch = epoch;
  header.shard = options.shard;
  header.incarnation = session.account->incarnation;
  header.parts = static_cast<std::uint16_t>(session.lanes.size());
  for (std::size_t part = 0; part < session.lanes.size(); ++part) {
    BulkLane& lane = session.lanes[part];
    header.part = static_cast<std::uint16_t>(part);
    auto batch = lane.downlink.take(header, settings.chunk_bytes);
    for (auto& frame : batch.frames) actions.push_back(SendTo{lane.peer, std::move(frame)});
    if (part > 0) continue;
    for (const auto& [tag, end] : batch.finished) session.delivered_at_byte[static_cast<FragmentId>(tag)] = end;
  }
}

// CREDIT tells how far the receiver has read: the first learner that has a version ends xi_sync.
void SyncerCore::Impl::note_delivery(Session& session, std::uint64_t received) {
  std::erase_if(session.delivered_at_byte, [&](const auto& entry) {
    if (received < entry.second) return false;
    if (const auto at = undelivered.find(entry.first); at != undelivered.end()) {
      xi_sync.add(now - at->second);
      undelivered.erase(at);
    }
    return true;
  });
}

}  // namespace diloco
