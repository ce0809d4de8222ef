// A step of a synchronous group against the same step of one process. Prevents: a row that several
// ranks touch and that is updated once per rank; gradients summed rank by rank where features share
// a table; a rank's sample that takes another rank's gradient; ranks that disagree and are
// believed.
//
// Covers: update.cc
#include <algorithm>
#include <cstring>
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "config/optimizers.h"
#include "shard/testing/exact_optimizers.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/reference.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace staged_update_test {

using ::testing::HasSubstr;
using testing::Row;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

constexpr int kPartitions = 2, kRows = 12, kWidth = 24, kColumns = 19;

// A global batch of one stack, and what each rank holds of it.
struct GroupBatch {
  int samples = 0;                            // of all ranks
  std::vector<int64_t> feature_samples;       // of all ranks
  std::vector<std::vector<int64_t>> of_rank;  // [rank][feature]
  std::vector<int> rank_of;                   // of each global sample
  std::vector<int> sample_of;                 // its number inside the rank
  std::vector<TestEntry> entries;             // global samples

  GroupBatch(int ranks, int features, std::mt19937_64& random)
      : of_rank(ranks, std::vector<int64_t>(features)) {
    for (auto& rank : of_rank) {
      const bool empty = random() % 5 == 0;
      for (int64_t& count : rank) count = empty ? 0 : random() % 9;
    }
    std::vector<int> used(ranks);
    for (int f = 0; f < features; ++f) {
      int64_t& total = feature_samples.emplace_back();
      for (int r = 0; r < ranks; ++r) {
        total += of_rank[r][f];
        for (int i = 0; i < of_rank[r][f]; ++i) {
          rank_of.push_back(r);
          sample_of.push_back(used[r]++);
        }
      }
    }
    samples = static_cast<int>(rank_of.size());
    entries = testing::RandomEntries({kPartitions, kRows, samples}, 3, random);
  }

  std::vector<TestEntry> EntriesOf(int rank) const {
    std::vector<TestEntry> result;
    for (TestEntry entry : entries) {
      if (rank_of[entry.sample] != rank) continue;
      entry.sample = sample_of[entry.sample];
      result.push_back(entry);
    }
    return result;
  }
};

StackSpec Stack(const v1::OptimizerConfig& optimizer, v1::DataType dtype = v1::FLOAT32) {
  StackSpec stack = testing::OneTableStack({kPartitions, kRows}, kWidth, kColumns, optimizer);
  stack.storage_dtype = dtype;
  return stack;
}

// A batch and the memory of its gradients.
struct Part {
  std::shared_ptr<const Batch> batch;
  std::vector<float> gradients;
};

// `gradient_of(sample)` is a row, or nothing for a sample without an entry.
template <class GradientOf>
Part MakePart(TestEngine& engine, const std::vector<TestEntry>& entries,
              const std::vector<int64_t>& feature_samples, std::mt19937_64& random,
              const GradientOf& gradient_of) {
  int samples = 0;
  for (const int64_t count : feature_samples) samples += static_cast<int>(count);
  TestBatch batch(entries, {kPartitions, kRows, samples}, 0, kPartitions,
                  1 + static_cast<int>(random() % 3), 1 + static_cast<int>(random() % 2));
  batch.feature_samples() = feature_samples;
  batch.Refresh();
  Part part;
  const auto prepared = engine.Prepare(batch.view());
  EXPECT_TRUE(prepared.ok()) << prepared.status();
  part.batch = *prepared;
  std::vector<bool> present(samples);
  for (const TestEntry& entry : entries) present[entry.sample] = true;
  for (int sample = 0; sample < samples; ++sample) {
    if (!present[sample]) continue;
    const Row row = gradient_of(sample);
    part.gradients.insert(part.gradients.end(), row.begin(), row.end());
  }
  return part;
}

class ApplyPartsTest : public ::testing::TestWithParam<testing::OptimizerCase> {
 protected:
  ApplyPartsTest()
      : optimizer_(testing::CompleteOptimizer(GetParam().text)),
        formula_(testing::CompleteOptimizer(testing::FormulaOf(GetParam()))),
        slots_(config::OptimizerSlots(optimizer_)) {}

  // Weights and slots of a row, live columns.
  testing::ExactRow ReadExact(TestEngine& engine, int partition, int row) {
    testing::ExactRow result;
    for (const float x : engine.ReadRow(0, partition, row, kColumns)) result.w.emplace_back(x);
    for (const config::SlotInfo& slot : slots_) {
      auto& values = result.slots.emplace_back();
      const int columns = slot.one_per_row ? 1 : kColumns;
      for (const float x : engine.ReadRow(0, partition, row, columns, slot.name))
        values.emplace_back(x);
    }
    return result;
  }

  void ExpectSameTables(TestEngine& a, TestEngine& b) {
    for (int p = 0; p < kPartitions; ++p) {
      for (int row = 0; row < kRows; ++row) {
        const auto same = [&](int columns, const std::string& slot) {
          const Row x = a.ReadRow(0, p, row, columns, slot),
                    y = b.ReadRow(0, p, row, columns, slot);
          ASSERT_EQ(std::memcmp(x.data(), y.data(), columns * sizeof(float)), 0)
              << "partition " << p << " row " << row << " " << slot;
        };
        same(kWidth, "");
        for (const config::SlotInfo& slot : slots_) same(slot.one_per_row ? 1 : kWidth, slot.name);
      }
    }
  }

  const v1::OptimizerConfig optimizer_, formula_;
  const std::vector<config::SlotInfo> slots_;
};

TEST_P(ApplyPartsTest, EqualsOneProcessFedTheConcatenatedBatch) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16, v1::FLOAT16}) {
    const TestShape shape{kPartitions, kRows};
    TestEngine group({Stack(optimizer_, dtype)}, shape, 0, kPartitions);
    TestEngine single({Stack(optimizer_, dtype)}, shape, 0, kPartitions);
    for (int step = 0; step < 12; ++step) {
      const int ranks = 1 + step % 4;
      const GroupBatch batch(ranks, 1 + static_cast<int>(random() % 3), random);
      std::vector<bool> missing(ranks);  // gradients
      for (int r = 0; r < ranks; ++r) missing[r] = random() % 4 == 0;
      std::vector<Row> gradients(batch.samples, Row(kWidth));
      for (int sample = 0; sample < batch.samples; ++sample) {
        if (missing[batch.rank_of[sample]]) continue;
        for (int c = 0; c < kColumns; ++c) gradients[sample][c] = normal(random);
      }
      const Part whole = MakePart(single, batch.entries, batch.feature_samples, random,
                                  [&](int sample) { return gradients[sample]; });
      std::vector<Part> parts;
      for (int r = 0; r < ranks; ++r) {
        parts.push_back(
            MakePart(group, batch.EntriesOf(r), batch.of_rank[r], random, [&](int sample) {
              for (int s = 0;; ++s) {
                if (batch.rank_of[s] == r && batch.sample_of[s] == sample) return gradients[s];
              }
            }));
      }
      const absl::flat_hash_map<std::string, double> overrides = {{"learning_rate", 0.05f}};
      std::vector<testing::RankInput> input;
      for (int r = 0; r < ranks; ++r) {
        testing::RankInput& part = input.emplace_back();
        part.batch = parts[r].batch;
        part.input.step = step;
        if (!missing[r]) part.input.stacks.push_back({0, parts[r].gradients, overrides});
      }
      ApplyInput whole_input;
      whole_input.step = step;
      whole_input.stacks.push_back({0, whole.gradients, {}});
      const bool any = std::find(missing.begin(), missing.end(), false) != missing.end();
      if (any) whole_input.stacks[0].hyperparameters = overrides;
      const int64_t rows = single.Apply(whole.batch, whole_input);
      EXPECT_EQ(group.ApplyParts(input), rows) << "ranks " << ranks;
      ExpectSameTables(group, single);
    }
  }
}

// Independent of the engine's order and kernels: one update per row, from the sum over all ranks.
TEST_P(ApplyPartsTest, AgreesWithDoublePrecision) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  TestEngine engine({Stack(optimizer_)}, {kPartitions, kRows}, 0, kPartitions);
  for (int step = 0; step < 4; ++step) {
    constexpr int kRanks = 3;
    const GroupBatch batch(kRanks, 2, random);
    std::map<std::pair<int, int>, std::vector<testing::Exact>> sums;
    std::map<std::pair<int, int>, int> touches;
    std::vector<Part> parts;
    std::vector<testing::RankInput> input;
    for (int r = 0; r < kRanks; ++r) {
      std::map<int, Row> gradients;
      const std::vector<TestEntry> entries = batch.EntriesOf(r);
      parts.push_back(MakePart(engine, entries, batch.of_rank[r], random, [&](int sample) {
        Row row(kWidth);
        for (int c = 0; c < kColumns; ++c) row[c] = normal(random);
        return gradients[sample] = row;
      }));
      for (const TestEntry& e : entries) {
        auto& sum = sums[{e.partition, e.row}];
        sum.resize(kColumns);
        for (int c = 0; c < kColumns; ++c)
          sum[c] = sum[c] + testing::Exact(e.gain) * testing::Exact(gradients[e.sample][c]);
        ++touches[{e.partition, e.row}];
      }
    }
    for (const Part& part : parts) {
      testing::RankInput& p = input.emplace_back();
      p.batch = part.batch;
      p.input.step = step;
      p.input.stacks.push_back({0, part.gradients, {}});
    }
    std::map<std::pair<int, int>, testing::ExactRow> expected;
    for (const auto& [key, sum] : sums) {
      expected[key] = ReadExact(engine, key.first, key.second);
      testing::ExactUpdate(formula_, step, sum, expected[key]);
    }
    EXPECT_EQ(engine.ApplyParts(input), static_cast<int64_t>(sums.size()));
    for (const auto& [key, row] : expected) {
      const testing::ExactRow actual = ReadExact(engine, key.first, key.second);
      // A rounding per term of the sum, which the formula may square.
      const double bound = (GetParam().bound + 4 * (touches[key] + 1)) * 0x1p-24;
      for (int c = 0; c < kColumns; ++c) {
        EXPECT_NEAR(actual.w[c].v, row.w[c].v, bound * row.w[c].m) << "column " << c;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, ApplyPartsTest, ::testing::ValuesIn(testing::OptimizerCases()),
                         [](const auto& info) { return info.param.name; });

class ApplyPartsErrorTest : public ::testing::Test {
 protected:
  ApplyPartsErrorTest()
      : engine_({Stack(testing::CompleteOptimizer("adam { bias_correction: true }"))},
                {kPartitions, kRows}, 0, kPartitions) {
    for (int r = 0; r < 3; ++r) {
      testing::RankInput& part = parts_.emplace_back();
      part.batch = MakeBatch({1, 1});
      part.input.step = 4;
      part.input.stacks.push_back({0, gradients_, {{"learning_rate", 0.5f}}});
    }
  }

  // Sample 0 has an entry.
  std::shared_ptr<const Batch> MakeBatch(const std::vector<int64_t>& feature_samples) {
    TestBatch batch({{0, 0, 3, 1.0f}}, {kPartitions, kRows, 2}, 0, kPartitions, 1, 1);
    batch.feature_samples() = feature_samples;
    batch.Refresh();
    return *engine_.Prepare(batch.view());
  }
  void ExpectRefused(const std::string& message) {
    const absl::Status status = testing::Stage(parts_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  TestEngine engine_;
  std::vector<float> gradients_ = std::vector<float>(kWidth, 1.0f);
  std::vector<testing::RankInput> parts_;
};

TEST_F(ApplyPartsErrorTest, AcceptsRanksThatAgree) {
  EXPECT_TRUE(testing::Stage(parts_).ok());
  parts_[1].input.stacks.clear();  // no gradients, no say
  EXPECT_TRUE(testing::Stage(parts_).ok());
}

TEST_F(ApplyPartsErrorTest, RefusesAnotherStep) {
  parts_[2].input.step = 5;
  ExpectRefused("rank 2: step is 5, but 4 for rank 0");
}

TEST_F(ApplyPartsErrorTest, RefusesSumsOfRowsThatTheBatchDidNotReturn) {
  parts_[0].input.stacks[0].of_rows = true;
  ExpectRefused("gradients of stack stack: they are sums of rows, but the batch did not return");
}

TEST_F(ApplyPartsErrorTest, RefusesAnotherSeed) {
  parts_[2].input.rng_seed = 5;
  ExpectRefused("rank 2: rng_seed is 5, but 0 for rank 0");
}

TEST_F(ApplyPartsErrorTest, RefusesOtherHyperparameters) {
  parts_[0].input.stacks.clear();
  parts_[2].input.stacks[0].hyperparameters["learning_rate"] = 0.25f;
  ExpectRefused("rank 2: hyperparameter learning_rate of stack stack is 0.25, but 0.5 for rank 1");
  parts_[2].input.stacks[0].hyperparameters["learning_rate"] = 0.5 + 1e-8;
  ExpectRefused("rank 2: hyperparameter learning_rate of stack stack is 0.50000001, but 0.5 for");
  parts_[1].input.stacks[0].hyperparameters["learning_rate"] = 0.3;
  parts_[2].input.stacks[0].hyperparameters["learning_rate"] = 0.1 + 0.2;  // the next double
  ExpectRefused("of stack stack is 0.30000000000000004, but 0.3 for rank 1");
  parts_[1].input.stacks[0].hyperparameters["learning_rate"] = 0.5;
  parts_[2].input.stacks[0].hyperparameters = {};
  ExpectRefused("hyperparameter learning_rate of stack stack is not given, but 0.5 for rank 1");
  parts_[2].input.stacks[0].hyperparameters = {{"learning_rate", 0.5f}, {"beta1", 0.5f}};
  ExpectRefused("rank 2: hyperparameter beta1 of stack stack is 0.5, but not given for rank 1");
}

TEST_F(ApplyPartsErrorTest, RefusesAnotherNumberOfFeatures) {
  parts_[1].batch = MakeBatch({2});
  ExpectRefused("rank 1: the number of features of stack stack is 1, but 2 for rank 0");
}

TEST_F(ApplyPartsErrorTest, RefusesAnotherModel) {
  ModelSpec spec = engine_.spec();
  spec.model_id = 8;
  ASSERT_TRUE(engine_.engine().CreateModel(spec).ok());
  TestBatch batch({{0, 0, 3, 1.0f}}, {kPartitions, kRows, 2}, 0, kPartitions, 1, 1);
  parts_[1].batch = *engine_.engine().PrepareBatch(8, {batch.view()}, nullptr);
  ExpectRefused("rank 1: model_id is 8, but 7 for rank 0");
}

TEST_F(ApplyPartsErrorTest, ADroppedModelIsNotFound) {
  absl::StatusOr<StagedUpdate> update = testing::Stage(parts_);
  ASSERT_TRUE(engine_.engine().DropModel(7).ok());
  EXPECT_EQ(testing::Stage(parts_).status().code(), absl::StatusCode::kNotFound);
  std::promise<absl::Status> status;
  engine_.engine().Apply(*std::move(update), [&](const absl::StatusOr<ApplyResult>& result) {
    status.set_value(result.status());
  });
  EXPECT_EQ(status.get_future().get().code(), absl::StatusCode::kNotFound);
}

// A part that came too late finds its model gone, even if it was checked before.
TEST_F(ApplyPartsErrorTest, APartOfADroppedModelIsNotAdded) {
  StagedUpdate update(2);
  const auto part = *CheckedPart::Make(parts_[0].batch, parts_[0].input);
  ASSERT_TRUE(update.Add(1, part).ok());
  EXPECT_FALSE(update.complete());
  ASSERT_TRUE(engine_.engine().DropModel(7).ok());
  EXPECT_EQ(update.Add(0, part).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(update.Has(0));
}

// Where each step brings its rate, a skipped one has none; nothing is divided by that of the table.
TEST(SkippedStepTest, NeedsNoHyperparameters) {
  TestEngine engine({Stack(testing::CompleteOptimizer("ftrl {} learning_rate: 0"))},
                    {kPartitions, kRows}, 0, kPartitions);
  TestBatch batch({{0, 0, 3, 1.0f}}, {kPartitions, kRows, 2}, 0, kPartitions, 1, 1);
  const auto prepared = *engine.Prepare(batch.view());
  ApplyInput input;
  input.step = 4;
  EXPECT_EQ(testing::Check(prepared, input).code(), absl::StatusCode::kInvalidArgument);
  input.skip = true;
  const Row before = engine.ReadRow(0, 0, 3, kWidth);
  EXPECT_EQ(engine.Apply(prepared, input), 0);
  EXPECT_EQ(engine.ReadRow(0, 0, 3, kWidth), before);
}

// Whoever has all gradients of a step may sum those of each row: the tables must get the same bits.
TEST(SumsOfRowsTest, MakeTheUpdateOfTheirSamples) {
  std::mt19937_64 random(TestSeed());
  const TestShape shape{kPartitions, kRows, 40};
  for (const testing::OptimizerCase& optimizer : testing::OptimizerCases()) {
    SCOPED_TRACE(optimizer.text);
    StackSpec stack = Stack(testing::CompleteOptimizer(optimizer.text));
    stack.result_mode = v1::UNIQUE_ROWS;
    const std::vector<TestEntry> entries = testing::RandomEntries(shape, 2, random);
    TestBatch batch(entries, shape, 0, kPartitions, 2, 1);
    TestEngine by_sample({stack}, {kPartitions, kRows}, 0, kPartitions);
    TestEngine by_row({stack}, {kPartitions, kRows}, 0, kPartitions);

    testing::RankInput samples, rows;
    samples.batch = *by_sample.Prepare(batch.view());
    rows.batch = *by_row.Prepare(batch.view());
    const StackEntries& arranged = samples.batch->stacks()[0];
    std::vector<float> gradients(arranged.samples.size() * kWidth);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const bool padding = i % kWidth >= kColumns;
      gradients[i] = padding ? 0 : static_cast<float>(random() % 2001) * 1e-3f - 1;
    }
    const size_t distinct = arranged.distinct_rows.size();
    std::vector<float> sums(distinct * kWidth);
    for (size_t i = 0; i < arranged.samples.size(); ++i) {
      for (uint32_t e = arranged.offsets[i]; e < arranged.offsets[i + 1]; ++e) {
        const Entry& entry = arranged.entries[e];
        const uint32_t* first = arranged.distinct_rows.data();
        const size_t row = std::lower_bound(first, first + distinct, entry.row) - first;
        for (int c = 0; c < kWidth; ++c) {
          float& sum = sums[row * kWidth + c];
          sum = sum + entry.gain * gradients[i * kWidth + c];
        }
      }
    }
    samples.input.step = rows.input.step = 3;
    samples.input.stacks.push_back({0, gradients, {}});
    rows.input.stacks.push_back({0, sums, {}});
    rows.input.stacks[0].of_rows = true;
    EXPECT_EQ(by_row.ApplyParts({rows}), by_sample.ApplyParts({samples}));
    for (int p = 0; p < kPartitions; ++p) {
      for (int row = 0; row < kRows; ++row) {
        EXPECT_EQ(by_row.ReadRow(0, p, row, kWidth), by_sample.ReadRow(0, p, row, kWidth));
      }
    }
    // One of several ranks may not: floats are summed in one order, over the samples of all.
    const absl::Status status = testing::Stage({rows, rows}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("in a step of 2 ranks"));
    sums.pop_back();
    rows.input.stacks[0].gradients = sums;
    EXPECT_EQ(testing::Stage({rows}).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace staged_update_test
}  // namespace emberd::shard
