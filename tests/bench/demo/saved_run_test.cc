#include "tests/bench/demo/saved_run.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/temp_dir.h"

namespace emberd::demo {
namespace saved_run_test {

using testing::ElementsAre;
using testing::HasSubstr;

class SavedRunTest : public testing::Test {
 protected:
  const TempDir folder_ = *TempDir::Create();
  const SavedRun run_{folder_.Path("checkpoints")};
  const std::string dense_ = run_.folder() + "/dense/step-40";
};

TEST_F(SavedRunTest, KeepsOptionsAndPositions) {
  EXPECT_THAT(std::string(run_.Arguments().status().message()), HasSubstr("--checkpoint-every"));
  ASSERT_TRUE(run_.Begin({"--seed", "7", "--quick"}).ok());
  EXPECT_THAT(*run_.Arguments(), ElementsAre("--seed", "7", "--quick"));
  ASSERT_TRUE(run_.SaveDense("step-40", {.round = 40, .dense_state = {1, 2, 3}}).ok());
  const auto position = run_.LoadDense("step-40");
  ASSERT_TRUE(position.ok()) << position.status();
  EXPECT_EQ(position->round, 40);
  EXPECT_FALSE(position->summed);
  EXPECT_THAT(position->dense_state, ElementsAre(1, 2, 3));
  EXPECT_FALSE(std::filesystem::exists(dense_ + ".tmp"));
}

TEST_F(SavedRunTest, AnotherRunBeginsAnew) {
  ASSERT_TRUE(run_.Begin({"--quick"}).ok());
  ASSERT_TRUE(run_.SaveDense("step-40", {}).ok());
  ASSERT_TRUE(run_.Begin({}).ok());
  EXPECT_EQ(run_.LoadDense("step-40").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SavedRunTest, LeavesFoldersOfOthersAlone) {
  std::filesystem::create_directory(run_.folder());
  std::ofstream(run_.folder() + "/thesis.tex") << "text";
  EXPECT_EQ(run_.Begin({}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::exists(run_.folder() + "/thesis.tex"));
}

TEST_F(SavedRunTest, NoticesWhatHasChanged) {
  ASSERT_TRUE(run_.Begin({}).ok());
  ASSERT_TRUE(run_.SaveDense("step-40", {.round = 40, .dense_state = {1, 2, 3}}).ok());
  const auto size = static_cast<int64_t>(std::filesystem::file_size(dense_));
  {
    std::fstream file(dense_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(size - 2);
    file.put('!');
  }
  const auto flipped = run_.LoadDense("step-40");
  EXPECT_EQ(flipped.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(flipped.status().message()), HasSubstr(dense_));
  for (const int64_t cut : {size - 4, int64_t{64}, int64_t{10}, int64_t{0}}) {
    std::filesystem::resize_file(dense_, cut);
    EXPECT_EQ(run_.LoadDense("step-40").status().code(), absl::StatusCode::kDataLoss) << cut;
  }
}

}  // namespace saved_run_test
}  // namespace emberd::demo
