// Order of names as people count: "h.2" before "h.10". Runs of ASCII digits compare as numbers of any length, the rest
// bytewise; names that differ only in leading zeros ("h.2", "h.02") are told apart bytewise, so the order is total.
#pragma once

#include <string_view>

namespace diloco {

bool natural_less(std::string_view a, std::string_view b);

}  // namespace diloco
