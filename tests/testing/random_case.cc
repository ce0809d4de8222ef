#include "tests/testing/random_case.h"

#include <cmath>
#include <cstdlib>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {
namespace {

int Draw(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}
bool Chance(Random& random, double p) { return std::bernoulli_distribution(p)(random); }

void MakeModel(Random& random, bool limits, v1::ModelConfig* model) {
  model->set_name("random");
  const int tables = Draw(random, 1, 4);
  for (int t = 0; t < tables; ++t) {
    v1::TableConfig* table = model->add_tables();
    table->set_name(absl::StrCat("t", t));
    table->set_vocabulary_size(Draw(random, 1, 200));
    table->set_embedding_dim(Chance(random, 0.7) ? 8 : Draw(random, 1, 20));
    table->set_combiner(static_cast<v1::Combiner>(Draw(random, 1, 3)));
    table->mutable_optimizer()->mutable_sgd();
    table->set_storage_dtype(v1::FLOAT32);
    if (limits) {
      table->set_max_ids_per_partition(Draw(random, 0, 20));
      table->set_max_unique_ids_per_partition(Draw(random, 0, 12));
    }
  }
  const int features = tables + Draw(random, 0, 2);
  for (int f = 0; f < features; ++f) {
    v1::FeatureConfig* feature = model->add_features();
    feature->set_name(absl::StrCat("f", f));
    feature->set_table(absl::StrCat("t", f < tables ? f : Draw(random, 0, tables - 1)));
    feature->set_batch_size(Draw(random, 1, 20));
  }
  v1::PlanConfig* plan = model->mutable_plan();
  plan->set_rules(Chance(random, 0.3) ? v1::TENSORFLOW : v1::JAX);
  plan->set_sample_layout(Chance(random, 0.3) ? v1::STACK_THEN_SPLIT : v1::SPLIT_THEN_STACK);
  plan->set_bucket_hash(static_cast<v1::BucketHash>(Draw(random, 1, 4)));
  plan->set_auto_stack(Chance(random, 0.8));
  if (Chance(random, 0.5)) plan->set_rotation(Draw(random, 0, 5));
  plan->set_max_ids_per_chip_per_sample(0);
}

template <typename T, typename S>
absl::Span<const T> Store(const std::vector<S>& from, std::vector<T>* to) {
  to->assign(from.begin(), from.end());
  return *to;
}

}  // namespace

int TestCases(int fallback) {
  const char* text = std::getenv("EMBERD_TEST_CASES");
  return text == nullptr ? fallback : std::atoi(text);
}

void MakeInput(Random& random, RandomFeature* feature) {
  std::vector<int64_t> flat, splits = {0}, indices;
  feature->flat_weights.clear();
  bool dense = true;
  for (size_t s = 0; s < feature->samples.size(); ++s) {
    const auto& ids = feature->samples[s];
    dense = dense && ids.size() == feature->samples[0].size();
    for (size_t i = 0; i < ids.size(); ++i) {
      flat.push_back(ids[i]);
      indices.insert(indices.end(), {static_cast<int64_t>(s), static_cast<int64_t>(i)});
      if (!feature->weights.empty()) feature->flat_weights.push_back(feature->weights[s][i]);
    }
    splits.push_back(static_cast<int64_t>(flat.size()));
  }
  IntSpan ids = Store(flat, &feature->wide);
  if (Chance(random, 0.5)) ids = Store(flat, &feature->narrow);
  const auto samples = static_cast<int64_t>(feature->samples.size());
  FeatureInput& input = feature->input;
  const int form = Draw(random, dense ? 0 : 1, 2);
  const auto store = [&](const std::vector<int64_t>& numbers) -> IntSpan {
    if (Chance(random, 0.5)) return Store(numbers, &feature->narrow_indices);
    return Store(numbers, &feature->wide_indices);
  };
  if (form == 0) {
    const int64_t n = samples == 0 ? 1 : static_cast<int64_t>(feature->samples[0].size());
    input.ids = DenseInput{ids, n, samples};
  } else if (form == 1) {
    input.ids = RaggedInput{store(splits), ids};
  } else {
    input.ids = SparseInput{store(indices), ids, samples};
  }
  input.has_weights = !feature->weights.empty();
  input.weights = feature->flat_weights;
}

RandomCase MakeRandomCase(Random& random, bool limits) {
  RandomCase c;
  MakeModel(random, limits, &c.model);
  c.topology.shards = 1 << Draw(random, 0, 2);
  c.topology.sparsecores_per_shard = 1 << Draw(random, 0, 2);
  for (int f = 0; f < c.model.features_size(); ++f) {
    auto feature = std::make_unique<RandomFeature>();
    int64_t vocabulary = 0;
    for (const auto& table : c.model.tables()) {
      if (table.name() == c.model.features(f).table()) vocabulary = table.vocabulary_size();
    }
    // A narrow range of ids makes duplicates inside a sample.
    const int range =
        static_cast<int>(Chance(random, 0.5) ? vocabulary : std::min<int64_t>(vocabulary, 6));
    const bool weighted = Chance(random, 0.4);
    const int same = Chance(random, 0.4) ? Draw(random, 0, 4) : -1;
    feature->samples.resize(Draw(random, 0, 24));
    if (weighted) feature->weights.resize(feature->samples.size());
    for (size_t s = 0; s < feature->samples.size(); ++s) {
      const int n = same >= 0 ? same : Draw(random, 0, 6);
      for (int i = 0; i < n; ++i) {
        feature->samples[s].push_back(Draw(random, 0, range - 1));
        if (weighted) feature->weights[s].push_back(static_cast<float>(Draw(random, -2, 4)) / 4.0f);
      }
    }
    // Weights of an empty list say nothing.
    MakeInput(random, feature.get());
    if (feature->flat_weights.empty()) feature->input.has_weights = false;
    c.features.push_back(std::move(feature));
  }
  return c;
}

std::vector<FeatureInput> RandomCase::inputs() const {
  std::vector<FeatureInput> inputs;
  for (const auto& feature : features) inputs.push_back(feature->input);
  return inputs;
}

EntryMap NaiveEntries(const RandomCase& c, const Plan& plan) {
  EntryMap entries;
  const int64_t partitions = plan.topology.partitions();
  for (size_t k = 0; k < plan.stacks.size(); ++k) {
    int64_t sample = 0;
    for (const FeaturePlan& feature : plan.stacks[k].features) {
      const TablePlan& table = plan.stacks[k].tables[feature.table_in_stack];
      const v1::Combiner combiner = c.model.tables(table.table).combiner();
      const RandomFeature& input = *c.features[feature.feature];
      for (size_t s = 0; s < input.samples.size(); ++s, ++sample) {
        float sum = 0, squares = 0;
        for (size_t i = 0; i < input.samples[s].size(); ++i) {
          const float w = input.weights.empty() ? 1.0f : input.weights[s][i];
          sum += w;
          squares += w * w;
        }
        for (size_t i = 0; i < input.samples[s].size(); ++i) {
          const float w = input.weights.empty() ? 1.0f : input.weights[s][i];
          float gain = w;
          if (combiner == v1::MEAN) gain = sum == 0 ? 0 : w / sum;
          if (combiner == v1::SQRTN) gain = squares == 0 ? 0 : w / std::sqrt(squares);
          const int64_t id = input.samples[s][i];
          const auto partition = static_cast<int>((id + table.shard_rotation) % partitions);
          Entry& entry =
              entries[{static_cast<int>(k), sample, partition, id / partitions + table.row_offset}];
          entry.gain += gain;
          entry.count = 1;
        }
      }
    }
  }
  return entries;
}

EntryMap EntriesOf(const PreprocessedBatch& batch, const Plan& plan) {
  EntryMap entries;
  const int slots = plan.topology.sparsecores_per_shard;
  for (int shard = 0; shard < plan.topology.shards; ++shard) {
    for (const StackBatchView& view : batch.ShardView(shard)) {
      for (size_t n = 0; n < view.segments.size(); ++n) {
        const CsrSegmentView& segment = view.segments[n];
        for (int k = 0; k < slots; ++k) {
          const int64_t begin = k == 0 ? segment.base : AlignCsr(segment.row_ends[k - 1]);
          for (int64_t i = begin; i < segment.row_ends[k]; ++i) {
            const int32_t in_slot = segment.sample_ids[i - segment.base];
            int64_t sample = -1;
            for (const SampleSpan& span : view.spans[n / view.minibatches]) {
              if (in_slot >= span.slot_begin && in_slot < span.slot_begin + span.count) {
                sample = span.sample_begin + in_slot - span.slot_begin;
              }
            }
            Entry& entry = entries[{view.stack, sample, shard * slots + k,
                                    segment.embedding_ids[i - segment.base]}];
            entry.gain += segment.gains[i - segment.base];
            ++entry.count;
          }
        }
      }
    }
  }
  return entries;
}

}  // namespace emberd::preprocess
