#include "server/log/log_reader.h"

#include <filesystem>
#include <limits>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/sanitized.h"
#include "server/files/files.h"
#include "server/log/log_files.h"
#include "server/log/testing/records.h"

namespace emberd::log {
namespace log_reader_test {

using absl::StatusCode;
using internal::v1::LogBlob;
using internal::v1::LogRecord;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// This machine, after it has lost power.
class OtherBoot : public LogFiles {
 public:
  explicit OtherBoot(char id = 'b') : id_(id) {}
  absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) override {
    return DiskLogFiles().Create(path);
  }
  absl::Status Sync(const std::string& path) override { return DiskLogFiles().Sync(path); }
  absl::Status SyncFolder(const std::string& path) override {
    return DiskLogFiles().SyncFolder(path);
  }
  absl::Status Remove(const std::string& path) override { return DiskLogFiles().Remove(path); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return DiskLogFiles().Rename(from, to);
  }
  absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) override {
    return DiskLogFiles().Open(path);
  }
  std::string BootId() override { return std::string(kBootIdBytes, id_); }

 private:
  const char id_;
};

class LogReaderTest : public ::testing::Test {
 protected:
  // Segments of states and some records each: 1 | 2 3 4 | 5, 6 | 7 8 9 | 10, ...
  void WriteLog(int segments, int each, v1::StorageConfig::Fsync fsync = v1::StorageConfig::NEVER) {
    std::filesystem::remove_all(folder_);
    const auto writer = *LogWriter::Open({.folder = folder_, .fsync = fsync}, 1, 1, StateRecord(1));
    for (int segment = 1;; ++segment) {
      for (int i = 0; i < each; ++i) {
        const uint64_t number = writer->records() + 1;
        blobs_.push_back(*AppendBytes(*writer, BlobBytes(number, 100)));
        EXPECT_TRUE(writer->Append(VoteRecord(number, blobs_.back())).ok());
      }
      if (segment == segments) break;
      EXPECT_TRUE(writer->StartSegment(StateRecord(writer->records() + 1)).ok());
    }
  }
  std::string Path(uint64_t segment) { return files::PathIn(folder_, RecordsName(segment)); }
  std::string BlobPath(uint64_t segment) { return files::PathIn(folder_, BlobsName(segment)); }
  static void Change(const std::string& path, int64_t offset, const std::string& bytes) {
    std::string all = *files::ReadFileWhole(path);
    all.resize(std::max(all.size(), offset + bytes.size()), '\0');
    all.replace(offset, bytes.size(), bytes);
    ASSERT_TRUE(files::WriteFileWhole(std::filesystem::path(path).parent_path(),
                                      std::filesystem::path(path).filename(), all)
                    .ok());
  }
  static void Flip(const std::string& path, int64_t offset) {
    const char flipped = static_cast<char>(files::ReadFileWhole(path)->at(offset) ^ 0x20);
    Change(path, offset, std::string(1, flipped));
  }
  absl::StatusOr<WholeLog> Read() { return ReadWhole(folder_); }
  absl::StatusOr<WholeLog> ReadAfterPowerLoss() { return ReadWhole(folder_, other_boot_); }
  // DATA_LOSS that names this file, and says so and what to do.
  void ExpectDamage(const std::string& path, const std::string& what) {
    ExpectDamage(Read().status(), path, what);
  }
  // Also after a loss of power.
  void ExpectDamageAnyhow(const std::string& path, const std::string& what) {
    ExpectDamage(path, what);
    ExpectDamage(ReadAfterPowerLoss().status(), path, what);
  }
  void ExpectDamage(const absl::Status& status, const std::string& path, const std::string& what) {
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    for (const std::string& part : {path + ":", what, "emberctl log verify " + folder_,
                                    std::string("move their folders shard-NNNN away, start the "
                                                "shards and restore a checkpoint")}) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }

  const TempDir dir_ = *TempDir::Create();
  const std::string folder_ = dir_.Path("log");
  OtherBoot other_boot_;
  std::vector<LogBlob> blobs_;
};

TEST_F(LogReaderTest, NoLogIsAnEmptyOne) {
  EXPECT_EQ(Read()->end.next_segment, 1u);
  EXPECT_EQ(Read()->end.next_sequence, 1u);
  EXPECT_EQ(Read()->end.first_segment, 0u);
  // A process that died before its first segment counted.
  std::filesystem::create_directory(folder_);
  ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(1), std::string(10000, '\0')).ok());
  EXPECT_EQ(Read()->end.next_segment, 2u);
  EXPECT_EQ(Read()->end.next_sequence, 1u);
  EXPECT_EQ(Read()->end.torn_bytes, 0);
  ASSERT_TRUE(LogWriter::Open({.folder = folder_}, 2, 1, StateRecord(1)).ok());
  EXPECT_THAT(Read()->numbers(), ElementsAre(1));
}

// A process that dies leaves any part of its last record.
TEST_F(LogReaderTest, EveryCutOfTheTailEndsTheLog) {
  WriteLog(2, 3);
  const WholeLog whole = *Read();
  ASSERT_THAT(whole.numbers(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  const std::string bytes = *files::ReadFileWhole(Path(2));
  const LogPosition last = whole.records.back().position;
  for (int64_t cut = last.offset; cut < last.offset + last.bytes; ++cut) {
    for (const bool zeros : {false, true}) {
      std::string part = bytes.substr(0, cut);
      if (zeros) part.resize(bytes.size(), '\0');
      ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(2), part).ok());
      const absl::StatusOr<WholeLog> log = Read();
      ASSERT_TRUE(log.ok()) << log.status();
      // Of its end, zeros may be missing.
      if (log->records.size() == 8) {
        EXPECT_GE(cut, last.offset + last.bytes - kFrameAlignment);
        continue;
      }
      ASSERT_THAT(log->numbers(), ElementsAre(1, 2, 3, 4, 5, 6, 7)) << cut;
      EXPECT_EQ(log->end.next_sequence, 8u);
      EXPECT_EQ(log->end.next_segment, 3u);
      EXPECT_LE(log->end.torn_bytes, cut - last.offset);
      if (cut > last.offset) {
        EXPECT_THAT(log->end.torn, HasSubstr(absl::StrCat(Path(2), ": byte ", last.offset)));
        EXPECT_GT(log->end.torn_bytes, 0);
      }
    }
  }
}

// Later starts must not take what an earlier one has left out, nor stumble over it.
TEST_F(LogReaderTest, WhatWasLeftOutStaysOut) {
  WriteLog(1, 4);
  const WholeLog whole = *Read();
  Flip(Path(1), whole.records[3].position.offset + 40);
  ASSERT_TRUE(ReadAfterPowerLoss().ok());
  EXPECT_THAT(ReadAfterPowerLoss()->numbers(), ElementsAre(1, 2, 3));
  ASSERT_TRUE(LogWriter::Open({.folder = folder_}, 2, 4, StateRecord(104)).ok());
  EXPECT_THAT(Read()->numbers(), ElementsAre(1, 2, 3, 104));
  EXPECT_EQ(Read()->end.next_segment, 3u);
  // Whole segments, too.
  ASSERT_TRUE(LogWriter::Open({.folder = folder_}, 3, 3, StateRecord(203)).ok());
  EXPECT_THAT(Read()->numbers(), ElementsAre(1, 2, 203));
  EXPECT_EQ(Read()->end.next_sequence, 4u);
}

TEST_F(LogReaderTest, AFlippedByteIsNoticedWhereverItIs) {
  constexpr int64_t kStride = kSanitized ? 5 : 1;
  WriteLog(2, 3);
  const WholeLog whole = *Read();
  for (const uint64_t segment : {1, 2}) {
    const std::string bytes = *files::ReadFileWhole(Path(segment));
    for (const ReadRecord& read : whole.records) {
      const LogPosition& position = read.position;
      if (position.segment != segment || position.sequence == 8) continue;
      LogRecord record = read.record;
      const auto end = static_cast<int64_t>(kFrameHeadBytes + record.ByteSizeLong());
      for (int64_t i = 0; i < end; i += kStride) {
        Flip(Path(segment), position.offset + i);
        ExpectDamage(Path(segment), absl::StrCat("byte ", position.offset, ": record ",
                                                 position.sequence, " is damaged"));
        ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(segment), bytes).ok());
      }
    }
    for (int64_t i = 0; i < kLogHeadBytes; i += kStride) {
      Flip(Path(segment), i);
      ExpectDamage(Path(segment), "byte 0: the header of the segment is damaged");
      ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(segment), bytes).ok());
    }
  }
  EXPECT_TRUE(Read().ok());
}

// A process that dies between the state of a segment and its head has lost nothing.
TEST_F(LogReaderTest, ASegmentWithoutItsHeadDoesNotCount) {
  WriteLog(1, 3);
  const auto writer = *LogWriter::Open({.folder = folder_}, 2, 5, StateRecord(5));
  for (const size_t bytes : {0, 1, 64, 127}) {
    Change(Path(2), static_cast<int64_t>(bytes), std::string(kLogHeadBytes - bytes, '\0'));
    const absl::StatusOr<WholeLog> log = Read();
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_THAT(log->numbers(), ElementsAre(1, 2, 3, 4));
    EXPECT_EQ(log->end.next_segment, 3u);
    EXPECT_EQ(log->end.next_sequence, 5u);
  }
}

// A segment has room for its head before it has blobs: a smaller file has lost records.
TEST_F(LogReaderTest, AFileOfRecordsThatWasCutIsNamed) {
  for (const uint64_t newest : {1, 2}) {
    WriteLog(static_cast<int>(newest), 3);
    const std::string bytes = *files::ReadFileWhole(Path(newest));
    for (const int64_t left : {int64_t{0}, kLogHeadBytes - 1}) {
      ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(newest), bytes.substr(0, left)).ok());
      ExpectDamageAnyhow(Path(newest), absl::StrCat(BlobsName(newest), " exists"));
    }
    std::filesystem::remove(Path(newest));
    if (newest > 1) ExpectDamageAnyhow(Path(newest), "the file is missing");
    // A process that dies before that has lost nothing.
    ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(newest), "").ok());
    ASSERT_TRUE(std::filesystem::remove(BlobPath(newest)));
    const absl::StatusOr<WholeLog> log = Read();
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_EQ(log->records.size(), 4 * (newest - 1));
  }
}

TEST_F(LogReaderTest, ADamagedBlobIsNamed) {
  WriteLog(1, 3);
  Buffer<char> buffer;
  for (int64_t i = 0; i < 100; i += 7) {
    const int64_t place = static_cast<int64_t>(blobs_[1].offset()) + i;
    Flip(BlobPath(1), place);
    EXPECT_TRUE(ReadBlob(folder_, blobs_[0], buffer).ok());
    EXPECT_TRUE(ReadBlob(folder_, blobs_[2], buffer).ok());
    const absl::Status status = ReadBlob(folder_, blobs_[1], buffer).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr(BlobPath(1) + ": byte 128: "));
    Flip(BlobPath(1), place);
  }
  std::filesystem::resize_file(BlobPath(1), 200);
  EXPECT_THAT(std::string(ReadBlob(folder_, blobs_[1], buffer).status().message()),
              HasSubstr("ends at byte 200, but a record names 100 bytes at byte 128"));
  LogBlob beyond = blobs_[0];
  beyond.set_offset(std::numeric_limits<uint64_t>::max() - 10);
  EXPECT_EQ(ReadBlob(folder_, beyond, buffer).status().code(), StatusCode::kDataLoss);
  beyond = blobs_[0];
  beyond.set_bytes(std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(ReadBlob(folder_, beyond, buffer).status().code(), StatusCode::kDataLoss);
  std::filesystem::remove(BlobPath(1));
  EXPECT_THAT(std::string(ReadBlob(folder_, blobs_[0], buffer).status().message()),
              HasSubstr(BlobPath(1) + ": is missing"));
  ExpectDamage(BlobPath(1), "is missing");
}

// After a loss of power, a blob that is missing ends the log. One that the disk does not show may
// come back.
TEST_F(LogReaderTest, WhatAnErrorOfTheDiskHidesIsNotCutOff) {
  WriteLog(1, 3);
  const std::string hidden = dir_.Path("hidden");
  std::filesystem::rename(BlobPath(1), hidden);
  std::filesystem::create_symlink(BlobPath(1), BlobPath(1));
  const absl::Status status = ReadAfterPowerLoss().status();
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(absl::IsDataLoss(status)) << status;
  std::filesystem::remove(BlobPath(1));
  std::filesystem::rename(hidden, BlobPath(1));
  EXPECT_THAT(ReadAfterPowerLoss()->numbers(), ElementsAre(1, 2, 3, 4));
}

TEST_F(LogReaderTest, AFileThatIsMissingOrAnothersIsNamed) {
  WriteLog(3, 2);
  const TempDir saved = *TempDir::Create();
  const auto copy = [](const std::string& from, const std::string& to) {
    std::filesystem::remove_all(to);
    std::filesystem::copy(from, to);
  };
  copy(folder_, saved.Path("log"));
  std::filesystem::remove(Path(2));
  ExpectDamage(Path(2), "the file is missing, but segment 3 begins with record 7");
  std::filesystem::remove(BlobPath(2));
  ExpectDamage(Path(2), "the file is missing");
  copy(saved.Path("log"), folder_);
  std::filesystem::remove(Path(3));
  ExpectDamage(Path(3), "the file is missing, but 0000000003.blobs exists");
  copy(saved.Path("log"), folder_);
  std::filesystem::remove(BlobPath(2));
  ExpectDamage(BlobPath(2), "is missing");
  copy(saved.Path("log"), folder_);
  std::filesystem::rename(Path(3), Path(9'000'000));
  ExpectDamage(Path(3), "is missing, and so are others");
  copy(saved.Path("log"), folder_);
  std::filesystem::copy_file(Path(1), Path(2), std::filesystem::copy_options::overwrite_existing);
  ExpectDamage(Path(2), "is segment 1 under another name");
  copy(saved.Path("log"), folder_);
  ASSERT_TRUE(
      LogWriter::Open({.folder = folder_, .shard = 3, .shards = 4}, 4, 10, StateRecord(10)).ok());
  ExpectDamage(Path(4), "is of shard 3 of 4, but segment 1 of shard 0 of 1");
  // The oldest ones may go; of the oldest, the blobs last.
  copy(saved.Path("log"), folder_);
  std::filesystem::remove(Path(1));
  EXPECT_THAT(Read()->numbers(), ElementsAre(4, 5, 6, 7, 8, 9));
  std::filesystem::remove(BlobPath(1));
  EXPECT_THAT(Read()->numbers(), ElementsAre(4, 5, 6, 7, 8, 9));
  EXPECT_EQ(Read()->end.first_segment, 2u);
  Flip(Path(2), 5);
  ExpectDamage(Path(2), "the header of the segment is damaged");
}

// As in a folder that was copied without it, or while the log went on.
TEST_F(LogReaderTest, TheSegmentThatTheLogBeginsWithIsMissing) {
  {
    const auto writer = *LogWriter::Open({.folder = folder_}, 1, 1, StateRecord(1));
    EXPECT_EQ(*writer->StartSegment(StateRecord(2)), 2u);
    LogRecord begins;
    begins.mutable_begins()->set_segment(2);
    EXPECT_TRUE(writer->Append(begins).ok());
    EXPECT_EQ(Read()->end.first_segment, 1u);  // not removed yet
    EXPECT_TRUE(writer->DropBefore(2).ok());
    LogRecord state = StateRecord(4);
    state.mutable_state()->set_begins(2);
    EXPECT_EQ(*writer->StartSegment(state), 3u);
  }
  EXPECT_EQ(Read()->end.first_segment, 2u);
  std::filesystem::remove(Path(2));
  ExpectDamageAnyhow(Path(2), "is missing, but the log says that it begins there");
  std::filesystem::remove(BlobPath(2));
  ExpectDamageAnyhow(Path(2), "is missing, but the log says that it begins there");
}

// Would catch: a log that is refused because a program of before, which does not say where a log
// begins, went on with it for a while.
TEST_F(LogReaderTest, AStateThatDoesNotSayWhereTheLogBeginsEndsWhatWasSaidBefore) {
  {
    const auto writer = *LogWriter::Open({.folder = folder_}, 1, 1, StateRecord(1));
    LogRecord state = StateRecord(2);
    state.mutable_state()->set_begins(1);
    EXPECT_EQ(*writer->StartSegment(state), 2u);
    EXPECT_EQ(*writer->StartSegment(StateRecord(3)), 3u);
    EXPECT_TRUE(writer->DropBefore(2).ok());
  }
  EXPECT_EQ(Read()->end.first_segment, 2u);
}

// What nobody had synced may be gone after the power was, and nothing else; then the log ends
// there.
TEST_F(LogReaderTest, OnlyWhatWasNotSyncedMayBeGoneAfterALossOfPower) {
  WriteLog(2, 3);
  const WholeLog whole = *Read();
  Flip(Path(1), whole.records[2].position.offset);
  ExpectDamage(Path(1), "record 3 is damaged, but record 4 at byte");
  absl::StatusOr<WholeLog> log = ReadAfterPowerLoss();
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_THAT(log->numbers(), ElementsAre(1, 2));
  EXPECT_EQ(log->end.next_sequence, 3u);
  EXPECT_EQ(log->end.next_segment, 3u);
  EXPECT_GT(log->end.torn_bytes, 0);

  std::filesystem::remove_all(folder_);
  {
    const auto writer = *LogWriter::Open({.folder = folder_, .fsync = v1::StorageConfig::ALWAYS}, 1,
                                         1, StateRecord(1));
    for (uint64_t i = 2; i <= 4; ++i) {
      ASSERT_TRUE(writer->Append(PlainRecord(i)).ok());
      if (i == 3) writer->WhenDurable(3, [](const absl::Status&) {});
      while (i == 3 && writer->durable() < 3) std::this_thread::yield();
    }
  }
  const std::string bytes = *files::ReadFileWhole(Path(1));
  const WholeLog synced = *Read();
  for (const int lost : {1, 2}) {  // records 2 and 3, which record 4 knows to be on the disk
    Flip(Path(1), synced.records[lost].position.offset);
    EXPECT_EQ(ReadAfterPowerLoss().status().code(), StatusCode::kDataLoss);
    ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(1), bytes).ok());
  }
  Flip(Path(1), synced.records[3].position.offset);
  EXPECT_THAT(ReadAfterPowerLoss()->numbers(), ElementsAre(1, 2, 3));
}

// The disk has the names of segments, and room for their heads, before anything else of them.
TEST_F(LogReaderTest, NoLossOfPowerTakesSegments) {
  WriteLog(4, 2);
  const std::string bytes = *files::ReadFileWhole(Path(2));
  for (const int64_t left : {int64_t{0}, kLogHeadBytes - 1}) {
    ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(2), bytes.substr(0, left)).ok());
    ExpectDamageAnyhow(Path(2), "the header of the segment is damaged, but ");
  }
  for (const uint64_t segment : {2, 3}) std::filesystem::remove(Path(segment));
  ExpectDamageAnyhow(Path(2), "the file is missing, but segment 4 begins with record 10");
}

// What follows the first record that is gone goes with it, segments too, unless it proves that the
// disk had the record: then somebody has cut the file.
TEST_F(LogReaderTest, ACutSegmentBeforeOthersIsATailOnlyWhereThePowerMayHaveTakenIt) {
  WriteLog(3, 2);
  const int64_t cut = Read()->records[4].position.offset + kFrameHeadBytes;  // in the second one
  std::filesystem::resize_file(Path(2), cut);
  ExpectDamage(Path(2), "record 5 is damaged, but ");
  const absl::StatusOr<WholeLog> log = ReadAfterPowerLoss();
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_THAT(log->numbers(), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(log->end.next_sequence, 5u);
  EXPECT_EQ(log->end.next_segment, 4u);
  EXPECT_THAT(log->end.torn, HasSubstr(Path(2)));

  WriteLog(3, 2);
  {
    // A machine that was started again in between has read all of it.
    OtherBoot later('c');
    ASSERT_TRUE(
        LogWriter::Open({.folder = folder_, .fsync = v1::StorageConfig::NEVER, .files = &later}, 4,
                        10, StateRecord(10))
            .ok());
  }
  EXPECT_EQ(ReadAfterPowerLoss()->records.size(), 10u);
  std::filesystem::resize_file(Path(2), cut);
  ExpectDamageAnyhow(Path(2), "record 5 is damaged, but ");
  WriteLog(3, 2, v1::StorageConfig::INTERVAL);
  ASSERT_TRUE(LogWriter::Open({.folder = folder_, .fsync = v1::StorageConfig::INTERVAL}, 4, 10,
                              StateRecord(10))
                  .ok());
  std::filesystem::resize_file(Path(2), cut);
  ExpectDamageAnyhow(Path(2), "record 5 is damaged, but ");
}

// A record may survive a loss of power that its blob does not.
TEST_F(LogReaderTest, ALossOfPowerThatTookABlobEndsTheLog) {
  WriteLog(2, 3);
  Flip(BlobPath(1), static_cast<int64_t>(blobs_[2].offset()));
  EXPECT_EQ(Read()->records.size(), 8u);
  const absl::StatusOr<WholeLog> log = ReadAfterPowerLoss();
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_THAT(log->numbers(), ElementsAre(1, 2, 3));
  EXPECT_THAT(log->end.torn, HasSubstr("the blob of record 4 is missing"));
}

TEST_F(LogReaderTest, RecordsOfWrongKindsAreNamed) {
  WriteLog(1, 1);
  const auto replace_first = [&](const LogRecord& record) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    LogHead head;
    head.segment = 1;
    head.first_sequence = 1;
    std::string frame = FrameFor(record);
    SealFrame(0, 1, 0, &frame);
    ASSERT_TRUE(files::WriteFileWhole(folder_, RecordsName(1), EncodeLogHead(head) + frame).ok());
    ASSERT_TRUE(files::WriteFileWhole(folder_, BlobsName(1), "").ok());
  };
  replace_first(PlainRecord(1));
  ExpectDamage(Path(1), "byte 128: record 1 begins a segment, but is not a state");
  replace_first(LogRecord());
  ExpectDamage(Path(1), "record 1 is of a kind that this program does not know");
  replace_first(StateRecord(1));
  EXPECT_TRUE(Read().ok());
}

TEST_F(LogReaderTest, AnErrorOfTheVisitorIsReturned) {
  WriteLog(1, 3);
  int visited = 0;
  const absl::Status status =
      ReadLog(folder_, [&](const LogRecord&, const LogPosition&) {
        return ++visited == 2 ? absl::AbortedError("enough") : absl::OkStatus();
      }).status();
  EXPECT_EQ(status, absl::AbortedError("enough"));
  EXPECT_EQ(visited, 2);
}

}  // namespace log_reader_test
}  // namespace emberd::log
