#include <algorithm>
#include <regex>

#include "diloco/base/merge_rules.h"
#include "diloco/merge/merge.h"

namespace diloco {
namespace {

double undiscounted(Weights kind, double tokens, double steps) {
  switch (kind) {
    case Weights::kTokensPerStep: return tokens * (tokens / steps);
    case Weights::kTokens: return tokens;
    case Weights::kEqual: return 1.0;
  }
  return 0.0;
}

bool matches(const TensorSpec& tensor, const std::regex& pattern) {
  if (std::regex_search(tensor.name, pattern)) return true;
  // A tied output head is an embedding under whichever of its names it is listed.
  return std::any_of(tensor.aliases.begin(), tensor.aliases.end(),
                     [&](const std::string& alias) { return std::regex_search(alias, pattern); });
}

}  // namespace

double contribution_weight(Weights kind, std::uint64_t c_tokens, std::uint64_t c_steps, double discount,
                           std::uint64_t staleness) {
  if (c_steps == 0) return 0.0;
  return undiscounted(kind, static_cast<double>(c_tokens), static_cast<double>(c_steps)) /
         (1.0 + discount * static_cast<double>(staleness));
}

std::vector<bool> rda_segments(const Layout& layout, const PayloadLayout& payload, const Settings& settings) {
  std::vector<bool> use(payload.segments.size(), false);
  const std::vector<MergeRule> rules = merge_rules(settings.merge_overrides);
  for (std::size_t i = 0; i < use.size(); ++i) {
    const TensorSpec& tensor = layout.tensors.at(payload.segments[i].tensor);
    const auto rule = std::find_if(rules.begin(), rules.end(), [&](const MergeRule& r) { return matches(tensor, r.name); });
    const MergeKind usual = tensor.shape.size() >= 2 ? settings.merge : MergeKind::kMean;
    use[i] = (rule != rules.end() ? rule->merge : usual) == MergeKind::kRda;
  }
  return use;
}

std::vector<std::string> unmatched_rules(const Layout& layout, const Settings& settings) {
  std::vector<std::string> texts;
  for (const MergeRule& rule : merge_rules(settings.merge_overrides)) {
    const bool any = std::any_of(layout.tensors.begin(), layout.tensors.end(),
                                 [&](const TensorSpec& tensor) { return matches(tensor, rule.name); });
    if (!any) texts.push_back(rule.text);
  }
  return texts;
}

}  // namespace diloco
