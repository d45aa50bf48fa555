// What a model looks like to the syncer: named tensors with shapes and dtypes. Identical on every learner of a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace diloco {

enum class Dtype : std::uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2, kF64 = 3 };
const char* dtype_name(Dtype dtype);       // "float32", "bfloat16", ...; "unknown" for anything else
std::size_t dtype_bytes(Dtype dtype);      // 0 for anything else

struct TensorSpec {
  std::string name;                  // the user's name, without wrapper prefixes
  std::vector<std::int64_t> shape;   // () for 0-d; a zero dimension gives an empty tensor
  Dtype dtype = Dtype::kF32;
  std::vector<std::string> aliases;  // other names of the same storage (tied tensors travel once)
  std::uint64_t numel() const;       // 1 for 0-d; 2^64 - 1 if it does not fit or a dimension is negative
  bool operator==(const TensorSpec&) const = default;
};

// Trainable tensors in the order of registration. That order is not significant: plans sort by name.
struct Layout {
  std::vector<TensorSpec> tensors;
  std::uint64_t numel() const;       // saturates at 2^64 - 1
  bool operator==(const Layout&) const = default;
};

// "'a', 'b', 'c', 'd' and 3 more".
std::string name_list(const std::vector<std::string>& names);
// "(10, 64)", "(5,)", "()".
std::string shape_text(const std::vector<std::int64_t>& shape);

// "" if equal; else the first difference (in the run's order, then what only the learner has) in one sentence that names
// the parameter on both sides, e.g.
// "parameter 'head.weight': this learner has float32 (10, 64), the run has float32 (10, 128)", followed by the names of
// further differing parameters if there are any. Insensitive to the order of tensors and of aliases.
std::string first_difference(const Layout& ours_of_learner, const Layout& of_run);
// Throws ConfigError: no tensors, empty or duplicate names (aliases included), unknown dtypes, negative dims, more than
// 2^62 elements.
void check_layout(const Layout& layout);

}  // namespace diloco
