#include "server/shard/mutation_record.h"

#include <gtest/gtest.h>

namespace emberd::server {
namespace mutation_record_test {

TEST(MutationRecordTest, AnswersARepeatFromTheRecord) {
  MutationRecord record;
  const Mutation mutation{"a", 1, 77};
  ASSERT_FALSE(record.Begin(mutation)->has_value());
  record.Finish(mutation, {5, 2});
  EXPECT_EQ(record.Begin(mutation)->value(), (RowCounts{5, 2}));
  EXPECT_FALSE(record.Begin({"b", 1, 77})->has_value()) << "another client counts for itself";
}

TEST(MutationRecordTest, RefusesARepeatWhileTheFirstIsInProgress) {
  MutationRecord record;
  const Mutation mutation{"a", 1, 77};
  ASSERT_TRUE(record.Begin(mutation).ok());
  EXPECT_EQ(record.Begin(mutation).status().code(), absl::StatusCode::kUnavailable);
}

TEST(MutationRecordTest, AnAbortedRequestMayComeAgain) {
  MutationRecord record;
  const Mutation mutation{"a", 1, 77};
  ASSERT_TRUE(record.Begin(mutation).ok());
  record.Abort(mutation);
  EXPECT_FALSE(record.Begin(mutation)->has_value());
}

TEST(MutationRecordTest, ANumberBelongsToOneRequest) {
  MutationRecord record;
  ASSERT_TRUE(record.Begin({"a", 1, 77}).ok());
  record.Finish({"a", 1, 77}, {});
  EXPECT_EQ(record.Begin({"a", 1, 78}).status().code(), absl::StatusCode::kInvalidArgument);
}

// A forgotten number must never look new: that would apply an old retry twice.
TEST(MutationRecordTest, NumbersOlderThanTheRecordAreRefused) {
  MutationRecord record({.per_client = 2, .clients = 10});
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    ASSERT_TRUE(record.Begin({"a", sequence, 0}).ok());
    record.Finish({"a", sequence, 0}, {static_cast<int64_t>(sequence), 0});
  }
  EXPECT_EQ(record.Begin({"a", 1, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(record.Begin({"a", 2, 0})->value().updated, 2);
}

TEST(MutationRecordTest, ForgetsTheLeastRecentClientFirst) {
  MutationRecord record({.per_client = 2, .clients = 2});
  for (const char* client : {"a", "b"}) {
    ASSERT_TRUE(record.Begin({client, 1, 0}).ok());
    record.Finish({client, 1, 0}, {9, 0});
  }
  ASSERT_TRUE(record.Begin({"a", 1, 0})->has_value());
  ASSERT_FALSE(record.Begin({"c", 1, 0})->has_value());
  EXPECT_TRUE(record.Begin({"a", 1, 0})->has_value());
}

TEST(MutationRecordTest, ChecksTheIdOfAClient) {
  EXPECT_TRUE(CheckMutation({"a", 1, 0}).ok());
  EXPECT_EQ(CheckMutation({"", 1, 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckMutation({std::string(65, 'x'), 1, 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckMutation({"a", 0, 0}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace mutation_record_test
}  // namespace emberd::server
