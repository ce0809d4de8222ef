// Would catch any deviation from TensorFlow's preprocessing: gains, merging, order, bucket counts,
// split masks, dropping, CSR buffers.
//
// Not compared: in 90 the order and the
// multiplicity of occurrences, because TensorFlow merges adjacent duplicates first and the rest
// later, and we merge once; in 11 the unsorted COO lists, which we never build.
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"
#include "preprocess/batch/chip_cost.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/sort_and_merge.h"
#include "tests/golden/golden_json.h"
#include "tests/golden/jax_device_buffer.h"

namespace emberd::preprocess {
namespace golden_tf_test {

using nlohmann::json;

json Load(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/tf/" + name + ".json"));
  return json::parse(file);
}

json Cases(const std::string& name) {
  json cases = Load(name).at("cases");
  EXPECT_FALSE(cases.empty()) << name;
  return cases;
}

// One feature given as TensorFlow's (row, id) lists, cut over the SparseCores of a chip.
struct Chip {
  StackShape shape;
  std::vector<int64_t> indices;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<SlotCsr> slots;
  std::vector<SlotBuckets> buckets;

  void Sort(int64_t samples, int cores) {
    FeatureInput input;
    input.ids = SparseInput{absl::MakeConstSpan(indices), absl::MakeConstSpan(ids), samples};
    input.has_weights = !weights.empty();
    input.weights = weights;
    const FeatureInput* const inputs[] = {&input};
    for (int64_t id : ids) {
      shape.rows_per_partition = std::max(shape.rows_per_partition, id / shape.partitions + 1);
    }
    std::vector<SlotLayout> layout;
    LayOutSamples(v1::STACK_THEN_SPLIT, {samples}, cores, &layout);
    slots = std::vector<SlotCsr>(cores);
    buckets = std::vector<SlotBuckets>(cores);
    SlotScratch scratch;
    for (int s = 0; s < cores; ++s) {
      SortSlot(shape, inputs, layout[s], GainKindOf(shape, inputs), &scratch,
               &buckets[s].multiplicity, &slots[s]);
    }
  }

  void Add(int64_t row, int64_t id) {
    indices.insert(indices.end(), {row, 0});
    ids.push_back(id);
  }

  void Cut(CutSet cuts, std::vector<SlotCsr>* cut) const {
    *cut = std::vector<SlotCsr>(slots.size());
    Buffer<int32_t> positions;
    for (size_t s = 0; s < slots.size(); ++s) {
      CutSlot(slots[s], buckets[s], cuts, &positions, &(*cut)[s]);
    }
  }
};

void ExpectSameBuffers(const json& expected, const ChipCsr& got) {
  const json result = {{"row_pointers", got.row_pointers},
                       {"sorted_sample_ids", got.sample_ids},
                       {"sorted_token_ids", got.token_ids},
                       {"sorted_gains", got.gains},
                       {"row_pointers_unpadded_size", got.row_pointers.size()},
                       {"ids_unpadded_size", got.token_ids.size()}};
  EXPECT_EQ(FirstDifferenceFrom(expected, result, {"num_minibatches_per_sc"}), "");
}

TEST(GoldenTfTest, CombinersAndMerging) {
  const std::map<std::string, v1::Combiner> combiners = {
      {"sum", v1::SUM}, {"mean", v1::MEAN}, {"sqrtn", v1::SQRTN}};
  for (const json& c : Cases("90_derived_coo_combiners")) {
    SCOPED_TRACE(c.at("name"));
    Chip chip;
    chip.shape.features = {{0, 0, combiners.at(c.at("combiner"))}};
    const json& values = c.at("values");
    for (size_t i = 0; i < values.size(); ++i) chip.Add(c.at("row_of_value")[i], values[i]);
    if (c.at("weights").is_array()) {
      c.at("weights").get_to(chip.weights);
    } else {
      chip.weights = {c.at("weights").get<float>()};
    }
    chip.Sort(c.at("sample_count"), 1);
    std::map<std::pair<int64_t, int64_t>, float> expected, got;
    for (size_t i = 0; i < c.at("expected_gains").size(); ++i) {
      expected[{c.at("expected_row_ids")[i], c.at("expected_col_ids")[i]}] +=
          c.at("expected_gains")[i].get<float>();
    }
    const SlotCsr& slot = chip.slots[0];
    for (int64_t i = 0; i < slot.End(0, 0); ++i) {
      got[{slot.sample_ids.data()[i], slot.embedding_ids.data()[i]}] = slot.gains.data()[i];
    }
    ASSERT_EQ(expected.size(), got.size());
    for (const auto& [key, gain] : expected) EXPECT_TRUE(WithinOneUlp(gain, got.at(key)));
  }
}

// The entries of a slot in (partition, bucket) order with their running counts, as TensorFlow lists
// them.
struct BucketLists {
  json rows = json::array(), cols = json::array(), gains = json::array(), changes = json::array();
  int64_t total = 0;

  void Add(const Chip& chip, size_t core, const SlotCsr& cut) {
    for (int p = 0; p < cut.partitions; ++p) {
      for (int b = 0; b < kBuckets; ++b) {
        const int64_t before = total;
        for (int64_t i = cut.Begin(b, p); i < cut.End(b, p); ++i, ++total) {
          rows.push_back(cut.sample_ids.data()[i]);
          cols.push_back(cut.embedding_ids.data()[i]);
          gains.push_back(cut.gains.data()[i]);
        }
        const int64_t index = (static_cast<int64_t>(core) * cut.partitions + p) * kBuckets + b + 1;
        if (total != before) changes.push_back({index, total});
      }
    }
  }
};

TEST(GoldenTfTest, MinibatchSplitsAndCsr) {
  for (const json& c : Cases("91_derived_minibatch")) {
    SCOPED_TRACE(c.at("name"));
    const json& params = c.at("params");
    const int cores = params.at("num_sc_per_chip");
    Chip chip;
    chip.shape.partitions = params.at("num_replica").get<int64_t>() * cores;
    chip.shape.features = {{0, 0, v1::SUM}};
    for (size_t i = 0; i < c.at("row_ids").size(); ++i)
      chip.Add(c.at("row_ids")[i], c.at("col_ids")[i]);
    chip.Sort(params.at("sample_count"), cores);

    const bool shuffled = params.at("allow_id_shuffling");
    BucketRule rule = MakeBucketRule(shuffled ? v1::ID_MODULO : v1::ID_RANGE, chip.shape);
    rule.rows_per_bucket = RoundUp(params.at("table_vocab_size"), kBuckets) / kBuckets;
    const bool dropping = params.at("allow_id_dropping");
    const PartitionLimits limits = {params.at("max_ids_per_partition"),
                                    params.at("max_unique_ids_per_partition")};
    const auto partitions = static_cast<int>(chip.shape.partitions);
    int64_t dropped = 0;
    bool overflow = false;
    for (int s = 0; s < cores; ++s) {
      FillBuckets(BucketMemo(rule, chip.shape, nullptr), limits,
                  dropping ? DropRule::kTensorFlow : DropRule::kKeep, chip.slots[s],
                  &chip.buckets[s]);
      dropped += chip.buckets[s].dropped;
      overflow = overflow || WorstOverflow(chip.buckets[s], partitions, limits).found();
    }
    if (c.contains("expected_error")) {
      // The bucket that TensorFlow meets first: core 0, partition 0, bucket 0 with 3 ids, 1 unique.
      EXPECT_TRUE(overflow);
      EXPECT_EQ(chip.buckets[0].ids.data()[0], 3);
      EXPECT_EQ(chip.buckets[0].unique.data()[0], 1);
      continue;
    }
    EXPECT_FALSE(overflow);
    const CutSet cuts = CutsOfStack(v1::TENSORFLOW, limits, chip.buckets, partitions);
    const json& expected = c.at("expected_splits");
    EXPECT_EQ(TensorFlowMask(cuts), expected.at("splits").get<uint64_t>());
    EXPECT_EQ(dropped, expected.at("dropped").get<int64_t>());

    std::vector<SlotCsr> cut;
    chip.Cut(~CutSet{1}, &cut);
    BucketLists lists;
    int64_t max_ids = 0, max_unique = 0;
    for (int s = 0; s < cores; ++s) {
      lists.Add(chip, s, cut[s]);
      for (int p = 0; p < partitions; ++p) {
        max_ids = std::max<int64_t>(max_ids, chip.slots[s].partition_ids.data()[p]);
        max_unique = std::max<int64_t>(max_unique, chip.slots[s].partition_unique.data()[p]);
      }
    }
    EXPECT_EQ(lists.rows, expected.at("sorted_row_ids"));
    EXPECT_EQ(lists.cols, expected.at("sorted_col_ids"));
    EXPECT_EQ(FirstDifferenceFrom(expected.at("sorted_gains"), lists.gains, {}), "");
    EXPECT_EQ(lists.changes, expected.at("id_counts_changes"));
    EXPECT_EQ(max_ids, expected.at("max_ids").get<int64_t>());
    EXPECT_EQ(max_unique, expected.at("max_uniques").get<int64_t>());

    chip.Cut(cuts, &cut);
    const json& csr = c.at("expected_csr");
    EXPECT_EQ(MinibatchCount(cuts), csr.at("num_minibatches_per_sc").get<int>());
    ExpectSameBuffers(csr, MakeChipCsr(cut));
  }
}

TEST(GoldenTfTest, ListOfCooToCsr) {
  const json c = Load("11_list_of_coo_to_csr");
  const json& params = c.at("params");
  const int64_t samples = params.at("sample_count");
  Chip chip;
  chip.shape.partitions = params.at("num_physical_replica");
  chip.shape.features = {{0, 0, v1::SUM}};
  for (int64_t r = 0; r < samples; ++r) {
    for (int64_t id = r; id < 1024; id += samples) chip.Add(r, id);
  }
  chip.Sort(samples, params.at("num_sc_per_chip"));
  for (size_t s = 0; s < chip.slots.size(); ++s) {
    const json& expected = c.at("expected_per_sc").at(s);
    const SlotCsr& slot = chip.slots[s];
    json counts = {0}, rows = json::array(), cols = json::array();
    for (int p = 0; p < slot.partitions; ++p) {
      for (int64_t i = slot.Begin(0, p); i < slot.End(0, p); ++i) {
        rows.push_back(slot.sample_ids.data()[i]);
        cols.push_back(slot.embedding_ids.data()[i]);
      }
      counts.push_back(rows.size());
    }
    EXPECT_EQ(rows, expected.at("sorted_row_ids"));
    EXPECT_EQ(cols, expected.at("sorted_col_ids"));
    EXPECT_EQ(counts, expected.at("id_counts"));
  }
  ExpectSameBuffers(c.at("expected_csr"), MakeChipCsr(chip.slots));
  const json& dropping = c.at("id_dropping");
  const int64_t tight = dropping.at("max_ids_per_chip_per_sample").get<int64_t>() * samples;
  const JaxDeviceBuffer dropped = FillJaxDeviceBuffer(chip.slots, tight, true);
  const json& expected = dropping.at("allow_id_dropping_true");
  EXPECT_EQ(dropped.dropped, expected.at("derived_dropped_ids").get<int64_t>());
  EXPECT_EQ(json(dropped.row_pointers), expected.at("derived_row_pointers"));
  EXPECT_EQ(dropped.embedding_ids.size(), expected.at("derived_ids_unpadded_size").get<size_t>());
}

}  // namespace golden_tf_test
}  // namespace emberd::preprocess
