// A session's bulk connections, one per part of the learner's model. What the ranks of an island send is put together in
// the unsharded layout as it arrives; from there on an island is a learner like any other.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/core/syncer_impl.h"

namespace diloco {

BulkLane* SyncerCore::Impl::lane_of(Session& session, PeerId peer) {
  for (BulkLane& lane : session.lanes) {
    if (lane.peer == peer) return &lane;
  }
  return nullptr;
}

void SyncerCore::Impl::on_lane(PeerId peer, const Header& header, Bytes payload) {
  const auto it = sessions.find(header.session);
  const bool known = it != sessions.end() && it->second.control != 0 && it->second.lane_token == header.transfer &&
                     it->second.lanes.size() == header.parts;
  BulkLane* lane = known ? &it->second.lanes[header.part] : nullptr;
  if (!lane || lane->peer != 0) {
    send(peer, MessageType::kRehello, nullptr, {});
    actions.push_back(CutPeer{peer, "LANE with an unknown session or a wrong token"});
    // A rank that comes back has lost what was under way; the whole island starts afresh.
    if (lane && header.parts > 1) end_session(header.session, fmt::format("part {} connected again", header.part), true);
    return;
  }
  Session& session = it->second;
  lane->peer = peer;
  peer_session[peer] = session.id;
  if (header.part > 0) {
    lane->liveness.start(now, settings.heartbeat_interval_s, settings.heartbeat_timeout_s);
    lane->downlink.reset(header.offset, sender_window(settings.credit_window_bytes));
    std::string why;
    const auto body = decode_lane(payload, &why);
    if (!body) return violation(session, "LANE: " + why);
    bind_part(session, *lane, body->part);
  }
  const bool all = std::all_of(session.lanes.begin(), session.lanes.end(), [](const BulkLane& l) { return l.peer != 0; });
  if (session.control != 0 && all) complete_lanes(session);
}

// From the order of HELLO's tensors to the run's.
void SyncerCore::Impl::bind_part(Session& session, BulkLane& lane, const Part& part) {
  if (part.size() != session.tensors.size()) {
    return violation(session, fmt::format("part {} names {} tensors, the model has {}", &lane - session.lanes.data(),
                                          part.size(), session.tensors.size()));
  }
  lane.part.resize(part.size());
  for (std::size_t i = 0; i < part.size(); ++i) lane.part[session.tensors[i]] = part[i];
}

void SyncerCore::Impl::complete_lanes(Session& session) {
  if (session.lanes.size() > 1) {
    std::vector<Part> parts;
    for (const BulkLane& lane : session.lanes) parts.push_back(lane.part);
    Layout own = *layout;  // without what the run has added since
    own.tensors.resize(session.tensors.size());
    if (const std::string fault = parts_fault(own, parts); !fault.empty()) {
      reject(session.control, "parts", fmt::format("the ranks of '{}' do not hold the model between them: {}",
                                                   session.account->learner, fault));
      return end_session(session.id, "its parts are not the model", true);
    }
    const auto owned = owners(parts);
    for (std::size_t part = 0; part < owned.size(); ++part) session.lanes[part].owned = owned[part];
    log(LogLevel::kInfo, fmt::format("learner '{}': all {} parts of its {} ranks are connected", session.account->learner,
                                     session.lanes.size(), session.ranks));
  }
  session.whole = true;
  for (FragmentId p = 0; p < slots.size(); ++p) {
    if (slots[p].state) queue_image(session, p);
  }
  pump(session);
  elect_anchors();
}

PartMap SyncerCore::Impl::map_of(const BulkLane& lane, const PayloadLayout& payload) const {
  return {*layout, payload, lane.part, lane.owned};
}

// One part of an upload begins. The leader's says which copy it is, and the other ranks are asked for the same.
void SyncerCore::Impl::gather(Session& session, BulkLane& lane, const Header& header, const Begin& begin, bool keep) {
  const FragmentId p = begin.fragment;
  const auto part = static_cast<std::size_t>(&lane - session.lanes.data());
  const PayloadLayout& payload = begin.kind == PayloadKind::kAnchor ? slots[p].anchor : slots[p].contribution;
  const auto key = std::pair(p, begin.kind);
  const auto found = session.gathering.find(key);
  std::shared_ptr<Gathering> whole = found == session.gathering.end() ? nullptr : found->second;
  if (part == 0 && keep) {
    if (whole) return violation(session, fmt::format("fragment {} is begun twice", p));
    whole = std::make_shared<Gathering>();
    whole->begin = begin;
    whole->whole = Buffer::make(payload.bytes);
    whole->left = static_cast<std::uint32_t>(session.lanes.size());
    whole->begun.resize(session.lanes.size());
    session.gathering[key] = whole;
    for (std::size_t other = 1; other < session.lanes.size(); ++other) {
      BulkLane& asked = session.lanes[other];
      Pull pull;
      pull.kind = begin.kind;
      pull.fragment = p;
      pull.round = begin.round;
      pull.clock = begin.clock;
      pull.step = begin.step;
      pull.base = begin.base;
      send(asked.peer, MessageType::kPull, &session, encode(pull), p, asked.uplink_credit.grant_now());
    }
  }
  if (part > 0 && whole) {
    if (whole->begun[part]) return violation(session, fmt::format("part {} of fragment {} is begun twice", part, p));
    const Begin& first = whole->begin;
    if (begin.base != first.base || begin.step != first.step || begin.c_steps != first.c_steps ||
        header.incarnation != session.account->incarnation) {
      return violation(session, fmt::format("part {} of fragment {} is of incarnation {:016x}, base {}, step {} ({} of its "
                                            "steps new), part 0 of {:016x}, {}, {} ({})", part, p, header.incarnation,
                                            to_string(begin.base), begin.step, begin.c_steps,
                                            session.account->incarnation, to_string(first.base), first.step,
                                            first.c_steps));
    }
  }
  if (whole) whole->begun[part] = true;  // null: nobody wants it any more, its bytes are counted and dropped
  lane.filling = whole;
  const auto map = std::make_shared<const PartMap>(map_of(lane, payload));
  Reassembly::Sink sink;
  if (whole) {
    sink = [map, whole](std::uint64_t offset, std::span<const std::byte> bytes) {
      if (!whole->given_up) map->scatter(offset, bytes, whole->whole->data());
    };
  }
  on_transfer(session, lane, lane.uplink.begin(header, begin, map->bytes(), whole != nullptr, std::move(sink)));
}

// A part is complete; the upload, if it was the last one.
std::optional<std::pair<Begin, BufferPtr>> SyncerCore::Impl::gathered(Session& session, BulkLane& lane) {
  const std::shared_ptr<Gathering> whole = std::exchange(lane.filling, nullptr);
  if (!whole || whole->given_up || --whole->left > 0) return std::nullopt;
  session.gathering.erase({whole->begin.fragment, whole->begin.kind});
  return std::pair(whole->begin, std::move(whole->whole));
}

void SyncerCore::Impl::give_up_gathering(Session& session, FragmentId p, PayloadKind kind, const std::string& why) {
  const auto it = session.gathering.find({p, kind});
  if (it == session.gathering.end()) return;
  it->second->given_up = true;
  it->second->whole.reset();
  session.gathering.erase(it);
  log(LogLevel::kWarning, fmt::format("what '{}' sent of fragment {} does not count: {}", session.account->learner, p, why));
  if (kind == PayloadKind::kAnchor) {
    if (slots[p].init_from == session.id && slots[p].init_job == 0) slots[p].init_from = 0;
    return elect_anchors();
  }
  session.pulled[p].reset();
  session.reserved -= slots[p].contribution.bytes;
  for (auto& [number, round] : rounds) {  // it is asked again
    if (round.fragment != p) continue;
    round.waiting.erase(session.id);
    round.pulled.erase(session.account->learner);
  }
}

// Connections of the ranks behind the leader: signs of life both ways. `silent`: which one has given none.
void SyncerCore::Impl::serve_lanes(Session& session, std::string* silent) {
  for (std::size_t part = 1; part < session.lanes.size(); ++part) {
    BulkLane& lane = session.lanes[part];
    if (lane.peer == 0) continue;
    if (lane.liveness.silent(now)) {
      *silent = fmt::format("part {} silent", part);
    } else if (lane.liveness.must_speak(now)) {
      lane.liveness.said(now);
      send(lane.peer, MessageType::kHeartbeat, &session, encode(Heartbeat{}));
    }
  }
}

}  // namespace diloco
