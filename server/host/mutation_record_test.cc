#include <gtest/gtest.h>

#include "server/host/mutation_votes.h"

namespace emberd::host {
namespace mutation_record_test {

TEST(MutationRecordTest, AnswersARepeatFromTheRecord) {
  MutationRecord record;
  const Mutation mutation{"a", 1, 77};
  ASSERT_FALSE(record.Find(mutation)->has_value());
  record.Finish(mutation, {5, 2});
  EXPECT_EQ(record.Find(mutation)->value(), (RowCounts{5, 2}));
  EXPECT_FALSE(record.Find({"b", 1, 77})->has_value()) << "another client counts for itself";
}

TEST(MutationRecordTest, ANumberBelongsToOneRequest) {
  MutationRecord record;
  record.Finish({"a", 1, 77}, {});
  EXPECT_EQ(record.Find({"a", 1, 78}).status().code(), absl::StatusCode::kInvalidArgument);
}

// A forgotten number must never look new: that would apply an old retry twice.
TEST(MutationRecordTest, NumbersOlderThanTheRecordAreRefused) {
  MutationRecord record({.per_client = 2, .clients = 10});
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    record.Finish({"a", sequence, 0}, {static_cast<int64_t>(sequence), 0});
  }
  EXPECT_EQ(record.Find({"a", 1, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(record.Find({"a", 2, 0})->value().updated, 2);
}

// Would catch: a vote that another shard holds, on which nobody can decide any more, for its client
// has made more changes since than a client's part of the record holds.
TEST(MutationRecordTest, YoungOnesAreKeptWhileThereIsPlentyOfRoom) {
  MutationRecord record(
      {.per_client = 2, .young = absl::InfiniteDuration(), .clients = 10, .entries = 20});
  record.Finish({"quiet", 1, 0}, {7, 0});
  uint64_t sequence = 0;
  while (sequence < 9) record.Finish({"a", ++sequence, 0}, {});
  const auto first = record.Find({"a", 1, 0});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->has_value());
  // They take no place of another client's young ones.
  while (sequence < 100) record.Finish({"a", ++sequence, 0}, {});
  EXPECT_EQ(record.Find({"a", 1, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(record.Find({"a", 92, 0})->has_value());
  EXPECT_TRUE(record.Find({"quiet", 1, 0})->has_value());
}

// Would catch: old results of clients that are long gone, as on any shard that has run for months,
// in whose place no young ones are kept.
TEST(MutationRecordTest, OldOnesOfQuietClientsTakeHalfOfTheRoom) {
  for (const absl::Duration young : {absl::ZeroDuration(), absl::InfiniteDuration()}) {
    MutationRecord record({.per_client = 2, .young = young, .clients = 100, .entries = 20});
    for (const char* client : {"a", "b", "c", "d", "e", "f", "g"}) {
      for (const uint64_t sequence : {1, 2}) record.Finish({client, sequence, 0}, {});
    }
    const bool old = young == absl::ZeroDuration();
    EXPECT_EQ(record.Find({"b", 2, 0}).ok(), !old);
    EXPECT_EQ(record.Find({"d", 2, 0}).ok(), true);
    EXPECT_TRUE(record.Find({"g", 1, 0})->has_value());
  }
}

// Another model's may be all that is left of a client: after a restore into a fresh record, its old
// numbers of this model must not look new.
TEST(MutationRecordTest, ACheckpointTellsWhatIsForgotten) {
  MutationRecord record({.per_client = 2, .clients = 10});
  record.Finish({"a", 1, 0}, {}, /*model_id=*/5);
  record.Finish({"a", 2, 0}, {}, /*model_id=*/6);
  record.Finish({"a", 3, 0}, {}, /*model_id=*/6);
  record.Finish({"b", 1, 0}, {}, /*model_id=*/6);
  MutationRecord::Clients saved;
  record.Save(5, &saved);
  ASSERT_EQ(saved.size(), 1) << "nothing of b is of the model, or forgotten";
  MutationRecord fresh;
  fresh.Restore(5, saved);
  EXPECT_EQ(fresh.Find({"a", 1, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(fresh.Find({"a", 2, 0})->has_value());
}

// So must be those of a client that made room for others.
TEST(MutationRecordTest, ACheckpointTellsWhoIsForgotten) {
  MutationRecord record({.per_client = 2, .clients = 1});
  record.Finish({"a", 4, 0}, {}, /*model_id=*/5);
  record.Finish({"b", 1, 0}, {}, /*model_id=*/5);
  MutationRecord::Clients saved;
  record.Save(5, &saved);
  for (const bool known : {false, true}) {  // by what it has done to another model
    MutationRecord fresh;
    if (known) fresh.Finish({"a", 1, 0}, {}, /*model_id=*/6);
    fresh.Restore(5, saved);
    EXPECT_EQ(fresh.Find({"a", 4, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_FALSE(fresh.Find({"a", 5, 0})->has_value());
    EXPECT_TRUE(fresh.Find({"b", 1, 0})->has_value());
  }
}

// Would catch: a number that the record has twice, the second time without an entry, which ends the
// process.
TEST(MutationRecordTest, ANumberThatARestoreBringsMeanwhileIsKeptOnce) {
  MutationRecord record({.per_client = 2});
  record.Finish({"a", 1, 5}, {}, /*model_id=*/5);
  MutationRecord::Clients saved;
  record.Save(5, &saved);
  record.Restore(5, {});     // a restore begins, and a change of another model gets the number
  record.Restore(5, saved);  // it ends, before that change does
  for (const uint64_t sequence : {1, 2, 3, 4}) record.Finish({"a", sequence, 6}, {}, 6);
  MutationRecord::Clients now;
  record.Save(6, &now);
  ASSERT_EQ(now.size(), 1);
  EXPECT_EQ(now[0].mutations_size(), 2);
  EXPECT_TRUE(record.Find({"a", 4, 6})->has_value());
}

TEST(MutationRecordTest, ForgetsTheLeastRecentClientFirst) {
  MutationRecord record({.per_client = 2, .clients = 2});
  for (const char* client : {"a", "b"}) {
    record.Finish({client, 1, 0}, {9, 0});
  }
  ASSERT_TRUE(record.Find({"a", 1, 0})->has_value());
  record.Finish({"c", 1, 0}, {9, 0});
  EXPECT_TRUE(record.Find({"a", 1, 0})->has_value());
  EXPECT_EQ(record.Find({"b", 1, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(MutationRecordTest, ChecksTheIdOfAClient) {
  EXPECT_TRUE(CheckMutation({"a", 1, 0}).ok());
  EXPECT_EQ(CheckMutation({"", 1, 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckMutation({std::string(65, 'x'), 1, 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckMutation({"a", 0, 0}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace mutation_record_test
}  // namespace emberd::host
