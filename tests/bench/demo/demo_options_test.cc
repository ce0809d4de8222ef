#include "tests/bench/demo/demo_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::demo {
namespace demo_options_test {

using testing::HasSubstr;

TEST(DemoOptionsTest, AResumedRunHasTheOptionsOfTheOneBefore) {
  DemoOptions before;
  before.experiment.quick = true;
  before.experiment.seed = 7;
  before.experiment.examples = 12'345;
  before.checkpoint_every = 10;
  before.shards = 8;
  DemoOptions defaults;
  defaults.emberd = "emberd";
  const auto resumed = ResumedOptions(defaults, before.Arguments(),
                                      {"--resume", "--out", "there", "--quick", "--max-gap", "1"});
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->Arguments(), before.Arguments());
  EXPECT_TRUE(resumed->resume);
  EXPECT_EQ(resumed->out, "there");
  EXPECT_EQ(resumed->max_gap, 1);
  EXPECT_EQ(resumed->emberd, "emberd");
}

TEST(DemoOptionsTest, TheSamePartitionsMayBeOnOtherShards) {
  const auto saved = DemoOptions().Arguments();
  const auto resumed = ResumedOptions(
      {}, saved, {"--resume", "--shards", "2", "--sparsecores", "4", "--checkpoint-every", "0"});
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->shards, 2);
  EXPECT_EQ(resumed->sparsecores, 4);
  const auto other = ResumedOptions({}, saved, {"--resume", "--shards", "2"});
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("is 4; the run to continue had 8"));
}

TEST(DemoOptionsTest, AnotherRunCannotBeGoneOnWith) {
  const auto other = ResumedOptions({}, DemoOptions().Arguments(), {"--resume", "--seed", "2"});
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("--seed 1"));
}

TEST(DemoOptionsTest, OnlyOneBatchAStepCanBeRepeated) {
  DemoOptions options;
  options.checkpoint_every = 5;
  EXPECT_TRUE(CheckCheckpointOptions(options).ok());
  options.experiment.pipelined = true;
  EXPECT_EQ(CheckCheckpointOptions(options).code(), absl::StatusCode::kInvalidArgument);
  options.experiment.pipelined = false;
  options.experiment.consistency = "async";
  EXPECT_EQ(CheckCheckpointOptions(options).code(), absl::StatusCode::kInvalidArgument);
  options.checkpoint_every = 0;
  EXPECT_TRUE(CheckCheckpointOptions(options).ok());
}

}  // namespace demo_options_test
}  // namespace emberd::demo
