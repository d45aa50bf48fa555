// one_session, tombstone, liveness, credit, eligibility, armed, newest_image, payload_intact, memory_bound: what passes
// between the syncer and one learner.
#include <algorithm>

#include <fmt/format.h>

#include "diloco/sim/invariants_impl.h"

namespace diloco::sim {

SessionBooks* ShardInvariants::Impl::session(SessionId id) {
  const auto it = sessions.find(id);
  return it == sessions.end() ? nullptr : &it->second;
}

// The WELCOME has been sent.
void ShardInvariants::Impl::open_session(PeerId peer, const Header& header) {
  LifeBooks* of = life(header.incarnation);
  const auto hello = hellos.find(peer);
  if (!of || hello == hellos.end() || hello->second.incarnation != header.incarnation) {
    return fail("one_session", fmt::format("a WELCOME for incarnation {:016x}, which has not introduced itself",
                                           header.incarnation));
  }
  if (tombs.contains(of->incarnation)) fail("tombstone", fmt::format("{} is admitted again after it was sent away", of->id));
  for (const auto& [id, other] : sessions) {
    if (other.life->id == of->id) fail("one_session", fmt::format("{} is admitted while it has a session", of->id));
  }
  SessionBooks& books = sessions[header.session];
  books.id = header.session;
  books.control = peer;
  books.life = of;
  books.clock = hello->second.clock;
  books.steps = hello->second.steps;
  books.tokens = hello->second.tokens;
  books.last_step = books.heard = syncer_now;
  books.adopted = hello->second.adopted;
  books.adopted.resize(fragments.size());
  for (auto* flags : {&books.ordered, &books.waited_for, &books.armed}) flags->resize(fragments.size());
  books.up.granted = 0;  // until the WELCOME is there
  books.down.granted = hello->second.credit;
}

void ShardInvariants::Impl::close_session(Incarnation incarnation, const std::string& why) {
  for (auto it = sessions.begin(); it != sessions.end(); ++it) {
    SessionBooks& books = it->second;
    if (books.life->incarnation != incarnation) continue;
    if (why.starts_with("silent") && syncer_now + kTimeSlack < books.heard + settings.heartbeat_timeout_s) {
      fail("liveness", fmt::format("{} is called silent {:.3f} s after its last message", books.life->id,
                                   syncer_now - books.heard));
    }
    if (frame_from == &books) frame_from = nullptr;
    sessions.erase(it);
    return;
  }
}

bool ShardInvariants::Impl::stalled(const SessionBooks& books) const {
  return syncer_now >= books.last_step + std::max(5.0 * std::max(books.step_s, 0.0), 2.0);
}

bool ShardInvariants::Impl::sets_pace(const SessionBooks& books) const {
  return books.steps > 0 && (settings.mode == Mode::kLockstep || !stalled(books));
}

// T_K: the K-th largest clock of those who make steps.
std::optional<Clock> ShardInvariants::Impl::quorum_clock() const {
  std::array<Clock, 64> clocks;
  std::size_t n = 0;
  for (const auto& [id, books] : sessions) {
    if (!sets_pace(books) || n == clocks.size()) continue;
    clocks[n++] = books.clock;
  }
  if (n < settings.min_quorum) return std::nullopt;
  std::sort(clocks.begin(), clocks.begin() + static_cast<std::ptrdiff_t>(n), std::greater<>());
  return clocks[settings.min_quorum - 1];
}

Seconds ShardInvariants::Impl::quorum_step_s() const {
  std::array<Seconds, 64> steps;
  std::size_t n = 0;
  for (const auto& [id, books] : sessions) {
    if (!sets_pace(books) || books.step_s <= 0.0 || n == steps.size()) continue;
    steps[n++] = books.step_s;
  }
  if (n < settings.min_quorum) return 0.0;
  std::sort(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(n));
  return steps[settings.min_quorum - 1];
}

void ShardInvariants::Impl::on_step(SessionBooks& books, const Step& step) {
  if (step.steps > books.steps) {
    const Seconds took = syncer_now - books.last_step;
    if (books.steps > 0 && took > 0.0) average(books.step_s, took / static_cast<double>(step.steps - books.steps));
    books.last_step = syncer_now;
  }
  books.steps = std::max(books.steps, step.steps);
  books.tokens = std::max(books.tokens, step.tokens);
  books.clock = std::max(books.clock, step.clock);
  for (const auto& [fragment, version] : step.adopted) {
    if (fragment < books.adopted.size()) books.adopted[fragment] = std::max(books.adopted[fragment], version);
  }
}

// ---- to the syncer ----

void ShardInvariants::at_syncer(PeerId peer, const Header& header, Bytes payload, TimePoint now) {
  Impl& at = *impl_;
  at.syncer_now = now;
  at.frame_from = nullptr;
  if (header.type == MessageType::kHello) {
    std::string why;
    if (const auto hello = decode_hello(payload, &why)) {
      at.hellos[peer] = {header.incarnation, hello->steps, hello->tokens, hello->downlink_credit, hello->clock,
                         hello->adopted};
    }
    return;
  }
  SessionBooks* session = at.session(header.session);
  if (!session) return;
  if (header.type == MessageType::kLane) {
    if (!session->laned) at.lanes[peer] = session->id;
    session->laned = true;
    return;
  }
  const auto lane = at.lanes.find(peer);
  if (peer != session->control && (lane == at.lanes.end() || lane->second != session->id)) return;
  at.frame_from = session;
  if (peer == session->control) session->heard = now, session->heard_once = true;
  std::string why;
  switch (header.type) {
    case MessageType::kStep:
      if (const auto step = decode_step(payload, &why)) at.on_step(*session, *step);
      break;
    case MessageType::kCredit:
      session->down.granted = std::max(session->down.granted, header.offset);
      session->down.acknowledged = std::max(session->down.acknowledged, std::min(header.total, session->down.sent));
      std::erase_if(session->image_ends, [&](const auto& image) {
        if (header.total < image.second) return false;
        if (const auto since = at.undelivered.find(image.first); since != at.undelivered.end()) {
          average(at.sync_s, now - since->second);
          at.undelivered.erase(since);
        }
        return true;
      });
      break;
    case MessageType::kBegin:
      session->arriving = decode_begin(payload, &why);
      session->arriving_total = header.total;
      at.check_memory();
      break;
    case MessageType::kChunk:
      session->up.received += payload.size();
      break;
    case MessageType::kMiss: {
      const FragmentId p = header.fragment;
      if (p >= session->ordered.size()) break;
      session->ordered[p] = session->waited_for[p] = false;
      if (auto& mailbox = at.share(*session->life, p).mailbox) mailbox->given_up = true;
      break;
    }
    default: break;
  }
}

void ShardInvariants::peer_gone(PeerId peer) { impl_->hellos.erase(peer); }

void ShardInvariants::before_actions(TimePoint now) {
  Impl& at = *impl_;
  at.syncer_now = now;
  for (const FragmentId p : at.own) {
    at.fragments[p].newest_before = at.fragments[p].newest;
    at.fragments[p].replaced = false;
  }
}

void ShardInvariants::runs_screen(const RunScreen& screen) {
  Impl& at = *impl_;
  SessionBooks* from = at.frame_from;
  if (!from || !from->arriving || from->arriving->kind != PayloadKind::kContribution) {
    return at.fail("payload_intact", "a contribution is screened that nobody has sent");
  }
  const Begin begin = *from->arriving;
  LifeBooks& life = *from->life;
  const Share& share = at.share(life, begin.fragment);
  const std::uint64_t hash = checksum(screen.payload->bytes());
  const auto sent = std::find_if(share.sent.rbegin(), share.sent.rend(), [&](const Copy& copy) {
    return copy.from == begin.from && copy.to == begin.to && copy.base == begin.base;
  });
  if (sent == share.sent.rend() || (sent->hash != 0 && sent->hash != hash)) {
    at.fail("payload_intact", fmt::format("tokens [{}, {}) of {} on fragment {} arrive {}", begin.from, begin.to, life.id,
                                          begin.fragment, sent == share.sent.rend() ? "without having been sent"
                                                                                    : "with other bytes than were staged"));
  }
  at.screening[screen.job] = {&life, begin.fragment,
                              {begin.from, begin.to, begin.c_steps, begin.clock, begin.base, hash, at.syncer_now}};
  std::erase_if(at.payloads, [](const auto& held) { return held.first.expired(); });
  at.payloads.emplace_back(screen.payload, screen.payload->size());
  from->arriving.reset();
  from->ordered.at(begin.fragment) = false;
  at.check_memory();
}

// The mailbox keeps it, unless a refusal follows in this event.
void ShardInvariants::screen_done(JobId job) {
  Impl& at = *impl_;
  at.just_screened.reset();
  const auto it = at.screening.find(job);
  if (it == at.screening.end()) return;
  const auto done = it->second;
  at.screening.erase(it);
  for (auto& [id, session] : at.sessions) {
    if (session.life == done.life && !session.ordered[done.fragment]) session.waited_for[done.fragment] = false;
  }
  if (at.tombs.contains(done.life->incarnation)) return;
  auto& mailbox = at.share(*done.life, done.fragment).mailbox;
  at.just_screened = done;
  at.replaced_by_it = mailbox;
  mailbox = done.copy;
}

// ---- from the syncer ----

void ShardInvariants::Impl::check_grant(const SessionBooks& books, const Header& header) {
  if (header.offset > books.up.received + settings.credit_window_bytes) {
    fail("credit", fmt::format("the syncer grants {} {} bytes with {} received; the window is {}", books.life->id,
                               header.offset, books.up.received, settings.credit_window_bytes));
  }
}

void ShardInvariants::Impl::on_pull(SessionBooks& books, const Header& header, const Pull& pull) {
  check_grant(books, header);
  const FragmentId p = pull.fragment;
  if (!check_own(p, "asks for") || pull.kind != PayloadKind::kContribution) return;
  LifeBooks& of = *books.life;
  Share& share = this->share(of, p);
  if (!books.laned) fail("eligibility", fmt::format("{} is asked for fragment {} before it can send", of.id, p));
  if (books.ordered[p]) fail("eligibility", fmt::format("{} is asked for fragment {} twice", of.id, p));
  if (share.adopted < share.merged_in) {
    fail("eligibility", fmt::format("{} is asked for fragment {} with version {}; its last work went into {}", of.id, p,
                                    to_string(share.adopted), to_string(share.merged_in)));
  }
  if (books.adopted[p].epoch != epoch) {
    fail("eligibility", fmt::format("{} is asked for fragment {} with version {} in epoch {}", of.id, p,
                                    to_string(books.adopted[p]), epoch));
  }
  // In lockstep it makes a step for a round whose clock it has passed.
  const bool ahead = settings.mode == Mode::kLockstep && books.steps > 0 && books.clock >= pull.clock;
  if (of.tokens.back() <= run.merged_to(of, p) && !ahead) {
    fail("eligibility", fmt::format("{} is asked for fragment {} without having made a token since", of.id, p));
  }
  if (share.mailbox && settings.adopt != Adopt::kRebase && share.mailbox->base != books.adopted[p]) {
    fail("eligibility", fmt::format("{} is asked for fragment {} while work that it has overwritten waits to be merged",
                                    of.id, p));
  }
  if (share.mailbox && share.mailbox->given_up) {
    fail("eligibility", fmt::format("{} is asked for fragment {} again before the work is merged that it has given up",
                                    of.id, p));
  }
  if (fragments[p].closing && !on_arrival()) {
    fail("eligibility", fmt::format("{} is asked for fragment {}, which is being merged", of.id, p));
  }
  if (pull.held_to != (share.mailbox ? share.mailbox->to : 0)) {
    fail("mailbox", fmt::format("{} is told that tokens up to {} of fragment {} are held; held are {}", of.id, pull.held_to,
                                p, share.mailbox ? share.mailbox->to : 0));
  }
  books.ordered[p] = books.waited_for[p] = true;
  check_memory();
}

// An image begins to be sent.
void ShardInvariants::Impl::on_image(SessionBooks& books, const OutFrame& frame) {
  const FragmentId p = frame.header.fragment;
  if (!check_own(p, "publishes")) return;
  const FragmentBooks& of = fragments[p];
  const bool late = on_arrival() && of.images.contains(frame.header.version);  // there each is answered alone
  if (frame.header.version != of.newest && frame.header.version != of.newest_before && !late) {
    fail("newest_image", fmt::format("{} is sent fragment {} version {}; the newest is {}", books.life->id, p,
                                     to_string(frame.header.version), to_string(of.newest)));
  }
  if (!tables_seen.emplace(p, frame.header.version).second) return;
  std::string why;
  const auto begin = decode_begin(frame.payload(), &why);
  if (!begin) return fail("readable", "a BEGIN of the syncer cannot be read: " + why);
  if (frame.header.version == of.newest) run.check_table(p, begin->merged);
}

void ShardInvariants::from_syncer(PeerId peer, const OutFrame& frame) {
  Impl& at = *impl_;
  const Header& header = frame.header;
  if (header.type == MessageType::kWelcome) return at.open_session(peer, header);
  SessionBooks* session = at.session(header.session);
  if (!session) return;
  const Bytes body = frame.payload();
  std::string why;
  switch (header.type) {
    case MessageType::kPull:
      if (const auto pull = decode_pull(body, &why)) at.on_pull(*session, header, *pull);
      else at.fail("readable", "a PULL cannot be read: " + why);
      break;
    case MessageType::kArm:
      if (const auto arm = decode_arm(body, &why)) {
        session->armed.assign(at.fragments.size(), false);
        for (const FragmentId p : arm->fragments) session->armed.at(p) = true;
      } else {
        at.fail("readable", "an ARM cannot be read: " + why);
      }
      break;
    case MessageType::kCredit:
      at.check_grant(*session, header);
      break;
    case MessageType::kBegin:
      at.on_image(*session, frame);
      break;
    case MessageType::kChunk: {
      CreditBooks& down = session->down;
      down.sent += frame.slice.size;
      const std::uint64_t window = std::max(at.settings.credit_window_bytes, Settings{}.credit_window_bytes);
      if (down.sent > down.granted || down.sent - down.acknowledged > window) {
        at.fail("credit", fmt::format("{} has been sent {} bytes of weights; granted are {}, acknowledged {}",
                                      session->life->id, down.sent, down.granted, down.acknowledged));
      }
      if (header.offset + frame.slice.size == header.total) session->image_ends[header.fragment] = down.sent;
      break;
    }
    case MessageType::kReject: {
      const auto reject = decode_reject(body, &why);
      if (reject && (reject->code == "superseded" || reject->code == "ejected")) {
        LifeBooks& life = *session->life;
        at.tombs.insert(life.incarnation);
        for (const FragmentId p : at.own) {
          if (p >= life.shares.size() || !life.shares[p].mailbox) continue;
          life.shares[p].mailbox.reset();
          if (at.fragments[p].round) at.fragments[p].round->disturbed = true;  // it may be below K again
        }
        if (reject->code == "ejected" && !life.poisoned && !at.run.huge_values) {
          at.fail("finite", fmt::format("{} is ejected; its parameters were finite all the time", life.id));
        }
      }
      break;
    }
    default: break;
  }
}

// ---- after every event ----

// What the grace window is computed from, now and a while back.
void ShardInvariants::Impl::note_pace() {
  constexpr std::size_t kKept = 4096;
  const Seconds step = quorum_step_s(), sync = std::max(sync_s, 0.0);
  if (!paces.empty() && paces.back().step_s == step && paces.back().sync_s == sync) return;
  if (paces.size() == kKept) paces.erase(paces.begin(), paces.begin() + kKept / 2);
  paces.push_back({syncer_now, step, sync});
}

// What is due within the horizon is kept staged, so that a pull is answered at once. One session an event, by turns.
void ShardInvariants::Impl::check_armed(const SyncerCore& syncer) {
  if (settings.mode != Mode::kDecoupled || on_arrival() || sessions.empty()) return;
  auto it = sessions.upper_bound(armed_turn);
  if (it == sessions.end()) it = sessions.begin();
  armed_turn = it->first;
  const SessionBooks& books = it->second;
  const auto clock = quorum_clock();
  if (!books.laned || !clock) return;
  const Seconds step = quorum_step_s();
  const Seconds its_step = books.step_s < 0.0 ? step : books.step_s;
  const Clock ahead = 1 + std::max<Clock>(settings.overlap_steps, step > 0.0 ? static_cast<Clock>(its_step / step) : 1);
  for (const FragmentId p : own) {
    if (books.armed[p] || fragments[p].due > *clock + ahead || !syncer.fragment(p)) continue;
    fail("armed", fmt::format("fragment {} is due at {}, the clock is {}, and {} does not keep it staged", p,
                              fragments[p].due, *clock, books.life->id));
  }
}

// Somebody who says nothing for the whole timeout is not a member any more. To the WELCOME the answer may take longer.
void ShardInvariants::Impl::check_silence() {
  if (sessions.empty()) return;
  auto it = sessions.upper_bound(silence_turn);
  if (it == sessions.end()) it = sessions.begin();
  silence_turn = it->first;
  const SessionBooks& books = it->second;
  if (syncer_now > books.heard + settings.heartbeat_timeout_s * (books.heard_once ? 1 : 6) + kTimeSlack) {
    fail("liveness", fmt::format("{} has been silent for {:.3f} s and still has its session", books.life->id,
                                 syncer_now - books.heard));
  }
}

// Contributions held by the syncer, and those arriving. In lockstep it is who may join that is bounded.
void ShardInvariants::Impl::check_memory() {
  if (settings.mode == Mode::kLockstep) return;
  std::uint64_t held = 0;
  for (const auto& [payload, bytes] : payloads) held += payload.expired() ? 0 : bytes;
  for (const auto& [id, books] : sessions) {
    if (books.arriving && books.arriving->kind == PayloadKind::kContribution) held += books.arriving_total;
  }
  if (held > options.payload_memory_bytes) {
    fail("memory_bound", fmt::format("contributions of {} bytes are held, the bound is {}", held,
                                     options.payload_memory_bytes));
  }
}

void ShardInvariants::after_syncer(const SyncerCore& syncer) {
  Impl& at = *impl_;
  at.check_untouched(syncer);
  if (!at.stopped) {
    at.check_armed(syncer);
    at.check_silence();
  }
  if (at.settings.mode != Mode::kLockstep && syncer.payload_bytes_held() > at.options.payload_memory_bytes) {
    at.fail("memory_bound", fmt::format("the syncer holds {} payload bytes, the bound is {}", syncer.payload_bytes_held(),
                                        at.options.payload_memory_bytes));
  }
  at.check_order(syncer);
  at.note_quorums();
  at.note_pace();
  at.frame_from = nullptr;
  at.just_screened.reset();
  at.run.check_gaps();
  at.run.check_progress();
}

}  // namespace diloco::sim
