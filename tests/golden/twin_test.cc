// Would catch: a server path (plan, layout, limits, hash, cuts, buffers) that differs from the
// recorded behaviour of JAX, which golden_jax_test holds RunJaxCase to. Random models go both ways
// and must give the same buffers. The same of TensorFlow, whose arrays a slow loop builds.
#include <cmath>
#include <iostream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/testing/seed.h"
#include "preprocess/batch/chip_cost.h"
#include "preprocess/batch/cuts.h"
#include "tests/golden/jax_case.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace twin_test {

using nlohmann::json;

// A random case within what JAX can express: sample counts divide by the slots, and limits are
// positive and the same for all tables; weights are positive, because JAX divides by zero.
RandomCase MakeTwinCase(Random& random) {
  RandomCase c = MakeRandomCase(random, /*limits=*/false);
  const int max_ids = 1 + static_cast<int>(random() % 24);
  const int max_unique = 1 + static_cast<int>(random() % 24);
  for (v1::TableConfig& table : *c.model.mutable_tables()) {
    table.set_max_ids_per_partition(max_ids);
    table.set_max_unique_ids_per_partition(max_unique);
  }
  c.model.mutable_plan()->set_rules(v1::JAX);
  c.model.mutable_plan()->set_bucket_hash(v1::HIGHWAY_HASH);
  const size_t slots = c.topology.sparsecores_per_shard;
  for (auto& feature : c.features) {
    const size_t samples = std::max(slots, feature->samples.size() / slots * slots);
    feature->samples.resize(samples);
    if (!feature->weights.empty()) feature->weights.resize(samples);
    for (auto& weights : feature->weights) {
      for (float& weight : weights) weight = std::abs(weight) + 0.25f;
    }
    MakeInput(random, feature.get());
  }
  return c;
}

std::string CombinerName(v1::Combiner combiner) {
  if (combiner == v1::MEAN) return "mean";
  return combiner == v1::SQRTN ? "sqrtn" : "sum";
}

json JaxCaseOf(const RandomCase& c, const Plan& plan) {
  json stacks = json::object(), features = json::array();
  for (const auto& feature : c.features) {
    features.push_back({{"ids", feature->samples}});
    if (!feature->weights.empty()) features.back()["weights"] = feature->weights;
  }
  for (const StackPlan& stack : plan.stacks) {
    int64_t row_offset = 0;
    for (const FeaturePlan& feature : stack.features) {
      const TablePlan& table = stack.tables[feature.table_in_stack];
      const size_t samples = c.features[feature.feature]->samples.size();
      stacks[stack.name].push_back(
          {{"name", feature.name},
           {"feature_index", feature.feature},
           {"max_ids_per_partition", stack.limits.ids},
           {"max_unique_ids_per_partition", stack.limits.unique},
           {"row_offset", row_offset},
           {"col_offset", feature.col_offset},
           {"col_shift", feature.col_shift},
           {"batch_size", samples},
           {"suggested_coo_buffer_size_per_device", nullptr},
           {"combiner", CombinerName(c.model.tables(table.table).combiner())}});
      row_offset += static_cast<int64_t>(samples) * plan.topology.shards;
    }
  }
  const bool split_last = c.model.plan().sample_layout() == v1::STACK_THEN_SPLIT;
  return {{"kind", "preprocess"},
          {"input",
           {{"options",
             {{"local_device_count", 1},
              {"global_device_count", plan.topology.shards},
              {"num_sc_per_device", plan.topology.sparsecores_per_shard},
              {"allow_id_dropping", c.model.plan().allow_id_dropping()},
              {"enable_minibatching", true},
              {"stacking_strategy", split_last ? "STACK_THEN_SPLIT" : "SPLIT_THEN_STACK"}}},
            {"stacks", stacks},
            {"hosts", {{{"features", features}}}}}}};
}

// The entries of every (slot, mini-batch, partition), in order.
using Segments = std::vector<std::vector<std::tuple<int32_t, int32_t, float>>>;

Segments SegmentsOf(const json& device, int64_t partitions) {
  Segments segments;
  const auto pointers = device.at("row_pointers").get<std::vector<int64_t>>();
  const int64_t block = std::max<int64_t>(partitions, kCsrAlignment);
  int64_t begin = 0;
  for (size_t first = 0; first < pointers.size(); first += block) {
    for (int64_t p = 0; p < partitions; ++p) {
      auto& segment = segments.emplace_back();
      for (int64_t i = begin; i < pointers[first + p]; ++i) {
        segment.emplace_back(device.at("embedding_ids")[i], device.at("sample_ids")[i],
                             device.at("gains")[i]);
      }
      begin = AlignCsr(pointers[first + p]);
    }
  }
  return segments;
}

Segments SegmentsOf(const PreprocessedBatch& batch, const Plan& plan, int stack) {
  const int slots = plan.topology.sparsecores_per_shard;
  Segments segments;
  const size_t count = batch.ShardView(0)[stack].segments.size();
  for (size_t n = 0; n < count; ++n) {
    for (int shard = 0; shard < plan.topology.shards; ++shard) {
      const CsrSegmentView view = batch.ShardView(shard)[stack].segments[n];
      for (int k = 0; k < slots; ++k) {
        auto& segment = segments.emplace_back();
        const int64_t begin = k == 0 ? view.base : AlignCsr(view.row_ends[k - 1]);
        for (int64_t i = begin - view.base; i < view.row_ends[k] - view.base; ++i) {
          segment.emplace_back(view.embedding_ids[i], view.sample_ids[i], view.gains[i]);
        }
      }
    }
  }
  return segments;
}

TEST(TwinTest, TheServerBuildsTheBuffersOfJax) {
  const uint64_t seed = TestSeed(1);
  int cut = 0, refused = 0, dropped = 0;
  for (int n = 0; n < TestCases(1000); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    Random random(seed * 1000003 + n);
    RandomCase c = MakeTwinCase(random);
    c.model.mutable_plan()->set_allow_id_dropping(n % 3 == 0);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto preprocessor = std::make_unique<Preprocessor>(&c.model, &*plan, nullptr);
    const auto jax = RunJaxCase(JaxCaseOf(c, *plan));
    ASSERT_TRUE(jax.ok()) << jax.status();
    const auto batch = preprocessor->Run(c.inputs());
    ASSERT_EQ(jax->contains("fatal"), !batch.ok()) << batch.status() << jax->dump().substr(0, 300);
    refused += !batch.ok();
    if (!batch.ok()) continue;
    const json& host = jax->at("hosts")[0];
    ASSERT_EQ(host.at("num_minibatches"), (*batch)->statistics().num_minibatches());
    cut += (*batch)->statistics().num_minibatches() > 1;
    for (size_t k = 0; k < plan->stacks.size(); ++k) {
      const json& stack = host.at("stacks").at(plan->stacks[k].name);
      ASSERT_EQ(SegmentsOf(stack.at("devices")[0], plan->topology.partitions()),
                SegmentsOf(**batch, *plan, static_cast<int>(k)));
      const auto& statistics = (*batch)->statistics().stacks(static_cast<int>(k));
      ASSERT_EQ(stack.at("stats").at("dropped_id_count"), statistics.dropped_ids());
      dropped += statistics.dropped_ids() > 0;
    }
  }
  std::cout << "cut " << cut << ", refused " << refused << ", dropped " << dropped << std::endl;
  EXPECT_GT(cut, 0);
  EXPECT_GT(dropped, 0);
}

// What TensorFlow hands a chip of one stack, entry by entry and straight from its rules. `entries`:
// of all stacks; `samples`: of the stack.
ChipCsr SlowChipCsr(const EntryMap& entries, const Plan& plan, int stack, int64_t samples,
                    uint64_t mask) {
  const int64_t partitions = plan.topology.partitions();
  const int cores = plan.topology.sparsecores_per_shard;
  const int64_t of_core = (samples + cores - 1) / cores;
  const int64_t vocabulary = plan.stacks[stack].rows_per_partition * partitions;
  std::vector<int64_t> ends;  // of mini-batches, in buckets
  for (int64_t bucket = 1; bucket < 64; ++bucket) {
    int64_t level = 5, odd = bucket;
    for (; odd % 2 == 0; odd /= 2) --level;
    if (mask >> ((1 << level) - 1 + odd / 2) & 1) ends.push_back(bucket);
  }
  ends.push_back(64);
  // (core, mini-batch, partition, row, sample)
  std::map<std::tuple<int64_t, size_t, int64_t, int64_t, int64_t>, float> sorted;
  for (const auto& [key, entry] : entries) {
    const auto& [its_stack, sample, partition, row] = key;
    if (its_stack != stack) continue;
    const int64_t bucket =
        std::min<int64_t>((row * partitions + partition) / ((vocabulary + 63) / 64), 63);
    size_t minibatch = 0;
    while (bucket >= ends[minibatch]) ++minibatch;
    sorted[{sample / of_core, minibatch, partition, row, sample % of_core}] = entry.gain;
  }
  ChipCsr chip;
  auto next = sorted.begin();
  for (int64_t core = 0; core < cores; ++core) {
    for (size_t m = 0; m < ends.size(); ++m) {
      for (int64_t p = 0; p < (partitions + 7) / 8 * 8; ++p) {
        for (; next != sorted.end() && std::get<0>(next->first) == core &&
               std::get<1>(next->first) == m && std::get<2>(next->first) == p;
             ++next) {
          chip.token_ids.push_back(static_cast<int32_t>(std::get<3>(next->first)));
          chip.sample_ids.push_back(static_cast<int32_t>(std::get<4>(next->first)));
          chip.gains.push_back(next->second);
        }
        chip.row_pointers.push_back(static_cast<int32_t>(chip.gains.size()));
        while (chip.gains.size() % 8 != 0) {
          chip.token_ids.push_back(2147483647);
          chip.sample_ids.push_back(2147483647);
          chip.gains.push_back(2147483648.0f);
        }
      }
    }
  }
  return chip;
}

TEST(TwinTest, TheServerBuildsTheArraysOfTensorFlow) {
  const uint64_t seed = TestSeed(1);
  int cut = 0;
  for (int n = 0; n < TestCases(500); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    Random random(seed * 1000003 + n);
    RandomCase c = MakeRandomCase(random, /*limits=*/true);
    c.model.mutable_plan()->Clear();
    c.model.mutable_plan()->set_rules(v1::TENSORFLOW);
    c.model.mutable_plan()->set_sample_layout(v1::STACK_THEN_SPLIT);
    c.model.mutable_plan()->set_bucket_hash(v1::ID_RANGE);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto preprocessor = std::make_unique<Preprocessor>(&c.model, &*plan, nullptr);
    const auto batch = preprocessor->Run(c.inputs());
    if (!batch.ok()) {
      ASSERT_TRUE(absl::IsResourceExhausted(batch.status())) << batch.status();
      continue;
    }
    cut += (*batch)->cuts() != 0;
    const EntryMap entries = NaiveEntries(c, *plan);
    for (int k = 0; k < static_cast<int>(plan->stacks.size()); ++k) {
      const ChipCsr got = MakeChipCsr((*batch)->slots(k));
      const ChipCsr expected = SlowChipCsr(entries, *plan, k, (*batch)->stack_samples(k),
                                           TensorFlowMask((*batch)->cuts()));
      ASSERT_EQ(got.row_pointers, expected.row_pointers);
      ASSERT_EQ(got.sample_ids, expected.sample_ids);
      ASSERT_EQ(got.token_ids, expected.token_ids);
      ASSERT_THAT(got.gains, testing::Pointwise(testing::FloatEq(), expected.gains));
    }
  }
  EXPECT_GT(cut, 0);
}

}  // namespace twin_test
}  // namespace emberd::preprocess
