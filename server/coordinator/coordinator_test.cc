// The whole path of a step inside one process: a coordinator over shards, against a slow reference
// that knows nothing of stacks, partitions or CSR. Every test runs over in-process shards and over
// real shard servers on loopback.
#include "server/coordinator/coordinator.h"

#include <cmath>
#include <filesystem>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "base/testing/seed.h"
#include "config/config.h"
#include "server/coordinator/unary_calls.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_server.h"

namespace emberd::coordinator {
namespace coordinator_test {

using testing::HasSubstr;

constexpr char kModel[] = R"(
  name: "m"
  seed: 7
  tables { name: "user" vocabulary_size: 100 embedding_dim: 8 combiner: SUM optimizer { sgd {} learning_rate: 0.5 } }
  tables { name: "item" vocabulary_size: 57 embedding_dim: 5 combiner: MEAN optimizer { sgd {} learning_rate: 0.5 } }
  tables { name: "tag" vocabulary_size: 33 embedding_dim: 12 combiner: SQRTN
           optimizer { adagrad { initial_accumulator: 0.1 } learning_rate: 0.5 } }
  features { name: "u" table: "user" batch_size: 8 }
  features { name: "i" table: "item" batch_size: 8 }
  features { name: "j" table: "item" batch_size: 4 }
  features { name: "t" table: "tag" batch_size: 8 }
)";

template <typename T>
v1::Tensor MakeTensor(v1::DataType dtype, const std::vector<int64_t>& shape,
                      const std::vector<T>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (const int64_t extent : shape) tensor.add_shape(extent);
  tensor.set_data(values.data(), values.size() * sizeof(T));
  return tensor;
}

std::vector<float> Floats(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

// One sample: (id, weight) pairs.
using Sample = std::vector<std::pair<int64_t, float>>;
using Batch = std::map<std::string, std::vector<Sample>>;

v1::FeatureIds Ragged(const std::string& name, const std::vector<Sample>& samples) {
  std::vector<int32_t> splits = {0};
  std::vector<int64_t> ids;
  std::vector<float> weights;
  for (const Sample& sample : samples) {
    for (const auto& [id, weight] : sample) {
      ids.push_back(id);
      weights.push_back(weight);
    }
    splits.push_back(static_cast<int32_t>(ids.size()));
  }
  v1::FeatureIds feature;
  feature.set_feature(name);
  const auto n = static_cast<int64_t>(ids.size());
  *feature.mutable_ragged()->mutable_row_splits() =
      MakeTensor(v1::INT32, {static_cast<int64_t>(splits.size())}, splits);
  *feature.mutable_ragged()->mutable_values() = MakeTensor(v1::INT64, {n}, ids);
  *feature.mutable_ragged()->mutable_weights() = MakeTensor(v1::FLOAT32, {n}, weights);
  return feature;
}

// Shards and a coordinator over them.
class Cluster {
 public:
  // `more`: of the cluster's description.
  Cluster(int shards, int sparsecores, bool remote, const std::string& more = "") {
    auto cluster = config::ParseCluster([&] {
      std::string text =
          absl::StrCat("sparsecores_per_shard: ", sparsecores, " shard_threads: 2\n");
      for (int i = 0; i < shards; ++i)
        absl::StrAppend(&text, "shards { address: '127.0.0.1:0' }\n");
      absl::StrAppend(&text, "coordinators { address: '127.0.0.1:0' } ", more);
      return text;
    }());
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *cluster;
    for (int i = 0; i < shards; ++i) {
      if (remote) {
        servers_.push_back(nullptr);
        StartShard(i);
      } else {
        backends_.push_back(*host::MakeLocalShard(cluster_, i, &metrics_, &threads_));
      }
    }
    for (size_t i = 0; i < servers_.size(); ++i) {
      backends_.push_back(host::MakeRemoteShard(
          {.index = static_cast<int>(i),
           .address = servers_[i]->address(),
           .limits =
               rpc::MessageLimits{cluster_.budgets().max_message_bytes(), rpc::MemoryBudget()},
           .place = rpc::PlaceOf(cluster_, static_cast<int>(i)),
           // Every other one, however short the payloads.
           .share_from_bytes = static_cast<int64_t>(i % 2)}));
    }
    coordinator_ = std::make_unique<Coordinator>(cluster_, 0, backends_, &metrics_, &threads_);
  }

  // Starts shard i, at its old address if it had one.
  void StartShard(int i) {
    if (servers_[i] != nullptr)
      *cluster_.mutable_shards(i)->mutable_address() = servers_[i]->address();
    servers_[i].reset();
    auto server = host::ShardServer::Start({cluster_, i, &metrics_, &threads_});
    ASSERT_TRUE(server.ok()) << server.status();
    servers_[i] = *std::move(server);
  }
  void StopShard(int i) { servers_[i]->Drain(absl::ZeroDuration()); }

  Coordinator* operator->() { return coordinator_.get(); }
  rpc::CallContext* context() { return &context_; }
  ModelRegistryOptions registry_options() {
    return {.topology = {cluster_.shards_size(), cluster_.sparsecores_per_shard(), 0},
            .threads = &threads_,
            .metrics = &metrics_,
            .explain_lost = [](const auto&, const absl::Status& lost) { return lost; },
            .give_up = [](const auto&, uint64_t) { return absl::OkStatus(); }};
  }

  uint64_t Declare(const std::string& text = kModel) {
    v1::DeclareModelRequest request;
    *request.mutable_config() = *config::ParseModel(text);
    auto response = coordinator_->DeclareModel(request, context());
    EXPECT_TRUE(response.ok()) << response.status();
    return response->model_id();
  }

  absl::StatusOr<step::LookupOutput> Lookup(const v1::LookupRequest& request) {
    return coordinator_->resources().steps->Lookup(request, v1::Token::TRAINER, context());
  }
  absl::StatusOr<v1::ApplyGradientsResponse> Apply(const v1::ApplyGradientsRequest& request) {
    return coordinator_->resources().steps->ApplyGradients(request, context());
  }

  std::vector<float> Read(uint64_t model, const std::string& table, int64_t rows,
                          const std::string& slot = "") {
    std::vector<int64_t> ids(rows);
    for (int64_t i = 0; i < rows; ++i) ids[i] = i;
    v1::ReadRowsRequest request;
    request.set_model_id(model);
    request.set_table(table);
    request.set_slot(slot);
    *request.mutable_ids() = MakeTensor(v1::INT64, {rows}, ids);
    auto response = coordinator_->resources().rows->ReadRows(request, context());
    EXPECT_TRUE(response.ok()) << response.status();
    return Floats(response->values());
  }

 private:
  v1::ClusterConfig cluster_;
  ops::Metrics metrics_{"test"};
  ThreadPools threads_{2};
  std::vector<std::unique_ptr<host::ShardServer>> servers_;
  std::vector<std::shared_ptr<host::ShardBackend>> backends_;
  std::unique_ptr<Coordinator> coordinator_;
  rpc::CallContext context_{absl::Now() + absl::Seconds(100)};
};

class CoordinatorTest : public testing::TestWithParam<bool> {
 protected:
  bool remote() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Transports, CoordinatorTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Remote" : "Local"; });

struct TableInfo {
  std::string name;
  int64_t rows;
  int64_t dim;
};
const std::map<std::string, TableInfo> kTableOf = {{"u", {"user", 100, 8}},
                                                   {"i", {"item", 57, 5}},
                                                   {"j", {"item", 57, 5}},
                                                   {"t", {"tag", 33, 12}}};

// Gain of each entry of a sample, by the definition in model.proto, in double precision.
std::vector<double> Gains(const std::string& table, const Sample& sample) {
  double sum = 0, squares = 0;
  for (const auto& [id, weight] : sample) {
    sum += weight;
    squares += double{weight} * weight;
  }
  std::vector<double> gains;
  for (const auto& [id, weight] : sample) {
    gains.push_back(table == "user"   ? weight
                    : table == "item" ? (sum == 0 ? 0 : weight / sum)
                                      : (squares == 0 ? 0 : weight / std::sqrt(squares)));
  }
  return gains;
}

Batch RandomBatch(std::mt19937& random) {
  Batch batch;
  for (const auto& [feature, table] : kTableOf) {
    const size_t samples = 1 + random() % 9;  // not divisible by anything in particular
    for (size_t s = 0; s < samples; ++s) {
      Sample& sample = batch[feature].emplace_back();
      const size_t ids = random() % 5;
      for (size_t k = 0; k < ids; ++k) {
        sample.push_back({static_cast<int64_t>(random() % table.rows), 0.25f * (1 + random() % 8)});
      }
    }
  }
  return batch;
}

v1::LookupRequest LookupOf(uint64_t model, const Batch& batch) {
  v1::LookupRequest request;
  request.set_model_id(model);
  for (const auto& [feature, samples] : batch) *request.add_features() = Ragged(feature, samples);
  return request;
}

TEST_P(CoordinatorTest, LookupsAndUpdatesAgreeWithPlainLoops) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  Cluster cluster(2, 2, remote());
  const uint64_t model = cluster.Declare();

  std::map<std::string, std::vector<double>> weights, accumulators;
  for (const auto& [feature, table] : kTableOf) {
    const std::vector<float> rows = cluster.Read(model, table.name, table.rows);
    weights[table.name].assign(rows.begin(), rows.end());
    accumulators[table.name].assign(rows.size(), 0.1);
  }
  for (int step = 0; step < 5; ++step) {
    const Batch batch = RandomBatch(random);
    auto output = cluster.Lookup(LookupOf(model, batch));
    ASSERT_TRUE(output.ok()) << output.status();

    v1::ApplyGradientsRequest apply;
    apply.set_model_id(model);
    apply.set_batch_handle(output->batch_handle);
    apply.mutable_mutation()->set_client_id("test");
    apply.mutable_mutation()->set_sequence(step + 1);
    std::map<std::string, std::map<int64_t, std::vector<double>>> row_gradients;
    for (const int index : output->order) {
      const std::string& feature = output->model->config.features(index).name();
      const TableInfo& table = kTableOf.at(feature);
      const auto& view = output->activations.features[index];
      const auto* activation = reinterpret_cast<const float*>(view.bytes.data());
      const std::vector<Sample>& samples = batch.at(feature);
      ASSERT_EQ(view.samples, static_cast<int64_t>(samples.size()));
      std::vector<float> gradient(samples.size() * table.dim);
      for (float& value : gradient) value = static_cast<float>(random() % 2001) / 1000 - 1;
      for (size_t s = 0; s < samples.size(); ++s) {
        const std::vector<double> gains = Gains(table.name, samples[s]);
        for (int64_t c = 0; c < table.dim; ++c) {
          double expected = 0;
          for (size_t k = 0; k < samples[s].size(); ++k) {
            expected += gains[k] * weights[table.name][samples[s][k].first * table.dim + c];
          }
          ASSERT_NEAR(activation[s * table.dim + c], expected, 1e-5)
              << feature << " sample " << s << " column " << c;
        }
        for (size_t k = 0; k < samples[s].size(); ++k) {
          std::vector<double>& row = row_gradients[table.name][samples[s][k].first];
          row.resize(table.dim);
          for (int64_t c = 0; c < table.dim; ++c) row[c] += gains[k] * gradient[s * table.dim + c];
        }
      }
      v1::FeatureGradient* to = apply.add_gradients();
      to->set_feature(feature);
      *to->mutable_gradient() =
          MakeTensor(v1::FLOAT32, {static_cast<int64_t>(samples.size()), table.dim}, gradient);
    }
    auto applied = cluster.Apply(apply);
    ASSERT_TRUE(applied.ok()) << applied.status();

    int64_t touched = 0;
    for (const auto& [table, rows] : row_gradients) {
      touched += static_cast<int64_t>(rows.size());
      for (const auto& [id, gradient] : rows) {
        for (size_t c = 0; c < gradient.size(); ++c) {
          const size_t at = id * gradient.size() + c;
          double rate = 0.5;
          if (table == "tag")
            rate /= std::sqrt(accumulators[table][at] += gradient[c] * gradient[c]);
          weights[table][at] -= rate * gradient[c];
        }
      }
    }
    EXPECT_EQ(applied->rows_updated(), touched);
    for (const auto& [feature, table] : kTableOf) {
      const std::vector<float> rows = cluster.Read(model, table.name, table.rows);
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_NEAR(rows[i], weights[table.name][i], 1e-4)
            << table.name << " value " << i << " after step " << step;
      }
    }
  }
}

v1::LookupRequest SmallLookup(uint64_t model) {
  return LookupOf(
      model, {{"u", {{{1, 1.0f}}, {}}}, {"i", {{{2, 1.0f}}}}, {"j", {}}, {"t", {{{3, 1.0f}}}}});
}

v1::ApplyGradientsRequest SmallApply(uint64_t model, uint64_t handle, uint64_t sequence) {
  v1::ApplyGradientsRequest request;
  request.set_model_id(model);
  request.set_batch_handle(handle);
  request.mutable_mutation()->set_client_id("test");
  request.mutable_mutation()->set_sequence(sequence);
  request.add_gradients()->set_feature("u");
  *request.mutable_gradients(0)->mutable_gradient() =
      MakeTensor(v1::FLOAT32, {2, 8}, std::vector<float>(16, 1.0f));
  return request;
}

TEST_P(CoordinatorTest, ARetriedUpdateIsAnsweredFromTheRecord) {
  Cluster cluster(2, 1, remote());
  const uint64_t model = cluster.Declare();
  auto output = cluster.Lookup(SmallLookup(model));
  ASSERT_TRUE(output.ok()) << output.status();
  const auto request = SmallApply(model, output->batch_handle, 1);
  auto first = cluster.Apply(request);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->replayed());
  const std::vector<float> rows = cluster.Read(model, "user", 100);
  auto second = cluster.Apply(request);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(second->replayed());
  EXPECT_EQ(second->rows_updated(), first->rows_updated());
  EXPECT_EQ(cluster.Read(model, "user", 100), rows);

  const absl::Status again = cluster.Apply(SmallApply(model, output->batch_handle, 2)).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kNotFound) << again;
}

// A request that is refused may be sent again, mended, under the same number.
TEST_P(CoordinatorTest, ARefusedUpdateLeavesBatchAndNumberUsable) {
  Cluster cluster(2, 1, remote());
  const uint64_t model = cluster.Declare();
  auto output = cluster.Lookup(SmallLookup(model));
  ASSERT_TRUE(output.ok()) << output.status();
  const std::vector<float> rows = cluster.Read(model, "user", 100);
  auto bad = SmallApply(model, output->batch_handle, 1);
  *bad.mutable_gradients(0)->mutable_gradient() =
      MakeTensor(v1::FLOAT32, {2, 8}, std::vector<float>(16, std::nanf("")));
  const absl::Status refused = cluster.Apply(bad).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("gradient of feature 'u' is nan at sample 0, column 0"));
  EXPECT_EQ(cluster.Read(model, "user", 100), rows);
  auto mended = cluster.Apply(SmallApply(model, output->batch_handle, 1));
  EXPECT_TRUE(mended.ok()) << mended.status();
}

TEST_P(CoordinatorTest, DeclaringTwiceFindsTheModelAndAConflictNamesTheField) {
  Cluster cluster(2, 1, remote());
  v1::DeclareModelRequest request;
  *request.mutable_config() = *config::ParseModel(kModel);
  auto first = cluster->DeclareModel(request, cluster.context());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->created());
  auto second = cluster->DeclareModel(request, cluster.context());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_FALSE(second->created());
  EXPECT_EQ(second->model_id(), first->model_id());
  // Samples are planned once.
  request.mutable_config()->mutable_features(0)->set_batch_size(77);
  auto other = cluster->DeclareModel(request, cluster.context());
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(other->created());
  EXPECT_EQ(other->model_id(), first->model_id());
  EXPECT_EQ(other->plan().SerializeAsString(), first->plan().SerializeAsString());
  request.mutable_config()->mutable_tables(1)->set_embedding_dim(6);
  const absl::Status conflict = cluster->DeclareModel(request, cluster.context()).status();
  EXPECT_EQ(conflict.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(conflict.message()), HasSubstr("tables[1].embedding_dim"));
}

TEST_P(CoordinatorTest, ATableThatAClientFillsIsServedWhenItSaysSo) {
  Cluster cluster(2, 1, remote());
  v1::DeclareModelRequest request;
  *request.mutable_config() = *config::ParseModel(kModel);
  request.mutable_config()->mutable_tables(1)->mutable_initializer()->mutable_assigned();
  const auto first = cluster->DeclareModel(request, cluster.context());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->unfilled());
  const auto second = cluster->DeclareModel(request, cluster.context());
  EXPECT_TRUE(second->unfilled());
  EXPECT_NE(second->history(), first->history()) << "it begins anew";
  request.set_filled(first->history());
  EXPECT_EQ(cluster->DeclareModel(request, cluster.context()).status().code(),
            absl::StatusCode::kAborted);
  v1::DescribeModelRequest describe;
  describe.set_model_id(second->model_id());
  const absl::Status waits = cluster->DescribeModel(describe, cluster.context()).status();
  EXPECT_EQ(waits.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(waits.message()), HasSubstr("0 assignments so far"));
  request.set_filled(second->history());
  for (int attempt = 0; attempt < 2; ++attempt) {  // the second is a retry
    const auto filled = cluster->DeclareModel(request, cluster.context());
    ASSERT_TRUE(filled.ok()) << filled.status();
    EXPECT_FALSE(filled->unfilled());
    EXPECT_EQ(filled->history(), second->history());
  }
  EXPECT_TRUE(cluster->DescribeModel(describe, cluster.context()).ok());
}

// Would catch: NOT_FOUND, "never given", for a batch whose rows have been declared anew: who was
// told to retry must hear of that in the end.
TEST_P(CoordinatorTest, AnUpdateOfRowsThatAreGoneHearsSoHoweverOftenItIsSent) {
  Cluster cluster(2, 1, remote());
  v1::DeclareModelRequest request;
  *request.mutable_config() = *config::ParseModel(kModel);
  request.mutable_config()->mutable_tables(1)->mutable_initializer()->mutable_assigned();
  const auto declare = [&](uint64_t filled) {
    request.set_filled(filled);
    return cluster->DeclareModel(request, cluster.context());
  };
  const auto first = declare(0);
  ASSERT_TRUE(first.ok() && declare(first->history()).ok()) << first.status();
  const uint64_t model = first->model_id();
  const auto output = cluster.Lookup(SmallLookup(model));
  ASSERT_TRUE(output.ok()) << output.status();
  const auto update = [&] {
    return cluster.Apply(SmallApply(model, output->batch_handle, 1)).status();
  };
  v1::DropModelRequest drop;
  drop.set_name("m");
  ASSERT_TRUE(cluster->DropModel(drop, cluster.context()).ok());
  const auto second = declare(0);
  ASSERT_TRUE(second.ok()) << second.status();
  for (int attempt = 0; attempt < 2; ++attempt) {
    const absl::Status waits = update();
    EXPECT_TRUE(absl::IsUnavailable(waits)) << waits;
  }
  ASSERT_TRUE(declare(second->history()).ok());
  const absl::Status gone = update();
  EXPECT_TRUE(absl::IsAborted(gone)) << gone;
  EXPECT_THAT(std::string(gone.message()), HasSubstr("begin again with its rows of now"));
}

TEST_P(CoordinatorTest, AReleasedBatchIsGone) {
  Cluster cluster(2, 1, remote());
  const uint64_t model = cluster.Declare();
  auto output = cluster.Lookup(SmallLookup(model));
  ASSERT_TRUE(output.ok()) << output.status();
  v1::ReleaseBatchRequest release;
  release.set_model_id(model);
  release.set_batch_handle(output->batch_handle);
  EXPECT_TRUE(cluster->resources().steps->ReleaseBatch(release, cluster.context()).ok());
  EXPECT_EQ(cluster->resources().steps->ReleaseBatch(release, cluster.context()).status().code(),
            absl::StatusCode::kNotFound);
  const v1::GetStatusResponse status = cluster->GetStatus(cluster.context());
  EXPECT_EQ(status.batches(), 0);
  for (const v1::ShardStatus& shard : status.shards()) EXPECT_EQ(shard.batches(), 0);
}

TEST_P(CoordinatorTest, InferenceKeepsNothing) {
  Cluster cluster(2, 1, remote());
  const uint64_t model = cluster.Declare();
  v1::LookupRequest request = SmallLookup(model);
  request.set_inference(true);
  auto output = cluster.Lookup(request);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->batch_handle, 0u);
  const v1::GetStatusResponse status = cluster->GetStatus(cluster.context());
  EXPECT_EQ(status.batches(), 0);
  for (const v1::ShardStatus& shard : status.shards()) EXPECT_EQ(shard.batches(), 0);
}

TEST_P(CoordinatorTest, AssignedRowsAreReadBackAndARepeatIsRecognised) {
  Cluster cluster(4, 1, remote());
  const uint64_t model = cluster.Declare();
  v1::AssignRowsRequest request;
  request.set_model_id(model);
  request.set_table("item");
  request.mutable_mutation()->set_client_id("test");
  request.mutable_mutation()->set_sequence(9);
  *request.mutable_ids() = MakeTensor(v1::INT32, {3}, std::vector<int32_t>{56, 0, 7});
  std::vector<float> values(15);
  for (int i = 0; i < 15; ++i) values[i] = static_cast<float>(i);
  *request.mutable_values() = MakeTensor(v1::FLOAT32, {3, 5}, values);
  auto first = cluster->resources().rows->AssignRows(request, cluster.context());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->replayed());
  const std::vector<float> rows = cluster.Read(model, "item", 57);
  EXPECT_EQ(std::vector<float>(rows.begin() + 56 * 5, rows.end()),
            std::vector<float>(values.begin(), values.begin() + 5));
  EXPECT_EQ(std::vector<float>(rows.begin() + 35, rows.begin() + 40),
            std::vector<float>(values.begin() + 10, values.end()));
  EXPECT_TRUE(cluster->resources().rows->AssignRows(request, cluster.context())->replayed());
  *request.mutable_ids() = MakeTensor(v1::INT32, {3}, std::vector<int32_t>{56, 0, 56});
  EXPECT_EQ(cluster->resources().rows->AssignRows(request, cluster.context()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Would catch: an assignment that is answered as made, and was made on another model.
TEST_P(CoordinatorTest, AnAssignmentToAnotherModelIsNoRepeat) {
  Cluster cluster(2, 1, remote());
  v1::AssignRowsRequest request;
  request.set_model_id(cluster.Declare());
  request.set_table("item");
  request.mutable_mutation()->set_client_id("test");
  request.mutable_mutation()->set_sequence(9);
  *request.mutable_ids() = MakeTensor(v1::INT32, {1}, std::vector<int32_t>{3});
  *request.mutable_values() = MakeTensor(v1::FLOAT32, {1, 5}, std::vector<float>(5, 1.0f));
  ASSERT_TRUE(cluster->resources().rows->AssignRows(request, cluster.context()).ok());
  std::string other = kModel;
  other.replace(other.find("name: \""), 7, "name: \"another_");
  request.set_model_id(cluster.Declare(other));
  EXPECT_EQ(cluster->resources().rows->AssignRows(request, cluster.context()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Would catch: calls that wait for a declaration for longer than anybody waits for them, with the
// threads that lookups need.
TEST_P(CoordinatorTest, WhoWaitsForADeclarationEndsAtItsDeadline) {
  Cluster cluster(1, 1, remote());
  ModelRegistry& registry = *cluster->resources().registry;
  bool declaring = false;
  const auto find_rows = [&](const v1::ModelConfig&) -> absl::StatusOr<std::optional<RowSource>> {
    declaring = true;
    rpc::CallContext late(SteadyNow() + absl::Milliseconds(10));
    EXPECT_EQ(registry.Reset("other", &late).status().code(), absl::StatusCode::kDeadlineExceeded);
    rpc::CallContext gone(absl::InfiniteFuture());
    gone.Cancel();
    EXPECT_EQ(registry.Reset("other", &gone).status().code(), absl::StatusCode::kCancelled);
    return std::nullopt;
  };
  const auto declared = registry.Declare(*config::ParseModel(kModel), find_rows, cluster.context());
  EXPECT_TRUE(declared.ok()) << declared.status();
  EXPECT_TRUE(declaring);
  EXPECT_EQ(registry.Reset("other", cluster.context()).status().code(),
            absl::StatusCode::kNotFound);
}

// Would catch: rows that are given up for a checkpoint that was there when the call began.
TEST_P(CoordinatorTest, ACheckpointThatGoesBeforeItIsRestoredCostsNoRows) {
  const TempDir storage = *TempDir::Create();
  Cluster cluster(
      2, 1, remote(),
      absl::StrCat("storage { directory: '", storage.Path("s"), "' durability: MEMORY }"));
  const uint64_t model = cluster.Declare();
  Checkpoints& checkpoints = *cluster->resources().checkpoints;
  v1::SaveCheckpointRequest save;
  save.set_model("m");
  save.set_name("a");
  const auto saved = checkpoints.Save(
      save, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, cluster.context());
  ASSERT_TRUE(saved.ok()) << saved.status();
  const std::vector<float> before = cluster.Read(model, "item", 57);
  v1::RestoreCheckpointRequest restore;
  restore.set_model("m");
  restore.set_name("a");
  bool deleted = false;
  const auto report = [&](const v1::CheckpointProgress& progress) -> absl::Status {
    if (deleted || progress.phase() != "restoring") return absl::OkStatus();
    deleted = true;
    v1::DeleteCheckpointRequest request;
    request.set_model("m");
    request.set_name("a");
    return checkpoints.Delete(request, cluster.context()).status();
  };
  EXPECT_EQ(checkpoints.Restore(restore, report, cluster.context()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(deleted);
  EXPECT_EQ(cluster.Read(model, "item", 57), before);
}

// Would catch: a model that is there after its drop, with the rows that were dropped, since another
// coordinator had found their checkpoint before the drop gave it up.
TEST_P(CoordinatorTest, RowsThatAreGivenUpWhileTheyComeBackAreNotServed) {
  const TempDir storage = *TempDir::Create();
  Cluster cluster(2, 1, remote(),
                  absl::StrCat("storage { directory: '", storage.path(), "' durability: LOG }"));
  v1::DeclareModelRequest declare;
  *declare.mutable_config() = *config::ParseModel(kModel);
  const auto first = Await([&] { return cluster->DeclareModel(declare, cluster.context()); });
  ASSERT_TRUE(first.ok()) << first.status();
  const uint64_t model = first->model_id();
  const std::vector<float> initial = cluster.Read(model, "item", 57);
  v1::AssignRowsRequest assign;
  assign.set_model_id(model);
  assign.set_table("item");
  assign.mutable_mutation()->set_client_id("test");
  assign.mutable_mutation()->set_sequence(1);
  *assign.mutable_ids() = MakeTensor(v1::INT32, {1}, std::vector<int32_t>{3});
  *assign.mutable_values() = MakeTensor(v1::FLOAT32, {1, 5}, std::vector<float>(5, 7.0f));
  ASSERT_TRUE(cluster->resources().rows->AssignRows(assign, cluster.context()).ok());
  Checkpoints& checkpoints = *cluster->resources().checkpoints;
  v1::SaveCheckpointRequest save;
  save.set_model("m");
  const auto saved = checkpoints.Save(
      save, [](const v1::CheckpointProgress&) { return absl::OkStatus(); }, cluster.context());
  ASSERT_TRUE(saved.ok()) << saved.status();
  v1::DropModelRequest drop;
  drop.set_name("m");
  ASSERT_TRUE(cluster->DropModel(drop, cluster.context()).ok());
  ASSERT_GT(*checkpoints.store().GivenUpUntil("m"), 0);
  // As before the drop: the model is not there only because its shards have lost it.
  ASSERT_TRUE(std::filesystem::remove(storage.Path("checkpoints/m/.given_up")));
  int asked = 0;
  const auto find_rows = [&](const v1::ModelConfig& config) {
    auto rows = cluster->auto_checkpoints()->FindRows(config, "");
    EXPECT_TRUE(rows.ok()) << rows.status();
    EXPECT_EQ(rows.ok() && rows->has_value(), ++asked == 1);
    if (rows.ok() && rows->has_value()) {
      (*rows)->report = [&](int64_t, int64_t) { return checkpoints.store().GiveUp("m"); };
    }
    return rows;
  };
  const auto declared =
      cluster->resources().registry->Declare(declare.config(), find_rows, cluster.context());
  ASSERT_TRUE(declared.ok()) << declared.status();
  EXPECT_TRUE(declared->created);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(cluster.Read(model, "item", 57), initial);
}

// Would catch: a model that comes back with the rows from before its reset or drop, for a
// checkpoint of them was saved after the checkpoints had been given up, or another coordinator made
// the model of one by then; and a coordinator that goes on with what the shards no longer have.
TEST_P(CoordinatorTest, WhatIsSavedWhileRowsGoIsGivenUpToo) {
  Cluster cluster(2, 1, remote());
  std::vector<uint64_t> given_up;
  bool disk_fails = false;
  std::function<void()> after_the_note = [] {};
  ModelRegistryOptions options = cluster.registry_options();
  options.give_up = [&](const std::string& model, uint64_t history) {
    given_up.push_back(history);
    if (history == 0) after_the_note();
    return history != 0 && disk_fails ? absl::InternalError("disk") : absl::OkStatus();
  };
  const step::ShardSet& shards = *cluster->resources().shards;
  ModelRegistry registry(shards, options);
  const auto declare = [&] {
    const auto declared = registry.Declare(*config::ParseModel(kModel), nullptr, cluster.context());
    EXPECT_TRUE(declared.ok()) << declared.status();
    return declared->model;
  };
  const auto drop = [&] { return registry.Drop("m", nullptr, cluster.context()); };
  const uint64_t first = declare()->history;
  const auto reset = registry.Reset("m", cluster.context());
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_EQ(given_up, (std::vector<uint64_t>{0, first}));
  EXPECT_TRUE(*drop());
  EXPECT_EQ(given_up, (std::vector<uint64_t>{0, first, 0, (*reset)->history}));

  after_the_note = [&] { cluster.Declare(); };
  EXPECT_TRUE(*drop()) << "the note comes before the look at what there is";
  after_the_note = [] {};

  disk_fails = true;
  const uint64_t id = declare()->id;
  const uint64_t before = registry.Recall(id).history();
  EXPECT_EQ(registry.Reset("m", cluster.context()).status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(registry.Recall(id).history(), before);
  EXPECT_EQ(drop().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(registry.IdOf("m"), 0u);
}

// Would catch: a caller who is told, or reads, that nothing has changed, and loses a shard then.
TEST(CoordinatorRestartTest, WhoseCheckpointsAreGivenUpBeforeAShardGoesIsTold) {
  Cluster cluster(2, 1, /*remote=*/true);
  ModelRegistryOptions options = cluster.registry_options();
  int noted = 0;
  options.give_up = [&](const std::string& model, uint64_t history) {
    ++noted;
    cluster.StopShard(1);
    return absl::OkStatus();
  };
  ModelRegistry registry(*cluster->resources().shards, options);
  const auto declared = registry.Declare(*config::ParseModel(kModel), nullptr, cluster.context());
  ASSERT_TRUE(declared.ok()) << declared.status();
  const absl::Status refused = registry.Drop("m", nullptr, cluster.context()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("shard 1 at "), HasSubstr("the checkpoints of before")));
  EXPECT_EQ(noted, 1);
  const absl::Status at_once = registry.Drop("m", nullptr, cluster.context()).status();
  EXPECT_EQ(at_once.code(), absl::StatusCode::kUnavailable) << at_once;
  EXPECT_EQ(noted, 1) << "what is known before it begins changes nothing";
}

TEST_P(CoordinatorTest, WhoWaitsUntilOtherRowsAreServedEndsWithItsCaller) {
  Cluster cluster(1, 1, remote());
  ModelRegistry& registry = *cluster->resources().registry;
  const v1::ModelConfig config = *config::ParseModel(R"(
    name: "live"
    tables { name: "t" vocabulary_size: 20 embedding_dim: 8 combiner: SUM optimizer { none {} } }
    features { name: "f" table: "t" })");
  // A checkpoint in which no row has a value of its own.
  internal::v1::CheckpointSource checkpoint;
  checkpoint.mutable_manifest()->set_model("m");
  *checkpoint.mutable_manifest()->mutable_config() = config;
  *checkpoint.mutable_manifest()->mutable_plan() = preprocess::PlanToProto(
      config, *preprocess::MakePlan(config, {.shards = 1, .sparsecores_per_shard = 1}));
  bool told = false;
  const auto report = [&](int64_t, int64_t) {
    told = true;
    rpc::CallContext gone(absl::InfiniteFuture());
    gone.Cancel();
    EXPECT_EQ(registry.Serve(config, {{checkpoint}, nullptr}, &gone).status().code(),
              absl::StatusCode::kCancelled);
    return absl::OkStatus();
  };
  const auto served = registry.Serve(config, {{checkpoint}, report}, cluster.context());
  EXPECT_TRUE(served.ok()) << served.status();
  EXPECT_TRUE(told);
}

TEST_P(CoordinatorTest, AnExportGivesEveryRowOnceInOrder) {
  Cluster cluster(2, 2, remote());
  const uint64_t model = cluster.Declare();
  v1::ExportTableRequest request;
  request.set_model_id(model);
  request.set_table("user");
  request.set_first_row(3);
  auto run = cluster->resources().rows->StartExport(request, cluster.context());
  ASSERT_TRUE(run.ok()) << run.status();
  std::vector<float> exported;
  while (true) {
    auto part = (*run)();
    ASSERT_TRUE(part.ok()) << part.status();
    if (!part->has_value()) break;
    EXPECT_EQ((*part)->first_row(), 3 + static_cast<int64_t>(exported.size()) / 8);
    const std::vector<float> values = Floats((*part)->values());
    exported.insert(exported.end(), values.begin(), values.end());
  }
  const std::vector<float> rows = cluster.Read(model, "user", 100);
  EXPECT_EQ(exported, std::vector<float>(rows.begin() + 24, rows.end()));
}

// A shard that restarts has lost its rows and batches. An update of a batch from before must not be
// applied to some shards only, and nobody may get initial rows for trained ones before the reset.
TEST(CoordinatorRestartTest, ARestartedShardHasLostItsRowsUntilTheReset) {
  Cluster cluster(2, 1, /*remote=*/true);
  const uint64_t model = cluster.Declare();
  const std::vector<float> initial = cluster.Read(model, "user", 100);
  auto output = cluster.Lookup(SmallLookup(model));
  ASSERT_TRUE(output.ok()) << output.status();

  cluster.StopShard(1);
  const absl::Status down = cluster.Lookup(SmallLookup(model)).status();
  EXPECT_EQ(down.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(down.message()), HasSubstr("shard 1 at 127.0.0.1:"));
  const absl::Status not_applied =
      cluster.Apply(SmallApply(model, output->batch_handle, 1)).status();
  EXPECT_EQ(not_applied.code(), absl::StatusCode::kUnavailable);

  cluster.StartShard(1);
  const absl::Status refused = Await(  // the channel reconnects in its own time
      [&] { return cluster.Apply(SmallApply(model, output->batch_handle, 1)).status(); },
      [](const absl::Status& status) { return !absl::IsUnavailable(status); });
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("shard 1 no longer has its rows"));
  const absl::Status lost = cluster.Lookup(SmallLookup(model)).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss) << lost;
  v1::ResetModelRequest reset;
  reset.set_name("m");
  ASSERT_TRUE(cluster->ResetModel(reset, cluster.context()).ok());
  EXPECT_EQ(cluster.Read(model, "user", 100), initial) << "something was applied";

  auto again = cluster.Lookup(SmallLookup(model));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(cluster.Apply(SmallApply(model, again->batch_handle, 2)).ok());
}

// Coordinators alone know the plan of a model that is lost on all shards: to declare it for other
// samples must not make it anew.
TEST(CoordinatorRestartTest, WhatAllShardsHaveLostIsFoundByAnyBatchSize) {
  Cluster cluster(1, 1, /*remote=*/true);
  cluster.Declare();
  cluster.StopShard(0);
  cluster.StartShard(0);
  v1::DeclareModelRequest request;
  *request.mutable_config() = *config::ParseModel(kModel);
  request.mutable_config()->mutable_features(0)->set_batch_size(77);
  const absl::Status lost =
      Await([&] { return cluster->DeclareModel(request, cluster.context()).status(); },
            [](const absl::Status& status) { return !absl::IsUnavailable(status); });
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss) << lost;
}

}  // namespace coordinator_test
}  // namespace emberd::coordinator
