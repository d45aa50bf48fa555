// Where settings come from besides arguments: a TOML file and the environment.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <toml++/toml.h>

#include "diloco/base/errors.h"
#include "diloco/base/settings_fields.h"

namespace diloco {
namespace {

const std::string kPrefix = "DILOCO_";
// Read by setup.py and by the test suites; they may be in the environment of a program started there.
const std::vector<std::string> kDevelopment = {"DILOCO_BUILD_DIR", "DILOCO_SOAK"};

[[noreturn]] void fail_at(const std::string& path, std::size_t line, std::string_view what) {
  throw ConfigError(fmt::format("{}:{}: {}", path, line, what));
}

std::string read_file(const std::string& path) {
  std::ifstream in(path);
  in.peek();  // a directory opens and fails here
  if (!in.is_open() || in.bad()) {
    throw ConfigError(fmt::format("cannot read the settings file {}; check the path and its permissions", path));
  }
  std::ostringstream content;
  content << in.rdbuf();
  return content.str();
}

toml::table parse(const std::string& content, const std::string& path) {
  try {
    return toml::parse(content, path);
  } catch (const toml::parse_error& error) {
    fail_at(path, error.source().begin.line, error.description());
  }
}

std::string value_text(const toml::node& node, const std::string& name, const std::string& path) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* integer = node.as_integer()) return fmt::format("{}", integer->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* boolean = node.as_boolean()) return boolean->get() ? "true" : "false";
  fail_at(path, node.source().begin.line,
          fmt::format("expected `name = value` with a number or a text, got a {} called {}; settings have no sections",
                      node.is_table() ? "section" : "list or date", name));
}

std::string variable_name(const std::string& setting) {
  std::string out = kPrefix;
  for (const char c : setting) out += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

// The prefix is left out of the comparison: common to all names, it would make any two of them look alike.
std::string advice(const std::string& variable, const std::vector<std::string>& others) {
  std::vector<std::string> known = detail::field_names();
  for (const auto& name : others) known.push_back(name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name);
  const std::string near = suggest(variable.substr(kPrefix.size()), known);
  return near.empty() ? "unset it" : "did you mean " + variable_name(near) + "?";
}

}  // namespace

void apply_toml_file(Settings& settings, const std::string& path) {
  const toml::table table = parse(read_file(path), path);
  struct Entry {
    std::size_t line;
    std::string name;
    const toml::node* node;
  };
  std::vector<Entry> entries;
  for (const auto& [key, node] : table) {
    entries.push_back({key.source().begin.line, std::string(key.str()), &node});
  }
  // The table is sorted by name; whoever reads the error expects the first wrong line.
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.line < b.line; });
  for (const auto& entry : entries) {
    const std::string value = value_text(*entry.node, entry.name, path);
    try {
      settings.set(entry.name, value);
    } catch (const ConfigError& error) {
      fail_at(path, entry.line, error.what());
    }
  }
}

void apply_environment(Settings& settings, const std::map<std::string, std::string>& environment,
                       const std::vector<std::string>& also_allowed) {
  std::map<std::string, std::string> setting_of;  // variable -> setting
  for (const auto& name : detail::field_names()) setting_of[variable_name(name)] = name;
  std::vector<std::string> others = also_allowed;
  others.insert(others.end(), kDevelopment.begin(), kDevelopment.end());

  for (const auto& [variable, value] : environment) {
    if (!variable.starts_with(kPrefix)) continue;
    const auto found = setting_of.find(variable);
    if (found != setting_of.end()) {
      try {
        settings.set(found->second, value);
      } catch (const ConfigError& error) {
        throw ConfigError(fmt::format("environment variable {}: {}", variable, error.what()));
      }
    } else if (std::find(others.begin(), others.end(), variable) == others.end()) {
      throw ConfigError(fmt::format("environment variable {} is not a setting; {}", variable,
                                    advice(variable, others)));
    }
  }
}

}  // namespace diloco
