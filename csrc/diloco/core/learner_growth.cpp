// Tensors that are added to the model while it trains (core/syncer_growth.cpp: when the run takes them). Until it has
// them they are this learner's own; their account begins where they were added.
#include <algorithm>

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

// How many tensors of ours the run should have: as many as there were at the beginning, or after a growth.
std::size_t LearnerCore::Impl::tensors_of(const Welcome& welcome) const {
  const auto stage = std::find_if(growths.begin(), growths.end(), [&](const Growth& growth) {
    return growth.from == welcome.layout.tensors.size();
  });
  return stage == growths.end() ? options.layout.tensors.size() : stage->from;
}

// The first WELCOME's, or one of a run that has grown. What is known already stays as it is.
void LearnerCore::Impl::take_plan(const Welcome& welcome) {
  const auto known = static_cast<FragmentId>(fragments.size());
  if (const auto alone = options.layout.tensors.size() - welcome.layout.tensors.size(); alone > 0) {
    const std::string& first = options.layout.tensors[welcome.layout.tensors.size()].name;
    log(LogLevel::kWarning, fmt::format("{} parameter(s) that were added while training ('{}'{}) are not the run's: this "
                                        "learner trains them alone until another one adds the same", alone, first,
                                        alone > 1 ? " and others" : ""));
  }
  if (plan && welcome.plan.size() <= known) return;
  plan = welcome.plan;
  layout = welcome.layout;
  fragments.resize(plan->size());
  make_payloads();
  for (FragmentId p = known; p < fragments.size(); ++p) {
    const std::string& name = layout.tensors[plan->fragments[p].tensors.front()].name;
    const auto at = std::find_if(options.layout.tensors.begin(), options.layout.tensors.end(),
                                 [&](const TensorSpec& tensor) { return tensor.name == name; });
    const auto position = static_cast<std::uint32_t>(at - options.layout.tensors.begin());
    for (const Growth& growth : growths) {
      if (position < growth.from) break;
      fragments[p].from = growth.tokens;
      fragments[p].from_steps = growth.steps;
    }
    discard(p, 0, fragments[p].from, DiscardReason::kRefused);  // it was not there
  }
  if (known > 0) log(LogLevel::kInfo, fmt::format("the run has what was added to the model: {} fragments now", plan->size()));
}

}  // namespace diloco
