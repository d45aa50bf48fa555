// Internal to base: one entry per setting, from which set, get, validate, the table and the documentation follow.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "diloco/base/settings.h"

namespace diloco::detail {

struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;   // low itself is not allowed
  bool high_open = false;  // high itself is not allowed
  bool contains(double value) const;
  std::string text() const;  // "at least 1", "above 0 and below 1"
};

struct Field {
  SettingInfo info;
  Range range;  // numbers only
  // Returns "" if the text was understood, else what would have been: "a number". Ranges are validate()'s matter.
  std::function<std::string(Settings&, const std::string&)> set;
  std::function<std::string(const Settings&)> get;
  std::function<double(const Settings&)> number;  // null for text and choices
};

const std::vector<Field>& fields();
std::vector<std::string> field_names();
const Field& field(const std::string& name);  // throws ConfigError with a suggestion

}  // namespace diloco::detail
