// What a trainer gets instead of activations. Catches: a sample that is told of another's row, rows
// of one shard or partition taken for those of another, rows where they are not less to send, and
// answers that are let go while their rows are still to be sent.
#include "server/coordinator/answer_rows.h"

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/seed.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/coordinator/activations.h"

namespace emberd::server {
namespace answer_rows_test {

// b and c share a table; d's stack has another width, and padding columns.
constexpr char kModel[] =
    "name: 'm' tables { name: 'a' vocabulary_size: 200 embedding_dim: 8 combiner: SUM }"
    "tables { name: 'bc' vocabulary_size: 300 embedding_dim: 8 combiner: SUM }"
    "tables { name: 'd' vocabulary_size: 100 embedding_dim: 20 combiner: SUM }"
    "features { name: 'a' table: 'a' } features { name: 'b' table: 'bc' }"
    "features { name: 'c' table: 'bc' } features { name: 'd' table: 'd' }";
constexpr int kFeatures = 4;

class AnswerRowsTest : public testing::Test {
 protected:
  using Ids = std::vector<std::vector<int64_t>>;  // [feature][sample]; -1: none

  // Shards that answer with rows of which each element says which one it is.
  void Gather(preprocess::Topology topology, const Ids& ids) {
    results_.clear();
    batch_.reset();  // before the model that made it
    model_ = *MakeServedModel(*config::ParseModel(kModel), topology, nullptr, &metrics_);
    splits_.assign(kFeatures, {0});
    values_.assign(kFeatures, {});
    std::vector<preprocess::FeatureInput> inputs(kFeatures);
    for (int f = 0; f < kFeatures; ++f) {
      for (const int64_t id : ids[f]) {
        if (id >= 0) values_[f].push_back(id);
        if (f == with_two_ids_) values_[f].push_back(id + 1);
        splits_[f].push_back(static_cast<int64_t>(values_[f].size()));
      }
      inputs[f].ids =
          preprocess::RaggedInput{absl::MakeConstSpan(splits_[f]), absl::MakeConstSpan(values_[f])};
    }
    batch_ = *model_->preprocessor->Run(inputs);
    for (int shard = 0; shard < topology.shards; ++shard) results_.push_back(Answer(shard));
  }

  GatherResult Answer(int shard) {
    const preprocess::Topology& topology = model_->plan.topology;
    auto memory = std::make_shared<std::vector<std::vector<float>>>();
    GatherResult result;
    for (const preprocess::StackBatchView& view : batch_->ShardView(shard)) {
      // (partition, local row), as the shard sorts them.
      std::set<std::pair<int, int32_t>> rows;
      for (const preprocess::CsrSegmentView& segment : view.segments) {
        int64_t begin = segment.base;
        for (int k = 0; k < topology.sparsecores_per_shard; ++k) {
          for (int64_t i = begin; i < segment.row_ends[k]; ++i) {
            rows.emplace(k, segment.embedding_ids[i - segment.base]);
          }
          begin = preprocess::AlignCsr(segment.row_ends[k]);
        }
      }
      std::vector<float>& floats = memory->emplace_back();
      const int64_t width = model_->plan.stacks[view.stack].embedding_dim;
      for (const auto& [k, row] : rows) {
        const int partition = shard * topology.sparsecores_per_shard + k;
        floats.insert(floats.end(), width, Mark(view.stack, partition, row));
      }
      result.rows.push_back({view.stack, width * 4,
                             absl::MakeConstSpan(reinterpret_cast<const char*>(floats.data()),
                                                 floats.size() * sizeof(float)),
                             0});
    }
    alive_ = memory;
    result.owner = std::move(memory);
    EXPECT_TRUE(ArrangeUniqueRows(*model_, *batch_, shard, pool_, cpu_, &result).ok());
    return result;
  }
  static float Mark(int stack, int partition, int64_t row) {
    return static_cast<float>((stack * 100 + partition) * 1000 + row);
  }
  // Where the plan says that an id of the feature lives.
  float MarkOf(int feature, int64_t id) const {
    const auto [stack, position] = model_->plan.feature_at[feature];
    const auto& table = model_->plan.stacks[stack]
                            .tables[model_->plan.stacks[stack].features[position].table_in_stack];
    const int partitions = model_->plan.topology.partitions();
    return Mark(stack, static_cast<int>((id + table.shard_rotation) % partitions),
                id / partitions + table.row_offset);
  }
  std::shared_ptr<AnswerRows> Find(v1::DataType dtype = v1::FLOAT32) {
    return AnswerRows::Find(results_, *model_, *batch_, dtype, &cpu_);
  }
  void ExpectRowsOf(const Ids& ids, AnswerRows* rows) {
    const std::vector<RowPlaces> places = rows->places();
    for (int f = 0; f < kFeatures; ++f) {
      ASSERT_TRUE(rows->Has(f));
      rows->IndexSamples(f);
      std::string bytes;
      for (const absl::string_view piece : rows->Pieces(f))
        bytes.append(piece.data(), piece.size());
      const size_t row_bytes = rows->width(f) * sizeof(float);
      ASSERT_EQ(bytes.size(), rows->rows(f) * row_bytes);
      EXPECT_EQ(CountRows(places[f]), rows->rows(f));
      ASSERT_EQ(rows->index(f).size(), ids[f].size());
      EXPECT_EQ(rows->bytes(f), static_cast<int64_t>(bytes.size() + 4 * ids[f].size()));
      for (size_t s = 0; s < ids[f].size(); ++s) {
        const int32_t row = rows->index(f)[s];
        if (ids[f][s] < 0) {
          EXPECT_EQ(row, -1);
          continue;
        }
        ASSERT_GE(row, 0);
        ASSERT_LT(row, rows->rows(f));
        float mark = 0;
        std::memcpy(&mark, bytes.data() + row * row_bytes, sizeof(mark));
        EXPECT_EQ(mark, MarkOf(f, ids[f][s])) << "feature " << f << ", sample " << s;
      }
    }
  }

  ops::Metrics metrics_{"test"};
  CpuPool cpu_{2};
  BufferPool pool_;
  int with_two_ids_ = -1;  // a feature
  std::shared_ptr<const ServedModel> model_;
  std::vector<std::vector<int64_t>> splits_, values_;
  std::shared_ptr<const preprocess::PreprocessedBatch> batch_;
  std::vector<GatherResult> results_;
  std::weak_ptr<const void> alive_;
};

TEST_F(AnswerRowsTest, EachSampleHasItsRow) {
  std::mt19937 random(TestSeed());
  for (const preprocess::Topology topology :
       {preprocess::Topology{1, 1}, {1, 4}, {2, 2}, {4, 1}, {8, 1}, {1, 16}, {2, 32}}) {
    for (int round = 0; round < 5; ++round) {
      Ids ids(kFeatures);
      for (int f = 0; f < kFeatures; ++f) {
        for (int s = 0; s < 150 + f; ++s) {
          ids[f].push_back(random() % 8 == 0 ? -1 : static_cast<int64_t>(random() % 30));
        }
      }
      Gather(topology, ids);
      const auto rows = Find();
      ASSERT_NE(rows, nullptr);
      ExpectRowsOf(ids, rows.get());
    }
  }
}

// b has the ids at both ends of their table, and c those in between: the rows from b's first to its
// last are mostly c's.
TEST_F(AnswerRowsTest, AFeatureWithOthersRowsIsSentActivations) {
  Ids ids(kFeatures, std::vector<int64_t>(120, 3));
  for (int s = 0; s < 120; ++s) {
    ids[1][s] = s % 2 == 0 ? 0 : 299;
    ids[2][s] = 10 + 2 * s;
  }
  Gather({1, 1}, ids);
  const auto rows = Find();
  ASSERT_NE(rows, nullptr);
  EXPECT_TRUE(rows->Has(0));
  EXPECT_FALSE(rows->Has(1)) << "122 rows for 120 samples";
  EXPECT_TRUE(rows->Has(2));
  EXPECT_TRUE(rows->places()[1].empty());
}

TEST_F(AnswerRowsTest, RowsThatAreNotFewerAreNotSent) {
  Ids ids(kFeatures);
  for (int f = 0; f < kFeatures; ++f) {
    for (int s = 0; s < 80; ++s) ids[f].push_back(s);
  }
  Gather({2, 2}, ids);
  EXPECT_EQ(Find(), nullptr);
  // One that has many is sent with others that have few.
  for (int f = 1; f < kFeatures; ++f) ids[f].assign(80, 5);
  Gather({2, 2}, ids);
  const auto rows = Find();
  ASSERT_NE(rows, nullptr);
  ExpectRowsOf(ids, rows.get());
}

// They keep all of the answer from going, as long as the trainer does not read.
TEST_F(AnswerRowsTest, LargeAnswersAreNotKeptForAFewRows) {
  Ids ids(kFeatures, std::vector<int64_t>(80, 5));
  with_two_ids_ = 3;
  Gather({2, 2}, ids);
  auto rows = Find();
  ASSERT_NE(rows, nullptr);
  EXPECT_TRUE(rows->Has(0));
  EXPECT_FALSE(rows->Has(3)) << "its sums are no rows";
  rows.reset();
  for (int s = 0; s < 80; ++s) ids[3][s] = s;
  Gather({2, 2}, ids);
  EXPECT_EQ(Find(), nullptr);
}

TEST_F(AnswerRowsTest, RowsOfAnotherTypeAreNotSent) {
  const Ids ids(kFeatures, std::vector<int64_t>(80, 5));
  Gather({2, 2}, ids);
  EXPECT_NE(Find(v1::FLOAT32), nullptr);
  EXPECT_EQ(Find(v1::BFLOAT16), nullptr) << "they would have to be rounded first";
}

TEST_F(AnswerRowsTest, SamplesWithoutIdsHaveNoRows) {
  Ids ids(kFeatures, std::vector<int64_t>(80, -1));
  Gather({2, 2}, ids);
  EXPECT_EQ(Find(), nullptr);
  ids[0].assign(80, 7);
  Gather({2, 2}, ids);
  const auto rows = Find();
  ASSERT_NE(rows, nullptr);
  EXPECT_TRUE(rows->Has(0));
  EXPECT_FALSE(rows->Has(1)) << "of no rows, not even the sums could be sent";
}

TEST_F(AnswerRowsTest, TheAnswersLiveAsLongAsTheRows) {
  Gather({1, 1}, Ids(kFeatures, std::vector<int64_t>(80, 5)));
  auto rows = Find();
  ASSERT_NE(rows, nullptr);
  auto room = std::make_shared<int>(0);
  rows->Keep(room);
  results_.clear();
  EXPECT_FALSE(alive_.expired());
  EXPECT_EQ(room.use_count(), 2);
  rows.reset();
  EXPECT_TRUE(alive_.expired());
  EXPECT_EQ(room.use_count(), 1);
}

}  // namespace answer_rows_test
}  // namespace emberd::server
