// Bad input: a clear status, nothing changed, and the server lives. A failure here means that a
// request was believed before it was checked whole (tables have moved, a good lookup fails
// afterwards, the process is gone), or that its sender is not told what was wrong.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>

#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/bad_cases.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace bad_input_test {

using ::testing::HasSubstr;

// All cases share a cluster, so that each also stands behind all the others before it.
class BadInputTest : public ::testing::TestWithParam<BadCase> {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<Cluster>> cluster =
        Cluster::Start({.shards = 2, .config = kStrictCluster});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = cluster->release();
    client_ = cluster_->Connect().release();
    ASSERT_NE(client_, nullptr);
    absl::StatusOr<client::Model> model = client_->DeclareModel(StrictModel().DebugString());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = new client::Model(*model);
  }
  static void TearDownTestSuite() {
    delete model_;
    delete client_;
    delete cluster_;
  }

  void SetUp() override { ASSERT_NE(model_, nullptr) << "there is no cluster"; }

  static std::string TableDigest() {
    absl::StatusOr<std::string> digest = Digest(*client_, *model_);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or("none");
  }

  // With all shards: one may be too busy to answer the coordinator in a second.
  static client::ClusterStatus Status() {
    const auto status =
        Await([] { return client_->GetStatus(); },
              [](const absl::StatusOr<client::ClusterStatus>& seen) {
                return seen.ok() && std::all_of(seen->shards.begin(), seen->shards.end(),
                                                [](const auto& shard) { return shard.reachable; });
              });
    EXPECT_TRUE(status.ok()) << status.status();
    return status.value_or(client::ClusterStatus());
  }

  inline static Cluster* cluster_ = nullptr;
  inline static client::Client* client_ = nullptr;
  inline static client::Model* model_ = nullptr;
};

TEST_P(BadInputTest, IsRefusedAndChangesNothing) {
  static std::atomic<uint64_t> sequence = 1;
  const BadCase& bad = GetParam();
  const Api api(cluster_->address());
  const std::string before = TableDigest();
  const client::ClusterStatus status_before = Status();

  const grpc::Status status = bad.call({api, model_->id, sequence.fetch_add(100)});
  EXPECT_EQ(status.error_code(), bad.code) << status.error_message();
  for (const std::string& word : bad.words) {
    EXPECT_THAT(status.error_message(), HasSubstr(word));
  }

  EXPECT_EQ(TableDigest(), before);
  v1::LookupRequest good = GoodLookup(model_->id);
  good.set_inference(true);
  v1::LookupResponse response;
  const grpc::Status after = Call(&v1::EmbeddingService::Stub::Lookup, api, good, &response);
  EXPECT_TRUE(after.ok()) << after.error_message();
  // It has left no batch and no model behind.
  const client::ClusterStatus status_after = Status();
  EXPECT_EQ(status_after.batches, status_before.batches);
  EXPECT_EQ(status_after.batch_bytes, status_before.batch_bytes);
  EXPECT_EQ(status_after.models.size(), status_before.models.size());
  for (size_t i = 0; i < status_after.shards.size(); ++i) {
    EXPECT_EQ(status_after.shards[i].batches, status_before.shards[i].batches);
    EXPECT_EQ(status_after.shards[i].table_bytes, status_before.shards[i].table_bytes);
  }
}

std::string Name(const ::testing::TestParamInfo<BadCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Lookup, BadInputTest, ::testing::ValuesIn(BadLookups()), Name);
INSTANTIATE_TEST_SUITE_P(ApplyGradients, BadInputTest, ::testing::ValuesIn(BadApplies()), Name);
INSTANTIATE_TEST_SUITE_P(Rows, BadInputTest, ::testing::ValuesIn(BadRows()), Name);
INSTANTIATE_TEST_SUITE_P(Model, BadInputTest, ::testing::ValuesIn(BadModels()), Name);

}  // namespace bad_input_test
}  // namespace emberd::testing
