#include <vector>

#include <gtest/gtest.h>

#include "preprocess/batch/chip_cost.h"

namespace emberd::preprocess {
namespace program_buffers_test {

TEST(ProgramBuffersTest, AreSizedForTheSamplesOfTheStack) {
  Plan plan;
  plan.topology = {.shards = 4, .sparsecores_per_shard = 2};
  StackPlan& stack = plan.stacks.emplace_back();
  stack.embedding_dim = 16;
  stack.features.resize(2);
  stack.features[0].feature = 2;
  stack.features[1].feature = 0;
  // Feature 1 is of another stack.
  const std::vector<int64_t> samples = {5, 1000, 8};
  const ProgramBuffers buffers =
      SizeProgramBuffers(plan, stack, v1::SPLIT_THEN_STACK, samples, 3, 64);
  EXPECT_EQ(buffers.samples, 13);
  EXPECT_EQ(buffers.id_capacity, 40);  // 39, in steps of 8
  EXPECT_EQ(buffers.row_pointers, 64 * 2 * 8);
  EXPECT_EQ(buffers.activation_rows, 3 + 4);  // each feature is cut into halves of its own
  EXPECT_EQ(buffers.bytes_per_sparsecore, (40 * 12 + 1024 * 4) / 2 + 7 * 16 * 4);

  // Of 5 and 7 samples, together: 6 on each of both SparseCores, and not 3 + 4.
  EXPECT_EQ(
      SizeProgramBuffers(plan, stack, v1::STACK_THEN_SPLIT, {{5, 1000, 7}}, 3, 64).activation_rows,
      6);
}

}  // namespace program_buffers_test
}  // namespace emberd::preprocess
