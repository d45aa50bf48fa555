// Base of tests that run over both transports.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "learner/bowl.h"

namespace diloco::testing {

struct NetTest : ::testing::TestWithParam<const char*> {
  Net net{std::string(GetParam()) == "inproc"};
};

}  // namespace diloco::testing

#define DILOCO_OVER_BOTH_NETS(suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(Nets, suite, ::testing::Values("inproc", "zmq"), [](const auto& info) { \
    return std::string(info.param);                                                      \
  })
