#include "server/coordinator/programs/values.h"

#include <memory>

#include "base/steady_time.h"
#include "gtest/gtest.h"

namespace emberd::coordinator {
namespace values_test {

// As by `docker pause`: when it goes on, the sweep may come before the clients' signs of life.
TEST(HandlesTest, TimeInWhichTheProcessStoodStillDoesNotCount) {
  Handles handles(/*coordinator=*/0, /*lease=*/absl::Seconds(60));
  absl::Time now = SteadyNow();
  const uint64_t handle = handles.Insert("trainer", std::make_shared<Value>());
  EXPECT_EQ(handles.Sweep(now), 0);
  now += absl::Seconds(300);
  EXPECT_EQ(handles.Sweep(now), 0);
  for (int second = 1; second < 60; ++second) {
    now += absl::Seconds(1);
    ASSERT_EQ(handles.Sweep(now), 0) << second;
  }
  EXPECT_TRUE(handles.CheckRelease({handle}).ok());
  now += absl::Seconds(9);  // more than may have passed before it was inserted
  EXPECT_EQ(handles.Sweep(now), 1);
  EXPECT_EQ(handles.count(), 0);
}

}  // namespace values_test
}  // namespace emberd::coordinator
