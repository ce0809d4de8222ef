// Models that serve checkpoints, on real processes. A failure here means that a lookup fails or
// mixes two checkpoints while one follows the other, that rows of training are lost to serving, or
// that a served model takes more memory than its weights.
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "base/floats.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/metrics.h"
#include "tests/testing/program_api.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace serving_test {

using ::testing::HasSubstr;

constexpr int64_t kUsers = 3000;
constexpr int64_t kItems = 500;
constexpr int64_t kSamples = 64;
constexpr int64_t kIds = 4;  // of a sample

// Of one stack each; a sample's activation is kIds times what all rows hold.
std::string Config(const std::string& name, const std::string& optimizer) {
  return absl::Substitute(
      "name: '$0' optimizer { $1 }\n"
      "tables { name: 'users' vocabulary_size: $2 embedding_dim: 16 combiner: SUM }\n"
      "tables { name: 'items' vocabulary_size: $3 embedding_dim: 8 combiner: SUM }\n"
      "features { name: 'user' table: 'users' } features { name: 'friend' table: 'users' }\n"
      "features { name: 'item' table: 'items' }",
      name, optimizer, kUsers, kItems);
}

struct Ids {
  explicit Ids(std::mt19937_64* random) {
    for (const int64_t vocabulary : {kUsers, kUsers, kItems}) {
      std::vector<int64_t>& feature = ids.emplace_back(kSamples * kIds);
      for (int64_t& id : feature) {
        id = static_cast<int64_t>((*random)() % static_cast<uint64_t>(vocabulary));
      }
    }
  }
  std::vector<client::FeatureIds> Features() const {
    std::vector<client::FeatureIds> features;
    const char* const names[] = {"user", "friend", "item"};
    for (int f = 0; f < 3; ++f) {
      features.push_back({names[f], client::DenseIds{absl::MakeConstSpan(ids[f]), kIds}});
    }
    return features;
  }
  std::vector<std::vector<int64_t>> ids;
};

class ServingTest : public ::testing::Test {
 protected:
  void Start(ClusterOptions options = {.coordinators = 2}) {
    absl::StrAppend(&options.config, " storage { directory: \"", storage_.path(), "\" }");
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
  }
  void DeclareTraining() {
    const auto model = client_->DeclareModel(Config("clicks", "adagrad {}"));
    ASSERT_TRUE(model.ok()) << model.status();
    training_ = *model;
  }
  // Every value of every row is `version` in the checkpoint "v`version`".
  void Save(int version) {
    for (const auto& [table, rows, columns] :
         {std::tuple("users", kUsers, 16), std::tuple("items", kItems, 8)}) {
      std::vector<int64_t> ids(rows);
      for (int64_t id = 0; id < rows; ++id) ids[id] = id;
      const std::vector<float> values(rows * columns, static_cast<float>(version));
      const auto assigned = client_->AssignRows(training_, table, ids, values);
      ASSERT_TRUE(assigned.ok()) << assigned.status();
    }
    const auto saved = client_->SaveCheckpoint("clicks", {.name = absl::StrCat("v", version)});
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  static grpc::Status Serve(const Api& api, const std::string& name, const std::string& as,
                            v1::DataType storage = v1::DATA_TYPE_UNSPECIFIED) {
    v1::ServeCheckpointRequest request;
    request.set_model("clicks");
    request.set_name(name);
    request.set_serve_as(as);
    request.set_storage_dtype(storage);
    v1::CheckpointProgress done;
    return Call(&v1::CheckpointService::Stub::ServeCheckpoint, api, request, &done);
  }
  void ExpectServes(const std::string& name, const std::string& as = "live",
                    v1::DataType storage = v1::DATA_TYPE_UNSPECIFIED) {
    const grpc::Status served = Serve(Api(cluster_->address()), name, as, storage);
    ASSERT_TRUE(served.ok()) << served.error_message();
  }
  static void ExpectRefused(const grpc::Status& status, grpc::StatusCode code,
                            const std::string& text) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  }
  client::Model Find(const std::string& name) {
    auto model = client_->DescribeModel(name);
    EXPECT_TRUE(model.ok()) << model.status();
    return model.value_or(client::Model());
  }
  // The version that all rows of a lookup have; -1 if they have several.
  static absl::StatusOr<int> LookedUp(client::Client& client, const client::Model& model,
                                      std::mt19937_64* random) {
    const Ids ids(random);
    const auto found = client.Lookup(model, ids.Features(), {.inference = true});
    if (!found.ok()) return found.status();
    const float first = found->activations[0].values[0];
    for (const client::Activation& activation : found->activations) {
      for (const float value : activation.values) {
        if (value != first) return -1;
      }
    }
    return static_cast<int>(first / kIds);
  }
  void ExpectLooksUp(int version, const std::string& name = "live") {
    std::mt19937_64 random(1);
    const auto found = LookedUp(*client_, Find(name), &random);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, version);
  }
  int64_t ShardTableBytes() {
    const client::ClusterStatus status = AwaitAllShards(*client_);
    int64_t bytes = 0;
    for (const auto& shard : status.shards) bytes += shard.table_bytes;
    return bytes;
  }
  v1::DescribeModelResponse Describe(const std::string& name, int coordinator = 0) {
    v1::DescribeModelRequest request;
    request.set_name(name);
    v1::DescribeModelResponse response;
    const grpc::Status status = Call(&v1::EmbeddingService::Stub::DescribeModel,
                                     Api(cluster_->address(coordinator)), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  const TempDir storage_ = *TempDir::Create();
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model training_;
};

TEST_F(ServingTest, OneCheckpointFollowsTheOtherUnderLookups) {
  constexpr int kVersions = 6;
  Start();
  DeclareTraining();
  for (int version = 1; version <= kVersions; ++version) Save(version);
  ExpectServes("v1");
  const client::Model live = Find("live");
  const int64_t bytes = ShardTableBytes();

  std::atomic<bool> over{false};
  std::atomic<int64_t> lookups{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937_64 random(caller);
      client::ClientOptions options;
      options.addresses = {cluster_->address(caller % 2)};
      options.max_attempts = 1;
      const auto client = client::Client::Connect(options);
      ASSERT_TRUE(client.ok()) << client.status();
      int newest = 0;
      while (!over) {
        const auto version = LookedUp(**client, live, &random);
        ASSERT_TRUE(version.ok()) << version.status();
        ASSERT_NE(*version, -1) << "rows of several checkpoints in one answer";
        ASSERT_GE(*version, newest) << "an older checkpoint after a newer one";
        newest = *version;
        ++lookups;
        absl::SleepFor(absl::Milliseconds(2));  // there are hundreds in each change all the same
      }
      EXPECT_EQ(newest, kVersions);
    });
  }
  for (int version = 2; version <= kVersions; ++version) {
    const int64_t before = lookups;
    EXPECT_TRUE(Eventually([&] { return lookups > before + 20; }));
    const grpc::Status served =
        Serve(Api(cluster_->address(version % 2)), absl::StrCat("v", version), "live");
    EXPECT_TRUE(served.ok()) << served.error_message();
  }
  // The coordinator that was not asked follows, and old rows go.
  EXPECT_TRUE(Eventually([&] { return Describe("live", 1).serves() == "clicks/v6"; }));
  EXPECT_EQ(Describe("live", 0).serves(), "clicks/v6");
  EXPECT_TRUE(Eventually([&] { return ShardTableBytes() == bytes; })) << ShardTableBytes();
  over = true;
  for (std::thread& caller : callers) caller.join();
  RecordProperty("lookups", std::to_string(lookups));
  // Training was not touched.
  ExpectLooksUp(kVersions, "clicks");
}

TEST_F(ServingTest, ServesInSixteenBitsAndWithoutSlots) {
  Start();
  DeclareTraining();
  std::mt19937_64 random(3);
  for (int step = 0; step < 5; ++step) {
    const Ids ids(&random);
    const auto found = client_->Lookup(training_, ids.Features());
    ASSERT_TRUE(found.ok()) << found.status();
    const auto applied = client_->ApplyGradients(training_, found->batch,
                                                 Gradients(*found, MixedGradients(step, *found)));
    ASSERT_TRUE(applied.ok()) << applied.status();
  }
  ASSERT_TRUE(client_->SaveCheckpoint("clicks", {.name = "v1"}).ok());
  ExpectServes("v1", "live", v1::BFLOAT16);
  const client::Model live = Find("live");
  std::vector<int64_t> ids(kUsers);
  for (int64_t id = 0; id < kUsers; ++id) ids[id] = id;
  const auto trained = client_->ReadRows(training_, "users", ids);
  const auto served = client_->ReadRows(live, "users", ids);
  ASSERT_TRUE(trained.ok() && served.ok()) << trained.status() << served.status();
  for (size_t i = 0; i < trained->values.size(); ++i) {
    ASSERT_EQ(served->values[i], FromBfloat16(ToBfloat16(trained->values[i]))) << i;
  }
  // Memory is that of the weights: two bytes a value, of rows that are padded to whole partitions.
  const v1::DescribeModelResponse described = Describe("live");
  EXPECT_EQ(described.slots_size(), 0);
  const int64_t values = kUsers * 16 + kItems * 8;
  EXPECT_LE(described.plan().table_bytes(), 2 * values * 105 / 100);
  EXPECT_LT(described.plan().table_bytes() * 2, Describe("clicks").plan().table_bytes());
  // The next one is stored likewise.
  Save(7);
  ExpectServes("v7");
  EXPECT_EQ(Describe("live").model_id(), described.model_id());
  ExpectLooksUp(7);
}

TEST_F(ServingTest, TablesWithoutAnOptimizerAreOnlyLookedUp) {
  Start({});
  DeclareTraining();
  Save(3);
  const int64_t trained = Describe("clicks").plan().table_bytes();
  ASSERT_TRUE(client_->DropModel("clicks").value_or(false));
  const std::string config = absl::StrReplaceAll(
      Config("clicks", "none {}"), {{"combiner: SUM", "combiner: SUM storage_dtype: FLOAT16"}});
  const auto restored = client_->RestoreCheckpoint("clicks", {.name = "v3", .config = config});
  ASSERT_TRUE(restored.ok()) << restored.status();
  ExpectLooksUp(3, "clicks");

  // Two bytes a value instead of eight, as it is planned and as shards count it. Nothing is
  // evicted.
  const int64_t bytes = Describe("clicks").plan().table_bytes();
  EXPECT_EQ(bytes * 4, trained);
  EXPECT_EQ(Describe("clicks").slots_size(), 0);
  EXPECT_TRUE(Eventually([&] {
    double counted = 0, resident = 0;
    for (int shard = 0; shard < 2; ++shard) {
      const auto metrics = FetchMetrics(cluster_->shard_http_address(shard));
      counted += MetricSum(metrics, "emberd_table_bytes");
      resident += MetricSum(metrics, "emberd_table_resident_bytes");
    }
    return counted == static_cast<double>(bytes) && resident == counted;
  }));

  ProgramApi api(cluster_->address());
  v1::ApplyGradientsRequest update;
  update.set_model_id(Find("clicks").id);
  update.set_batch_handle(7);
  update.mutable_mutation()->set_client_id("trainer");
  update.mutable_mutation()->set_sequence(1);
  v1::ApplyGradientsResponse updated;
  const std::string unsupported =
      "Unsupported optimizer in minibatching mode: the tables of model 'clicks' have optimizer "
      "none";
  ExpectRefused(Call(&v1::EmbeddingService::Stub::ApplyGradients, api.api(), update, &updated),
                grpc::FAILED_PRECONDITION, unsupported);
  v1::ProgramSpec program;
  program.set_kind(v1::ProgramSpec::UPDATE);
  program.set_model("clicks");
  const absl::Status compiled = api.Compile(program).status();
  EXPECT_EQ(compiled.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(compiled.message()), HasSubstr(unsupported));
  // Nobody serves it from elsewhere, so that rows may be assigned.
  training_ = Find("clicks");
  Save(4);
  ExpectLooksUp(4, "clicks");
}

// Would catch: a model whose tables are not all stored alike, and of which a second checkpoint was
// not served, for it was to be stored as the first table is.
TEST_F(ServingTest, TheNextCheckpointIsStoredTableByTableAsTheOneBefore) {
  Start();
  const auto model = client_->DeclareModel(
      absl::StrReplaceAll(Config("clicks", "adagrad {}"),
                          {{"embedding_dim: 8", "storage_dtype: FLOAT16 embedding_dim: 8"}}));
  ASSERT_TRUE(model.ok()) << model.status();
  training_ = *model;
  Save(1);
  Save(2);
  ExpectServes("v1");
  const int64_t bytes = Describe("live").plan().table_bytes();
  ExpectServes("v2");
  ExpectLooksUp(2);
  EXPECT_EQ(Describe("live").plan().table_bytes(), bytes);
}

TEST_F(ServingTest, RefusesWhatDoesNotFitBesideWhatItServes) {
  // In each of 4 partitions: rows of training and their slots, and one served model.
  const int64_t weights = 4 * ((kUsers / 4 + 8) * 16 + (kItems / 4 + 8) * 8);
  Start({.config = absl::StrCat("budgets { bytes_per_sparsecore: ", weights * 4, " }")});
  DeclareTraining();
  Save(1);
  Save(2);
  ExpectServes("v1");
  ExpectServes("v2", "other");
  ExpectRefused(Serve(Api(cluster_->address()), "v2", "live"), grpc::RESOURCE_EXHAUSTED,
                "(budgets.bytes_per_sparsecore) are in use");
  ExpectLooksUp(1);
  ExpectLooksUp(2, "other");
  EXPECT_EQ(Describe("live").serves(), "clicks/v1");
  ASSERT_TRUE(client_->DropModel("other").value_or(false));
  ExpectServes("v2");
  ExpectLooksUp(2);
}

TEST_F(ServingTest, RefusesWhatWouldChangeIt) {
  Start();
  DeclareTraining();
  Save(1);
  const Api api(cluster_->address());
  ExpectRefused(Serve(api, "v1", ""), grpc::ALREADY_EXISTS,
                "model 'clicks' is declared on this cluster and serves no checkpoint; serve the "
                "checkpoint under another name");
  ExpectRefused(Serve(api, "v9", "live"), grpc::NOT_FOUND, "has no checkpoint \"v9\"");
  ExpectRefused(Serve(api, "v1", "no name"), grpc::INVALID_ARGUMENT, "name");
  ExpectRefused(Serve(api, "v1", "live", v1::INT32), grpc::INVALID_ARGUMENT, "storage_dtype");
  ExpectServes("v1");
  const client::Model live = Find("live");
  std::mt19937_64 random(1);
  const Ids batch(&random);
  const auto lookup = client_->Lookup(live, batch.Features());
  EXPECT_EQ(lookup.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(lookup.status().message()), HasSubstr("inference is false; it must be"));
  const auto train = client_->Train(live, {.group = "g"});
  EXPECT_THAT(std::string(train.status().message()),
              HasSubstr("Unsupported optimizer in minibatching mode"));
  const std::vector<int64_t> ids = {1};
  const std::vector<float> values(8);
  for (const absl::Status& status :
       {client_->AssignRows(live, "items", ids, values).status(),
        client_->SaveCheckpoint("live").status(), client_->ResetModel("live")}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("serves checkpoint 'clicks/v1'"));
  }
  ExpectRefused(Serve(api, "v1", "live", v1::FLOAT16), grpc::ALREADY_EXISTS,
                "storage_dtype: FLOAT32 in the declared model, FLOAT16 in the requested one");
  ExpectLooksUp(1);
  EXPECT_TRUE(client_->DropModel("live").value_or(false));
  EXPECT_EQ(client_->DescribeModel("live").status().code(), absl::StatusCode::kNotFound);
  ExpectServes("v1", "live", v1::FLOAT16);
}

TEST_F(ServingTest, ARestartedShardGetsItsRowsAgain) {
  Start();
  DeclareTraining();
  Save(1);
  Save(2);
  ExpectServes("v1");
  ExpectLooksUp(1);
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  std::mt19937_64 random(5);
  const client::Model live = Find("live");
  absl::StatusOr<int> version;
  EXPECT_TRUE(Eventually([&] {
    version = LookedUp(*client_, live, &random);
    return version.ok();
  })) << version.status();
  EXPECT_EQ(version.value_or(0), 1);
  // Without the checkpoint it is lost, loudly, until another one is served.
  ASSERT_TRUE(client_->DeleteCheckpoint("clicks", "v1").ok());
  cluster_->KillShard(0);
  ASSERT_TRUE(cluster_->RestartShard(0).ok());
  EXPECT_TRUE(Eventually([&] {
    return LookedUp(*client_, live, &random).status().code() == absl::StatusCode::kDataLoss;
  }));
  EXPECT_THAT(std::string(LookedUp(*client_, live, &random).status().message()),
              HasSubstr("`emberctl serve clicks v1 --as live` loads them again"));
  ExpectServes("v2");
  ExpectLooksUp(2);
}

TEST_F(ServingTest, ACoordinatorDiesInTheMiddleOfASwap) {
  // Shard 0 serves the new rows, shard 1 has not been told.
  Start({.coordinators = 2, .failpoints = {{"coordinator-1", "model.serves=die"}}});
  DeclareTraining();
  Save(1);
  Save(2);
  ExpectServes("v1");
  EXPECT_FALSE(Serve(Api(cluster_->address(1)), "v2", "live").ok());
  std::mt19937_64 random(5);
  const client::Model live = Find("live");
  for (int i = 0; i < 50; ++i) {
    const auto version = LookedUp(*client_, live, &random);
    ASSERT_TRUE(version.ok()) << version.status();
    ASSERT_EQ(*version, 1);
  }
  grpc::Status served;
  EXPECT_TRUE(Eventually([&] {
    served = Serve(Api(cluster_->address()), "v2", "live");
    return served.ok();
  })) << served.error_message();
  ExpectLooksUp(2);
}

TEST_F(ServingTest, SeveralClustersServeOneCheckpoint) {
  Start();
  DeclareTraining();
  Save(1);
  Save(2);
  const std::unique_ptr<Cluster> training = std::move(cluster_);
  const std::unique_ptr<client::Client> trainer = std::move(client_);
  for (const auto& [shards, sparsecores] : {std::pair(2, 2), std::pair(1, 4), std::pair(4, 2)}) {
    SCOPED_TRACE(absl::StrCat(shards, " shards of ", sparsecores));
    Start({.shards = shards, .sparsecores_per_shard = sparsecores});
    ExpectServes("v1", "");
    ExpectLooksUp(1, "clicks");
    ExpectServes("", "");
    ExpectLooksUp(2, "clicks");
    client_.reset();
    cluster_.reset();
  }
}

}  // namespace serving_test
}  // namespace emberd::testing
