// A retry must not train twice. A failure here means that an update whose reply was lost is applied
// again when the client repeats it, or that a repeat is refused although it was applied.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace exactly_once_test {

class ExactlyOnceTest : public ClusterFixture {
 protected:
  void SetUp() override { StartCluster({.coordinators = 2}, MixedModel("mixed")); }

  absl::StatusOr<client::LookupResult> Lookup(uint64_t seed) {
    const std::vector<OwnedIds> batch = MixedBatch(seed, 20);
    return client_->Lookup(model_, Features(batch));
  }
  absl::StatusOr<client::ApplyResult> Apply(const client::LookupResult& found, uint64_t sequence) {
    client::ApplyOptions options;
    options.sequence = sequence;
    const std::vector<std::vector<float>> gradients = MixedGradients(1, found);
    return client_->ApplyGradients(model_, found.batch, Gradients(found, gradients), options);
  }
};

TEST_F(ExactlyOnceTest, ARepeatedApplyIsAnsweredFromTheRecord) {
  absl::StatusOr<client::LookupResult> found = Lookup(1);
  ASSERT_TRUE(found.ok()) << found.status();
  const std::string before = TableDigest();
  absl::StatusOr<client::ApplyResult> first = Apply(*found, 100);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->replayed);
  EXPECT_GT(first->rows_updated, 0);
  const std::string after = TableDigest();
  EXPECT_NE(after, before);
  // More steps in between do not make it forget.
  ASSERT_TRUE(TrainStep(*client_, model_, 2, 20).ok());
  const std::string later = TableDigest();
  for (int i = 0; i < 3; ++i) {
    absl::StatusOr<client::ApplyResult> again = Apply(*found, 100);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(again->replayed);
    EXPECT_EQ(again->rows_updated, first->rows_updated);
  }
  EXPECT_EQ(TableDigest(), later);
}

TEST_F(ExactlyOnceTest, AnotherSequenceDoesNotApplyTheBatchAgain) {
  absl::StatusOr<client::LookupResult> found = Lookup(1);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(Apply(*found, 100).ok());
  const std::string after = TableDigest();
  EXPECT_EQ(Apply(*found, 101).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(TableDigest(), after);
}

// A trainer that lost its batch looks up again and keeps the number: the first try may have been
// made after all.
TEST_F(ExactlyOnceTest, ASequenceNamesOneUpdateWhateverTheBatch) {
  absl::StatusOr<client::LookupResult> first = Lookup(1);
  absl::StatusOr<client::LookupResult> second = Lookup(1);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(Apply(*first, 100).ok());
  const std::string after = TableDigest();
  absl::StatusOr<client::ApplyResult> again = Apply(*second, 100);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(TableDigest(), after);
}

TEST_F(ExactlyOnceTest, ASequenceNamesOneRequestOnly) {
  absl::StatusOr<client::LookupResult> found = Lookup(1);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(Apply(*found, 100).ok());
  const std::string after = TableDigest();
  client::AssignOptions options;
  options.sequence = 100;
  const absl::Status status =
      client_->AssignRows(model_, "users", {3}, std::vector<float>(16, 1.0f), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(TableDigest(), after);
}

// Copies of one request that arrive at the same time, as after a client has given up waiting and
// tried again.
TEST_F(ExactlyOnceTest, CopiesInFlightTogetherAreAppliedOnce) {
  for (uint64_t round = 0; round < 20; ++round) {
    absl::StatusOr<client::LookupResult> found = Lookup(round);
    ASSERT_TRUE(found.ok()) << found.status();
    std::vector<absl::StatusOr<client::ApplyResult>> results(4, absl::UnknownError("no answer"));
    std::vector<std::thread> threads;
    for (auto& result : results) {
      threads.emplace_back([&] { result = Apply(*found, 1000 + round); });
    }
    for (std::thread& thread : threads) thread.join();
    int fresh = 0;
    for (const auto& result : results) {
      ASSERT_TRUE(result.ok()) << result.status();
      fresh += result->replayed ? 0 : 1;
    }
    EXPECT_EQ(fresh, 1);
  }
}

TEST_F(ExactlyOnceTest, SequencesMayArriveOutOfOrder) {
  absl::StatusOr<client::LookupResult> first = Lookup(1);
  absl::StatusOr<client::LookupResult> second = Lookup(2);
  ASSERT_TRUE(first.ok() && second.ok());
  for (const auto& [found, sequence] : {std::pair(&*second, 201), std::pair(&*first, 200)}) {
    absl::StatusOr<client::ApplyResult> applied = Apply(*found, sequence);
    ASSERT_TRUE(applied.ok()) << applied.status();
    EXPECT_FALSE(applied->replayed);
  }
}

TEST_F(ExactlyOnceTest, ARepeatedAssignIsNotDoneAgain) {
  client::AssignOptions options;
  options.sequence = 7;
  const std::vector<float> old_row(16, 1.0f), new_row(16, 2.0f);
  absl::StatusOr<bool> replayed = client_->AssignRows(model_, "users", {3}, old_row, options);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_FALSE(*replayed);
  ASSERT_TRUE(client_->AssignRows(model_, "users", {3}, new_row).ok());
  replayed = client_->AssignRows(model_, "users", {3}, old_row, options);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_TRUE(*replayed);
  // Other values are another request, which must not be taken for made.
  EXPECT_EQ(client_->AssignRows(model_, "users", {3}, new_row, options).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ReadRows(model_, "users", {3})->values, new_row);
}

// The record of assignments lies in the shards, so any coordinator can answer a repeat.
TEST_F(ExactlyOnceTest, ARepeatedAssignThroughAnotherCoordinatorIsNotDoneAgain) {
  client::ClientOptions options = cluster_->client_options();
  options.client_id = client_->client_id();
  options.addresses = {cluster_->address(1)};
  absl::StatusOr<std::unique_ptr<client::Client>> other = client::Client::Connect(options);
  ASSERT_TRUE(other.ok()) << other.status();
  absl::StatusOr<client::Model> model = (*other)->DeclareModel(MixedModel("mixed"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->id, model_.id);
  EXPECT_FALSE(model->created);
  client::AssignOptions assign;
  assign.sequence = 7;
  const std::vector<float> old_row(16, 1.0f), new_row(16, 2.0f);
  ASSERT_TRUE(client_->AssignRows(model_, "users", {3}, old_row, assign).ok());
  ASSERT_TRUE(client_->AssignRows(model_, "users", {3}, new_row).ok());
  absl::StatusOr<bool> replayed = (*other)->AssignRows(*model, "users", {3}, old_row, assign);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_TRUE(*replayed);
  EXPECT_EQ(client_->ReadRows(model_, "users", {3})->values, new_row);
}

}  // namespace exactly_once_test
}  // namespace emberd::testing
