#include <algorithm>
#include <cctype>

#include "diloco/base/settings.h"

namespace diloco {
namespace {

std::string folded(const std::string& name) {
  std::string out;
  for (const char c : name) out += c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Edits (insert, delete, replace, swap of neighbours) from a to b.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string suggest(const std::string& wrong, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 256;  // names from outside: bound the work
  constexpr std::size_t kTelling = 4;    // shorter parts of names ("lr", "max") occur in too many of them
  if (wrong.size() > kLongest) return "";
  const std::string needle = folded(wrong);
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(1, needle.size() / 3) + 1;
  for (const auto& name : known) {
    const std::size_t distance = edit_distance(needle, folded(name));
    if (distance < best_distance) {
      best_distance = distance;
      best = name;
    }
  }
  if (!best.empty() || needle.size() < kTelling) return best;
  const auto contains = [&](const std::string& name) { return folded(name).find(needle) != std::string::npos; };
  const auto found = std::find_if(known.begin(), known.end(), contains);
  return found == known.end() ? "" : *found;
}

}  // namespace diloco
