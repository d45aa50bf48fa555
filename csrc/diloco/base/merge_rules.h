// The text of settings.merge_overrides as rules.
#pragma once

#include <regex>
#include <string>
#include <vector>

#include "diloco/base/settings.h"

namespace diloco {

struct MergeRule {
  std::string text;  // "REGEX=mean"
  std::regex name;   // searched for anywhere in a tensor's name
  MergeKind merge = MergeKind::kMean;
};

// In the order of the text, "REGEX=mean;REGEX=rda"; empty text: none. Throws ConfigError (what is wrong with which rule).
std::vector<MergeRule> merge_rules(const std::string& text);

}  // namespace diloco
