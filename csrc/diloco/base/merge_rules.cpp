#include "diloco/base/merge_rules.h"

#include <fmt/format.h>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

MergeRule merge_rule(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  const std::string kind = equals == std::string::npos ? "" : text.substr(equals + 1);
  if (equals == 0 || (kind != "mean" && kind != "rda")) {
    throw ConfigError(fmt::format("merge_overrides must be rules REGEX=mean or REGEX=rda, separated by semicolons, got \"{}\"",
                                  text));
  }
  try {
    return {text, std::regex(text.substr(0, equals)), kind == "rda" ? MergeKind::kRda : MergeKind::kMean};
  } catch (const std::regex_error& error) {
    throw ConfigError(fmt::format("merge_overrides must have a regular expression (ECMAScript) before \"={}\", got \"{}\": {}",
                                  kind, text.substr(0, equals), error.what()));
  }
}

}  // namespace

std::vector<MergeRule> merge_rules(const std::string& text) {
  std::vector<MergeRule> rules;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(';', begin), text.size());
    rules.push_back(merge_rule(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return rules;
}

}  // namespace diloco
