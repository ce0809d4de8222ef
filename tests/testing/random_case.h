// Small random models and batches for tests, and what a plain map makes of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "emberd/v1/model.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/batch/sort_and_merge.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

using Random = std::mt19937_64;

// EMBERD_TEST_CASES or `fallback`.
int TestCases(int fallback);

// The ids of one feature and the memory that its FeatureInput points to.
struct RandomFeature {
  std::vector<std::vector<int64_t>> samples;
  std::vector<std::vector<float>> weights;  // same shape; empty if the input has none
  FeatureInput input;

  std::vector<int32_t> narrow, narrow_indices;
  std::vector<int64_t> wide, wide_indices;
  std::vector<float> flat_weights;
};

struct RandomCase {
  v1::ModelConfig model;
  Topology topology;
  std::vector<std::unique_ptr<RandomFeature>> features;
  std::vector<FeatureInput> inputs() const;
};

// Tables with few rows, so that ids repeat inside and across samples. `limits`: with limits per
// partition (which may be too tight for any cut).
RandomCase MakeRandomCase(Random& random, bool limits);
// A feature with the given samples, in a random form and width.
void MakeInput(Random& random, RandomFeature* feature);

// (stack, canonical sample, partition, local row).
using EntryKey = std::tuple<int, int64_t, int, int64_t>;
struct Entry {
  float gain = 0;
  int count = 0;
};
using EntryMap = std::map<EntryKey, Entry>;

// Computed straight from the ids, one by one.
EntryMap NaiveEntries(const RandomCase& c, const Plan& plan);
// Read back from what the shards get; count > 1 where an entry stands more than once.
EntryMap EntriesOf(const PreprocessedBatch& batch, const Plan& plan);

}  // namespace emberd::preprocess
