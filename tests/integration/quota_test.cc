// Each limit on what one client, one connection and all streams may ask. A failure here means that
// one busy trainer can keep all others out, or that it is not told which limit it has met.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/bad_cases.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace quota_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

class QuotaTest : public ClusterFixture {
 protected:
  void StartWith(const std::string& budgets) {
    StartCluster(
        {.shards = 2,
         .config = absl::StrCat("budgets { ", budgets, " } timeouts { shard_call_ms: 300000 }")},
        StrictModel().DebugString());
    ASSERT_FALSE(HasFatalFailure());
    api_ = std::make_unique<Api>(cluster_->address());
  }
  void TearDown() override {
    if (cluster_ != nullptr) cluster_->ResumeShard(0);
    for (std::thread& thread : stuck_) thread.join();
  }

  grpc::Status Lookup(const Api& api, absl::Duration deadline = absl::Minutes(4)) const {
    v1::LookupRequest request = GoodLookup(model_.id);
    request.set_inference(true);
    v1::LookupResponse response;
    grpc::ClientContext context;
    Prepare(&context);
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    return api.embedding->Lookup(&context, request, &response);
  }
  // Lookups that stay in work until shard 0 is resumed; returns when the coordinator has them.
  void GetStuck(int lookups) {
    if (stuck_.empty()) cluster_->SuspendShard(0);
    for (int i = 0; i < lookups; ++i) {
      stuck_.emplace_back([this] {
        const grpc::Status status = Lookup(*api_);
        EXPECT_TRUE(status.ok()) << status.error_message();
      });
    }
    const auto all = static_cast<double>(stuck_.size());
    ASSERT_TRUE(Eventually([&] { return InFlight() == all; }));
  }
  void GetUnstuck() {
    cluster_->ResumeShard(0);
    for (std::thread& thread : stuck_) thread.join();
    stuck_.clear();
  }
  double InFlight() const {
    return MetricSum(FetchMetrics(cluster_->http_address()), "emberd_in_flight_requests",
                     "server=\"coordinator-0\"");
  }

  std::unique_ptr<Api> api_;
  std::vector<std::thread> stuck_;
};

TEST_F(QuotaTest, RequestsOfOneClient) {
  StartWith("client_requests: 2");
  GetStuck(2);
  const Api other_connection(cluster_->address());
  const grpc::Status refused = Lookup(other_connection);
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(refused.error_message(),
              AllOf(HasSubstr("client 127.0.0.1 has 2 requests in progress"),
                    HasSubstr("budgets.client_requests is 2")));
  GetUnstuck();
  EXPECT_TRUE(Lookup(*api_).ok());
}

TEST_F(QuotaTest, BytesOfOneClient) {
  constexpr size_t kAnswer = 3 * (4 + 4 + 3) * sizeof(float);
  // Room for one request with its answer, and not quite for a second one: Lookup's has two bytes
  // more.
  const size_t limit = 2 * GoodLookup(1).ByteSizeLong() + kAnswer;
  StartWith(absl::StrCat("client_in_flight_bytes: ", limit));
  GetStuck(1);
  const grpc::Status refused = Lookup(*api_);
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(
      refused.error_message(),
      AllOf(HasSubstr("a request needs"),
            HasSubstr(absl::StrCat("of client 127.0.0.1's budgets.client_in_flight_bytes = ", limit,
                                   " are free"))));
  GetUnstuck();
  // The answer counts until it has been sent, which may be a moment after it was received.
  const grpc::Status status = Await([&] { return Lookup(*api_); });
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(QuotaTest, WaitingRequests) {
  StartWith("max_waiting_requests: 3 client_requests: 1000");
  // One by one, for a burst would not fit: 32 get a thread each, three wait.
  for (int i = 0; i < 35 && !HasFatalFailure(); ++i) GetStuck(1);
  const grpc::Status refused = Lookup(*api_);
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_THAT(refused.error_message(), AllOf(HasSubstr("3 requests wait already"),
                                             HasSubstr("budgets.max_waiting_requests")));
}

TEST_F(QuotaTest, CallsOnOneConnection) {
  StartWith("connection_calls: 1");
  GetStuck(1);
  // The client's own gRPC waits with the second call; other connections do not notice.
  EXPECT_EQ(Lookup(*api_, absl::Seconds(1)).error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_EQ(InFlight(), 1);
  const Api other_connection(cluster_->address());
  v1::GetLimitsRequest request;
  request.set_model("strict");
  v1::GetLimitsResponse response;
  grpc::ClientContext context;
  Prepare(&context);
  const grpc::Status status = other_connection.admin->GetLimits(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(QuotaTest, TrainStreams) {
  StartWith("max_train_streams: 1");
  absl::StatusOr<std::unique_ptr<client::TrainStream>> first =
      client_->Train(model_, {.group = "first"});
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status refused = client_->Train(model_, {.group = "second"}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("budgets.max_train_streams"));
  first->reset();
  // The threads of a stream are free a moment after its end.
  const absl::Status status =
      Await([&] { return client_->Train(model_, {.group = "second"}).status(); });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(QuotaTest, TrainStreamsOfOneClient) {
  StartWith("client_requests: 1");
  absl::StatusOr<std::unique_ptr<client::TrainStream>> first =
      client_->Train(model_, {.group = "first"});
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status refused = client_->Train(model_, {.group = "second"}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("budgets.client_requests is 1"));
}

}  // namespace quota_test
}  // namespace emberd::testing
