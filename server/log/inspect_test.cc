#include "server/log/inspect.h"

#include <chrono>
#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "server/files/files.h"
#include "server/log/log_files.h"
#include "server/log/testing/records.h"
#include "server/log/testing/sample.h"

namespace emberd::log {
namespace inspect_test {

using internal::v1::LogRecord;
using ::testing::ElementsAre;

TEST(InspectTest, FindsTheLogsOfAShardAndOfAllShards) {
  const TempDir dir = *TempDir::Create();
  for (const int shard : {0, 1, 10}) {
    WriteSampleLog(dir.Path(absl::StrCat("shard-", absl::Dec(shard, absl::kZeroPad4), "/log")),
                   shard, 11);
  }
  std::filesystem::create_directories(dir.Path("shard-0002/log"));
  std::filesystem::create_directories(dir.Path("checkpoints/shard-0003"));
  EXPECT_THAT(*FindLogs(dir.path()),
              ElementsAre(dir.Path("shard-0000/log"), dir.Path("shard-0001/log"),
                          dir.Path("shard-0010/log")));
  EXPECT_THAT(*FindLogs(dir.Path("shard-0010")), ElementsAre(dir.Path("shard-0010/log")));
  EXPECT_THAT(*FindLogs(dir.Path("shard-0010/log")), ElementsAre(dir.Path("shard-0010/log")));
  EXPECT_EQ(FindLogs(dir.Path("shard-0002")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FindLogs(dir.Path("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST(InspectTest, ShowsAndVerifiesTheSameRecords) {
  const TempDir dir = *TempDir::Create();
  WriteSampleLog(dir.path(), 2, 4);
  std::vector<std::string> shown;
  const LogSummary summary = *ShowLog(dir.path(), [&](const LogEntry& entry) {
    shown.push_back(absl::StrCat(entry.sequence, " ", entry.kind, " ", entry.model, " ",
                                 entry.subject, " ", entry.details));
    return absl::OkStatus();
  });
  EXPECT_THAT(shown, ElementsAre("1 state   0 models, 0 clients with 0 changes, 0 votes, 0 groups",
                                 "2 model_made ads  history 0000000000000000",
                                 "3 vote ads trainer/17 update", "4 decision ads trainer/17 commit",
                                 "5 part 0000000000000008 run/3 rank 0 of 2, generation 0"));
  const LogSummary verified = *VerifyLog(dir.path());
  for (const LogSummary& each : {summary, verified}) {
    EXPECT_EQ(each.records, 5u);
    EXPECT_EQ(each.blobs, 1u);
    EXPECT_GT(each.bytes, 5000);
    EXPECT_EQ(each.next_sequence, 6u);
    EXPECT_EQ(each.shard, 2);
    EXPECT_EQ(each.shards, 4);
    EXPECT_EQ(each.fsync, v1::StorageConfig::INTERVAL);
  }
  EXPECT_EQ(summary.bytes, verified.bytes);
  ASSERT_TRUE(files::WriteFileWhole(dir.path(), BlobsName(1), std::string(5000, 'x')).ok());
  EXPECT_TRUE(ShowLog(dir.path(), [](const LogEntry&) { return absl::OkStatus(); }).ok());
  EXPECT_EQ(VerifyLog(dir.path()).status().code(), absl::StatusCode::kDataLoss);
}

// A vote that was open when the first segment began.
TEST(InspectTest, VerifiesWhatTheFirstStateHolds) {
  const TempDir dir = *TempDir::Create();
  LogOptions options{.folder = dir.path(), .fsync = v1::StorageConfig::NEVER};
  {
    const auto writer = *LogWriter::Open(options, 1, 1, StateRecord(1));
    const auto blob = AppendBytes(*writer, BlobBytes(1, 1000));
    ASSERT_TRUE(blob.ok()) << blob.status();
    LogRecord state = StateRecord(2);
    *state.mutable_state()->add_votes()->mutable_vote() = VoteRecord(1, *blob).vote();
    state.mutable_state()->set_oldest_blob_segment(blob->segment());
    ASSERT_TRUE(writer->StartSegment(state).ok());
    ASSERT_TRUE(writer->DropBefore(2).ok());
  }
  EXPECT_EQ(VerifyLog(dir.path())->blobs, 1u);
  ASSERT_TRUE(std::filesystem::remove(files::PathIn(dir.path(), BlobsName(1))));
  EXPECT_EQ(VerifyLog(dir.path()).status().code(), absl::StatusCode::kDataLoss);
}

// A shard at work drops segments between their listing and their reading.
TEST(InspectTest, ALogThatMovesOnIsReadAgain) {
  const TempDir dir = *TempDir::Create();
  const auto writer = *LogWriter::Open({.folder = dir.path(), .fsync = v1::StorageConfig::NEVER}, 1,
                                       1, StateRecord(1));
  uint64_t segment = 1;
  const auto move_on = [&] {
    EXPECT_TRUE(writer->StartSegment(StateRecord(++segment)).ok());
    EXPECT_TRUE(writer->DropBefore(segment).ok());
  };
  int reads = 0;
  const auto read = [&](int moves) {
    reads = 0;
    return ReadMovingLog(dir.path(), [&]() -> absl::StatusOr<LogSummary> {
      if (reads++ < moves) {
        move_on();
        return absl::NotFoundError(absl::StrCat("gone ", reads));
      }
      return LogSummary();
    });
  };
  EXPECT_TRUE(read(0).ok());
  EXPECT_EQ(reads, 1);
  EXPECT_TRUE(read(3).ok());
  EXPECT_EQ(reads, 4);
  EXPECT_EQ(read(1000).status(), absl::NotFoundError("gone 10"));
  EXPECT_EQ(reads, 10);
  // Records go before blobs, and blobs that later records name stay.
  ASSERT_TRUE(files::WriteFileWhole(dir.path(), BlobsName(1), "blobs").ok());
  reads = 0;
  const auto moved = ReadMovingLog(dir.path(), [&]() -> absl::StatusOr<LogSummary> {
    if (reads++ > 0) return LogSummary();
    EXPECT_TRUE(writer->StartSegment(StateRecord(segment + 1)).ok());
    EXPECT_TRUE(std::filesystem::remove(files::PathIn(dir.path(), RecordsName(segment))));
    return absl::NotFoundError("gone");
  });
  EXPECT_TRUE(moved.ok()) << moved.status();
  EXPECT_EQ(reads, 2);
  // The room of a segment goes when it ends, which a reader sees as a file that was cut off.
  reads = 0;
  const std::string records = files::PathIn(dir.path(), RecordsName(segment + 1));
  const auto cut = ReadMovingLog(dir.path(), [&]() -> absl::StatusOr<LogSummary> {
    if (reads++ > 0) return LogSummary();
    std::filesystem::resize_file(records, std::filesystem::file_size(records) / 2);
    return absl::DataLossError("cut off");
  });
  EXPECT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(reads, 2);
  // Records are written into the room that is there.
  reads = 0;
  const auto written = ReadMovingLog(dir.path(), [&]() -> absl::StatusOr<LogSummary> {
    if (reads++ > 0) return LogSummary();
    std::filesystem::last_write_time(
        records, std::filesystem::last_write_time(records) + std::chrono::seconds(1));
    return absl::DataLossError("half a record");
  });
  EXPECT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(reads, 2);
  // Damage is not read again and again, however busy the shard is.
  reads = 0;
  const auto busy = ReadMovingLog(dir.path(), [&]() -> absl::StatusOr<LogSummary> {
    ++reads;
    move_on();
    return absl::DataLossError("byte 7");
  });
  EXPECT_EQ(busy.status(), absl::DataLossError("byte 7"));
  EXPECT_EQ(reads, 2);
  // What is missing from a log that stands still is damage.
  reads = 0;
  const auto damaged = ReadMovingLog(dir.path(), [&]() -> absl::StatusOr<LogSummary> {
    ++reads;
    return absl::DataLossError("damaged");
  });
  EXPECT_EQ(damaged.status(), absl::DataLossError("damaged"));
  EXPECT_EQ(reads, 1);
}

TEST(InspectTest, ShowsEachRecordOfAMovingLogOnce) {
  const auto show_while = [](const std::string& folder, auto&& move) {
    std::vector<uint64_t> shown;
    const auto summary = ShowLog(folder, [&](const LogEntry& entry) {
      if (shown.empty()) move();
      shown.push_back(entry.sequence);
      return absl::OkStatus();
    });
    EXPECT_TRUE(summary.ok()) << summary.status();
    return shown;
  };
  for (const bool drops : {false, true}) {
    const TempDir dir = *TempDir::Create();
    LogOptions options;
    options.folder = dir.path();
    const auto writer = *LogWriter::Open(options, 1, 1, StateRecord(1));
    for (const int segment : {2, 3}) EXPECT_TRUE(writer->StartSegment(StateRecord(segment)).ok());
    const auto move = [&] {
      if (drops) {
        EXPECT_TRUE(writer->DropBefore(3).ok());
        return;
      }
      // As a segment that could not be begun.
      std::filesystem::remove(files::PathIn(dir.path(), BlobsName(3)));
      std::filesystem::remove(files::PathIn(dir.path(), RecordsName(3)));
    };
    EXPECT_EQ(show_while(dir.path(), move),
              drops ? std::vector<uint64_t>({1, 3}) : std::vector<uint64_t>({1, 2}));
  }
}

TEST(InspectTest, ShowIsEndedByWhoeverIsShown) {
  const TempDir dir = *TempDir::Create();
  WriteSampleLog(dir.path(), 0, 4);
  int shown = 0;
  const auto summary = ShowLog(dir.path(), [&](const LogEntry&) {
    ++shown;
    EXPECT_TRUE(files::WriteFileWhole(dir.path(), BlobsName(9), "moves").ok());
    return absl::CancelledError("enough");
  });
  EXPECT_EQ(summary.status(), absl::CancelledError("enough"));
  EXPECT_EQ(shown, 1);
}

// A kind that was added to the log and not here would be shown without a word.
TEST(InspectTest, EachKindOfRecordHasWords) {
  std::set<std::string> shown;
  const auto* const kinds = LogRecord::descriptor()->oneof_decl(0);
  for (int i = 0; i < kinds->field_count(); ++i) {
    LogRecord record;
    record.GetReflection()->MutableMessage(&record, kinds->field(i));
    const LogEntry entry = EntryWriter().Write(record, {});
    EXPECT_EQ(entry.kind, kinds->field(i)->name());
    EXPECT_FALSE(entry.model.empty() && entry.subject.empty() && entry.details.empty())
        << entry.kind;
    shown.insert(entry.kind);
  }
  EXPECT_EQ(shown.size(), static_cast<size_t>(kinds->field_count()));
  EXPECT_EQ(EntryWriter().Write(LogRecord(), {}).kind, "unknown");
}

}  // namespace inspect_test
}  // namespace emberd::log
