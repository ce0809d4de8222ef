// Would catch: an id lost, doubled, moved to another row or sample, or given another gain on its
// way through extraction, sort, merge and partitioning, for any form of input, stacking, layout and
// topology.
#include "preprocess/batch/preprocessor.h"

#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/testing/sanitized.h"
#include "base/testing/seed.h"
#include "preprocess/batch/cuts.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace preprocessor_test {

void ExpectSameEntries(const EntryMap& expected, const EntryMap& got) {
  ASSERT_EQ(expected.size(), got.size());
  auto it = got.begin();
  for (const auto& [key, entry] : expected) {
    ASSERT_EQ(key, it->first);
    ASSERT_EQ(entry.count, it->second.count);
    ASSERT_FLOAT_EQ(entry.gain, it->second.gain);
    ++it;
  }
}

// Every mini-batch respects the limits of its stack, and a row lies in one mini-batch alone.
void ExpectWithinLimits(const PreprocessedBatch& batch, const Plan& plan) {
  const int slots = plan.topology.sparsecores_per_shard;
  std::map<std::tuple<int, int, int32_t>, int64_t> minibatch_of_row;  // (stack, partition, row)
  for (int shard = 0; shard < plan.topology.shards; ++shard) {
    for (const StackBatchView& view : batch.ShardView(shard)) {
      const PartitionLimits& limits = plan.stacks[view.stack].limits;
      ASSERT_EQ(view.minibatches, batch.statistics().num_minibatches());
      for (size_t n = 0; n < view.segments.size(); ++n) {
        const CsrSegmentView& segment = view.segments[n];
        for (int k = 0; k < slots; ++k) {
          const int64_t begin = k == 0 ? segment.base : AlignCsr(segment.row_ends[k - 1]);
          std::set<int32_t> rows;
          for (int64_t i = begin; i < segment.row_ends[k]; ++i) {
            const int32_t row = segment.embedding_ids[i - segment.base];
            rows.insert(row);
            const auto minibatch = static_cast<int64_t>(n) % view.minibatches;
            const auto place =
                minibatch_of_row.insert({{view.stack, shard * slots + k, row}, minibatch});
            ASSERT_EQ(place.first->second, minibatch);
          }
          ASSERT_FALSE(
              limits.Exceeded(segment.row_ends[k] - begin, static_cast<int64_t>(rows.size())));
        }
      }
    }
  }
}

// Runs random cases and hands what comes out to `check`.
void ForRandomCases(bool limits, int count,
                    const std::function<void(RandomCase&, const Plan&, Preprocessor&)>& check) {
  const uint64_t seed = TestSeed(1);
  for (int n = 0; n < TestCases(Rounds(count)); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    Random random(seed * 1000003 + n);
    RandomCase c = MakeRandomCase(random, limits);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    Preprocessor preprocessor(&c.model, &*plan, nullptr);
    check(c, *plan, preprocessor);
    if (testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << c.model.DebugString();
      return;
    }
  }
}

TEST(PreprocessorTest, RandomBatchesHoldWhatAMapHolds) {
  ForRandomCases(/*limits=*/false, 2000, [](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    const auto batch = pre.Run(c.inputs());
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ((*batch)->statistics().num_minibatches(), 1);
    ExpectSameEntries(NaiveEntries(c, plan), EntriesOf(**batch, plan));
  });
}

TEST(PreprocessorTest, RandomBatchesUnderLimitsLoseNothingAndKeepTheLimits) {
  int cut = 0, refused = 0, plain = 0;
  ForRandomCases(/*limits=*/true, 2000, [&](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    const auto batch = pre.Run(c.inputs());
    if (!batch.ok()) {
      ++refused;
      ASSERT_EQ(batch.status().code(), absl::StatusCode::kResourceExhausted) << batch.status();
      return;
    }
    ++((*batch)->statistics().num_minibatches() > 1 ? cut : plain);
    ExpectWithinLimits(**batch, plan);
    ExpectSameEntries(NaiveEntries(c, plan), EntriesOf(**batch, plan));
  });
  std::cout << "plain " << plain << ", cut " << cut << ", refused " << refused << std::endl;
  EXPECT_GT(cut, plain / 10);
}

// Would catch: dropping more than the limits ask for, dropping in silence, or keeping what is over
// the limits.
TEST(PreprocessorTest, DroppingKeepsTheLimitsAndCountsWhatItDrops) {
  int dropping = 0;
  ForRandomCases(/*limits=*/true, 2000, [&](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    const bool fits = pre.Run(c.inputs()).ok();
    c.model.mutable_plan()->set_allow_id_dropping(true);
    Preprocessor dropper(&c.model, &plan, nullptr);
    const auto batch = dropper.Run(c.inputs());
    ASSERT_TRUE(batch.ok()) << batch.status();
    ExpectWithinLimits(**batch, plan);
    int64_t dropped = 0, entries = 0, expected = 0;
    for (const auto& stack : (*batch)->statistics().stacks()) dropped += stack.dropped_ids();
    for (const auto& [key, entry] : EntriesOf(**batch, plan)) entries += entry.count;
    for (const auto& [key, entry] : NaiveEntries(c, plan)) expected += entry.count;
    dropping += dropped > 0;
    ASSERT_EQ(entries == expected, dropped == 0);
    ASSERT_TRUE(fits || dropped > 0);
    // TensorFlow drops from what just fits, too, and counts entries.
    if (c.model.plan().rules() == v1::TENSORFLOW) return;
    ASSERT_EQ(fits, dropped == 0);
    // A dropped entry counts once for every occurrence that merged into it.
    ASSERT_LE(expected - entries, dropped);
  });
  EXPECT_GT(dropping, 0);
}

// Would catch: a step of the two-phase API that differs from Run, or cuts of others that change the
// content.
TEST(PreprocessorTest, CutsOfOtherReplicasOnlyCutFiner) {
  ForRandomCases(/*limits=*/true, 1000, [](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    auto sorted = pre.Sort(c.inputs());
    ASSERT_TRUE(sorted.ok()) << sorted.status();
    const auto own = pre.FindCuts(sorted->get());
    if (!own.ok()) return;
    ASSERT_EQ((*sorted)->needs_minibatches(), *own != 0);
    const uint64_t cuts = *own | 0x8000000100000100u;
    // A cut before the first bucket, which no replica finds, would make one mini-batch too many.
    ASSERT_EQ(pre.Finish(sorted->get(), cuts | 1).status().code(), absl::StatusCode::kInternal);
    const auto batch = pre.Finish(sorted->get(), cuts);
    ASSERT_TRUE(batch.ok()) << batch.status();
    ASSERT_EQ((*batch)->statistics().num_minibatches(), MinibatchCount(cuts));
    ExpectWithinLimits(**batch, plan);
    ExpectSameEntries(NaiveEntries(c, plan), EntriesOf(**batch, plan));
  });
}

// All arrays of a batch, one after another.
std::vector<uint32_t> BitsOf(const PreprocessedBatch& batch, const Plan& plan) {
  std::vector<uint32_t> bits;
  const auto add = [&bits](const auto& values) {
    for (const auto& value : values) {
      uint32_t word = 0;
      std::memcpy(&word, &value, sizeof(word));
      bits.push_back(word);
    }
  };
  for (int shard = 0; shard < plan.topology.shards; ++shard) {
    for (const StackBatchView& view : batch.ShardView(shard)) {
      for (const CsrSegmentView& segment : view.segments) {
        bits.push_back(segment.base);
        add(segment.row_ends);
        add(segment.embedding_ids);
        add(segment.sample_ids);
        add(segment.gains);
      }
    }
  }
  return bits;
}

// Would catch: results that depend on which thread came first, or on buffers that an earlier batch
// used.
TEST(PreprocessorTest, AnyNumberOfThreadsGivesTheSameBits) {
  ForRandomCases(/*limits=*/true, 300, [](RandomCase& c, const Plan& plan, Preprocessor& one) {
    const auto expected = one.Run(c.inputs());
    for (int threads : {2, 8}) {
      CpuPool cpu(threads);
      const auto many = std::make_unique<Preprocessor>(&c.model, &plan, &cpu);
      for (int repeat = 0; repeat < 2; ++repeat) {
        const auto got = many->Run(c.inputs());
        ASSERT_EQ(expected.status(), got.status());
        if (!got.ok()) continue;
        ASSERT_EQ(BitsOf(**expected, plan), BitsOf(**got, plan));
        ASSERT_EQ((*expected)->statistics().SerializeAsString(),
                  (*got)->statistics().SerializeAsString());
      }
    }
  });
}

// Would catch: content that depends on how partitions are dealt to shards (P fixed).
TEST(PreprocessorTest, ShardsAndSlotsDoNotChangeTheEntries) {
  ForRandomCases(/*limits=*/false, 300, [](RandomCase& c, const Plan&, Preprocessor&) {
    v1::PlanConfig* named = c.model.mutable_plan();
    if (named->rules() == v1::TENSORFLOW && !named->has_rotation()) named->set_rotation(3);
    EntryMap expected;
    for (Topology topology : {Topology{1, 8}, Topology{2, 4}, Topology{8, 1}}) {
      const auto plan = MakePlan(c.model, topology);
      const auto pre = std::make_unique<Preprocessor>(&c.model, &*plan, nullptr);
      const auto batch = pre->Run(c.inputs());
      ASSERT_TRUE(batch.ok()) << batch.status();
      const EntryMap entries = EntriesOf(**batch, *plan);
      if (expected.empty()) expected = entries;
      ExpectSameEntries(expected, entries);
    }
  });
}

v1::ModelConfig OneTable(int64_t rows, int max_ids) {
  v1::ModelConfig model;
  v1::TableConfig* table = model.add_tables();
  table->set_name("words");
  table->set_vocabulary_size(rows);
  table->set_embedding_dim(8);
  table->set_combiner(v1::SUM);
  table->set_max_ids_per_partition(max_ids);
  table->mutable_optimizer()->mutable_sgd();
  v1::FeatureConfig* feature = model.add_features();
  feature->set_name("title");
  feature->set_table("words");
  return model;
}

TEST(PreprocessorTest, AHotIdOverTheLimitIsAnErrorThatHelps) {
  const v1::ModelConfig model = OneTable(100, 4);
  const auto plan = MakePlan(model, {1, 1});
  const auto pre = std::make_unique<Preprocessor>(&model, &*plan, nullptr);
  const std::vector<int32_t> ids(5, 7);
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), 1, 5};
  const absl::Status status = pre->Run({input}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"table 'words'", "partition 0", "5 ids", "max_ids_per_partition is 4",
                           "source slot 0", "allow_id_dropping"}) {
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(part));
  }
  EXPECT_FALSE(pre->Run({}).ok());
  EXPECT_FALSE(pre->Run({input, input}).ok());
  // An error leaves nothing behind.
  input.ids = DenseInput{absl::MakeConstSpan(ids).subspan(1), 1, 4};
  EXPECT_TRUE(pre->Run({input}).ok());
}

// Would catch: JAX's choice of what to drop under the rules of TensorFlow; drops that depend on the
// batch before, or that are counted but stay.
TEST(PreprocessorTest, DropsByTheRulesOfThePlan) {
  v1::ModelConfig model = OneTable(100, 0);
  model.mutable_tables(0)->set_max_unique_ids_per_partition(1);
  model.mutable_plan()->set_allow_id_dropping(true);
  const std::vector<int32_t> ids = {7, 7, 7};
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), 1, 3};
  for (const auto& [rules, dropped] : {std::pair(v1::JAX, 0), {v1::TENSORFLOW, 2}}) {
    model.mutable_plan()->set_rules(rules);
    const auto plan = MakePlan(model, {1, 1});
    const auto pre = std::make_unique<Preprocessor>(&model, &*plan, nullptr);
    const auto batch = pre->Run({input});
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ((*batch)->statistics().stacks(0).dropped_ids(), dropped);
    int64_t entries = 0;
    for (const auto& [key, entry] : EntriesOf(**batch, *plan)) entries += entry.count;
    EXPECT_EQ(entries, 3 - dropped);
  }
}

// Would catch: gains of 0 for a sample whose weights are too large to be summed.
TEST(PreprocessorTest, WeightsThatSumToInfinityAreAnError) {
  for (const auto& [combiner, weight] : {std::pair(v1::MEAN, 2e38f), {v1::SQRTN, 1e20f}}) {
    v1::ModelConfig model = OneTable(100, 0);
    model.mutable_tables(0)->set_combiner(combiner);
    const auto plan = MakePlan(model, {1, 2});
    const auto pre = std::make_unique<Preprocessor>(&model, &*plan, nullptr);
    const std::vector<int32_t> ids = {1, 2, 3, 4};
    FeatureInput input;
    input.ids = DenseInput{absl::MakeConstSpan(ids), 2, 2};
    input.has_weights = true;
    for (const std::vector<float>& weights :
         {std::vector<float>{1, 1, weight, weight}, std::vector<float>{weight}}) {
      input.weights = weights;
      const int sample = weights.size() == 1 ? 0 : 1;
      EXPECT_EQ(pre->Run({input}).status(),
                absl::InvalidArgumentError(absl::StrCat(
                    "feature 'title': the weights of sample ", sample,
                    " (their squares, with SQRTN) sum to more than the largest float32, 3.4e+38; "
                    "scale them down")));
    }
    const std::vector<float> ones(4, 1);
    input.weights = ones;
    EXPECT_TRUE(pre->Run({input}).ok());
  }
}

// Would catch: gains of 0, or wrong ones, with SQRTN for weights whose squares are too small for a
// float32.
TEST(PreprocessorTest, GainsOfSmallWeightsAreThoseOfLargeOnes) {
  v1::ModelConfig model = OneTable(100, 0);
  model.mutable_tables(0)->set_combiner(v1::SQRTN);
  const auto plan = MakePlan(model, {1, 1});
  Preprocessor pre(&model, &*plan, nullptr);
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5, 6};
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), 3, 2};
  input.has_weights = true;
  const auto gains_of = [&](const std::vector<float>& weights, float scale) {
    std::vector<float> scaled;
    for (const float weight : weights) scaled.push_back(weight * scale);
    input.weights = scaled;
    const auto batch = pre.Run({input});
    EXPECT_TRUE(batch.ok()) << batch.status();
    std::vector<float> gains;
    for (const auto& [key, entry] : EntriesOf(**batch, *plan)) {
      gains.push_back(entry.gain);
    }
    return gains;
  };
  for (const std::vector<float>& weights :
       {std::vector<float>{1.7f, -2.9f, 0.3f, 0, 0, 0}, std::vector<float>{1.7f}}) {
    const std::vector<float> gains = gains_of(weights, 1);
    EXPECT_NE(gains[0], 0);
    for (const float scale : {0x1p-60f, 0x1p-73f, 0x1p-100f, 0x1p-120f}) {
      EXPECT_EQ(gains_of(weights, scale), gains) << scale;
    }
  }
  // Many squares that have lost bits have a sum that would not show it.
  std::vector<int32_t> many(4096);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int32_t>(i % 100);
  input.ids = DenseInput{absl::MakeConstSpan(many), 4096, 1};
  EXPECT_EQ(gains_of({1.7f}, 0x1p-69f), gains_of({1.7f}, 1));
}

// Would catch: gains that shards refuse, without the name of the feature.
TEST(PreprocessorTest, GainsThatAreNotFiniteAreAnError) {
  const std::vector<int32_t> ids = {1, 2, 4, 3, 3, 5};
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), 3, 2};
  input.has_weights = true;
  for (const auto& [combiner, weights] :
       {std::pair(v1::SUM, std::vector<float>{1, 1, 1, 2e38f, 2e38f, 1}),
        {v1::SUM, std::vector<float>{2e38f}},
        {v1::MEAN, std::vector<float>{1, 1, 1, 1e38f, -1e38f, 1e-10f}}}) {
    v1::ModelConfig model = OneTable(100, 0);
    model.mutable_tables(0)->set_combiner(combiner);
    const auto plan = MakePlan(model, {1, 2});
    Preprocessor pre(&model, &*plan, nullptr);
    input.weights = weights;
    const absl::Status status = pre.Run({input}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("feature 'title': the weights of sample 1 give one of its ids"));
  }
}

TEST(PreprocessorTest, StatisticsSayWhatABatchNeeded) {
  const v1::ModelConfig model = OneTable(100, 0);
  const auto plan = MakePlan(model, {1, 2});
  const auto pre = std::make_unique<Preprocessor>(&model, &*plan, nullptr);
  // Slot 0: samples {2, 2, 4}, {1}; slot 1: {2, 6}, {}.
  const std::vector<int32_t> ids = {2, 2, 4, 1, 2, 6}, splits = {0, 3, 4, 6, 6};
  FeatureInput input;
  input.ids = RaggedInput{absl::MakeConstSpan(splits), absl::MakeConstSpan(ids)};
  const auto batch = *pre->Run({input});
  const v1::StackStatistics& stack = batch->statistics().stacks(0);
  EXPECT_EQ(stack.stack(), "words");
  EXPECT_EQ(stack.ids(), 5);
  EXPECT_EQ(stack.duplicate_ids(), 1);
  EXPECT_EQ(stack.max_ids_per_partition(), 2);
  EXPECT_EQ(stack.max_unique_ids_per_partition(), 2);
  EXPECT_EQ(stack.unique_ids(), 3);  // 2 in partition 0, 1 in partition 1
  EXPECT_EQ(stack.required_buffer_size(), 24);
  EXPECT_EQ(stack.dropped_ids(), 0);
  EXPECT_EQ(batch->feature_samples()[0], 4);
  EXPECT_EQ(batch->stack_samples(0), 4);
  EXPECT_GT(batch->bytes(), 0);
}

// With a replica for each shard, as on TPUs. Would catch: a planner that counts the samples of all
// replicas where those of one are meant, or the other way round, so that stacks hold as many times
// the limit as there are shards.
TEST(PreprocessorTest, ThePlansEstimateIsTheActivationsOfAFullBatch) {
  Random random(TestSeed(1));
  for (int n = 0; n < 100; ++n) {
    RandomCase c = MakeRandomCase(random, /*limits=*/false);
    const bool of_one = c.model.plan().rules() == v1::TENSORFLOW;
    const int slots = c.topology.sparsecores_per_shard;
    std::vector<std::vector<int32_t>> splits;
    for (v1::FeatureConfig& feature : *c.model.mutable_features()) {
      const int samples = slots * static_cast<int>(1 + random() % 9);
      feature.set_batch_size(samples * (of_one ? 1 : c.topology.shards));
      splits.emplace_back(samples + 1);
    }
    std::vector<FeatureInput> inputs(splits.size());
    for (size_t f = 0; f < splits.size(); ++f) {
      inputs[f].ids = RaggedInput{absl::MakeConstSpan(splits[f]), absl::Span<const int32_t>()};
    }
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const v1::ModelPlan shown = PlanToProto(c.model, *plan);
    const auto pre = std::make_unique<Preprocessor>(&c.model, &*plan, nullptr);
    const auto batch = *pre->Run(inputs);
    for (int s = 0; s < shown.stacks_size(); ++s) {
      EXPECT_EQ(shown.stacks(s).activation_bytes() * slots,
                batch->stack_samples(s) * 4 * shown.stacks(s).embedding_dim());
    }
  }
}

// Would catch: buckets that are those of other rows where two preprocessors remember them together.
TEST(PreprocessorTest, OneAlikeCutsAlike) {
  int cut = 0;
  ForRandomCases(/*limits=*/true, 300, [&](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    Preprocessor alike(&c.model, &plan, nullptr, &pre);
    const auto batch = pre.Run(c.inputs());
    const auto other = alike.Run(c.inputs());
    ASSERT_EQ(batch.status(), other.status());
    if (!batch.ok()) return;
    ASSERT_EQ((*batch)->cuts(), (*other)->cuts());
    ASSERT_EQ((*batch)->statistics().SerializeAsString(),
              (*other)->statistics().SerializeAsString());
    cut += (*batch)->cuts() != 0;
  });
  EXPECT_GT(cut, 0);
}

// Would catch: a sample whose number has more bits than keys of the largest stack have left for it,
// and so becomes another row's, or another partition's.
TEST(PreprocessorTest, SamplesThatKeysCannotNumberAreRefused) {
  constexpr int kPartitions = 1024;
  v1::ModelConfig model;
  v1::TableConfig* const table = model.add_tables();
  table->set_name("t");
  table->set_vocabulary_size(kPartitions * ((int64_t{1} << 31) - 8));
  table->set_embedding_dim(8);
  v1::FeatureConfig* const feature = model.add_features();
  feature->set_name("f");
  feature->set_table("t");
  constexpr int64_t kMost = int64_t{1} << 23;
  std::vector<int32_t> splits(kMost + 2, 1);
  splits[0] = 0;
  const std::vector<int64_t> ids = {7};
  feature->set_batch_size(static_cast<int32_t>(kMost + 1));
  const auto plan = MakePlan(model, {kPartitions, 1});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto preprocessor = std::make_unique<Preprocessor>(&model, &*plan, nullptr);
  FeatureInput input;
  input.ids = RaggedInput{absl::MakeConstSpan(splits), absl::MakeConstSpan(ids)};
  const absl::Status status = preprocessor->Run({input}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("8388609 samples in one source slot; allowed: [0, 8388608]"));
}

}  // namespace preprocessor_test
}  // namespace emberd::preprocess
