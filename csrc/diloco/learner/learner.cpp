#include "diloco/learner/learner.h"

#include <fmt/format.h>
#include <unistd.h>

#include <random>
#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <variant>

#include "diloco/base/errors.h"
#include "diloco/base/version.h"
#include "diloco/core/memory_budget.h"
#include "diloco/learner/learner_impl.h"

namespace diloco {
namespace {

constexpr std::size_t kLogsKept = 1000;
// A learner learns the run's chunk size only with WELCOME; this is the most it takes from a syncer.
constexpr std::uint64_t kLargestChunk = 64ull << 20;
constexpr std::size_t kLongestId = 64;

std::uint64_t random_u64() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) ^ device();
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown-host";
  return name;
}

std::string checked_id(const std::string& given, const std::string& host) {
  if (given.empty()) return fmt::format("{}-{:08x}", host.substr(0, kLongestId - 9), random_u64() & 0xffffffff);
  if (given.size() > kLongestId) {
    throw ConfigError(fmt::format("learner_id: expected 1 to {} bytes of text, got {} bytes ('{}')", kLongestId,
                                  given.size(), given));
  }
  return given;
}

}  // namespace

Learner::Impl::Impl(LearnerOptions given, std::shared_ptr<ParameterStore> store,
                    std::unique_ptr<ClientTransport> given_transport)
    : options(std::move(given)), host(host_name()), id(checked_id(options.learner_id, host)), mover(std::move(store)),
      phases(options.phases) {
  while (incarnation == 0) incarnation = random_u64();
  random.seed(random_u64());
  TransportLimits limits;
  limits.chunk_bytes = kLargestChunk;
  limits.linger_s = options.linger_s;
  transport = given_transport ? std::move(given_transport) : make_zmq_client(parse_endpoint(options.syncer), limits);
  if (!options.ledger_dir.empty() && (!options.island || options.island->group->rank() == 0)) {
    ledger = LedgerFile::create(options.ledger_dir, id, incarnation, static_cast<std::uint64_t>(pid));
  }
  if (options.island && options.island->group->rank() > 0) part = std::make_unique<PartCore>(part_options());
  else core = std::make_unique<LearnerCore>(core_options());
  if (options.learner_id.empty() && core) {
    keep_log(Log{LogLevel::kInfo, fmt::format("no learner_id was given: this learner is '{}'", id)});
  }
  io = std::thread([this] { run(); });
}

LearnerCoreOptions Learner::Impl::core_options() {
  LearnerCoreOptions result;
  result.learner_id = id;
  result.run_id = options.run_id;
  result.host = host;
  result.software = std::string("diloco ") + kVersion;
  result.pid = static_cast<std::uint64_t>(pid);
  result.incarnation = incarnation;
  result.layout = mover.store().layout();
  result.insisted_settings = options.settings;
  result.endpoint_text = options.syncer;
  result.give_up_after_s = options.give_up_after_s;
  result.staging_bytes = options.staging_bytes;
  result.random = [this] { return random(); };
  result.read_anchor = read_anchor();
  if (options.island) {
    result.layout = options.island->layout;
    result.island = IslandOptions{options.island->group->size(), options.island->rank.parts, options.island->held};
  }
  return result;
}

PartOptions Learner::Impl::part_options() {
  PartOptions result;
  result.part = options.island->rank.part;
  result.parts = options.island->rank.parts;
  result.replica = options.island->rank.replica;
  result.layout = options.island->layout;
  result.held = options.island->held;
  result.read_anchor = read_anchor();
  result.random = [this] { return random(); };
  return result;
}

std::function<void(FragmentId, std::uint64_t, std::span<std::byte>)> Learner::Impl::read_anchor() {
  return [this](FragmentId fragment, std::uint64_t offset, std::span<std::byte> out) {
    mover.read_anchor(layout(), payload(fragment, PayloadKind::kAnchor), offset, out);
  };
}

void Learner::Impl::feed(const LearnerEvent& event) { execute(core->handle(event, clock.now())); }
void Learner::Impl::feed_part(const PartEvent& event) { execute(part->handle(event, clock.now())); }

void Learner::Impl::execute(std::vector<LearnerAction> actions) {
  for (LearnerAction& action : actions) std::visit([&](auto& a) { route(a); }, action);
  if (plan() != nullptr && plan()->size() != known_fragments) {
    known_fragments = plan()->size();
    if (ledger) ledger->set_fragments(known_fragments);
  }
}

void Learner::Impl::route(Stage& action) {
  const Range pieces_to_stage = pieces_of(action.fragment, PayloadKind::kContribution);
  stages.push_back(Staging{std::move(action), pieces_to_stage});
}

void Learner::Impl::route(AdoptFragment& action) {
  Adoption adoption;
  adoption.image = pieces_of(action.fragment, PayloadKind::kImage);
  if (action.sent) adoption.sent = pieces_of(action.fragment, PayloadKind::kContribution);
  adoption.action = std::move(action);
  adoptions.push_back(std::move(adoption));
}

void Learner::Impl::route(Discard& action) {
  if (ledger) ledger->discard(action.fragment, action.from, action.to, action.reason);
}

void Learner::Impl::route(Progress& action) {
  if (ledger) ledger->progress(action.tokens);
}

void Learner::Impl::route(Rejected& action) {
  refused = true;
  failure = fmt::format("the syncer at {} refused learner '{}' ({}): {}", options.syncer, id, action.reject.code,
                        action.reject.text);
}

void Learner::Impl::route(GaveUp& action) {
  gave_up = true;
  failure = action.text;
}

Learner::Impl::Range Learner::Impl::pieces_of(FragmentId fragment, PayloadKind kind) {
  const std::size_t first = pieces.size();
  mover.append_pieces(layout(), payload(fragment, kind), &pieces);
  return {first, pieces.size() - first};
}

void Learner::Impl::throw_if_failed() const {
  if (refused) throw ConfigError(failure);
  if (gave_up) throw TransportError(failure);
}

void Learner::Impl::keep_log(const Log& action) {
  if (!options.log) {
    if (action.level >= LogLevel::kInfo) write_stderr(log_line(level_name(action.level), id, action.text));
    return;
  }
  if (logs.size() >= kLogsKept) logs.pop_front();
  logs.push_back(action);
}

Learner::Learner(LearnerOptions options, std::shared_ptr<ParameterStore> store,
                 std::unique_ptr<ClientTransport> transport)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(store), std::move(transport))) {}

Learner::~Learner() {
  // In a forked child the thread does not exist and the sockets are the parent's: leave everything alone.
  if (::getpid() != impl_->pid) {
    static_cast<void>(impl_.release());
    return;
  }
  impl_->close(0.0);
}

bool Learner::join(Seconds timeout_s, const std::function<void()>& interrupted) {
  impl_->check_process("join()");
  impl_->deliver_logs();
  const bool joined = impl_->options.island ? impl_->island_join(timeout_s, interrupted)
                                            : impl_->join(timeout_s, interrupted);
  impl_->deliver_logs();
  return joined;
}

BoundaryResult Learner::boundary(const Boundary& event, const std::function<void()>& interrupted) {
  impl_->check_process("boundary()");
  impl_->deliver_logs();
  BoundaryResult result;
  if (impl_->options.island) impl_->island_boundary(event, interrupted, &result);
  else impl_->boundary(event, interrupted, &result);
  return result;
}

void Learner::grow(const std::function<void()>& append) {
  impl_->check_process("grow()");
  impl_->grow(append);
  impl_->deliver_logs();
}

void Learner::close(Seconds flush_s) {
  if (::getpid() != impl_->pid) return;  // a forked child's exit handlers end up here
  impl_->close(flush_s);
  impl_->deliver_logs();
}

bool Learner::closed() const {
  if (::getpid() != impl_->pid) return true;
  const std::lock_guard lock(impl_->mutex);
  return impl_->closed;
}

LearnerStats Learner::stats() const {
  impl_->check_process("stats()");
  impl_->deliver_logs();
  const std::lock_guard lock(impl_->mutex);
  if (impl_->core) return impl_->core->stats();
  LearnerStats stats;
  stats.state = impl_->closed ? "closed" : impl_->part->connected() ? "training" : "away";
  stats.steps = impl_->part->steps();
  stats.tokens = impl_->counted_tokens;
  stats.adoptions = impl_->adopted_count;
  stats.staged_bytes = impl_->part->staged_bytes();
  return stats;
}

std::uint64_t Learner::tokens_under_way(const std::function<void()>& interrupted) {
  impl_->check_process("tokens_under_way()");
  return impl_->tokens_under_way(interrupted);
}

ExchangeWaits Learner::exchange_waits() const { return impl_->waits; }
PhaseSeconds Learner::phase_seconds() const { return impl_->phases.seconds(); }

std::string Learner::learner_id() const { return impl_->id; }

Incarnation Learner::incarnation() const { return impl_->incarnation; }

void Learner::read_anchor(std::uint32_t tensor, float* out) const { impl_->mover.copy_anchor(tensor, out); }

std::vector<std::uint32_t> Learner::beyond_run() const {
  impl_->check_process("beyond_run()");
  const std::lock_guard lock(impl_->mutex);
  std::unordered_set<std::string_view> run;
  for (const TensorSpec& tensor : impl_->layout().tensors) run.insert(tensor.name);
  std::vector<std::uint32_t> beyond;
  const std::vector<TensorSpec>& own = impl_->mover.store().layout().tensors;
  for (std::uint32_t i = 0; i < own.size() && own.size() > run.size(); ++i) {
    if (!run.contains(own[i].name)) beyond.push_back(i);
  }
  return beyond;
}

std::string Learner::describe() const {
  impl_->check_process("describe()");
  const std::lock_guard lock(impl_->mutex);
  const Layout& layout = impl_->mover.store().layout();
  const double mib = 1.0 / (1 << 20);
  std::string text = fmt::format("learner '{}' of the syncer at {}: {} tensors, {} parameters; anchors {:.1f} MiB of "
                                 "host memory",
                                 impl_->id, impl_->options.syncer, layout.tensors.size(), layout.numel(),
                                 static_cast<double>(impl_->mover.anchor_bytes()) * mib);
  if (impl_->plan() == nullptr) return text + "; the plan comes with the syncer's welcome";
  const LearnerStats stats = impl_->core ? impl_->core->stats() : LearnerStats{};
  const Settings& settings = impl_->settings();
  Layout held = impl_->layout();  // the run's order, of an island's rank with the shapes of its part
  const auto indices = indices_in(layout, held);
  for (std::size_t i = 0; i < indices.size(); ++i) held.tensors[i].shape = layout.tensors[indices[i]].shape;
  const LearnerBudget budget = learner_budget(held, *impl_->plan(), settings, impl_->options.staging_bytes);
  return text + fmt::format(", staged {:.1f} MiB, sent images {:.1f} MiB, arriving {:.1f} MiB; mostly {:.1f} MiB in all, at "
                            "most {:.1f} MiB; {} fragments, one sync of each per {} steps, {} steps "
                            "under way; mode {}, merge {}, adopt {}, wire {}",
                            static_cast<double>(stats.staged_bytes) * mib,
                            static_cast<double>(stats.sent_image_bytes) * mib,
                            static_cast<double>(stats.arriving_bytes) * mib,
                            static_cast<double>(budget.usual()) * mib, static_cast<double>(budget.most()) * mib,
                            impl_->plan()->size(),
                            settings.sync_every, settings.overlap_steps, settings.get("mode"), settings.get("merge"),
                            settings.get("adopt"), settings.get("wire_dtype"));
}

TransportCounters Learner::counters() const {
  impl_->check_process("counters()");
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace diloco
