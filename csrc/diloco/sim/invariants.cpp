#include "diloco/sim/invariants.h"

#include <algorithm>

#include <fmt/format.h>

#include "diloco/sim/invariants_impl.h"

namespace diloco::sim {

constexpr std::size_t kMostViolations = 32;  // more say nothing new
constexpr std::size_t kSentKept = 16;

Invariants::Invariants(const ClusterOptions& options) : run_(std::make_unique<RunBooks>(options)) {
  for (std::uint32_t shard = 0; shard < options.shards; ++shard) {
    shards_.push_back(std::make_unique<ShardInvariants>(*run_, shard));
  }
}
Invariants::~Invariants() = default;
const std::vector<Violation>& Invariants::violations() const { return run_->violations; }
void Invariants::fail(const char* invariant, std::string text) { run_->fail(invariant, std::move(text)); }

RunBooks::RunBooks(const ClusterOptions& given) : options(given), settings(given.settings) {
  current.resize(options.learners.size());
  well_since.assign(options.learners.size(), std::numeric_limits<double>::infinity());
  shard_well_since.assign(options.shards, 0.0);
  quorum_well_since = std::numeric_limits<double>::infinity();
}

void RunBooks::fail(const char* invariant, std::string text) {
  if (violations.size() < kMostViolations) violations.push_back({invariant, std::move(text), event, now});
}

void Invariants::begin_event(std::uint64_t number, TimePoint now) {
  run_->event = number;
  run_->now = now;
}

LifeBooks* RunBooks::life(Incarnation incarnation) {
  const auto it = lives.find(incarnation);
  return it == lives.end() ? nullptr : it->second.get();
}

Share& RunBooks::share(LifeBooks& life, FragmentId fragment) {
  if (life.shares.size() <= fragment) life.shares.resize(std::max<std::size_t>(fragments.size(), fragment + 1));
  return life.shares[fragment];
}

// ---- nodes ----

ShardInvariants::ShardInvariants(RunBooks& run, std::uint32_t shard) : impl_(std::make_unique<Impl>(run, shard)) {}
ShardInvariants::~ShardInvariants() = default;
ShardInvariants::Impl::Impl(RunBooks& of, std::uint32_t number) : run(of), shard(number) {}

bool ShardInvariants::Impl::check_own(FragmentId p, const char* what) {
  if (p < fragments.size() && fragments[p].shard == shard) return true;
  fail("own_shard", fmt::format("shard {} {} fragment {}, which the plan gives to {}", shard, what, p,
                                p < fragments.size() ? fmt::format("shard {}", fragments[p].shard) : "nobody"));
  return false;
}

void ShardInvariants::starts() {
  Impl& at = *impl_;
  at.sessions.clear();
  at.hellos.clear();
  at.lanes.clear();
  at.tombs.clear();  // the next life does not know
  at.screening.clear();
  at.undelivered.clear();
  at.paces.clear();
  at.payloads.clear();
  at.reached.clear();
  at.opened.clear();
  at.quorum_s = at.sync_s = -1.0;
  at.epoch = 0;
  at.open_rounds = 0;
  at.stopped = false;
  for (const FragmentId p : at.own) {
    FragmentBooks& fragment = at.fragments[p];
    fragment.newest = fragment.newest_before = {};
    fragment.clock = 0;
    fragment.state.reset();
    fragment.round.reset();
    fragment.closing.reset();
    fragment.due = 0;
    fragment.anchor_clock = 0;
    for (auto& [incarnation, life] : at.lives) {
      if (p >= life->shares.size()) continue;
      life->shares[p].mailbox.reset();
      life->shares[p].merged_in = {};
    }
  }
}

void ShardInvariants::dies() { starts(); }

void ShardInvariants::disturbed() {
  for (const FragmentId p : impl_->own) {
    if (auto& round = impl_->fragments[p].round) round->disturbed = true;
  }
}

void Invariants::learner_starts(std::size_t learner, Incarnation incarnation) {
  auto life = std::make_unique<LifeBooks>();
  life->learner = learner;
  life->id = run_->options.learners[learner].id;
  life->incarnation = incarnation;
  life->tokens.push_back(0);
  run_->current[learner] = life.get();
  run_->lives[incarnation] = std::move(life);
}

void Invariants::learner_dies(std::size_t learner) {
  if (run_->current[learner]) run_->current[learner]->alive = false;
}

void Invariants::poisoned(std::size_t learner, bool huge) {
  run_->current[learner]->poisoned = true;
  run_->huge_values = run_->huge_values || huge;
}

// ---- what a learner counts ----

void Invariants::made_step(std::size_t learner, std::uint64_t tokens) {
  LifeBooks& life = *run_->current[learner];
  life.tokens.push_back(life.tokens.back() + tokens);
  ++life.clock;
}

void Invariants::progress(std::size_t learner, std::uint64_t tokens) {
  const LifeBooks& life = *run_->current[learner];
  if (tokens != life.tokens.back()) {
    run_->fail("counters", fmt::format("{} has counted {} tokens and made {}", life.id, tokens, life.tokens.back()));
  }
}

namespace {

// The step after which a life had made this many tokens; nothing if no boundary lies there.
std::optional<std::uint64_t> step_at(const LifeBooks& life, std::uint64_t tokens) {
  const auto it = std::lower_bound(life.tokens.begin(), life.tokens.end(), tokens);
  if (it == life.tokens.end() || *it != tokens) return std::nullopt;
  return static_cast<std::uint64_t>(it - life.tokens.begin());
}

}  // namespace

void ShardInvariants::from_learner(std::size_t learner, const OutFrame& frame) {
  Impl& at = *impl_;
  LifeBooks& life = *at.run.current[learner];
  const Header& header = frame.header;
  const Bytes body = frame.payload();
  std::string why;
  switch (header.type) {
    case MessageType::kStep: {
      const auto step = decode_step(body, &why);
      if (!step) return at.fail("readable", fmt::format("a STEP of {} cannot be read: {}", life.id, why));
      if (step->steps != life.steps() || step->tokens != life.tokens.back() || step->clock != life.clock) {
        at.fail("counters", fmt::format("{} reports {} steps, {} tokens, clock {}; it has {}, {}, {}", life.id, step->steps,
                                        step->tokens, step->clock, life.steps(), life.tokens.back(), life.clock));
      }
      for (const auto& [fragment, version] : step->adopted) {
        if (version != at.share(life, fragment).adopted) {
          at.fail("counters", fmt::format("{} reports fragment {} at version {}; it has adopted {}", life.id, fragment,
                                          to_string(version), to_string(at.share(life, fragment).adopted)));
        }
      }
      break;
    }
    case MessageType::kBegin: {
      const auto begin = decode_begin(body, &why);
      if (!begin) return at.fail("readable", fmt::format("a BEGIN of {} cannot be read: {}", life.id, why));
      if (begin->kind != PayloadKind::kContribution) break;
      if (!at.check_own(begin->fragment, "is sent")) break;
      Share& share = at.share(life, begin->fragment);
      Copy copy{begin->from, begin->to, begin->c_steps, begin->clock, begin->base, 0, 0.0};
      const auto first = step_at(life, begin->from), last = step_at(life, begin->to);
      if (!first || !last || *last - *first != begin->c_steps || begin->from >= begin->to) {
        at.fail("counters", fmt::format("{} sends tokens [{}, {}) of fragment {} as {} steps", life.id, begin->from,
                                        begin->to, begin->fragment, begin->c_steps));
      }
      const auto staged = std::find_if(share.staged.begin(), share.staged.end(),
                                       [&](const Copy& one) { return one.to == begin->to; });
      if (staged == share.staged.end()) {
        // It may have waited long behind others; then only its counters can be checked.
        if (begin->to > life.tokens.back()) at.fail("counters", fmt::format("{} sends tokens it has not made", life.id));
      } else {
        copy.hash = staged->hash;
        if (staged->base != begin->base) {
          at.fail("base_known", fmt::format("{} sends fragment {} against version {}; it was staged against {}", life.id,
                                            begin->fragment, to_string(begin->base), to_string(staged->base)));
        }
        if (staged->clock != begin->clock) {
          at.fail("counters", fmt::format("{} sends fragment {} with clock {}; it was staged at {}", life.id,
                                          begin->fragment, begin->clock, staged->clock));
        }
      }
      share.sent.push_back(copy);
      if (share.sent.size() > kSentKept) share.sent.pop_front();
      break;
    }
    case MessageType::kHello: {
      const auto hello = decode_hello(body, &why);
      if (!hello) return at.fail("readable", fmt::format("the HELLO of {} cannot be read: {}", life.id, why));
      if (hello->steps != life.steps() || hello->tokens != life.tokens.back() || hello->clock != life.clock) {
        at.fail("counters", fmt::format("{} introduces itself with {} steps, {} tokens, clock {}; it has {}, {}, {}",
                                        life.id, hello->steps, hello->tokens, hello->clock, life.steps(),
                                        life.tokens.back(), life.clock));
      }
      break;
    }
    case MessageType::kChunk:
      if (SessionBooks* session = at.session(header.session)) {
        session->up.sent += frame.slice.size;
        if (session->up.sent > session->up.granted) {
          at.fail("credit", fmt::format("{} has sent {} bytes of contributions, granted are {}", life.id, session->up.sent,
                                        session->up.granted));
        }
      }
      break;
    case MessageType::kCredit:
      if (SessionBooks* session = at.session(header.session)) {
        const std::uint64_t window = std::max(at.settings.credit_window_bytes, Settings{}.credit_window_bytes);
        const std::uint64_t received = session->down.received;
        if (header.total != received || header.offset > std::max(window, received + at.settings.credit_window_bytes)) {
          at.fail("credit", fmt::format("{} grants {} bytes and says it has {}; it has {}", life.id, header.offset,
                                        header.total, received));
        }
      }
      break;
    default: break;
  }
}

void ShardInvariants::at_learner(std::size_t learner, const Header& header, Bytes payload) {
  Impl& at = *impl_;
  SessionBooks* session = at.session(header.session);
  if (!session || session->life != at.run.current[learner]) return;
  switch (header.type) {
    case MessageType::kWelcome:
      session->up.granted = std::max(session->up.granted, at.settings.credit_window_bytes);
      break;
    case MessageType::kPull:
    case MessageType::kCredit:
      session->up.granted = std::max(session->up.granted, header.offset);
      break;
    case MessageType::kChunk:
      session->down.received += payload.size();
      break;
    default: break;
  }
}

void Invariants::adopted(std::size_t learner, const AdoptFragment& adopt, const PayloadLayout& image,
                         const PayloadLayout& contribution, const Tensors& anchor, const Tensors& local) {
  RunBooks& at = *run_;
  LifeBooks& life = *at.current[learner];
  Share& share = at.share(life, adopt.fragment);
  if (adopt.image) {
    const auto& images = at.fragments.at(adopt.fragment).images;
    const auto published = images.find(adopt.version);
    if (published == images.end() || published->second.hash != checksum(adopt.image->bytes())) {
      at.fail("adopted_is_published",
              fmt::format("{} adopts fragment {} version {}, {}", life.id, adopt.fragment, to_string(adopt.version),
                          published == images.end() ? "which was never published" : "with other bytes than were published"));
    } else {
      life.clock = std::max(life.clock, published->second.clock);
    }
    if (adopt.version <= share.adopted) {
      at.fail("version_order", fmt::format("{} adopts fragment {} version {} after {}", life.id, adopt.fragment,
                                           to_string(adopt.version), to_string(share.adopted)));
    }
    at.check_taken_off(life, share, adopt);
    share.adopted = adopt.version;
  } else if (adopt.version != share.adopted) {
    at.fail("version_order", fmt::format("{} takes fragment {} again as version {}; it has {}", life.id, adopt.fragment,
                                         to_string(adopt.version), to_string(share.adopted)));
  }
  if (adopt.formula != AdoptFormula::kRebase) share.dropped_to = life.tokens.back();
  check_adoption(adopt, image, contribution, anchor, local);
}

// Rebasing takes off exactly the copy that the new version contains: with less the work would count twice, with more it
// would be lost. After a syncer has lost its state nobody can say which that is.
void RunBooks::check_taken_off(const LifeBooks& life, Share& share, const AdoptFragment& adopt) {
  std::optional<Copy> contained;
  std::erase_if(share.merged, [&](const auto& entry) {
    if (entry.first > adopt.version) return false;
    if (entry.second.from >= share.dropped_to) contained = entry.second;  // else it is not part of the local work any more
    return true;
  });
  const bool same_life = adopt.version.epoch == share.adopted.epoch;
  if (!same_life) share.merged.clear();
  if (!same_life || adopt.formula != AdoptFormula::kRebase) return;
  const bool right = contained ? adopt.sent && checksum(adopt.sent->bytes()) == contained->hash : !adopt.sent;
  if (!right) {
    fail("taken_off", fmt::format("{} adopts fragment {} version {}, which contains {} of its work, and takes off {}", life.id,
                                  adopt.fragment, to_string(adopt.version), contained ? "a copy" : "nothing",
                                  adopt.sent ? "something else" : "nothing"));
  }
}

void Invariants::after_learner() {
  run_->check_gaps();
  run_->check_progress();
}

}  // namespace diloco::sim
