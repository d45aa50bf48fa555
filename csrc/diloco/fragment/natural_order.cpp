#include "diloco/fragment/natural_order.h"

#include <cstddef>

namespace diloco {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Takes the digits at `at`, without leading zeros.
std::string_view take_number(std::string_view text, std::size_t& at) {
  while (at < text.size() && text[at] == '0') ++at;
  const std::size_t begin = at;
  while (at < text.size() && is_digit(text[at])) ++at;
  return text.substr(begin, at - begin);
}

}  // namespace

bool natural_less(std::string_view a, std::string_view b) {
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const std::string_view left = take_number(a, i);
      const std::string_view right = take_number(b, j);
      if (left.size() != right.size()) return left.size() < right.size();
      if (left != right) return left < right;
    } else {
      if (a[i] != b[j]) return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
      ++i;
      ++j;
    }
  }
  const bool a_done = i == a.size();
  const bool b_done = j == b.size();
  if (a_done != b_done) return a_done;
  return a < b;
}

}  // namespace diloco
