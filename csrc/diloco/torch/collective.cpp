#include "diloco/torch/collective.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>

#include "diloco/base/clock.h"
#include "diloco/base/errors.h"
#include "diloco/fragment/schedule.h"
#include "diloco/merge/merge.h"
#include "diloco/torch/agreement.h"

namespace diloco {
namespace {

// A contribution between its staging and its adoption.
struct Sent {
  Pending pending;
  std::vector<at::Tensor> rows;    // messages of all ranks
  std::uint64_t from = 0, to = 0;  // tokens
  std::uint64_t steps_at_to = 0;   // steps of the account where it ends
  Clock staged_at = 0;
  bool detached = false;           // the local work it stands for has been dropped since
};

// Tokens [0, from) of this rank on a fragment are settled; the work since is in the parameters.
struct Account {
  std::uint64_t from = 0, from_steps = 0;
  std::optional<Sent> sent;
};

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

struct CollectiveLearner::Impl {
  Impl(Collectives given_group, Collectives given_control, CollectiveOptions given)
      : group(std::move(given_group)), control(std::move(given_control)), options(std::move(given)) {}

  void start(std::vector<NamedParameter> parameters);
  CollectiveResult boundary(const Boundary& event, const std::function<void()>& interrupted);
  void stage(FragmentId p);
  void send(FragmentId p, Sent sent);
  void finish(FragmentId p, const std::function<void()>& interrupted, CollectiveResult* result);
  void wait(const Pending& pending, const std::function<void()>& interrupted);
  void settle(FragmentId p, const Sent& sent, AdoptFormula formula, bool counted);
  void drop_poison(FragmentId except);
  void count_bad(const std::vector<int>& refused);
  void warn(const Merged& merged);
  bool load(const CollectiveState& state);
  std::string unfit(const CollectiveState& state) const;
  static std::string weights_of(const CollectiveState& state);
  std::vector<std::vector<std::string>> names_by_fragment() const;
  void discard(DiscardReason reason, std::uint64_t from, std::uint64_t to) {
    if (to > from) discarded[reason_name(reason)] += to - from;
  }
  void log(LogLevel level, const std::string& text) {
    if (options.log) options.log(level, text);
  }
  AdoptFormula formula() const {
    switch (plan.settings.adopt) {
      case Adopt::kRebase: return AdoptFormula::kRebase;
      case Adopt::kBlend: return AdoptFormula::kBlend;
      case Adopt::kOverwrite: break;
    }
    return AdoptFormula::kOverwrite;
  }
  void check(const char* call) const {
    if (::getpid() != pid) {
      throw std::logic_error(std::string(call) + ": this learner was created in process " + std::to_string(pid) +
                             " and cannot be used in its child: process groups do not survive fork()");
    }
    if (closed) throw std::logic_error(std::string(call) + ": this learner is closed; create a new one to train on");
    if (failure) std::rethrow_exception(failure);
  }

  const Collectives group, control;
  const CollectiveOptions options;
  const pid_t pid = ::getpid();
  CollectivePlan plan;
  std::unique_ptr<CollectiveNumbers> numbers;
  std::vector<Account> accounts;  // by fragment

  Clock clock = 0;            // over all lives
  std::uint64_t tokens = 0;   // over all lives of this rank
  std::uint64_t life_steps = 0, life_tokens = 0;
  std::uint64_t merges = 0, contributions_sent = 0, contributions_merged = 0, tokens_merged = 0;
  std::uint64_t bytes_out = 0;  // and in: every rank's messages are of one size
  std::map<std::string, std::uint64_t> discarded;
  std::vector<std::uint64_t> bad_payloads;
  double lr = 0.0;
  unsigned lr_apart = 0;
  bool told_twin = false;
  Seconds waited_s = 0.0;
  std::exception_ptr failure;
  bool closed = false;
};

void CollectiveLearner::Impl::start(std::vector<NamedParameter> parameters) {
  // What this rank refuses is told to all before it is thrown: the others would wait for it.
  std::string problem;
  Layout layout;
  Settings settings;
  try {
    settings = collective_settings(options.settings);
    layout = TorchParameterStore(parameters).layout();
    plan = make_collective_plan(layout, settings, group.rank(), group.size());
    numbers = options.on_device ? device_numbers(plan, std::move(parameters)) : host_numbers(plan, std::move(parameters));
  } catch (const ConfigError& error) {
    problem = error.what();
  }
  agree(control, layout, settings, options.on_device, problem);
  accounts.resize(plan.size());
  bad_payloads.resize(static_cast<std::size_t>(group.size()));
  for (FragmentId p = 0; p < plan.size(); ++p) {
    at::Tensor weights = numbers->weights(p);
    const Pending pending = group.start_broadcast(weights, 0);
    options.on_device ? pending.order_after() : pending.wait();
    numbers->begin(p, weights);
  }
  if (group.rank() != 0) return;
  for (const auto& warning : outer_warnings(settings)) log(LogLevel::kWarning, warning);
  for (const auto& rule : unmatched_rules(layout, settings)) {
    log(LogLevel::kInfo, "merge_overrides: no tensor matches \"" + rule + "\"");
  }
}

CollectiveResult CollectiveLearner::Impl::boundary(const Boundary& event, const std::function<void()>& interrupted) {
  CollectiveResult result;
  ++clock;
  ++life_steps;
  tokens += event.tokens;
  life_tokens += event.tokens;
  lr = event.lr;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    if (lockstep_stages_at(p, clock, plan.settings, plan.size())) stage(p);
  }
  for (FragmentId p = 0; p < plan.size(); ++p) {
    const auto& sent = accounts[p].sent;
    if (sent && clock >= sent->staged_at + plan.settings.overlap_steps) finish(p, interrupted, &result);
  }
  return result;
}

void CollectiveLearner::Impl::stage(FragmentId p) {
  const Account& account = accounts[p];
  const Work work = work_of(plan.settings, tokens - account.from, clock - account.from_steps, lr);
  Sent sent;
  sent.rows = numbers->stage(p, work);
  sent.from = account.from;
  sent.to = tokens;
  sent.steps_at_to = clock;
  sent.staged_at = clock;
  send(p, std::move(sent));
  ++contributions_sent;
}

void CollectiveLearner::Impl::send(FragmentId p, Sent sent) {
  sent.pending = options.on_device ? group.start_all_gather(sent.rows, sent.rows[static_cast<std::size_t>(group.rank())])
                                   : group.start_exchange(sent.rows);
  bytes_out += plan.messages[p].bytes * static_cast<std::uint64_t>(group.size() - 1);
  accounts[p].sent = std::move(sent);
}

void CollectiveLearner::Impl::wait(const Pending& pending, const std::function<void()>& interrupted) {
  constexpr Seconds kSlice = 0.25;
  if (options.on_device) return pending.order_after();
  const TimePoint start = monotonic_now();
  while (!pending.wait_for(kSlice)) {
    if (interrupted) interrupted();
  }
  waited_s += monotonic_now() - start;
}

void CollectiveLearner::Impl::finish(FragmentId p, const std::function<void()>& interrupted, CollectiveResult* result) {
  const Sent sent = *std::exchange(accounts[p].sent, std::nullopt);
  wait(sent.pending, interrupted);
  const Merged merged = numbers->merge(p);
  ++merges;
  const bool poison = std::find(merged.refused.begin(), merged.refused.end(), group.rank()) != merged.refused.end();
  const AdoptFormula chosen = poison ? AdoptFormula::kOverwrite : formula();
  settle(p, sent, chosen, !poison);
  numbers->adopt(p, chosen, chosen == AdoptFormula::kRebase && !sent.detached);
  ++result->adopted;
  if (poison) {
    drop_poison(p);
    result->reset = true;
  }
  count_bad(merged.refused);
  if (group.rank() == 0) warn(merged);
}

// What becomes of this rank's tokens on the fragment.
void CollectiveLearner::Impl::settle(FragmentId p, const Sent& sent, AdoptFormula formula, bool counted) {
  Account& account = accounts[p];
  if (counted) {
    tokens_merged += sent.to - sent.from;
    if (sent.to > sent.from) ++contributions_merged;
  } else {
    discard(DiscardReason::kNonfinite, sent.from, sent.to);
  }
  if (!sent.detached) {
    account.from = sent.to;
    account.from_steps = sent.steps_at_to;
  }
  if (formula == AdoptFormula::kRebase) return;
  const DiscardReason reason = !counted ? DiscardReason::kNonfinite
                               : formula == AdoptFormula::kBlend ? DiscardReason::kBlended
                                                                 : DiscardReason::kOverwritten;
  discard(reason, account.from, tokens);
  account.from = tokens;
  account.from_steps = clock;
}

// This rank's other weights cannot be trusted either: the global ones again, everywhere. What it has sent before stands.
void CollectiveLearner::Impl::drop_poison(FragmentId except) {
  for (FragmentId p = 0; p < plan.size(); ++p) {
    if (p == except) continue;
    Account& account = accounts[p];
    discard(DiscardReason::kNonfinite, account.sent && !account.sent->detached ? account.sent->to : account.from, tokens);
    if (account.sent) account.sent->detached = true;
    account.from = tokens;
    account.from_steps = clock;
    numbers->restore(p);
  }
}

// Every rank sees the same contributions, so all count alike and stop at the same step.
void CollectiveLearner::Impl::count_bad(const std::vector<int>& refused) {
  for (const int rank : refused) {
    log(LogLevel::kWarning, "a contribution of " + rank_text(rank) + " was not finite and is not merged");
    const std::uint64_t count = ++bad_payloads[static_cast<std::size_t>(rank)];
    if (count < plan.settings.max_bad_payloads) continue;
    throw ConfigError(rank_text(rank) + " sent " + std::to_string(count) +
                      " contributions that were not finite (max_bad_payloads); look at its data, or lower its learning rate");
  }
}

// Ranks that draw the same batches, and ranks whose learning rates stay far apart: what a syncer warns of, too.
void CollectiveLearner::Impl::warn(const Merged& merged) {
  constexpr double kFactor = 4.0;
  constexpr unsigned kSayAt = 10;  // merges in a row
  if (merged.twin && !std::exchange(told_twin, true)) {
    log(LogLevel::kWarning, rank_text(*merged.twin - 1) + " and " + rank_text(*merged.twin) +
                                " sent equal contributions: do they train on the same data in the same order?");
  }
  if (merged.works.empty()) return;
  const auto less = [](const Work& a, const Work& b) { return a.lr < b.lr; };
  const auto [low, high] = std::minmax_element(merged.works.begin(), merged.works.end(), less);
  lr_apart = low->lr > 0.0 && high->lr > kFactor * low->lr ? lr_apart + 1 : 0;
  if (lr_apart != kSayAt) return;
  log(LogLevel::kWarning, rank_text(static_cast<int>(high - merged.works.begin())) + " trains with learning rate " +
                              std::to_string(high->lr) + ", " +
                              rank_text(static_cast<int>(low - merged.works.begin())) + " with " +
                              std::to_string(low->lr) + ": do they follow different schedules?");
}

std::vector<std::vector<std::string>> CollectiveLearner::Impl::names_by_fragment() const {
  std::vector<std::vector<std::string>> out(plan.size());
  for (FragmentId p = 0; p < plan.size(); ++p) {
    for (const auto tensor : plan.plan.fragments[p].tensors) out[p].push_back(plan.layout.tensors[tensor].name);
  }
  return out;
}

// Why the state is none of this run; "" if it is.
std::string CollectiveLearner::Impl::unfit(const CollectiveState& state) const {
  if (state.plan != names_by_fragment() || state.fragments.size() != plan.size() ||
      state.accounts.size() != plan.size()) {
    return "the state is of other fragments (" + std::to_string(state.plan.size()) + " of them, here " +
           std::to_string(plan.size()) + "); load it with the model, fragmenter and num_fragments it was saved with";
  }
  if (state.outer_optimizer != plan.settings.get("outer_optimizer")) {
    return "the state was saved with outer_optimizer = " + state.outer_optimizer + ", here it is " +
           plan.settings.get("outer_optimizer") + "; load it with the one it was saved with";
  }
  const std::uint64_t arrays = outer_state_floats(outer_options(plan.settings));
  for (FragmentId p = 0; p < plan.size(); ++p) {
    const SavedFragment& saved = state.fragments[p];
    const std::uint64_t numel = plan.messages[p].contribution.numel;
    const auto fits = [](const at::Tensor& tensor, std::uint64_t wanted) {
      return tensor.defined() && tensor.scalar_type() == at::kFloat && tensor.is_cpu() && tensor.is_contiguous() &&
             static_cast<std::uint64_t>(tensor.numel()) == wanted;
    };
    const auto& message = state.accounts[p].message;
    if (!fits(saved.theta, numel) || (arrays > 0 && !fits(saved.outer, arrays * numel)) ||
        (message.defined() && (message.scalar_type() != at::kByte ||
                               static_cast<std::uint64_t>(message.numel()) != plan.messages[p].bytes))) {
      return "the state of fragment " + std::to_string(p) + " does not fit its " + std::to_string(numel) + " elements";
    }
  }
  return {};
}

std::string CollectiveLearner::Impl::weights_of(const CollectiveState& state) {
  std::uint64_t sum = 0;
  for (const auto& saved : state.fragments) {
    for (const at::Tensor& tensor : {saved.theta, saved.outer}) {
      if (!tensor.defined()) continue;
      sum = sum * 31 + checksum({static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    }
    sum = sum * 31 + saved.n;
  }
  return std::to_string(sum);
}

bool CollectiveLearner::Impl::load(const CollectiveState& state) {
  // Each rank tells: "o" if the state is its own, the step, and the weights or, after a "!", what is wrong.
  const bool own = state.rank == group.rank() && state.ranks == group.size();
  const std::string problem = unfit(state);
  const auto texts = exchange_texts(control, std::string(own ? "o " : "x ") + std::to_string(state.clock) + " " +
                                                 (problem.empty() ? weights_of(state) : "!" + problem));
  bool exact = true;
  std::string first_step, first_weights;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const auto blank = texts[rank].find(' ', 2);
    const std::string step = texts[rank].substr(2, blank - 2), weights = texts[rank].substr(blank + 1);
    const std::string name = rank_text(static_cast<int>(rank));
    if (weights.starts_with('!')) throw ConfigError(name + ": " + weights.substr(1));
    if (rank == 0) first_step = step, first_weights = weights;
    if (weights != first_weights) {
      throw ConfigError(name + " loads other global weights (step " + step + ") than rank 0 (step " + first_step +
                        "); load what all ranks saved at the same step");
    }
    if (step != first_step) {  // so it is where GradScaler has skipped a step on some ranks
      log(LogLevel::kWarning, name + " goes on from its step " + step + ", rank 0 from step " + first_step);
    }
    exact = exact && texts[rank].starts_with("o");
  }

  for (Account& account : accounts) {
    if (account.sent) wait(account.sent->pending, {});  // all ranks drop it together
    account = {};
  }
  for (FragmentId p = 0; p < plan.size(); ++p) numbers->load(p, state.fragments[p]);
  clock = exact ? state.clock : std::stoull(first_step);
  merges = state.merges;
  tokens = exact ? state.tokens : 0;
  contributions_sent = exact ? state.contributions_sent : 0;
  contributions_merged = exact ? state.contributions_merged : 0;
  tokens_merged = exact ? state.tokens_merged : 0;
  discarded = exact ? state.discarded : std::map<std::string, std::uint64_t>{};
  bad_payloads.assign(static_cast<std::size_t>(group.size()), 0);
  if (exact && state.bad_payloads.size() == bad_payloads.size()) bad_payloads = state.bad_payloads;
  for (FragmentId p = 0; p < plan.size(); ++p) {
    const auto& saved = state.accounts[p];
    accounts[p].from = exact ? saved.from : tokens;
    accounts[p].from_steps = exact ? saved.from_steps : clock;
    if (!exact || !saved.message.defined()) continue;
    send(p, {{}, numbers->stage_again(p, saved.message), saved.sent_from, saved.sent_to, saved.steps_at_to, saved.staged_at,
             saved.detached});
  }
  return exact;
}

CollectiveLearner::CollectiveLearner(std::vector<NamedParameter> parameters, Collectives group, Collectives control,
                                     CollectiveOptions options)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(control), std::move(options))) {
  impl_->start(std::move(parameters));
}

CollectiveLearner::~CollectiveLearner() {
  if (::getpid() == impl_->pid) close(0.0);
}

CollectiveResult CollectiveLearner::boundary(const Boundary& event, const std::function<void()>& interrupted) {
  impl_->check("boundary()");
  try {
    return impl_->boundary(event, interrupted);
  } catch (const TransportError&) {
    impl_->failure = std::current_exception();
    throw;
  } catch (const ConfigError&) {
    impl_->failure = std::current_exception();
    throw;
  } catch (...) {  // what the caller's `interrupted` threw, for one: it is not kept
    impl_->failure = std::make_exception_ptr(
        TransportError(rank_text(rank()) + " was interrupted within a step and is no longer in step with the others; end "
                       "all ranks, start them again and resume from a checkpoint"));
    throw;
  }
}

void CollectiveLearner::close(Seconds flush_s) {
  if (std::exchange(impl_->closed, true) || impl_->options.on_device) return;  // what is queued on a device goes on alone
  const TimePoint deadline = monotonic_now() + flush_s;
  for (const Account& account : impl_->accounts) {
    try {
      const Seconds left = deadline - monotonic_now();
      if (account.sent && left > 0 && !impl_->failure) static_cast<void>(account.sent->pending.wait_for(left));
    } catch (const TransportError&) {
      break;  // the others have gone already
    }
  }
}

int CollectiveLearner::rank() const { return impl_->group.rank(); }
int CollectiveLearner::ranks() const { return impl_->group.size(); }
void CollectiveLearner::read_anchor(std::uint32_t tensor, float* out) const { impl_->numbers->read_anchor(tensor, out); }

CollectiveStats CollectiveLearner::stats() const {
  const Impl& self = *impl_;
  CollectiveStats out;
  out.state = self.closed ? "closed" : self.failure ? "failed" : "training";
  out.steps = self.life_steps;
  out.tokens = self.life_tokens;
  out.clock = self.clock;
  out.merges = self.merges;
  out.contributions_sent = self.contributions_sent;
  out.contributions_merged = self.contributions_merged;
  out.tokens_merged = self.tokens_merged;
  out.discarded = self.discarded;
  out.bytes_out = out.bytes_in = self.bytes_out;
  out.waited_s = self.waited_s;
  for (FragmentId p = 0; p < self.accounts.size(); ++p) {
    const Account& account = self.accounts[p];
    out.tokens_outstanding += self.tokens - account.from;
    if (account.sent && account.sent->detached) out.tokens_outstanding += account.sent->to - account.sent->from;
    if (account.sent) out.under_way_bytes += self.plan.messages[p].bytes * static_cast<std::uint64_t>(self.plan.ranks);
    out.versions.push_back(self.numbers->version(p));
  }
  return out;
}

std::string CollectiveLearner::describe() const {
  const Impl& self = *impl_;
  const Settings& settings = self.plan.settings;
  std::uint64_t largest = 0, all = 0;
  for (const auto& message : self.plan.messages) {
    largest = std::max(largest, message.bytes);
    all += message.bytes;
  }
  const std::uint64_t others = static_cast<std::uint64_t>(self.plan.ranks - 1);
  return rank_text(self.plan.rank) + " of " + std::to_string(self.plan.ranks) + " without a syncer, merging " +
         self.numbers->place() + ": " + std::to_string(self.plan.layout.tensors.size()) + " tensors, " +
         std::to_string(self.plan.layout.numel()) + " parameters in " + std::to_string(self.plan.size()) +
         " fragments, one sync of each per " + std::to_string(settings.sync_every) + " steps, " +
         std::to_string(settings.overlap_steps) + " steps under way; " + std::to_string(all * others) +
         " bytes to the others per " + std::to_string(settings.sync_every) + " steps, at most " +
         std::to_string(largest * others) + " for one fragment; merge " + settings.get("merge") + ", adopt " +
         settings.get("adopt") + ", wire " + settings.get("wire_dtype");
}

CollectiveState CollectiveLearner::save() const {
  const Impl& self = *impl_;
  CollectiveState out;
  out.clock = self.clock;
  out.plan = self.names_by_fragment();
  out.outer_optimizer = self.plan.settings.get("outer_optimizer");
  out.rank = self.plan.rank;
  out.ranks = self.plan.ranks;
  out.tokens = self.tokens;
  out.merges = self.merges;
  out.contributions_sent = self.contributions_sent;
  out.contributions_merged = self.contributions_merged;
  out.tokens_merged = self.tokens_merged;
  out.discarded = self.discarded;
  out.bad_payloads = self.bad_payloads;
  for (FragmentId p = 0; p < self.plan.size(); ++p) {
    const Account& account = self.accounts[p];
    out.fragments.push_back(self.numbers->save(p));
    CollectiveState::Account saved{account.from, account.from_steps, {}, 0, 0, 0, 0, false};
    if (const auto& sent = account.sent) {
      saved.message = sent->rows[static_cast<std::size_t>(self.plan.rank)].to(at::kCPU, at::kByte, false, true);
      saved.sent_from = sent->from;
      saved.sent_to = sent->to;
      saved.steps_at_to = sent->steps_at_to;
      saved.staged_at = sent->staged_at;
      saved.detached = sent->detached;
    }
    out.accounts.push_back(std::move(saved));
  }
  return out;
}

bool CollectiveLearner::load(const CollectiveState& state) {
  impl_->check("load()");
  return impl_->load(state);
}

}  // namespace diloco
