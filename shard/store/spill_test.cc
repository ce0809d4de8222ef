// What a model writes when it leaves memory, and reads when it comes back: the rows and slots of
// every chunk that has been touched, wherever these lie. A chunk that is left out would come back
// as zeros, and rows that do not come back whole must not stay.
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/temp_dir.h"
#include "shard/store/model.h"
#include "shard/testing/spilled_files.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard::testing {
namespace spill_test {

constexpr TestShape kSpillShape = {.partitions = 2, .rows_per_partition = 4096, .samples = 1};

class SpillTest : public ::testing::Test {
 protected:
  SpillTest() {
    v1::OptimizerConfig optimizer;
    optimizer.mutable_adagrad()->set_initial_accumulator(0.5);
    ModelSpec spec;
    spec.name = "m";
    spec.partitions = spec.partition_count = kSpillShape.partitions;
    spec.stacks = {OneTableStack(kSpillShape, 16, 12, optimizer)};
    spec.stacks.push_back(spec.stacks[0]);
    spec.stacks[1].storage_dtype = v1::BFLOAT16;
    model_ = *Model::Create(
        spec, {.eager_bytes = 0, .memory = *MemoryManager::Create({.bytes = int64_t{1} << 40})});
    for (int stack = 0; stack < 2; ++stack) {
      // The ends, runs of several chunks, and chunks alone, not the same in both stacks.
      for (const int64_t row : {0, 1000, 1100, 1200, 4095, 4096, 7000, 8191}) {
        model_->stack(stack).EnsureRow(stack == 0 ? row : row / 3 + 5);
      }
    }
  }
  // All weights and slots, touched or not.
  std::string Bytes() const {
    std::string bytes;
    for (int i = 0; i < 2; ++i) {
      const StackStore& stack = model_->stack(i);
      bytes.append(stack.weights(), stack.weights_memory().size());
      for (const StackStore::Slot& slot : stack.slots()) {
        bytes.append(slot.memory.data(), slot.memory.size());
      }
    }
    return bytes;
  }
  bool Empty() const { return Bytes().find_first_not_of('\0') == std::string::npos; }

  const TempDir dir_ = *TempDir::Create();
  SpillFile file_ = *SpillFile::Create(dir_.path());
  std::shared_ptr<Model> model_;
};

TEST_F(SpillTest, RowsComeBackWithEveryBit) {
  const std::string before = Bytes();
  ASSERT_FALSE(Empty());
  ASSERT_TRUE(model_->Spill(file_).ok());
  EXPECT_LT(file_.bytes(), static_cast<int64_t>(before.size() / 2)) << "what nobody has touched";
  EXPECT_TRUE(Bytes() == before);
  model_->DropRows();
  EXPECT_TRUE(Empty());
  ASSERT_TRUE(model_->Fetch(file_).ok());
  EXPECT_TRUE(Bytes() == before);
  // A row that was not touched has its initial value as ever.
  model_->stack(0).EnsureRow(3000);
  EXPECT_EQ(model_->stack(0).slots()[0].data()[3000 * 16], 0.5f);
}

TEST_F(SpillTest, DamagedRowsDoNotStay) {
  ASSERT_TRUE(model_->Spill(file_).ok());
  model_->DropRows();
  const auto files = SpilledFiles();
  ASSERT_EQ(files.size(), 1u);
  const FileDescriptor file = files[0].Open();
  const auto lost = [&] {
    const absl::Status status = model_->Fetch(file_);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(files[0].name));
    EXPECT_TRUE(Empty());
  };
  char byte = 0;
  ASSERT_EQ(pread(file.get(), &byte, 1, 9000), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(pwrite(file.get(), &byte, 1, 9000), 1);
  lost();
  ASSERT_EQ(ftruncate(file.get(), 9000), 0);
  lost();
  ASSERT_EQ(ftruncate(file.get(), 0), 0);
  lost();
}

}  // namespace spill_test
}  // namespace emberd::shard::testing
