// The batches of a group's ranks, each preprocessed on its own, against the concatenated batch
// preprocessed as one: one update must leave the same bits. Prevents an order of samples, slots or
// features that preprocessing and the engine understand differently.
#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "server/host/hosted_models.h"
#include "shard/testing/test_engine.h"
#include "tests/testing/random_case.h"

namespace emberd::host {
namespace group_batches_test {

using preprocess::FeatureInput;
using preprocess::PreprocessedBatch;
using preprocess::Preprocessor;
using preprocess::Random;
using preprocess::RandomCase;
using preprocess::RandomFeature;
using shard::testing::TestEngine;

// Feature by feature, samples [cuts[r], cuts[r + 1]) of the global batch go to rank r.
using Cuts = std::vector<std::vector<int64_t>>;  // [feature][rank + 1]

Cuts MakeCuts(const RandomCase& global, int ranks, Random& random) {
  Cuts cuts;
  for (const auto& feature : global.features) {
    std::vector<int64_t>& ends = cuts.emplace_back();
    for (int r = 1; r < ranks; ++r) ends.push_back(random() % (feature->samples.size() + 1));
    ends.push_back(0);
    ends.push_back(static_cast<int64_t>(feature->samples.size()));
    std::sort(ends.begin(), ends.end());
  }
  return cuts;
}

std::vector<std::unique_ptr<RandomFeature>> FeaturesOfRank(const RandomCase& global,
                                                           const Cuts& cuts, int rank,
                                                           Random& random) {
  std::vector<std::unique_ptr<RandomFeature>> features;
  for (size_t f = 0; f < cuts.size(); ++f) {
    const RandomFeature& from = *global.features[f];
    auto& to = features.emplace_back(std::make_unique<RandomFeature>());
    const auto cut = [&](const auto& all, auto& part) {
      if (!all.empty()) part.assign(all.begin() + cuts[f][rank], all.begin() + cuts[f][rank + 1]);
    };
    cut(from.samples, to->samples);
    cut(from.weights, to->weights);
    preprocess::MakeInput(random, to.get());
    if (to->flat_weights.empty()) to->input.has_weights = false;
  }
  return features;
}

std::shared_ptr<const PreprocessedBatch> Preprocess(
    Preprocessor& preprocessor, const std::vector<std::unique_ptr<RandomFeature>>& features) {
  std::vector<FeatureInput> inputs;
  for (const auto& feature : features) inputs.push_back(feature->input);
  auto batch = preprocessor.Run(inputs);
  EXPECT_TRUE(batch.ok()) << batch.status();
  return *batch;
}

// Gradients by (stack, canonical sample of the global batch).
using Gradients = std::map<std::pair<int, int>, std::vector<float>>;

// A batch on one shard, with its gradients laid out. `global_sample(stack, sample)` names the
// batch's samples in the global batch.
struct ShardPart {
  shard::testing::RankInput part;
  std::vector<std::unique_ptr<std::vector<float>>> memory;

  template <class GlobalSample>
  ShardPart(TestEngine& engine, const PreprocessedBatch& batch, int shard,
            const Gradients& gradients, const GlobalSample& global_sample) {
    part.batch =
        *engine.engine().PrepareBatch(engine.spec().model_id, batch.ShardView(shard), nullptr);
    for (const shard::StackSums& sums : engine.Gather(part.batch)) {
      auto& values = memory.emplace_back(std::make_unique<std::vector<float>>());
      for (const int32_t sample : sums.samples) {
        const auto& row = gradients.at({sums.stack, global_sample(sums.stack, sample)});
        values->insert(values->end(), row.begin(), row.end());
      }
      part.input.stacks.push_back({sums.stack, *values, {}});
    }
  }
};

class Step {
 public:
  Step(RandomCase global, int ranks, Random& random) : global_(std::move(global)) {
    for (v1::TableConfig& table : *global_.model.mutable_tables()) {
      table.mutable_optimizer()->set_learning_rate(0.1f);
      table.mutable_optimizer()->mutable_adagrad()->set_initial_accumulator(0.1f);
      table.mutable_initializer()->mutable_uniform()->set_upper(1);
      table.set_result_mode(v1::PARTIAL_SUMS);
    }
    plan_ = *preprocess::MakePlan(global_.model, global_.topology);
    preprocessor_ = std::make_unique<Preprocessor>(&global_.model, &plan_, nullptr);
    whole_ = Preprocess(*preprocessor_, global_.features);
    cuts_ = MakeCuts(global_, ranks, random);
    for (int r = 0; r < ranks; ++r) {
      ranks_.push_back(Preprocess(*preprocessor_, FeaturesOfRank(global_, cuts_, r, random)));
    }
    std::normal_distribution<float> normal;
    for (size_t k = 0; k < plan_.stacks.size(); ++k) {
      for (int sample = 0; sample < whole_->stack_samples(static_cast<int>(k)); ++sample) {
        auto& row = gradients_[{static_cast<int>(k), sample}];
        row.resize(plan_.stacks[k].embedding_dim);
        for (float& x : row) x = normal(random);
      }
    }
  }

  int shards() const { return plan_.topology.shards; }

  void ExpectSameBits(int shard) {
    TestEngine single(ModelSpecFromPlan(7, global_.model, plan_, shard));
    TestEngine group(ModelSpecFromPlan(7, global_.model, plan_, shard));
    ShardPart whole(single, *whole_, shard, gradients_, [](int, int sample) { return sample; });
    std::vector<ShardPart> parts;
    std::vector<shard::testing::RankInput> input;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      parts.emplace_back(group, *ranks_[r], shard, gradients_, [&](int stack, int sample) {
        return GlobalSample(static_cast<int>(r), stack, sample);
      });
      input.push_back(parts.back().part);
    }
    EXPECT_EQ(group.ApplyParts(input), single.Apply(whole.part.batch, whole.part.input));
    for (size_t k = 0; k < plan_.stacks.size(); ++k) {
      const int width = plan_.stacks[k].embedding_dim;
      for (int p = 0; p < plan_.topology.sparsecores_per_shard; ++p) {
        for (int64_t row = 0; row < plan_.stacks[k].rows_per_partition; ++row) {
          for (const std::string slot : {"", "accumulator"}) {
            const int partition = shard * plan_.topology.sparsecores_per_shard + p;
            const auto read = [&](TestEngine& engine) {
              return engine.ReadRow(static_cast<int>(k), partition, row, width, slot);
            };
            const auto a = read(group), b = read(single);
            ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
                << "stack " << k << " partition " << partition << " row " << row << " " << slot;
          }
        }
      }
    }
  }

 private:
  int GlobalSample(int rank, int stack, int sample) const {
    for (const preprocess::FeaturePlan& feature : plan_.stacks[stack].features) {
      const int f = feature.feature;
      const auto in_feature = sample - ranks_[rank]->feature_sample_begin()[f];
      if (in_feature < ranks_[rank]->feature_samples()[f]) {
        return static_cast<int>(whole_->feature_sample_begin()[f] + cuts_[f][rank] + in_feature);
      }
    }
    ADD_FAILURE() << "sample " << sample << " belongs to no feature";
    return 0;
  }

  RandomCase global_;
  preprocess::Plan plan_;
  std::unique_ptr<Preprocessor> preprocessor_;
  std::shared_ptr<const PreprocessedBatch> whole_;
  std::vector<std::shared_ptr<const PreprocessedBatch>> ranks_;
  Cuts cuts_;
  Gradients gradients_;
};

TEST(GroupBatchesTest, UpdateAsTheConcatenatedBatchDoes) {
  Random random(TestSeed(1));
  for (int i = 0; i < preprocess::TestCases(60); ++i) {
    SCOPED_TRACE(i);
    Step step(preprocess::MakeRandomCase(random, /*limits=*/false), 1 + i % 4, random);
    for (int shard = 0; shard < step.shards(); ++shard) step.ExpectSameBits(shard);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace group_batches_test
}  // namespace emberd::host
