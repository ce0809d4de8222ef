// Messages of more than 64 MiB, and calls that are given up while they are under way. A failure
// here means that some limit of a transport cuts large batches off, or that work goes on, and
// memory is held, for callers who have left.
#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace large_message_test {

constexpr int64_t kVocabulary = 5000;
constexpr int64_t kDim = 128;
constexpr int64_t kSamples = 150'000;  // activations of 73 MiB
constexpr int64_t kInferenceSamples = 4 * kSamples;

class LargeMessageTest : public ClusterFixture {
 protected:
  void SetUp() override {
    client::ModelDescription description;
    description.name = "large";
    client::TableDescription& table = description.tables.emplace_back();
    table.name = "t";
    table.vocabulary_size = kVocabulary;
    table.embedding_dim = kDim;
    table.combiner = client::Combiner::kSum;
    table.initializer = client::Initializer::RowId();
    table.optimizer = client::Optimizer{"sgd", {{"learning_rate", 1.0f}}};
    description.features = {{"x", "t", kSamples}};
    StartCluster({.shards = 2}, description);
    ASSERT_FALSE(HasFatalFailure());
    ids_.resize(kInferenceSamples);
    for (int64_t i = 0; i < kInferenceSamples; ++i) ids_[i] = i * 7 % kVocabulary;
  }

  absl::Span<const int64_t> Ids(int64_t samples) {
    return absl::MakeConstSpan(ids_).first(samples);
  }

  // Requests in progress on a process, by its own account; GetStatus and /metrics do not count.
  double InFlight(const std::string& http_address) {
    const std::string page = FetchMetrics(http_address);
    EXPECT_FALSE(page.empty()) << http_address;
    return MetricSum(page, "emberd_in_flight_requests");
  }
  // Whether every process is at rest before long.
  bool ComesToRest() {
    return Eventually([&] {
      return InFlight(cluster_->http_address()) + InFlight(cluster_->shard_http_address(0)) +
                 InFlight(cluster_->shard_http_address(1)) ==
             0;
    });
  }

  std::vector<int64_t> ids_;
};

TEST_F(LargeMessageTest, LookupAndGradients) {
  absl::StatusOr<client::LookupResult> found =
      client_->Lookup(model_, {{"x", client::DenseIds{Ids(kSamples)}}});
  ASSERT_TRUE(found.ok()) << found.status();
  const client::Activation& x = found->activations[0];
  ASSERT_GT(x.values.size() * sizeof(float), 64u << 20);
  for (int64_t i = 0; i < kSamples; ++i) {
    const absl::Span<const float> row = x.values.subspan(i * kDim, kDim);
    ASSERT_EQ(std::count(row.begin(), row.end(), static_cast<float>(ids_[i])), kDim) << i;
  }
  // Every id stands in kSamples / kVocabulary samples, so its row falls by that many.
  const std::vector<float> ones(kSamples * kDim, 1.0f);
  absl::StatusOr<client::ApplyResult> applied =
      client_->ApplyGradients(model_, found->batch, {{"x", ones, kSamples}});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->rows_updated, kVocabulary);
  absl::StatusOr<client::RowValues> row = client_->ReadRows(model_, "t", {100});
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(row->values, std::vector<float>(kDim, 100.0f - kSamples / kVocabulary));
}

TEST_F(LargeMessageTest, ADeadlineFreesTheServers) {
  client::LookupOptions options;
  options.inference = true;
  options.deadline = absl::Milliseconds(30);
  const absl::Status status =
      client_->Lookup(model_, {{"x", client::DenseIds{Ids(kInferenceSamples)}}}, options).status();
  // The latter where the coordinator sees that what is left cannot be enough.
  EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(ComesToRest());
}

TEST_F(LargeMessageTest, ACancelledCallFreesTheServers) {
  for (int i = 0; i < 5; ++i) {
    absl::Status status;
    std::thread caller([&] {
      client::LookupOptions options;
      options.inference = true;
      status = client_->Lookup(model_, {{"x", client::DenseIds{Ids(kInferenceSamples)}}}, options)
                   .status();
    });
    absl::SleepFor(absl::Milliseconds(20 + 30 * i));
    client_->CancelCalls();
    caller.join();
    // It may have been quicker.
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  }
  EXPECT_TRUE(ComesToRest());
  EXPECT_TRUE(client_->Lookup(model_, {{"x", client::DenseIds{Ids(10)}}}).ok());
}

// The shards must hear of it, too: a silent shard cannot hold a coordinator's call for longer than
// its caller waits.
TEST_F(LargeMessageTest, CancellationReachesCallsToTheShards) {
  cluster_->SuspendShard(1);
  std::thread caller([&] {
    const absl::Status status =
        client_->Lookup(model_, {{"x", client::DenseIds{Ids(1000)}}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  });
  // Under way: the coordinator waits for the silent shard.
  EXPECT_TRUE(Eventually([&] { return InFlight(cluster_->http_address()) == 1; }));
  client_->CancelCalls();
  caller.join();
  // The coordinator lets go although the shard still says nothing.
  EXPECT_TRUE(Eventually([&] { return InFlight(cluster_->http_address()) == 0; }));
  cluster_->ResumeShard(1);
  EXPECT_TRUE(ComesToRest());
}

}  // namespace large_message_test
}  // namespace emberd::testing
