// Prevents: results that depend on the number of threads, on how partitions are dealt to shards, on
// the cut into slots and mini-batches, on lazy or eager rows, or on the SIMD instructions of the
// CPU. Each variant trains the same model on the same requests for some steps; a SHA-256 over every
// sum returned and another over all weights and slots must be the same, and the latter that of
// plain scalar loops.
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/floats.h"
#include "base/sha256.h"
#include "base/testing/sanitized.h"
#include "config/optimizers.h"
#include "hwy/targets.h"
#include "shard/store/portable_numbers.h"
#include "shard/store/stack_store.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/random_rounding.h"
#include "shard/testing/reference.h"
#include "shard/testing/scalar_optimizers.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace determinism_test {

using testing::Row;
using testing::RowValues;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

constexpr int kPartitions = 8, kPadding = 3;
constexpr int kSteps = Rounds(15);
const TestShape kShape{kPartitions, 8, 16};

// Bytes whose digest is compared.
class Recorder {
 public:
  void Add(const float* values, size_t count) {
    bytes_.append(reinterpret_cast<const char*>(values), count * sizeof(float));
  }
  void Add(const Row& row) { Add(row.data(), row.size()); }
  std::string Digest() const { return Sha256Hex(bytes_); }

 private:
  std::string bytes_;
};

// A model, and all requests that train it.
struct Training {
  struct Step {
    std::vector<std::vector<TestEntry>> entries;  // by stack
    std::vector<std::vector<float>> gradients;    // by stack: [samples, width]
  };
  std::vector<StackSpec> stacks;
  std::vector<Step> steps;

  Training(std::vector<StackSpec> model, uint64_t seed) : stacks(std::move(model)) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (Step& step : steps = std::vector<Step>(kSteps)) {
      for (const StackSpec& stack : stacks) {
        const int width = stack.embedding_dim;
        step.entries.push_back(testing::RandomEntries(kShape, 2, random));
        std::vector<float>& gradients = step.gradients.emplace_back(kShape.samples * width);
        for (size_t i = 0; i < gradients.size(); ++i) {
          if (static_cast<int>(i % width) < width - kPadding) gradients[i] = normal(random);
        }
      }
    }
  }
};

StackSpec Stack(const v1::OptimizerConfig& optimizer, int width, v1::DataType dtype) {
  StackSpec stack = testing::OneTableStack(kShape, width, width - kPadding, optimizer);
  stack.storage_dtype = dtype;
  return stack;
}

// What holds the rows: weights, then slots, row by row.
template <class ReadRow>
std::string TablesDigest(const Training& training, const ReadRow& read_row) {
  Recorder recorder;
  for (size_t s = 0; s < training.stacks.size(); ++s) {
    const int width = training.stacks[s].embedding_dim;
    std::vector<std::pair<std::string, int>> arrays = {{"", width}};
    for (const config::SlotInfo& slot : config::OptimizerSlots(training.stacks[s].optimizer))
      arrays.emplace_back(slot.name, slot.one_per_row ? 1 : width);
    for (const auto& [slot, columns] : arrays) {
      for (int p = 0; p < kPartitions; ++p) {
        for (int row = 0; row < kShape.rows_per_partition; ++row) {
          recorder.Add(read_row(static_cast<int>(s), p, row, columns, slot));
        }
      }
    }
  }
  return recorder.Digest();
}

struct Variant {
  std::string name;
  int threads = 1;
  int shards = 1;
  int slots = 2;
  int minibatches = 1;
  bool lazy = false;
};

class Cluster {
 public:
  Cluster(const Training& training, const Variant& variant)
      : training_(training), variant_(variant) {
    for (int s = 0; s < variant.shards; ++s) {
      engines_.push_back(std::make_unique<TestEngine>(
          training.stacks, kShape, s * PerShard(), PerShard(),
          EngineOptions{.eager_bytes = variant.lazy ? 0 : 1 << 20}, variant.threads));
    }
  }

  // Digests of all sums and of the tables.
  std::pair<std::string, std::string> Train() {
    for (int step = 0; step < kSteps; ++step) Step(step);
    return {sums_.Digest(), TablesDigest(training_, [&](int stack, int partition, int row,
                                                        int columns, const std::string& slot) {
              return engines_[partition / PerShard()]->ReadRow(stack, partition, row, columns,
                                                               slot);
            })};
  }

 private:
  int PerShard() const { return kPartitions / variant_.shards; }

  void Step(int number) {
    const Training::Step& step = training_.steps[number];
    // By stack, sample, shard.
    std::vector<std::map<int, std::map<int, Row>>> partials(training_.stacks.size());
    for (int s = 0; s < variant_.shards; ++s) {
      std::vector<std::unique_ptr<TestBatch>> batches;
      std::vector<preprocess::StackBatchView> views;
      for (size_t k = 0; k < training_.stacks.size(); ++k) {
        batches.push_back(std::make_unique<TestBatch>(
            step.entries[k], kShape, s * PerShard(), PerShard(), variant_.slots,
            variant_.minibatches, 2, static_cast<int>(k)));
        views.push_back(batches.back()->view());
      }
      TestEngine& engine = *engines_[s];
      const auto batch = *engine.engine().PrepareBatch(engine.spec().model_id, views, nullptr);
      const std::vector<StackSums> sums = engine.Gather(batch);
      std::vector<std::vector<float>> gradients(sums.size());
      ApplyInput input;
      input.step = number;
      for (size_t k = 0; k < sums.size(); ++k) {
        const int width = training_.stacks[k].embedding_dim;
        for (size_t i = 0; i < sums[k].samples.size(); ++i) {
          const int sample = sums[k].samples[i];
          const float* sum = sums[k].sums.data() + i * width;
          partials[k][sample][s].assign(sum, sum + width);
          const float* gradient = step.gradients[k].data() + sample * width;
          gradients[k].insert(gradients[k].end(), gradient, gradient + width);
        }
        input.stacks.push_back({static_cast<int>(k), gradients[k], {{"learning_rate", 0.1f}}});
      }
      engine.Apply(batch, input);
    }
    for (const auto& by_sample : partials) {
      for (const auto& [sample, by_shard] : by_sample) {
        Row sum;
        testing::FoldTree(by_shard, 0, variant_.shards, sum);
        sums_.Add(sum);
      }
    }
  }

  const Training& training_;
  const Variant variant_;
  std::vector<std::unique_ptr<TestEngine>> engines_;
  Recorder sums_;
};

// The same training in plain scalar code, one row and one column at a time.
std::string ScalarTraining(const Training& training) {
  TestEngine initial(training.stacks, kShape, 0, kPartitions);
  std::map<std::tuple<int, int, int, std::string>, Row> tables;
  TablesDigest(training,
               [&](int stack, int partition, int row, int columns, const std::string& slot) {
                 return tables[{stack, partition, row, slot}] =
                            initial.ReadRow(stack, partition, row, columns, slot);
               });
  for (int number = 0; number < kSteps; ++number) {
    const Training::Step& step = training.steps[number];
    for (size_t k = 0; k < training.stacks.size(); ++k) {
      const StackSpec& stack = training.stacks[k];
      const int width = stack.embedding_dim, columns = width - kPadding;
      const auto slots = config::OptimizerSlots(stack.optimizer);
      v1::OptimizerConfig optimizer = stack.optimizer;
      optimizer.set_learning_rate(0.1f);
      const StepRule rule = MakeStepRule(optimizer, number);
      const auto gradient_of = [&](int sample) {
        const float* gradient = step.gradients[k].data() + sample * width;
        return Row(gradient, gradient + columns);
      };
      for (const auto& [key, gradient] :
           testing::ReferenceGradients(step.entries[k], 0, kPartitions, columns, gradient_of)) {
        const auto& [partition, row] = key;
        const auto table = [&, partition = partition, row = row](const std::string& slot) -> Row& {
          return tables.at({static_cast<int>(k), partition, row, slot});
        };
        RowValues values{Row(table("").begin(), table("").begin() + columns), {}};
        for (const auto& slot : slots) {
          const Row& from = table(slot.name);
          values.slots.emplace_back(from.begin(), from.begin() + (slot.one_per_row ? 1 : columns));
        }
        testing::ScalarUpdate(rule, gradient, values);
        std::vector<uint16_t> random(width);
        RandomHalves(
            SubKey(SubKey(SubKey(NamedKey(1, "rounding of " + stack.name), number), partition),
                   row),
            width, random.data());
        for (int c = 0; c < columns; ++c) {
          float& w = values.w[c];
          const bool at_random = stack.stochastic_rounding;
          if (stack.storage_dtype == v1::BFLOAT16)
            w = FromBfloat16(at_random ? ToBfloat16Randomly(w, random[c]) : ToBfloat16(w));
          if (stack.storage_dtype == v1::FLOAT16)
            w = FromFloat16(at_random ? ToFloat16Randomly(w, random[c]) : ToFloat16(w));
        }
        std::copy(values.w.begin(), values.w.end(), table("").begin());
        for (size_t i = 0; i < slots.size(); ++i)
          std::copy(values.slots[i].begin(), values.slots[i].end(), table(slots[i].name).begin());
      }
    }
  }
  return TablesDigest(training,
                      [&](int stack, int partition, int row, int, const std::string& slot) {
                        return tables.at({stack, partition, row, slot});
                      });
}

// Every variant against the plain one, and that against scalar code.
void ExpectOneResult(const std::vector<StackSpec>& stacks) {
  const Training training(stacks, TestSeed());
  const auto expected = Cluster(training, {"base"}).Train();
  EXPECT_EQ(ScalarTraining(training), expected.second) << "scalar code";
  for (const Variant& variant : {Variant{"2 threads", 2, 1, 5, 3}, Variant{"4 threads", 4, 1, 1},
                                 Variant{"2 shards", 2, 2, 2, 1, true}, Variant{"4 shards", 1, 4},
                                 Variant{"8 shards", 1, 8}}) {
    EXPECT_EQ(Cluster(training, variant).Train(), expected) << variant.name;
  }
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  EXPECT_GE(targets.size(), 2u) << "nothing to compare on this CPU";
  for (const int64_t target : targets) {
    hwy::SetSupportedTargetsForTest(target);
    EXPECT_EQ(Cluster(training, {"target"}).Train(), expected) << hwy::TargetName(target);
  }
  hwy::SetSupportedTargetsForTest(0);
}

// Of any width, and of a width that some kernels are made for.
using WidthCase = std::tuple<testing::OptimizerCase, int>;
class DeterminismTest : public ::testing::TestWithParam<WidthCase> {};

TEST_P(DeterminismTest, OneResultForEveryOptimizer) {
  const auto& [optimizer, width] = GetParam();
  ExpectOneResult({Stack(testing::CompleteOptimizer(optimizer.text), width, v1::FLOAT32)});
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DeterminismTest,
                         ::testing::Combine(::testing::ValuesIn(testing::OptimizerCases()),
                                            ::testing::Values(24, 64)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).name, "Width",
                                               std::get<1>(info.param));
                         });

// Several stacks at once, narrow and wide, of every storage type.
TEST(DeterminismOfStorage, OneResultForEveryStorageType) {
  const v1::OptimizerConfig optimizer = testing::CompleteOptimizer("adagrad {}");
  std::vector<StackSpec> stacks = {
      Stack(optimizer, 8, v1::BFLOAT16), Stack(optimizer, 32, v1::BFLOAT16),
      Stack(optimizer, 24, v1::FLOAT16), Stack(optimizer, 16, v1::FLOAT16),
      Stack(optimizer, 64, v1::FLOAT32)};
  stacks[1].stochastic_rounding = stacks[2].stochastic_rounding = true;
  stacks[4].quantized = true;
  stacks[4].quantization.set_lower(-0.5f);
  stacks[4].quantization.set_upper(0.5f);
  stacks[4].quantization.set_num_buckets(256);
  for (size_t i = 0; i < stacks.size(); ++i) stacks[i].name = "stack" + std::to_string(i);
  ExpectOneResult(stacks);
}

// The larger of NaN and a bound is the bound on some CPUs, and a broken row would look like a good
// one.
TEST(DeterminismOfQuantization, NaNStaysNaN) {
  const TestShape shape{1, 8, 1};
  for (const int width : {8, 16}) {
    StackSpec stack =
        testing::OneTableStack(shape, width, width, testing::CompleteOptimizer("sgd {}"));
    stack.quantized = true;
    stack.quantization.set_lower(-1);
    stack.quantization.set_upper(1);
    stack.quantization.set_num_buckets(256);
    stack.tables[0].initializer.mutable_constant()->set_value(
        std::numeric_limits<float>::quiet_NaN());
    TestEngine engine({stack}, shape, 0, 1);
    ASSERT_TRUE(std::isnan(engine.ReadRow(0, 0, 0, width)[0]));
    TestBatch batch({{0, 0, 0, 1.0f}}, shape, 0, 1, 1, 1);
    for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
      hwy::SetSupportedTargetsForTest(target);
      const StackSums sums = engine.Gather(*engine.Prepare(batch.view()))[0];
      for (int c = 0; c < width; ++c) {
        EXPECT_TRUE(std::isnan(sums.sums[c])) << hwy::TargetName(target) << ", column " << c;
      }
    }
    hwy::SetSupportedTargetsForTest(0);
  }
}

}  // namespace determinism_test
}  // namespace emberd::shard
