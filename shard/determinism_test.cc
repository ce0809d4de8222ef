// Prevents: results that depend on the number of threads, on how partitions are dealt to shards, on
// the cut into slots and mini-batches, on lazy or eager rows, or on the SIMD instructions of the
// CPU. Each variant trains the same model on the same requests; every sum returned, every weight
// and every slot must have the same bits.
#include <cstring>

#include <gtest/gtest.h>

#include "config/optimizers.h"
#include "hwy/targets.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/reference.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace {

using testing::Row;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

constexpr int kPartitions = 8, kSteps = 12;
const TestShape kShape{kPartitions, 16, 48};
const std::vector<int> kWidths = {8, 24, 64};

struct Variant {
  std::string name;
  int threads = 1;
  int shards = 1;
  int slots = 2;
  int minibatches = 1;
  bool lazy = false;
};

uint64_t Hash(uint64_t hash, const float* values, size_t count) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values);
  for (size_t i = 0; i < count * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

class Cluster {
 public:
  Cluster(const v1::OptimizerConfig& optimizer, const Variant& variant) : variant_(variant) {
    std::vector<StackSpec> stacks;
    for (size_t i = 0; i < kWidths.size(); ++i) {
      stacks.push_back(OneTableStack(kShape, kWidths[i], kWidths[i] - 3, optimizer));
      stacks.back().storage_dtype = i == 1 ? v1::BFLOAT16 : v1::FLOAT32;
      stacks.back().quantized = i == 2;
      stacks.back().quantization.set_lower(-0.5f);
      stacks.back().quantization.set_upper(0.5f);
      stacks.back().quantization.set_num_buckets(256);
    }
    for (int s = 0; s < variant.shards; ++s) {
      engines_.push_back(std::make_unique<TestEngine>(
          stacks, kShape, s * PerShard(), PerShard(),
          EngineOptions{.threads = variant.threads, .eager_bytes = variant.lazy ? 0 : 1 << 20}));
    }
  }

  // One step of every stack; returns a hash of the activations.
  uint64_t Step(int step, std::mt19937_64& random) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t stack = 0; stack < kWidths.size(); ++stack) {
      const int width = kWidths[stack];
      const std::vector<TestEntry> entries = testing::RandomEntries(kShape, 3, random);
      std::vector<float> gradients(kShape.samples * width);
      std::normal_distribution<float> normal;
      for (size_t i = 0; i < gradients.size(); ++i) {
        gradients[i] = static_cast<int>(i % width) < width - 3 ? normal(random) : 0;
      }
      std::map<int, std::map<int, Row>> partials;  // sample, shard
      for (int s = 0; s < variant_.shards; ++s) {
        TestBatch test_batch(entries, kShape, s * PerShard(), PerShard(), variant_.slots,
                             variant_.minibatches, 2, static_cast<int>(stack));
        const auto batch = *engines_[s]->Prepare(test_batch.view());
        const StackSums sums = engines_[s]->Gather(batch)[0];
        std::vector<float> packed;
        for (size_t i = 0; i < sums.samples.size(); ++i) {
          const float* sum = sums.sums->data() + i * width;
          partials[sums.samples[i]][s].assign(sum, sum + width);
          const float* g = gradients.data() + sums.samples[i] * width;
          packed.insert(packed.end(), g, g + width);
        }
        ApplyInput input;
        input.step = step;
        input.stacks.push_back({static_cast<int>(stack), packed, {{"learning_rate", 0.1f}}});
        engines_[s]->Apply(batch, input);
      }
      for (const auto& [sample, by_shard] : partials) {
        Row sum;
        testing::FoldTree(by_shard, 0, variant_.shards, sum);
        hash = Hash(hash, sum.data(), sum.size());
      }
    }
    return hash;
  }

  uint64_t TablesHash(const v1::OptimizerConfig& optimizer) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t stack = 0; stack < kWidths.size(); ++stack) {
      std::vector<std::pair<std::string, int>> arrays = {{"", kWidths[stack]}};
      for (const config::SlotInfo& slot : config::OptimizerSlots(optimizer)) {
        arrays.emplace_back(slot.name, slot.one_per_row ? 1 : kWidths[stack]);
      }
      for (const auto& [slot, columns] : arrays) {
        for (int p = 0; p < kPartitions; ++p) {
          for (int row = 0; row < kShape.rows_per_partition; ++row) {
            const Row values =
                engines_[p / PerShard()]->ReadRow(static_cast<int>(stack), p, row, columns, slot);
            hash = Hash(hash, values.data(), values.size());
          }
        }
      }
    }
    return hash;
  }

 private:
  int PerShard() const { return kPartitions / variant_.shards; }
  const Variant variant_;
  std::vector<std::unique_ptr<TestEngine>> engines_;
};

std::vector<uint64_t> Train(const std::string& optimizer_text, const Variant& variant,
                            uint64_t seed) {
  const v1::OptimizerConfig optimizer = testing::CompleteOptimizer(optimizer_text);
  Cluster cluster(optimizer, variant);
  std::mt19937_64 random(seed);
  std::vector<uint64_t> hashes;
  for (int step = 0; step < kSteps; ++step) hashes.push_back(cluster.Step(step, random));
  hashes.push_back(cluster.TablesHash(optimizer));
  return hashes;
}

class DeterminismTest : public ::testing::TestWithParam<testing::OptimizerCase> {};

TEST_P(DeterminismTest, SameBitsForEveryVariant) {
  const uint64_t seed = testing::TestSeed();
  const std::vector<uint64_t> expected = Train(GetParam().text, {"base"}, seed);
  for (const Variant& variant :
       {Variant{"2 threads", 2}, Variant{"4 threads", 4}, Variant{"2 shards", 2, 2},
        Variant{"4 shards", 1, 4}, Variant{"8 shards", 1, 8}, Variant{"1 slot", 1, 1, 1},
        Variant{"5 slots, 3 mini-batches", 2, 1, 5, 3}, Variant{"lazy", 2, 2, 2, 1, true}}) {
    EXPECT_EQ(Train(GetParam().text, variant, seed), expected) << variant.name;
  }
}

TEST_P(DeterminismTest, SameBitsForEverySimdTarget) {
  const uint64_t seed = testing::TestSeed();
  const std::vector<uint64_t> expected = Train(GetParam().text, {"base"}, seed);
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  EXPECT_GE(targets.size(), 2u) << "nothing to compare on this CPU";
  for (const int64_t target : targets) {
    hwy::SetSupportedTargetsForTest(target);
    EXPECT_EQ(Train(GetParam().text, {"target"}, seed), expected) << hwy::TargetName(target);
  }
  hwy::SetSupportedTargetsForTest(0);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DeterminismTest,
                         ::testing::ValuesIn(testing::OptimizerCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace emberd::shard
