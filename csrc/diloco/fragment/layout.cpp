#include "diloco/fragment/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "diloco/base/errors.h"

namespace diloco {
namespace {

constexpr std::uint64_t kTooMany = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 62;
constexpr std::size_t kNamesListed = 4;

std::vector<std::string> sorted_aliases(const TensorSpec& tensor) {
  std::vector<std::string> aliases = tensor.aliases;
  std::sort(aliases.begin(), aliases.end());
  return aliases;
}

std::string describe(const TensorSpec& tensor) {
  return fmt::format("{} {}", dtype_name(tensor.dtype), shape_text(tensor.shape));
}

std::string describe_aliases(const TensorSpec& tensor) {
  const std::vector<std::string> aliases = sorted_aliases(tensor);
  return aliases.empty() ? "not tied to another" : fmt::format("tied to '{}'", fmt::join(aliases, "', '"));
}

using ByName = std::unordered_map<std::string_view, const TensorSpec*>;

ByName by_name(const Layout& layout) {
  ByName map;
  for (const TensorSpec& tensor : layout.tensors) map.emplace(tensor.name, &tensor);
  return map;
}

// The tensor of `layout` that has `name` as an alias, or null.
const TensorSpec* find_alias(const Layout& layout, const std::string& name) {
  for (const TensorSpec& tensor : layout.tensors) {
    if (std::find(tensor.aliases.begin(), tensor.aliases.end(), name) != tensor.aliases.end()) return &tensor;
  }
  return nullptr;
}

std::string describe_missing(const Layout& layout, const std::string& name, const char* hint) {
  if (const TensorSpec* tensor = find_alias(layout, name)) {
    return fmt::format("only as another name of '{}' ({})", tensor->name, describe(*tensor));
  }
  return hint;
}

struct Differences {
  std::string first;
  std::vector<std::string> more;
  void add(const std::string& name, std::string text) {
    if (first.empty()) {
      first = std::move(text);
    } else {
      more.push_back(name);
    }
  }
};

void compare_tensor(const TensorSpec& ours, const TensorSpec& theirs, Differences& out) {
  if (ours.shape != theirs.shape || ours.dtype != theirs.dtype) {
    out.add(ours.name, fmt::format("parameter '{}': this learner has {}, the run has {}", ours.name, describe(ours),
                                   describe(theirs)));
  } else if (sorted_aliases(ours) != sorted_aliases(theirs)) {
    out.add(ours.name, fmt::format("parameter '{}' ({}): on this learner it is {}, in the run it is {}", ours.name,
                                   describe(ours), describe_aliases(ours), describe_aliases(theirs)));
  }
}

void check_tensor(const TensorSpec& tensor) {
  if (tensor.name.empty()) throw ConfigError("a parameter has an empty name: give every parameter a name");
  if (dtype_bytes(tensor.dtype) == 0) {
    throw ConfigError(fmt::format("parameter '{}': unknown dtype number {}; float32, bfloat16, float16 and float64 are known",
                                  tensor.name, static_cast<int>(tensor.dtype)));
  }
  for (const std::int64_t dim : tensor.shape) {
    if (dim < 0) {
      throw ConfigError(fmt::format("parameter '{}': shape {} has a negative dimension", tensor.name,
                                    shape_text(tensor.shape)));
    }
  }
}

}  // namespace

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return "float32";
    case Dtype::kBf16: return "bfloat16";
    case Dtype::kF16: return "float16";
    case Dtype::kF64: return "float64";
  }
  return "unknown";
}

std::size_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return 4;
    case Dtype::kBf16: return 2;
    case Dtype::kF16: return 2;
    case Dtype::kF64: return 8;
  }
  return 0;
}

std::uint64_t TensorSpec::numel() const {
  std::uint64_t product = 1;
  bool overflow = false;
  for (const std::int64_t dim : shape) {
    if (dim == 0) return 0;
    if (dim < 0 || __builtin_mul_overflow(product, static_cast<std::uint64_t>(dim), &product)) overflow = true;
  }
  return overflow ? kTooMany : product;
}

std::uint64_t Layout::numel() const {
  std::uint64_t sum = 0;
  for (const TensorSpec& tensor : tensors) {
    if (__builtin_add_overflow(sum, tensor.numel(), &sum)) return kTooMany;
  }
  return sum;
}

std::string name_list(const std::vector<std::string>& names) {
  const std::size_t listed = std::min(names.size(), kNamesListed);
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(listed);
  std::string text = fmt::format("'{}'", fmt::join(names.begin(), end, "', '"));
  if (listed < names.size()) text += fmt::format(" and {} more", names.size() - listed);
  return text;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return shape.size() == 1 ? fmt::format("({},)", shape[0]) : fmt::format("({})", fmt::join(shape, ", "));
}

std::string first_difference(const Layout& ours_of_learner, const Layout& of_run) {
  const ByName ours = by_name(ours_of_learner);
  const ByName theirs = by_name(of_run);
  Differences found;
  for (const TensorSpec& tensor : of_run.tensors) {
    const auto at = ours.find(tensor.name);
    if (at != ours.end()) {
      compare_tensor(*at->second, tensor, found);
      continue;
    }
    found.add(tensor.name,
              fmt::format("parameter '{}': this learner has it {}, the run has {}", tensor.name,
                          describe_missing(ours_of_learner, tensor.name, "not at all (absent or not trainable)"),
                          describe(tensor)));
  }
  for (const TensorSpec& tensor : ours_of_learner.tensors) {
    if (theirs.contains(tensor.name)) continue;
    found.add(tensor.name,
              fmt::format("parameter '{}': this learner has {}, the run has it {}", tensor.name, describe(tensor),
                          describe_missing(of_run, tensor.name, "not at all (absent or not trainable)")));
  }
  if (found.first.empty() && ours_of_learner.tensors.size() != of_run.tensors.size()) {
    return fmt::format("this learner lists {} parameters, the run {}: a name is listed twice",
                       ours_of_learner.tensors.size(), of_run.tensors.size());
  }
  if (found.more.empty()) return found.first;
  return found.first + "; also different: " + name_list(found.more);
}

void check_layout(const Layout& layout) {
  if (layout.tensors.empty()) {
    throw ConfigError("nothing to synchronise: expected at least one trainable floating-point parameter, got none");
  }
  std::unordered_set<std::string_view> names;
  for (const TensorSpec& tensor : layout.tensors) {
    check_tensor(tensor);
    if (!names.insert(tensor.name).second) {
      throw ConfigError(fmt::format("parameter '{}' is listed twice: names must be unique", tensor.name));
    }
    for (const std::string& alias : tensor.aliases) {
      if (!names.insert(alias).second) {
        throw ConfigError(fmt::format("parameter '{}': its other name '{}' is in use already", tensor.name, alias));
      }
    }
  }
  if (layout.numel() > kMaxElements) {
    throw ConfigError(fmt::format("the layout has {} elements or more, at most {} (2^62) can be addressed", layout.numel(),
                                  kMaxElements));
  }
}

}  // namespace diloco
