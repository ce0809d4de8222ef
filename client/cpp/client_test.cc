#include "client/cpp/client.h"

#include <atomic>
#include <limits>
#include <set>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/testing/fake_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace client_test {

using ::emberd::client::testing::FakeService;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

const grpc::Status kLost(grpc::UNAVAILABLE, "the reply was lost");

class ClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ClientOptions options;
    options.addresses = {service_.address()};
    options.initial_backoff = absl::Milliseconds(2);
    options.max_backoff = absl::Milliseconds(10);
    options.max_attempts = 4;
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ModelDescription description;
    description.name = "m";
    description.tables.push_back({.name = "t", .vocabulary_size = 10, .embedding_dim = 2});
    description.features.push_back({.name = "x", .table = "t"});
    absl::StatusOr<Model> model = client_->DeclareModel(description);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

  absl::StatusOr<LookupResult> Lookup(LookupOptions options = {}) {
    return client_->Lookup(model_, {{"x", DenseIds{ids_}}}, options);
  }
  absl::StatusOr<ApplyResult> Apply(const BatchHandle& batch, ApplyOptions options = {}) {
    return client_->ApplyGradients(model_, batch, {{"x", gradient_, 3}}, options);
  }

  const std::vector<int64_t> ids_ = {4, 5, 6};
  const std::vector<float> gradient_ = {1, 2, 3, 4, 5, 6};
  FakeService service_;
  std::unique_ptr<Client> client_;
  Model model_;
};

TEST_F(ClientTest, AStep) {
  absl::StatusOr<LookupResult> found = Lookup();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->batch.value, 1u);
  EXPECT_THAT(found->Find("x")->values, ElementsAre(0, 0, 1, 1, 2, 2));
  EXPECT_EQ(found->statistics.num_minibatches, 1);
  ASSERT_THAT(found->statistics.stacks, SizeIs(1));
  EXPECT_EQ(found->statistics.stacks[0].ids, 17);
  EXPECT_EQ(found->statistics.stacks[0].pad_cells, 7);
  EXPECT_EQ(found->statistics.stacks[0].bytes_gathered, 544);
  EXPECT_EQ(found->statistics.stacks[0].activation_bytes_per_sparsecore, 96);
  EXPECT_EQ(found->statistics.stacks[0].imbalance, 1.5);
  EXPECT_EQ(found->statistics.stacks[0].limit_ids_per_partition, 20);
  EXPECT_EQ(found->statistics.stacks[0].limit_unique_ids_per_partition, 10);
  absl::StatusOr<ApplyResult> applied = Apply(found->batch);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->rows_updated, 1);
  EXPECT_FALSE(applied->replayed);
  EXPECT_EQ(service_.applies()[0].batch_handle(), 1u);
  EXPECT_TRUE(client_->ReleaseBatch(model_, found->batch).ok());
  EXPECT_EQ(service_.releases()[0].batch_handle(), 1u);
}

TEST_F(ClientTest, DeclareTakesTextAndDescriptions) {
  EXPECT_EQ(model_.id, 42u);
  EXPECT_TRUE(model_.created);
  absl::StatusOr<Model> again = client_->DeclareModel(
      "name: \"m\" tables { name: \"t\" vocabulary_size: 10 embedding_dim: 2 } "
      "features { name: \"x\" table: \"t\" }");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->created);
  absl::StatusOr<Model> found = client_->DescribeModel("m");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->FindFeature("x")->embedding_dim, 2);
  EXPECT_EQ(client_->DescribeModel("other").status().code(), absl::StatusCode::kNotFound);
  // What is wrong already here is not sent.
  EXPECT_EQ(client_->DeclareModel("nonsense").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->DeclareModelFile("/does/not/exist").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_THAT(service_.declares(), SizeIs(2));
}

// The fault this would catch: an update sent again under a new number after its reply was lost is
// applied twice.
TEST_F(ClientTest, ARetryKeepsItsSequence) {
  absl::StatusOr<LookupResult> found = Lookup();
  ASSERT_TRUE(found.ok()) << found.status();
  service_.AddFault({kLost, /*after_the_work=*/true});
  service_.AddFault({kLost, /*after_the_work=*/false});
  absl::StatusOr<ApplyResult> applied = Apply(found->batch);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_TRUE(applied->replayed);
  const std::vector<v1::ApplyGradientsRequest> sent = service_.applies();
  ASSERT_THAT(sent, SizeIs(3));
  for (const v1::ApplyGradientsRequest& request : sent) {
    EXPECT_EQ(request.SerializeAsString(), sent[0].SerializeAsString());
  }
  EXPECT_EQ(sent[0].mutation().client_id(), client_->client_id());
  EXPECT_EQ(service_.applied(), 1);
  // The next update is another one.
  ASSERT_TRUE(Apply(found->batch).ok());
  EXPECT_EQ(service_.applied(), 2);
}

TEST_F(ClientTest, TheCallerCanRepeatAnUpdateWithItsSequence) {
  absl::StatusOr<LookupResult> found = Lookup();
  ASSERT_TRUE(found.ok()) << found.status();
  ApplyOptions options;
  options.sequence = client_->NextSequence();
  for (int i = 0; i < 4; ++i) service_.AddFault({kLost, /*after_the_work=*/true});
  EXPECT_EQ(Apply(found->batch, options).status(), absl::UnavailableError("the reply was lost"));
  EXPECT_THAT(service_.applies(), SizeIs(4));
  absl::StatusOr<ApplyResult> applied = Apply(found->batch, options);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_TRUE(applied->replayed);
  EXPECT_EQ(service_.applied(), 1);
}

TEST_F(ClientTest, OnlyUnavailableIsRetried) {
  for (int code = 1; code <= 16; ++code) {
    const size_t before = service_.applies().size();
    const grpc::Status status(static_cast<grpc::StatusCode>(code), "as the server said");
    service_.AddFault({status});
    absl::StatusOr<ApplyResult> applied = Apply({1, 0});
    if (code == grpc::UNAVAILABLE) {
      EXPECT_TRUE(applied.ok()) << applied.status();
      continue;
    }
    EXPECT_EQ(applied.status(),
              absl::Status(static_cast<absl::StatusCode>(code), "as the server said"));
    EXPECT_EQ(service_.applies().size(), before + 1) << code;
  }
}

TEST_F(ClientTest, ADeadlineEndsACall) {
  service_.AddFault({.delay = absl::Seconds(30)});
  LookupOptions options;
  options.deadline = absl::Milliseconds(50);
  EXPECT_EQ(Lookup(options).status().code(), absl::StatusCode::kDeadlineExceeded);
  service_.ClearFaults();
  EXPECT_TRUE(Lookup().ok());
}

TEST_F(ClientTest, ADeadlineThatHasPassedIsNotTheUsualOne) {
  LookupOptions options;
  options.deadline = absl::Milliseconds(-1);
  EXPECT_EQ(Lookup(options).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ClientTest, WhatIsKeptForAnotherClientIsRefused) {
  const Kept elsewhere = {.handle = 7, .coordinator = 2};
  const auto answer = client_->programs().Call("GetMetrics", "regex: 'x'", {}, &elsewhere);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument) << answer.status();
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("of coordinator 2"));
}

TEST_F(ClientTest, CancelCallsEndsCallsOfOtherThreads) {
  service_.AddFault({.delay = absl::Seconds(30)});
  absl::Status status;
  std::atomic<bool> done = false;
  std::thread caller([&] {
    status = Lookup().status();
    done = true;
  });
  while (!done) {  // the call may not have begun when the first one comes
    client_->CancelCalls();
    absl::SleepFor(absl::Milliseconds(5));
  }
  caller.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  service_.ClearFaults();
  EXPECT_TRUE(Lookup().ok());
}

TEST_F(ClientTest, ThreadsShareAClient) {
  constexpr int kThreads = 4, kSteps = 25;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kSteps; ++i) {
        absl::StatusOr<LookupResult> found = Lookup();
        ASSERT_TRUE(found.ok()) << found.status();
        ASSERT_TRUE(Apply(found->batch).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(service_.applied(), kThreads * kSteps);
}

TEST_F(ClientTest, WrongAnswersAreInternalErrors) {
  service_.damage_lookup = [](v1::LookupResponse* r) {
    r->mutable_activations(0)->mutable_activation()->mutable_data()->pop_back();
  };
  EXPECT_EQ(Lookup().status().code(), absl::StatusCode::kInternal);
  service_.damage_read = [](v1::ReadRowsResponse* r) { r->mutable_values()->set_shape(0, 7); };
  EXPECT_EQ(client_->ReadRows(model_, "t", ids_).status().code(), absl::StatusCode::kInternal);
  service_.damage_read = [](v1::ReadRowsResponse* r) { r->clear_values(); };
  EXPECT_EQ(client_->ReadRows(model_, "t", ids_).status().code(), absl::StatusCode::kInternal);
  service_.damage_declare = [](v1::DeclareModelResponse* r) { r->clear_plan(); };
  EXPECT_EQ(client_
                ->DeclareModel("name: \"m\" tables { name: \"t\" vocabulary_size: 10 "
                               "embedding_dim: 2 } features { name: \"x\" table: \"t\" }")
                .status()
                .code(),
            absl::StatusCode::kInternal);
}

TEST_F(ClientTest, ABatchMustComeFromThisClient) {
  EXPECT_EQ(Apply({0, 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Apply({1, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ReleaseBatch(model_, {1, -1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(service_.applies(), SizeIs(0));
}

TEST_F(ClientTest, ReadAndAssignRows) {
  absl::StatusOr<RowValues> rows = client_->ReadRows(model_, "t", {3, 3});
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->dim, 2);
  EXPECT_THAT(rows->values, ElementsAre(3, 3.01f, 3, 3.01f));
  service_.AddFault({kLost, /*after_the_work=*/true});
  absl::StatusOr<bool> replayed = client_->AssignRows(model_, "t", {3, 4}, {7, 8, 9, 10});
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_TRUE(*replayed);
  EXPECT_THAT(client_->ReadRows(model_, "t", {4, 3})->values, ElementsAre(9, 10, 7, 8));
  EXPECT_EQ(client_->AssignRows(model_, "t", {3, 4}, {7, 8, 9}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// The fault this would catch: rows delivered twice, or left out, when a stream breaks in the
// middle.
TEST_F(ClientTest, ABrokenExportGoesOnWhereItEnded) {
  service_.broken_exports = 2;
  std::vector<float> all;
  const absl::Status status = client_->ExportTable(
      model_, "t", [&](int64_t first_row, absl::Span<const float> values, int64_t dim) {
        EXPECT_EQ(first_row * dim, static_cast<int64_t>(all.size()));
        all.insert(all.end(), values.begin(), values.end());
        return absl::OkStatus();
      });
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_THAT(all, SizeIs(20));
  for (int row = 0; row < 10; ++row) EXPECT_EQ(all[2 * row], row);
  EXPECT_THAT(service_.exports(), SizeIs(3));
  EXPECT_EQ(service_.exports()[2].first_row(), 6);
}

TEST_F(ClientTest, AnExportOfAPart) {
  std::vector<int64_t> firsts;
  ExportOptions options;
  options.first_row = 4;
  options.row_count = 5;
  const auto sink = [&](int64_t first_row, absl::Span<const float> values, int64_t) {
    firsts.push_back(first_row);
    return absl::OkStatus();
  };
  ASSERT_TRUE(client_->ExportTable(model_, "t", sink, options).ok());
  EXPECT_THAT(firsts, ElementsAre(4, 7));
  options.row_count = 7;
  EXPECT_EQ(client_->ExportTable(model_, "t", sink, options).code(), absl::StatusCode::kOutOfRange);
  // What this would catch, under UndefinedBehaviorSanitizer: a difference that overflows.
  options.first_row = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(client_->ExportTable(model_, "t", sink, options).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(client_->ExportTable(model_, "u", sink).code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientTest, AnExportStopsWithItsSink) {
  int calls = 0;
  const absl::Status status =
      client_->ExportTable(model_, "t", [&](int64_t, absl::Span<const float>, int64_t) {
        ++calls;
        return absl::UnavailableError("the disk is full");
      });
  EXPECT_EQ(status, absl::UnavailableError("the disk is full"));
  EXPECT_EQ(calls, 1);
}

TEST_F(ClientTest, AnExportWithAGapIsAnInternalError) {
  const auto ignore = [](int64_t, absl::Span<const float>, int64_t) { return absl::OkStatus(); };
  service_.damage_export = [](v1::ExportTableResponse* part) {
    if (part->first_row() > 0) part->set_first_row(part->first_row() + 1);
  };
  EXPECT_EQ(client_->ExportTable(model_, "t", ignore).code(), absl::StatusCode::kInternal);
  service_.damage_export = [](v1::ExportTableResponse* part) {
    part->mutable_values()->set_shape(0, 4);
  };
  EXPECT_EQ(client_->ExportTable(model_, "t", ignore).code(), absl::StatusCode::kInternal);
}

// The fault this would catch: rows of a model as it was, and as it is after a reset, in one table.
TEST_F(ClientTest, AnExportOfTwoHistoriesIsAborted) {
  service_.broken_exports = 1;
  uint64_t history = 0;
  service_.damage_export = [&](v1::ExportTableResponse* part) { part->set_history(++history); };
  int64_t rows = 0;
  const absl::Status status =
      client_->ExportTable(model_, "t", [&](int64_t, absl::Span<const float> values, int64_t dim) {
        rows += static_cast<int64_t>(values.size()) / dim;
        return absl::OkStatus();
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(rows, 3);
  EXPECT_THAT(service_.exports(), SizeIs(2));
}

// The fault this would catch: a group that began anew between two tries is dropped by the second.
TEST_F(ClientTest, WhatDropsIsNotTriedAgainHoweverItIsCalled) {
  service_.AddFault({kLost, /*after_the_work=*/true});
  const auto dropped = client_->programs().Call("DropGroup", "model: 'm' group: 'g'");
  EXPECT_EQ(dropped.status().code(), absl::StatusCode::kUnavailable) << dropped.status();
  service_.AddFault({kLost, /*after_the_work=*/true});
  EXPECT_EQ(client_->DropGroup("m", "g").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(client_->DropGroup("m", "g").ok());
}

TEST_F(ClientTest, Status) {
  absl::StatusOr<ClusterStatus> status = client_->GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->version, "0.0-fake");
  EXPECT_EQ(status->batches, 3);
  EXPECT_EQ(status->models[0].name, "m");
  EXPECT_EQ(status->shards[0].address, "127.0.0.1:1");
  EXPECT_FALSE(status->shards[0].reachable);
}

TEST(ClientConnectTest, ChecksItsOptions) {
  EXPECT_EQ(Client::Connect({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(UuidTest, IsOneAndIsNew) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string uuid = RandomUuid();
    EXPECT_THAT(uuid, MatchesRegex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-"
                                   "[0-9a-f]{12}"));
    EXPECT_TRUE(seen.insert(uuid).second);
  }
}

}  // namespace client_test
}  // namespace emberd::client
