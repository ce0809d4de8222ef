// Prevents a crash, a wild read or a silently dropped entry on anything that arrives from the wire.
#include "shard/batch/batch.h"

#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace batch_test {

using ::testing::HasSubstr;
using testing::TestBatch;
using testing::TestShape;

const TestShape kShape{2, 16, 6};

class BatchTest : public ::testing::Test {
 protected:
  // Samples 0 to 5 in 2 slots (0, 1, 2 | 3, 4, 5), both partitions.
  TestBatch MakeBatch(int minibatches = 1) {
    return TestBatch(
        {{0, 0, 4, 1.0f}, {0, 1, 5, 2.0f}, {2, 0, 4, 3.0f}, {5, 1, 0, 4.0f}, {5, 1, 1, 5.0f}},
        kShape, 0, 2, 2, minibatches, 1);
  }
  absl::StatusOr<StackEntries> Arrange(const TestBatch& batch) {
    return ArrangeEntries(const_cast<TestBatch&>(batch).view(), {2, kShape.rows_per_partition},
                          pool_, cpu_);
  }
  void ExpectRefused(const std::function<void(TestBatch&)>& breakage, const std::string& message) {
    TestBatch batch = MakeBatch();
    breakage(batch);
    const absl::Status status = Arrange(batch).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  BufferPool pool_;
  CpuPool cpu_{2};
};

TEST_F(BatchTest, ArrangesBySampleThenRow) {
  for (const int minibatches : {1, 2, 4}) {
    const TestBatch batch = MakeBatch(minibatches);
    const absl::StatusOr<StackEntries> stack = Arrange(batch);
    ASSERT_TRUE(stack.ok()) << stack.status();
    EXPECT_THAT(absl::Span<const int32_t>(stack->samples), ::testing::ElementsAre(0, 2, 5));
    EXPECT_THAT(absl::Span<const uint32_t>(stack->offsets), ::testing::ElementsAre(0, 2, 3, 5));
    std::vector<std::pair<uint32_t, float>> entries;
    for (int i = 0; i < 5; ++i) entries.emplace_back(stack->entries[i].row, stack->entries[i].gain);
    EXPECT_THAT(entries,
                ::testing::ElementsAre(std::pair(4u, 1.f), std::pair(21u, 2.f), std::pair(4u, 3.f),
                                       std::pair(16u, 4.f), std::pair(17u, 5.f)));
    EXPECT_THAT(stack->partition_entries, ::testing::ElementsAre(2, 3));
  }
}

TEST_F(BatchTest, EmptyBatchIsFine) {
  const TestBatch batch({}, kShape, 0, 2, 2, 1);
  const absl::StatusOr<StackEntries> stack = Arrange(batch);
  ASSERT_TRUE(stack.ok()) << stack.status();
  EXPECT_EQ(stack->samples.size(), 0u);
  EXPECT_EQ(stack->entry_count, 0);
}

TEST_F(BatchTest, RefusesBadEntries) {
  const auto entry = [](const std::function<void(TestBatch::Segment&)>& change) {
    return [change](TestBatch& batch) { change(batch.segments()[0]); };
  };
  ExpectRefused(entry([](auto& s) { s.rows[1] = 16; }),
                "entry 1: embedding id 16 must be in [0, 16)");
  ExpectRefused(entry([](auto& s) { s.rows[0] = -1; }), "embedding id -1");
  ExpectRefused(entry([](auto& s) { s.rows[0] = 2147483647; }), "embedding id 2147483647");
  ExpectRefused(entry([](auto& s) { s.samples[0] = 3; }), "sample id 3 is in no span");
  ExpectRefused(entry([](auto& s) { s.samples[0] = -2147483648; }), "sample id -2147483648");
  ExpectRefused(entry([](auto& s) { s.gains[0] = NAN; }), "gain nan must be finite");
  ExpectRefused(entry([](auto& s) { s.gains[0] = -INFINITY; }), "gain -inf must be finite");
}

TEST_F(BatchTest, RefusesBadSegments) {
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[0].row_ends[1] = 2000;
        b.Refresh();
      },
      "row_ends[1] = 2000");
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[0].row_ends[0] = -5;
        b.Refresh();
      },
      "row_ends[0] = -5");
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[0].row_ends[0] = 2147483647;
        b.Refresh();
      },
      "row_ends[0]");
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[1].row_ends[1] = b.segments()[1].row_ends[0] - 1;
        b.Refresh();
      },
      "segment 1: row_ends[1]");
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[0].base = -8;
        b.Refresh();
      },
      "base -8");
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[0].row_ends.pop_back();
        b.Refresh();
      },
      "row_ends 1 must be 2");
  ExpectRefused(
      [](TestBatch& b) {
        b.segments()[0].gains.pop_back();
        b.Refresh();
      },
      "of one size");
  ExpectRefused([](TestBatch& b) { b.view().segments.pop_back(); },
                "1 segments for 2 slots x 1 mini-batches");
  ExpectRefused([](TestBatch& b) { b.view().minibatches = 0; }, "0 mini-batches");
  ExpectRefused(
      [](TestBatch& b) {
        b.view().slots = -2;
        b.view().minibatches = -1;
      },
      "-2 slots");
}

TEST_F(BatchTest, RefusesBadSpans) {
  ExpectRefused([](TestBatch& b) { b.view().spans.pop_back(); }, "1 span lists for 2 slots");
  ExpectRefused([](TestBatch& b) { b.view().sample_count = -1; }, "sample_count -1");
  ExpectRefused([](TestBatch& b) { b.view().sample_count = 5; },
                "span (slot_begin 0, sample_begin 3, count 3)");
  ExpectRefused(
      [](TestBatch& b) {
        b.spans()[1][0].sample_begin = 2;
        b.Refresh();
      },
      "two spans hold canonical sample 2");
  ExpectRefused(
      [](TestBatch& b) {
        b.spans()[0][0].count = -1;
        b.Refresh();
      },
      "count -1");
  ExpectRefused(
      [](TestBatch& b) {
        b.spans()[0][0].slot_begin = -1;
        b.Refresh();
      },
      "slot_begin -1");
  ExpectRefused(
      [](TestBatch& b) {
        b.spans()[0][0].slot_begin = 2000000000;
        b.Refresh();
      },
      "slot_begin 2000000000");
  ExpectRefused(
      [](TestBatch& b) {
        b.spans()[0].push_back({1, 0, 1});
        b.Refresh();
      },
      "follow slot sample 3");
  ExpectRefused(
      [](TestBatch& b) {
        b.spans()[0][0].sample_begin = 2147483647;
        b.Refresh();
      },
      "sample_begin");
}

TEST_F(BatchTest, FindsTheSamplesOfEachFeature) {
  TestBatch batch = MakeBatch();  // samples 0, 2 and 5 have entries
  batch.feature_samples() = {0, 3, 1, 0, 2, 0};
  batch.Refresh();
  const absl::StatusOr<StackEntries> stack = Arrange(batch);
  ASSERT_TRUE(stack.ok()) << stack.status();
  EXPECT_THAT(stack->feature_offsets, ::testing::ElementsAre(0, 0, 2, 2, 2, 3, 3));
}

TEST_F(BatchTest, RefusesBadFeatureSamples) {
  const auto counts = [](std::vector<int64_t> values) {
    return [values](TestBatch& batch) {
      batch.feature_samples() = values;
      batch.Refresh();
    };
  };
  ExpectRefused(counts({}), "feature_samples: their sum 0 must be sample_count 6");
  ExpectRefused(counts({3, 2}), "feature_samples: their sum 5 must be sample_count 6");
  ExpectRefused(counts({3, -1, 4}), "feature_samples[1] = -1 must be in [0, 3]");
  ExpectRefused(counts({3, 4}), "feature_samples[1] = 4 must be in [0, 3]");
  ExpectRefused(counts({3, int64_t{1} << 62, int64_t{1} << 62}), "feature_samples[1]");
}

// Would catch: a row without its initial value that is overlooked among others of its run, slot,
// mini-batch or partition; batches that are looked through again and again.
TEST_F(BatchTest, KnowsWhetherItsRowsHaveTheirValues) {
  const TestShape shape{2, 4096, 2};  // several chunks of rows in each partition
  testing::TestEngine engine({OneTableStack(shape, 16, 16, {})}, shape, 0, 2, {.eager_bytes = 0});
  const auto touched = [&](std::vector<testing::TestEntry> entries, int minibatches = 1) {
    TestBatch batch(entries, shape, 0, 2, 2, minibatches, 1);
    const auto prepared = *engine.Prepare(batch.view());
    engine.Gather(prepared);
    return prepared->stacks()[0].rows_touched;
  };
  EXPECT_FALSE(touched({{0, 0, 5, 1.0f}, {1, 1, 5, 1.0f}}));
  EXPECT_TRUE(touched({{0, 0, 5, 1.0f}, {1, 1, 5, 1.0f}}));
  EXPECT_TRUE(touched({{1, 0, 6, 1.0f}}));  // of the same chunk
  EXPECT_FALSE(touched({{0, 0, 5, 1.0f}, {1, 0, 4000, 1.0f}}));
  EXPECT_FALSE(touched({{0, 0, 5, 1.0f}, {1, 1, 4000, 1.0f}}));
  EXPECT_TRUE(touched({{0, 0, 4000, 1.0f}, {1, 1, 4000, 1.0f}}));
  EXPECT_TRUE(touched({}));
  EXPECT_FALSE(touched({{0, 0, 5, 1.0f}, {0, 0, 1000, 1.0f}}));                   // last of a run
  EXPECT_FALSE(touched({{0, 0, 2000, 1.0f}, {0, 0, 4000, 1.0f}}));                // first of it
  EXPECT_FALSE(touched({{0, 1, 1000, 1.0f}, {1, 0, 5, 1.0f}, {1, 1, 5, 1.0f}}));  // first slot
  EXPECT_FALSE(touched({{0, 0, 5, 1.0f}, {0, 0, 3000, 1.0f}, {0, 0, 4000, 1.0f}}, 4));
  EXPECT_TRUE(touched({{0, 0, 5, 1.0f}, {0, 0, 3000, 1.0f}, {0, 0, 4000, 1.0f}}, 4));
}

TEST_F(BatchTest, EngineRefusesUnknownAndRepeatedStacks) {
  testing::TestEngine engine({OneTableStack(kShape, 8, 8, {})}, kShape, 0, 2);
  TestBatch batch = MakeBatch();
  EXPECT_TRUE(engine.engine().PrepareBatch(7, {batch.view()}, nullptr).ok());
  EXPECT_FALSE(engine.engine().PrepareBatch(7, {batch.view(), batch.view()}, nullptr).ok());
  batch.view().stack = 1;
  EXPECT_FALSE(engine.Prepare(batch.view()).ok());
  batch.view().stack = -1;
  EXPECT_FALSE(engine.Prepare(batch.view()).ok());
}

}  // namespace batch_test
}  // namespace emberd::shard
