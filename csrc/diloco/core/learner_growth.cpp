// Tensors that are added to the model while it trains (core/syncer_growth.cpp: when the run takes them). Until it has
// them they are this learner's own; their account begins where they were added.
#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "diloco/core/learner_impl.h"

namespace diloco {

// The syncer hears of it with a new HELLO.
void LearnerCore::Impl::on_grow(const Grow& grow) {
  growths.push_back({static_cast<std::uint32_t>(options.layout.tensors.size()), tokens, steps});
  options.layout.tensors.insert(options.layout.tensors.end(), grow.tensors.begin(), grow.tensors.end());
  if (!plan) layout = options.layout;
  for (auto& link : links) {
    if (link.down() || link.state == ShardLink::State::kConnecting) continue;  // the HELLO to come says it
    greet_again(link);
  }
}

// Nobody is away.
void LearnerCore::Impl::greet_again(ShardLink& link) {
  const bool told = std::exchange(link.told_away, true);
  lose(link, "the model or the run has grown", true);
  link.told_away = told;
}

// What the run is known to have comes first, in its order and stages, so that a syncer without state makes the same plan of
// it; then the rest, as it was added.
void LearnerCore::Impl::say_layout(Hello& hello) const {
  if (island() || !has_grown()) {
    hello.layout = options.layout;
    return;
  }
  const std::vector<TensorSpec>& own = options.layout.tensors;
  std::unordered_map<std::string_view, std::size_t> index;
  for (std::size_t i = 0; i < own.size(); ++i) index.emplace(own[i].name, i);
  std::vector<bool> said(own.size(), false);
  for (std::size_t i = 0; plan && i < layout.tensors.size(); ++i) {
    const std::size_t at = index.at(layout.tensors[i].name);
    said[at] = true;
    hello.layout.tensors.push_back(own[at]);
  }
  hello.grown_from = run_grown_from;
  const auto stage = [this](std::size_t i) {
    return std::count_if(growths.begin(), growths.end(), [i](const Growth& growth) { return growth.from <= i; });
  };
  std::ptrdiff_t last = -1;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (said[i]) continue;
    if (std::exchange(last, stage(i)) != last && !hello.layout.tensors.empty()) {
      hello.grown_from.push_back(static_cast<std::uint32_t>(hello.layout.tensors.size()));
    }
    hello.layout.tensors.push_back(own[i]);
  }
}

// What of ours a run must have: what it began with, as far as that is known, and all that it names itself.
Layout LearnerCore::Impl::own_part_of(const Welcome& welcome) const {
  std::unordered_set<std::string_view> needed;
  for (const TensorSpec& tensor : welcome.layout.tensors) needed.insert(tensor.name);
  const Layout& known = run_grown_from.empty() ? options.layout : layout;
  const std::size_t began = !run_grown_from.empty() ? run_grown_from.front()
                            : growths.empty()       ? known.tensors.size()
                                                    : growths.front().from;
  for (std::size_t i = 0; i < began; ++i) needed.insert(known.tensors[i].name);
  Layout own;
  for (const TensorSpec& tensor : options.layout.tensors) {
    if (needed.contains(tensor.name)) own.tensors.push_back(tensor);
  }
  return own;
}

// The first WELCOME's, or one of a run that has grown. What is known already stays as it is.
void LearnerCore::Impl::take_plan(const Welcome& welcome) {
  say_alone(welcome);
  const auto known = static_cast<FragmentId>(fragments.size());
  if (plan && welcome.plan.size() <= known) return;
  plan = welcome.plan;
  layout = welcome.layout;
  run_grown_from = welcome.grown_from;
  fragments.resize(plan->size());
  make_payloads();
  std::unordered_map<std::string_view, std::size_t> index;
  for (std::size_t i = 0; i < options.layout.tensors.size(); ++i) index.emplace(options.layout.tensors[i].name, i);
  for (FragmentId p = known; p < fragments.size(); ++p) {
    std::size_t newest = 0;  // the account begins with the tensor that came last
    for (const std::uint32_t tensor : plan->fragments[p].tensors) {
      if (const auto at = index.find(layout.tensors[tensor].name); at != index.end()) newest = std::max(newest, at->second);
    }
    for (const Growth& growth : growths) {
      if (newest < growth.from) break;
      fragments[p].from = growth.tokens;
      fragments[p].from_steps = growth.steps;
    }
    discard(p, 0, fragments[p].from, DiscardReason::kAbsent);
  }
  if (known > 0) log(LogLevel::kInfo, fmt::format("the run has what was added to the model: {} fragments now", plan->size()));
}

void LearnerCore::Impl::say_alone(const Welcome& welcome) {
  const std::size_t alone = options.layout.tensors.size() - welcome.layout.tensors.size();
  if (alone == 0) return;
  std::unordered_set<std::string_view> theirs;
  for (const TensorSpec& tensor : welcome.layout.tensors) theirs.insert(tensor.name);
  const auto first = std::find_if(options.layout.tensors.begin(), options.layout.tensors.end(),
                                  [&](const TensorSpec& tensor) { return !theirs.contains(tensor.name); });
  log(LogLevel::kWarning, fmt::format("{} parameter(s) that were added while training ('{}'{}) are not the run's: this "
                                      "learner trains them alone until another one adds the same", alone, first->name,
                                      alone > 1 ? " and others" : ""));
}

}  // namespace diloco
