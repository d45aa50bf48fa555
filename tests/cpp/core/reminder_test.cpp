#include "diloco/core/reminder.h"

#include <gtest/gtest.h>

namespace diloco {
namespace {

TEST(Reminder, SaysItAfterAWhileAndThenEverySoOften) {
  Reminder reminder;
  EXPECT_FALSE(reminder.due(false, 100.0));
  EXPECT_GT(reminder.next(), 1e300);
  EXPECT_FALSE(reminder.due(true, 100.0));
  EXPECT_EQ(reminder.next(), 105.0);
  EXPECT_FALSE(reminder.due(true, 104.9));
  EXPECT_TRUE(reminder.due(true, 105.0));
  EXPECT_FALSE(reminder.due(true, 134.9));
  EXPECT_TRUE(reminder.due(true, 140.0));
  EXPECT_EQ(reminder.next(), 170.0);
}

TEST(Reminder, WhatIsOverBeginsAnew) {
  Reminder reminder;
  EXPECT_FALSE(reminder.due(true, 0.0));
  EXPECT_FALSE(reminder.due(false, 4.0));
  EXPECT_FALSE(reminder.due(true, 5.0));
  EXPECT_FALSE(reminder.due(true, 9.9));
  EXPECT_TRUE(reminder.due(true, 10.0));
}

}  // namespace
}  // namespace diloco
