// What travels from the shards must never show in a result. Catches: rows of one stack pooled as
// another's, sums out of plan order, samples lost between Lookup and ApplyGradients, an order of
// additions that depends on the mode or on the number of shards, and answers that do not fit.
#include <cstring>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/floats.h"
#include "base/testing/seed.h"
#include "config/config.h"
#include "server/coordinator/coordinator.h"
#include "server/host/shard_backend.h"
#include "server/step/activations.h"

namespace emberd::coordinator {
namespace unique_rows_test {

using testing::HasSubstr;

constexpr int kPartitions = 8;

template <typename T>
v1::Tensor MakeTensor(v1::DataType dtype, const std::vector<int64_t>& shape,
                      const std::vector<T>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (const int64_t extent : shape) tensor.add_shape(extent);
  tensor.set_data(values.data(), values.size() * sizeof(T));
  return tensor;
}

class Cluster {
 public:
  explicit Cluster(int shards) {
    std::string text = absl::StrCat("sparsecores_per_shard: ", kPartitions / shards,
                                    " shard_threads: 2 coordinators { address: '127.0.0.1:0' }");
    for (int i = 0; i < shards; ++i) absl::StrAppend(&text, " shards { address: '127.0.0.1:0' }");
    const v1::ClusterConfig cluster = *config::ParseCluster(text);
    std::vector<std::shared_ptr<host::ShardBackend>> backends;
    for (int i = 0; i < shards; ++i)
      backends.push_back(*host::MakeLocalShard(cluster, i, &metrics_, &threads_));
    coordinator_ = std::make_unique<Coordinator>(cluster, 0, backends, &metrics_, &threads_);
  }

  void Declare(const std::string& config) {
    v1::DeclareModelRequest request;
    auto model = config::ParseModel(config);
    ASSERT_TRUE(model.ok()) << model.status();
    *request.mutable_config() = *model;
    auto response = coordinator_->DeclareModel(request, &context_);
    ASSERT_TRUE(response.ok()) << response.status();
    model_ = response->model_id();
  }

  void Assign(const std::string& table, int64_t id, const std::vector<float>& row) {
    v1::AssignRowsRequest request;
    request.set_model_id(model_);
    request.mutable_mutation()->set_client_id("test");
    request.mutable_mutation()->set_sequence(++sequence_);
    request.set_table(table);
    *request.mutable_ids() = MakeTensor<int64_t>(v1::INT64, {1}, {id});
    *request.mutable_values() = MakeTensor(v1::FLOAT32, {1, static_cast<int64_t>(row.size())}, row);
    const auto assigned = coordinator_->resources().rows->AssignRows(request, &context_);
    ASSERT_TRUE(assigned.ok()) << assigned.status();
  }

  // The bytes of all activations.
  std::string Look(v1::LookupRequest request) {
    request.set_model_id(model_);
    auto output = coordinator_->resources().steps->Lookup(request, v1::Token::TRAINER, &context_);
    EXPECT_TRUE(output.ok()) << output.status();
    std::string all;
    if (!output.ok()) return all;
    for (const int feature : output->order) {
      const step::FeatureActivationView& view = output->activations.features[feature];
      all.append(view.bytes.data(), view.bytes.size());
    }
    return all;
  }

  // The same; then an update that depends on them.
  std::string Step(v1::LookupRequest request) {
    request.set_model_id(model_);
    auto output = coordinator_->resources().steps->Lookup(request, v1::Token::TRAINER, &context_);
    EXPECT_TRUE(output.ok()) << output.status();
    if (!output.ok()) return "";
    v1::ApplyGradientsRequest apply;
    apply.set_model_id(model_);
    apply.set_batch_handle(output->batch_handle);
    apply.mutable_mutation()->set_client_id("test");
    apply.mutable_mutation()->set_sequence(++sequence_);
    std::string all;
    for (const int feature : output->order) {
      const step::FeatureActivationView& view = output->activations.features[feature];
      all.append(view.bytes.data(), view.bytes.size());
      v1::FeatureGradient* gradient = apply.add_gradients();
      gradient->set_feature(output->model->config.features(feature).name());
      gradient->mutable_gradient()->set_dtype(output->activations.dtype);
      gradient->mutable_gradient()->add_shape(view.samples);
      gradient->mutable_gradient()->add_shape(view.dim);
      gradient->mutable_gradient()->set_data(view.bytes.data(), view.bytes.size());
    }
    const auto applied = coordinator_->resources().steps->ApplyGradients(apply, &context_);
    EXPECT_TRUE(applied.ok()) << applied.status();
    return all;
  }

 private:
  ops::Metrics metrics_{"test"};
  ThreadPools threads_{2};
  std::unique_ptr<Coordinator> coordinator_;
  rpc::CallContext context_{absl::Now() + absl::Seconds(100)};
  uint64_t model_ = 0;
  uint64_t sequence_ = 0;
};

// Tables of every storage type and combiner, some quantized, some with limits that cut batches;
// MODE stands for the result mode.
std::string RandomModel(std::mt19937& random) {
  const char* storage[] = {"FLOAT32", "BFLOAT16", "FLOAT16"};
  const char* combiners[] = {"SUM", "MEAN", "SQRTN"};
  std::string model = "name: 'm' seed: 3 ";
  const int tables = 1 + random() % 4;
  for (int t = 0; t < tables; ++t) {
    absl::StrAppend(&model, "tables { name: 't", t, "' vocabulary_size: ", 1 + random() % 300,
                    " embedding_dim: ", 1 + random() % 40, " combiner: ", combiners[random() % 3],
                    " storage_dtype: ", storage[random() % 3], " result_mode: MODE ");
    if (random() % 3 == 0) {
      absl::StrAppend(&model, "quantization { lower: -0.2 upper: 0.3 num_buckets: 64 } ");
    }
    if (random() % 3 == 0) {
      absl::StrAppend(&model, "max_unique_ids_per_partition: 6 ");
    }
    absl::StrAppend(&model, "optimizer { adagrad {} learning_rate: 0.1 } } ");
    const int features = 1 + random() % 2;
    for (int f = 0; f < features; ++f) {
      absl::StrAppend(&model, "features { name: 'f", t, "_", f, "' table: 't", t, "' } ");
    }
  }
  return model;
}

v1::LookupRequest RandomLookup(const v1::ModelConfig& model, std::mt19937& random) {
  v1::LookupRequest request;
  request.set_activation_dtype(random() % 2 == 0 ? v1::FLOAT32 : v1::BFLOAT16);
  for (int i = 0; i < model.features_size(); ++i) {
    int64_t vocabulary = 0;
    for (const v1::TableConfig& table : model.tables()) {
      if (table.name() == model.features(i).table()) vocabulary = table.vocabulary_size();
    }
    const int64_t samples = random() % 60, bag = 1 + random() % 3;
    std::vector<int64_t> ids(samples * bag);
    // Half of the lookups repeat a few rows.
    const int64_t range = random() % 2 == 0 ? vocabulary : std::min<int64_t>(vocabulary, 5);
    for (int64_t& id : ids) id = random() % range;
    v1::FeatureIds* feature = request.add_features();
    feature->set_feature(model.features(i).name());
    *feature->mutable_dense()->mutable_ids() = MakeTensor(v1::INT64, {samples, bag}, ids);
  }
  return request;
}

std::string WithMode(std::string model, const std::string& mode) {
  for (size_t at; (at = model.find("MODE")) != std::string::npos;) model.replace(at, 4, mode);
  return model;
}

TEST(UniqueRowsTest, NoModeAndNoNumberOfShardsChangesABit) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  for (int trial = 0; trial < 8; ++trial) {
    const std::string model = RandomModel(random);
    SCOPED_TRACE(model);
    const v1::ModelConfig config = *config::ParseModel(WithMode(model, "AUTO"));
    std::vector<v1::LookupRequest> requests;
    for (int step = 0; step < 3; ++step) requests.push_back(RandomLookup(config, random));
    std::vector<std::string> expected;
    for (const char* mode : {"PARTIAL_SUMS", "UNIQUE_ROWS", "AUTO"}) {
      for (const int shards : {1, 2, 8}) {
        Cluster cluster(shards);
        cluster.Declare(WithMode(model, mode));
        std::vector<std::string> activations;
        for (const v1::LookupRequest& request : requests) {
          activations.push_back(cluster.Step(request));
        }
        if (expected.empty()) expected = activations;
        ASSERT_TRUE(activations == expected) << mode << ", " << shards << " shards";
      }
    }
  }
}

// A sum begins at +0 and is rounded once: -0 becomes +0, but what is too small for bfloat16 keeps
// its sign, and what is too large becomes infinite. So it must be where a sample's only row is
// rounded on its shard, or copied.
TEST(UniqueRowsTest, ASingleRowIsRoundedAsItsSum) {
  const std::string model =
      "name: 'm' tables { name: 't' vocabulary_size: 16 embedding_dim: 40 result_mode: MODE }"
      "features { name: 'f' table: 't' } features { name: 'g' table: 't' }";
  constexpr float kValues[] = {-0.0f, 0.0f, -1e-45f, 1e-45f, -1e-40f, 3.4028235e38f, -1.0f, 1.0f};
  std::vector<float> row;  // more than a vector of any CPU has
  for (int i = 0; i < 5; ++i) row.insert(row.end(), std::begin(kValues), std::end(kValues));
  std::string expected[2];
  for (const float value : row) {
    const float sum = 0.0f + value;
    const uint16_t half = ToBfloat16(sum);
    expected[0].append(reinterpret_cast<const char*>(&sum), sizeof(sum));
    expected[1].append(reinterpret_cast<const char*>(&half), sizeof(half));
  }
  for (const char* mode : {"PARTIAL_SUMS", "UNIQUE_ROWS", "AUTO"}) {
    for (const int shards : {1, 2, 8}) {
      for (const bool single : {true, false}) {
        Cluster cluster(shards);
        cluster.Declare(WithMode(model, mode));
        for (int64_t id = 0; id < 16; ++id) cluster.Assign("t", id, row);
        for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16}) {
          v1::LookupRequest request;
          request.set_activation_dtype(dtype);
          request.set_inference(true);
          const int64_t samples = 40;
          std::vector<int64_t> ids(samples);
          std::iota(ids.begin(), ids.end(), 0);
          for (int64_t& id : ids) id %= 16;
          for (const char* name : {"f", "g"}) {
            v1::FeatureIds* const feature = request.add_features();
            feature->set_feature(name);
            *feature->mutable_dense()->mutable_ids() = MakeTensor(v1::INT64, {samples, 1}, ids);
          }
          if (!single) {  // one sample of one feature has two: no sample of the stack is taken for
                          // one
            const std::vector<int64_t> splits = {0, 2}, two = {3, 4};
            *request.mutable_features(1)->mutable_ragged()->mutable_row_splits() =
                MakeTensor(v1::INT64, {2}, splits);
            *request.mutable_features(1)->mutable_ragged()->mutable_values() =
                MakeTensor(v1::INT64, {2}, two);
          }
          const std::string all = cluster.Look(request);
          const std::string& one = expected[dtype == v1::BFLOAT16];
          ASSERT_GE(all.size(), samples * one.size());
          for (int64_t s = 0; s < samples; ++s) {
            ASSERT_TRUE(all.substr(s * one.size(), one.size()) == one)
                << mode << ", " << shards << " shards, sample " << s;
          }
        }
      }
    }
  }
}

class WrongRowsTest : public testing::Test {
 protected:
  // Two stacks of one table each, of 8 and 16 columns; ids 0 and 1 in each.
  WrongRowsTest()
      : model_(*step::MakeServedModel(
            *config::ParseModel(
                "name: 'm' tables { name: 'a' vocabulary_size: 40 embedding_dim: 8 }"
                "tables { name: 'b' vocabulary_size: 40 embedding_dim: 16 storage_dtype: BFLOAT16 }"
                "features { name: 'fa' table: 'a' } features { name: 'fb' table: 'b' }"),
            {.shards = 1, .sparsecores_per_shard = 1}, nullptr, &metrics_)) {
    std::vector<preprocess::FeatureInput> inputs(2);
    for (auto& input : inputs) input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids_), 1, 2};
    batch_ = *model_->preprocessor->Run(inputs);
  }

  shard::StackRows Rows(int stack, int64_t row_bytes, int64_t count) {
    return {stack, row_bytes, absl::MakeConstSpan(bytes_).first(count * row_bytes), 2};
  }
  absl::Status Check(std::vector<shard::StackSums> sums, std::vector<shard::StackRows> rows,
                     v1::DataType dtype = v1::BFLOAT16) {
    return step::CheckGatherResult({1, std::move(sums), std::move(rows), nullptr}, *model_, *batch_,
                                   dtype);
  }

  ops::Metrics metrics_{"test"};
  const std::vector<int64_t> ids_ = {0, 1};
  const std::vector<char> bytes_ = std::vector<char>(1000);
  const std::shared_ptr<const step::ServedModel> model_;
  std::shared_ptr<const preprocess::PreprocessedBatch> batch_;
  CpuPool cpu_{1};
  BufferPool pool_;
};

// Room for two rows, or two samples and their sums, of each stack.
TEST_F(WrongRowsTest, AnAnswerHasAtMostTheBytesThatAreReserved) {
  const int64_t bytes = step::MaxGatherBytes(*model_, batch_->ShardView(0));
  EXPECT_GE(bytes, 2 * 32 + 2 * 32);
  EXPECT_LE(bytes, 2 * (4 + 8 * 4) + 2 * (4 + 16 * 4));
}

TEST_F(WrongRowsTest, EveryStackMustBeThereOnceWithItsRowSize) {
  const std::vector<int32_t> samples = {0, 1};
  const std::vector<float> zeros(32);
  const shard::StackSums sums = {0, samples, absl::MakeConstSpan(zeros).first(16), 2};
  EXPECT_TRUE(Check({sums}, {Rows(1, 32, 2)}).ok());
  EXPECT_TRUE(Check({}, {Rows(0, 32, 2), Rows(1, 32, 2)}).ok());
  const auto expect_internal = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  };
  expect_internal(Check({}, {Rows(1, 32, 2), Rows(0, 32, 2)}));
  expect_internal(Check({}, {Rows(0, 32, 2), Rows(0, 32, 2)}));
  expect_internal(Check({sums}, {Rows(0, 32, 2)}));
  expect_internal(Check({sums}, {Rows(2, 32, 2)}));
  expect_internal(Check({sums}, {Rows(-1, 32, 2)}));
  expect_internal(Check({sums}, {Rows(1, 64, 2)}));
  expect_internal(Check({sums}, {}));
  expect_internal(Check({sums}, {Rows(0, 32, 2), Rows(1, 32, 2)}));
}

// The batch has one id a sample. Rows of bfloat16 are no shorter for being rounded.
TEST_F(WrongRowsTest, RoundedRowsHaveTheirOwnSize) {
  const auto rounded = [&](int stack, int64_t row_bytes) {
    shard::StackRows rows = Rows(stack, row_bytes, 2);
    rows.rounded = true;
    return rows;
  };
  EXPECT_TRUE(Check({}, {rounded(0, 16), Rows(1, 32, 2)}).ok());
  EXPECT_FALSE(Check({}, {rounded(0, 16), Rows(1, 32, 2)}, v1::FLOAT32).ok());
  EXPECT_FALSE(Check({}, {rounded(0, 32), Rows(1, 32, 2)}).ok());
  EXPECT_FALSE(Check({}, {Rows(0, 16, 2), Rows(1, 32, 2)}).ok());
  host::GatherResult result{1, {}, {Rows(0, 32, 2), rounded(1, 32)}, nullptr};
  const absl::Status status = step::ArrangeUniqueRows(*model_, *batch_, 0, pool_, cpu_, &result);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
}

TEST_F(WrongRowsTest, RowsMustBeAsManyAsTheBatchHas) {
  for (const int64_t count : {0, 1, 3}) {
    host::GatherResult result{1, {}, {Rows(0, 32, 2), Rows(1, 32, count)}, nullptr};
    const absl::Status status = step::ArrangeUniqueRows(*model_, *batch_, 0, pool_, cpu_, &result);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the batch has 2 of 32 bytes"));
  }
}

TEST_F(WrongRowsTest, SumsAndPooledRowsStandInPlanOrder) {
  const std::vector<int32_t> samples = {0, 1};
  const std::vector<float> ones(32, 1);
  host::GatherResult result{1, {{1, samples, ones, 2}}, {Rows(0, 32, 2)}, nullptr};
  ASSERT_TRUE(step::CheckGatherResult(result, *model_, *batch_, v1::FLOAT32).ok());
  ASSERT_TRUE(step::ArrangeUniqueRows(*model_, *batch_, 0, pool_, cpu_, &result).ok());
  EXPECT_TRUE(result.rows.empty());
  ASSERT_EQ(result.stacks.size(), 2u);
  EXPECT_EQ(result.stacks[0].stack, 0);
  EXPECT_NE(result.stacks[0].later, nullptr);
  EXPECT_EQ(result.stacks[1].later, nullptr);
  const auto output = step::TakeOutput(*model_, batch_->feature_samples(), v1::FLOAT32);
  const step::Activations activations = step::ActivationsIn(*output, *model_, *batch_, v1::FLOAT32);
  step::CombineActivations({&result, 1}, *model_, *batch_, v1::FLOAT32, *output, {0, 1});
  EXPECT_EQ(activations.features[0].bytes, std::string(2 * 32, 0));
  const std::string last(activations.features[1].bytes.data(), 2 * 64);
  EXPECT_EQ(std::memcmp(last.data(), ones.data(), last.size()), 0);
}

// Shards of several versions: one rounds its rows, one sends them as they are stored, one sums.
TEST(MixedAnswersTest, GiveTheBitsOfSums) {
  ops::Metrics metrics("test");
  const auto model = *step::MakeServedModel(
      *config::ParseModel("name: 'm' tables { name: 't' vocabulary_size: 40 embedding_dim: 8 }"
                          "features { name: 'f' table: 't' }"),
      {.shards = 4, .sparsecores_per_shard = 1}, nullptr, &metrics);
  std::vector<int64_t> ids(40);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<preprocess::FeatureInput> inputs(1);
  inputs[0].ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 40};
  const auto batch = *model->preprocessor->Run(inputs);
  CpuPool cpu(1);
  BufferPool pool;
  // Row i of a shard holds `value`, of which bfloat16 keeps nothing but the sign.
  constexpr float kTiny = -1e-44f;
  const std::vector<float> stored(10 * 8, kTiny);
  const std::vector<uint16_t> rounded(10 * 8, ToBfloat16(kTiny));
  std::vector<int32_t> samples;
  std::vector<host::GatherResult> results(4);
  for (int shard = 0; shard < 4; ++shard) {
    host::GatherResult& result = results[shard];
    if (shard == 3) {
      const auto views = batch->ShardView(shard);
      for (const auto& segment : views[0].segments) {
        for (int32_t i = 0; i < segment.row_ends[0] - segment.base; ++i) {
          samples.push_back(segment.sample_ids[i]);
        }
      }
      std::sort(samples.begin(), samples.end());
      result.stacks.push_back({0, samples, stored, 10});
    } else if (shard == 1) {
      result.rows.push_back(
          {0, 32, {reinterpret_cast<const char*>(stored.data()), 10 * 32}, 10, false});
    } else {
      result.rows.push_back(
          {0, 16, {reinterpret_cast<const char*>(rounded.data()), 10 * 16}, 10, true});
    }
    ASSERT_TRUE(step::CheckGatherResult(result, *model, *batch, v1::BFLOAT16).ok());
    ASSERT_TRUE(step::ArrangeUniqueRows(*model, *batch, shard, pool, cpu, &result).ok());
  }
  const auto output = step::TakeOutput(*model, batch->feature_samples(), v1::BFLOAT16);
  const step::Activations activations = step::ActivationsIn(*output, *model, *batch, v1::BFLOAT16);
  step::CombineActivations(results, *model, *batch, v1::BFLOAT16, *output, {0});
  ASSERT_EQ(activations.features[0].bytes.size(), 40u * 16);
  for (size_t i = 0; i < 40 * 16; i += 2) {
    uint16_t half;
    std::memcpy(&half, activations.features[0].bytes.data() + i, sizeof(half));
    ASSERT_EQ(half, 0x8000) << i;
  }
}

}  // namespace unique_rows_test
}  // namespace emberd::coordinator
