#include "diloco/base/settings.h"

#include <fmt/format.h>

#include "diloco/base/errors.h"
#include "diloco/base/presets.h"
#include "diloco/base/settings_fields.h"

namespace diloco {
namespace detail {

std::vector<std::string> field_names() {
  std::vector<std::string> names;
  for (const auto& f : fields()) names.push_back(f.info.name);
  return names;
}

const Field& field(const std::string& name) {
  for (const auto& f : fields()) {
    if (f.info.name == name) return f;
  }
  const std::string near = suggest(name, field_names());
  throw ConfigError(fmt::format("unknown setting \"{}\"; {}", name,
                                near.empty() ? "docs/settings.md lists them all" : "did you mean " + near + "?"));
}

// Every setting that was not given: the preset's value, else the default.
void apply_preset(Settings& settings, const std::string& name) {
  for (const auto& f : fields()) {
    if (f.info.name != "preset" && !settings.given.contains(f.info.name)) f.set(settings, f.info.default_value);
  }
  for (const auto& preset : presets()) {
    if (preset.name != name) continue;
    for (const auto& [setting, value] : preset.values) {
      if (!settings.given.contains(setting)) field(setting).set(settings, value);
    }
  }
}

}  // namespace detail

void Settings::set(const std::string& name, const std::string& value) {
  const auto& f = detail::field(name);
  const std::string allowed = f.set(*this, value);
  if (allowed.empty()) {
    if (name == "preset") detail::apply_preset(*this, value);
    else given.insert(name);
    return;
  }
  const std::string near = suggest(value, f.info.choices);
  throw ConfigError(fmt::format("{} must be {}, got \"{}\"{}", name, allowed, value,
                                near.empty() ? "" : "; did you mean " + near + "?"));
}

std::string Settings::get(const std::string& name) const { return detail::field(name).get(*this); }

std::map<std::string, std::string> Settings::to_map() const {
  std::map<std::string, std::string> out;
  for (const auto& f : detail::fields()) out[f.info.name] = f.get(*this);
  return out;
}

const std::vector<SettingInfo>& settings_table() {
  static const std::vector<SettingInfo> table = [] {
    std::vector<SettingInfo> infos;
    for (const auto& f : detail::fields()) infos.push_back(f.info);
    return infos;
  }();
  return table;
}

}  // namespace diloco
