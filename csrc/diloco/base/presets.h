// Ready-made combinations of settings: which settings make which paper, with the reason for every number.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace diloco {

struct PresetInfo {
  std::string name;
  std::string source;  // the paper, or "ours"
  std::string reason;  // where the numbers come from, and what differs from the source
  std::vector<std::pair<std::string, std::string>> values;  // setting -> canonical text; all others keep their default
};

// Without "none". docs/settings.md is generated from it.
const std::vector<PresetInfo>& presets();

}  // namespace diloco
