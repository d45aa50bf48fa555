// Tests that are larger with DILOCO_SOAK=1.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace diloco::testing {

/// How many; `soak` with DILOCO_SOAK=1. Recorded under `what`, so that the soak report has it.
inline std::int64_t sized(const std::string& what, std::int64_t ci, std::int64_t soak) {
  const char* value = std::getenv("DILOCO_SOAK");
  const std::int64_t size = value && std::string(value) == "1" ? soak : ci;
  ::testing::Test::RecordProperty(what, std::to_string(size));
  return size;
}

}  // namespace diloco::testing
