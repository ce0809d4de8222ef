// Covers: log_files.cc
#include "server/log/log_writer.h"

#include <cerrno>
#include <filesystem>
#include <future>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "absl/cleanup/cleanup.h"
#include "base/buffers.h"
#include "base/temp_dir.h"
#include "server/files/files.h"
#include "server/log/log_reader.h"
#include "server/log/testing/faulty_files.h"
#include "server/log/testing/records.h"

namespace emberd::log {
namespace log_writer_test {

using absl::StatusCode;
using internal::v1::LogBlob;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class LogWriterTest : public ::testing::Test {
 protected:
  std::unique_ptr<LogWriter> Open(uint64_t segment = 1, uint64_t sequence = 1) {
    auto writer = LogWriter::Open(options_, segment, sequence, StateRecord(sequence));
    EXPECT_TRUE(writer.ok()) << writer.status();
    return writer.ok() ? *std::move(writer) : nullptr;
  }
  WholeLog Read() {
    absl::StatusOr<WholeLog> log = ReadWhole(options_.folder);
    EXPECT_TRUE(log.ok()) << log.status();
    return log.ok() ? *std::move(log) : WholeLog();
  }
  bool Exists(const std::string& name) {
    return std::filesystem::exists(files::PathIn(options_.folder, name));
  }

  const TempDir dir_ = *TempDir::Create();
  FaultyFiles files_{DiskLogFiles()};
  LogOptions options_{.folder = dir_.Path("shard-0002/log"),
                      .shard = 2,
                      .shards = 4,
                      .fsync = v1::StorageConfig::ALWAYS,
                      .files = &files_};
};

TEST_F(LogWriterTest, RecordsAreReadInTheirOrder) {
  {
    const auto writer = Open();
    for (uint64_t i = 2; i <= 100; ++i) EXPECT_EQ(*writer->Append(PlainRecord(i, i % 50)), i);
    EXPECT_EQ(writer->records(), 100u);
    EXPECT_TRUE(writer->failure().ok());
  }
  const WholeLog log = Read();
  ASSERT_EQ(log.records.size(), 100u);
  for (uint64_t i = 1; i <= 100; ++i) {
    EXPECT_EQ(NumberOf(log.records[i - 1].record), i);
    EXPECT_EQ(log.records[i - 1].position.sequence, i);
    EXPECT_EQ(log.records[i - 1].position.segment, 1u);
  }
  EXPECT_EQ(log.records[0].position.offset, kLogHeadBytes);
  EXPECT_EQ(log.end.next_segment, 2u);
  EXPECT_EQ(log.end.next_sequence, 101u);
  EXPECT_EQ(log.end.first_segment, 1u);
  EXPECT_EQ(log.end.torn_bytes, 0);
  EXPECT_EQ(log.end.torn, "");
  EXPECT_EQ(log.end.shard, 2);
  EXPECT_EQ(log.end.shards, 4);
  EXPECT_EQ(log.end.fsync, v1::StorageConfig::ALWAYS);
}

TEST_F(LogWriterTest, BlobsAreReadWhole) {
  std::vector<LogBlob> blobs;
  {
    const auto writer = Open();
    const std::string a = BlobBytes(1, 1000), b = BlobBytes(2, 1), c;
    const std::vector<absl::Span<const char>> pieces = {absl::MakeConstSpan(a.data(), a.size()),
                                                        absl::MakeConstSpan(c.data(), c.size()),
                                                        absl::MakeConstSpan(b.data(), b.size())};
    blobs.push_back(*writer->AppendBlob(pieces));
    blobs.push_back(*writer->AppendBlob({}));
    // More pieces than one system call takes.
    const std::vector<absl::Span<const char>> many(3000, absl::MakeConstSpan(a.data(), 7));
    blobs.push_back(*writer->AppendBlob(many));
  }
  Buffer<char> buffer;
  const absl::Span<const char> read = *ReadBlob(options_.folder, blobs[0], buffer);
  EXPECT_EQ(std::string(read.begin(), read.end()), BlobBytes(1, 1000) + BlobBytes(2, 1));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(read.data()) % kBlobAlignment, 0u);
  EXPECT_EQ(ReadBlob(options_.folder, blobs[1], buffer)->size(), 0u);
  EXPECT_EQ(ReadBlob(options_.folder, blobs[2], buffer)->size(), 21000u);
  for (const LogBlob& blob : blobs) {
    EXPECT_EQ(blob.segment(), 1u);
    EXPECT_EQ(blob.offset() % kBlobAlignment, 0u);
  }
}

// Catches: two that write at once and get the same place, and a checksum of another's bytes.
TEST_F(LogWriterTest, ManyWriteAtOnce) {
  constexpr int kThreads = 4, kEach = 200;
  options_.segment_bytes = 5'000;
  std::atomic<int> durable{0};
  {
    const auto writer = Open();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          const uint64_t number = 10 + t * kEach + i;
          const LogBlob blob = *AppendBytes(*writer, BlobBytes(number, number % 3000));
          const uint64_t sequence = *writer->Append(VoteRecord(number, blob));
          writer->WhenDurable(sequence,
                              [&](const absl::Status& status) { durable += status.ok(); });
          if (t == 0 && writer->SegmentFull()) {
            EXPECT_TRUE(writer->StartSegment(StateRecord(0)).ok());
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GT(writer->segment(), 2u);
  }
  EXPECT_EQ(durable, kThreads * kEach);
  const WholeLog log = Read();
  std::set<uint64_t> seen;
  Buffer<char> buffer;
  for (const ReadRecord& read : log.records) {
    if (!read.record.has_vote()) continue;
    const uint64_t number = NumberOf(read.record);
    EXPECT_TRUE(seen.insert(number).second);
    const auto bytes = ReadBlob(options_.folder, *BlobOf(read.record), buffer);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(std::string(bytes->begin(), bytes->end()), BlobBytes(number, number % 3000));
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kThreads * kEach));
}

TEST_F(LogWriterTest, SegmentsBeginWithTheStateAndAreDroppedFromTheOldest) {
  {
    const auto writer = Open();
    EXPECT_TRUE(writer->Append(PlainRecord(2)).ok());
    EXPECT_EQ(*writer->StartSegment(StateRecord(3)), 2u);
    EXPECT_TRUE(writer->Append(PlainRecord(4)).ok());
    EXPECT_EQ(*writer->StartSegment(StateRecord(5)), 3u);
    EXPECT_EQ(writer->segment(), 3u);
    EXPECT_THAT(Read().numbers(), ElementsAre(1, 2, 3, 4, 5));
    const int64_t bytes = writer->bytes();
    EXPECT_TRUE(writer->DropBefore(1).ok());
    EXPECT_TRUE(writer->DropBefore(2).ok());
    EXPECT_LT(writer->bytes(), bytes);
    EXPECT_FALSE(Exists("0000000001.records") || Exists("0000000001.blobs"));
    EXPECT_THAT(Read().numbers(), ElementsAre(3, 4, 5));
    EXPECT_TRUE(writer->DropBefore(100).ok());
    EXPECT_THAT(Read().numbers(), ElementsAre(5));
    EXPECT_EQ(writer->records(), 5u);
    EXPECT_TRUE(writer->Append(PlainRecord(6)).ok());
  }
  const WholeLog log = Read();
  EXPECT_EQ(log.end.first_segment, 3u);
  const auto writer = Open(log.end.next_segment, log.end.next_sequence);
  EXPECT_EQ(writer->records(), 7u);
  EXPECT_THAT(Read().numbers(), ElementsAre(5, 6, 7));
  EXPECT_EQ(writer->bytes() > 0, true);
}

// A vote that is still open when its segment ends is in the state of the next one, and its blob
// where it was; also for the next process.
TEST_F(LogWriterTest, BlobsStayAsLongAsARecordNamesThem) {
  {
    const auto writer = Open();
    const absl::StatusOr<LogBlob> blob = AppendBytes(*writer, BlobBytes(1, 1000));
    ASSERT_TRUE(blob.ok()) << blob.status();
    EXPECT_TRUE(writer->StartSegment(StateRecord(2)).ok());
    EXPECT_TRUE(writer->Append(VoteRecord(3, *blob)).ok());
    EXPECT_TRUE(writer->DropBefore(2).ok());
    EXPECT_FALSE(Exists("0000000001.records"));
    EXPECT_TRUE(Exists("0000000001.blobs"));
  }
  const WholeLog log = Read();
  EXPECT_THAT(log.numbers(), ElementsAre(2, 3));
  options_.older_blobs = log.end.older_blobs;
  const auto writer = Open(log.end.next_segment, log.end.next_sequence);
  const int64_t bytes = writer->bytes();
  EXPECT_TRUE(writer->DropBefore(2).ok());
  EXPECT_TRUE(Exists("0000000001.blobs"));
  EXPECT_EQ(writer->bytes(), bytes);
  EXPECT_TRUE(writer->DropBefore(3).ok());
  EXPECT_FALSE(Exists("0000000001.blobs"));
  EXPECT_LT(writer->bytes(), bytes);
  EXPECT_THAT(Read().numbers(), ElementsAre(log.end.next_sequence));
}

// The file of blobs of segment 1 is that of segment 3; a longer blob than it had fits, too.
TEST_F(LogWriterTest, BlobsOfDroppedSegmentsAreWrittenOver) {
  const auto inode = [&](const std::string& name) {
    struct stat status = {};
    EXPECT_EQ(stat(files::PathIn(options_.folder, name).c_str(), &status), 0) << name;
    return status.st_ino;
  };
  {
    const auto writer = Open();
    ASSERT_TRUE(AppendBytes(*writer, BlobBytes(1, 1000)).ok());
    const ino_t first = inode("0000000001.blobs");
    ASSERT_TRUE(writer->StartSegment(StateRecord(2)).ok());
    ASSERT_TRUE(writer->DropBefore(2).ok());
    EXPECT_EQ(inode("0000000001.spare"), first);
    ASSERT_TRUE(writer->StartSegment(StateRecord(3)).ok());
    EXPECT_EQ(inode("0000000003.blobs"), first);
    EXPECT_FALSE(Exists("0000000001.spare"));
    const absl::StatusOr<LogBlob> blob = AppendBytes(*writer, BlobBytes(7, 3000));
    ASSERT_TRUE(blob.ok() && writer->Append(VoteRecord(4, *blob)).ok());
    ASSERT_TRUE(writer->DropBefore(3).ok());
    EXPECT_FALSE(Exists("0000000002.spare"));  // there was nothing in it
  }
  const WholeLog log = Read();
  EXPECT_THAT(log.numbers(), ElementsAre(3, 4));
  Buffer<char> buffer;
  const auto bytes = ReadBlob(options_.folder, *BlobOf(log.records[1].record), buffer);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(std::string(bytes->data(), bytes->size()), BlobBytes(7, 3000));
}

TEST_F(LogWriterTest, KeepsNoMoreSparesThanItMay) {
  options_.spare_bytes = 2500;
  {
    const auto writer = Open();
    for (uint64_t i = 2; i <= 5; ++i) {
      ASSERT_TRUE(AppendBytes(*writer, BlobBytes(i, 1000)).ok());
      ASSERT_TRUE(writer->StartSegment(StateRecord(i)).ok());
    }
    ASSERT_TRUE(writer->DropBefore(5).ok());
    EXPECT_TRUE(Exists("0000000001.spare") && Exists("0000000002.spare"));
    EXPECT_FALSE(Exists("0000000003.spare") || Exists("0000000003.blobs"));
  }
  options_.spare_bytes = 1500;
  const WholeLog log = Read();
  const auto writer = Open(log.end.next_segment, log.end.next_sequence);
  EXPECT_FALSE(Exists("0000000002.spare"));  // too many
  EXPECT_FALSE(Exists("0000000001.spare"));  // in use
  EXPECT_THAT(Read().numbers(), ElementsAre(5, 6));
}

TEST_F(LogWriterTest, AFullDiskGetsSparesBack) {
  const auto writer = Open();
  ASSERT_TRUE(AppendBytes(*writer, BlobBytes(1, 1000)).ok());
  ASSERT_TRUE(writer->StartSegment(StateRecord(2)).ok());
  ASSERT_TRUE(writer->DropBefore(2).ok());
  ASSERT_TRUE(Exists("0000000001.spare"));
  files_.FailFrom(0, ENOSPC);
  EXPECT_EQ(AppendBytes(*writer, BlobBytes(2, 1000)).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_FALSE(Exists("0000000001.spare"));
  files_.Heal();
  EXPECT_TRUE(AppendBytes(*writer, BlobBytes(2, 1000)).ok());
}

TEST_F(LogWriterTest, ASegmentIsFullByBlobsOrByRecordsBehindItsState) {
  options_.segment_bytes = 1000;
  options_.record_bytes = 1000;
  const auto writer = Open();
  EXPECT_FALSE(writer->SegmentFull());
  EXPECT_TRUE(AppendBytes(*writer, std::string(1001, 'b')).ok());
  EXPECT_TRUE(writer->SegmentFull());
  internal::v1::LogRecord large = StateRecord(2);
  large.mutable_state()->mutable_dropped_histories()->Resize(1000, 7);
  EXPECT_TRUE(writer->StartSegment(large).ok());
  EXPECT_FALSE(writer->SegmentFull());
  EXPECT_TRUE(writer->Append(PlainRecord(3, 1000)).ok());
  EXPECT_TRUE(writer->SegmentFull());
}

TEST_F(LogWriterTest, OnlyAlwaysWaitsForTheDisk) {
  for (const auto fsync : {v1::StorageConfig::NEVER, v1::StorageConfig::INTERVAL}) {
    options_.fsync = fsync;
    options_.folder = dir_.Path(v1::StorageConfig::Fsync_Name(fsync));
    options_.interval = absl::Hours(1);
    const auto writer = Open();
    const std::thread::id self = std::this_thread::get_id();
    bool called = false;
    writer->WhenDurable(*writer->Append(PlainRecord(2)), [&](const absl::Status& status) {
      called = status.ok() && std::this_thread::get_id() == self;
    });
    EXPECT_TRUE(called);
    EXPECT_EQ(writer->durable(), fsync == v1::StorageConfig::NEVER ? 0 : 1);
  }
  options_.fsync = v1::StorageConfig::ALWAYS;
  options_.folder = dir_.Path("always");
  const auto writer = Open();
  std::promise<uint64_t> durable;
  writer->WhenDurable(*writer->Append(PlainRecord(2)),
                      [&](const absl::Status&) { durable.set_value(writer->durable()); });
  EXPECT_EQ(durable.get_future().get(), 2u);
}

TEST_F(LogWriterTest, IntervalSyncsByItself) {
  options_.fsync = v1::StorageConfig::INTERVAL;
  options_.interval = absl::Milliseconds(1);
  const auto writer = Open();
  ASSERT_TRUE(writer->Append(PlainRecord(2)).ok());
  while (writer->durable() < 2) std::this_thread::yield();
}

TEST_F(LogWriterTest, AFullDiskRefusesAndHeals) {
  options_.reserve_bytes = 4096;
  {
    const auto writer = Open();
    files_.FailFrom(0, ENOSPC);
    // What is bulk is refused; small records have room left.
    const absl::Status refused = AppendBytes(*writer, BlobBytes(1, 5000)).status();
    EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("the disk of " + options_.folder));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("lookups go on"));
    EXPECT_EQ(writer->failure(), refused);
    EXPECT_EQ(*writer->Append(PlainRecord(2)), 2u);
    EXPECT_EQ(writer->failure(), refused);
    uint64_t next = 3;
    while (writer->Append(PlainRecord(next, 100)).ok()) ++next;
    EXPECT_GT(next, 10u);
    EXPECT_EQ(writer->Append(PlainRecord(next, 100)).status().code(),
              StatusCode::kResourceExhausted);
    EXPECT_EQ(writer->StartSegment(StateRecord(next)).status().code(),
              StatusCode::kResourceExhausted);
    EXPECT_FALSE(Exists("0000000002.records") || Exists("0000000002.blobs"));
    EXPECT_EQ(writer->records(), next - 1);
    EXPECT_EQ(Read().end.next_sequence, next);
    files_.Heal();
    EXPECT_EQ(*writer->Append(PlainRecord(next)), next);
    EXPECT_EQ(*writer->StartSegment(StateRecord(next + 1)), 2u);
    EXPECT_TRUE(AppendBytes(*writer, BlobBytes(1, 5000)).ok());
    EXPECT_TRUE(writer->failure().ok());
    EXPECT_EQ(*writer->Append(PlainRecord(next + 2)), next + 2);
  }
  const std::vector<uint64_t> numbers = Read().numbers();
  for (size_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(numbers[i], i + 1);
}

// A record that was half written must not stand in the way of the next, shorter one.
TEST_F(LogWriterTest, WhatFailedHalfWayIsWrittenOver) {
  {
    const auto writer = Open();
    for (uint64_t next = 2; next < 20; ++next) {
      files_.FailFrom(0, EIO);
      const absl::Status refused = writer->Append(PlainRecord(1000 + next, 3000)).status();
      EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
      EXPECT_THAT(std::string(refused.message()), HasSubstr("cannot be written"));
      files_.Heal();
      EXPECT_EQ(Read().end.next_sequence, next);
      EXPECT_EQ(*writer->Append(PlainRecord(next, next)), next);
    }
  }
  EXPECT_EQ(Read().records.size(), 19u);
}

TEST_F(LogWriterTest, AfterAFailedSyncNothingIsTakenAgain) {
  for (const auto fsync : {v1::StorageConfig::ALWAYS, v1::StorageConfig::INTERVAL}) {
    options_.fsync = fsync;
    options_.interval = absl::Milliseconds(1);
    options_.folder = dir_.Path(v1::StorageConfig::Fsync_Name(fsync));
    const auto writer = Open();
    files_.FailSyncs(EIO);
    const uint64_t sequence = *writer->Append(PlainRecord(2));
    std::promise<absl::Status> told;
    writer->WhenDurable(sequence, [&](absl::Status status) { told.set_value(std::move(status)); });
    const absl::Status answer = told.get_future().get();
    EXPECT_EQ(answer.code(),
              fsync == v1::StorageConfig::ALWAYS ? StatusCode::kUnavailable : StatusCode::kOk);
    while (writer->failure().ok()) std::this_thread::yield();
    files_.Heal();
    for (int i = 0; i < 3; ++i) {
      const absl::Status refused = writer->Append(PlainRecord(3)).status();
      EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
      EXPECT_THAT(std::string(refused.message()), HasSubstr("restarted"));
      EXPECT_EQ(AppendBytes(*writer, "b").status(), refused);
      EXPECT_EQ(writer->StartSegment(StateRecord(3)).status(), refused);
      EXPECT_EQ(writer->DropBefore(1), absl::OkStatus());
      EXPECT_EQ(writer->failure(), refused);
    }
    EXPECT_LT(writer->durable(), 2u);
    // What was synced before is still that.
    writer->WhenDurable(1, [&](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  }
}

TEST_F(LogWriterTest, OpenSaysWhatIsWrong) {
  Open();
  const absl::Status again = LogWriter::Open(options_, 1, 2, StateRecord(2)).status();
  EXPECT_EQ(again.code(), StatusCode::kInternal);
  const absl::Status no_state = LogWriter::Open(options_, 2, 2, PlainRecord(2)).status();
  EXPECT_EQ(no_state.code(), StatusCode::kInternal);
  EXPECT_FALSE(Exists("0000000002.records"));
  // Of what an earlier process wrote: a second try might be told that all is there.
  files_.FailSyncs(ENOSPC);
  const absl::Status unsynced = LogWriter::Open(options_, 2, 2, StateRecord(2)).status();
  files_.Heal();
  EXPECT_EQ(unsynced.code(), StatusCode::kUnavailable) << unsynced;
  EXPECT_THAT(std::string(unsynced.message()), HasSubstr("restarted"));
  for (int64_t call = 0;; ++call) {
    files_.FailFrom(call, ENOSPC);
    const absl::Status full = LogWriter::Open(options_, 2, 2, StateRecord(2)).status();
    files_.Heal();
    if (full.ok()) {
      EXPECT_GT(call, 3);
      break;
    }
    EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(Read().numbers(), ElementsAre(1));
    EXPECT_FALSE(Exists("0000000002.records") || Exists("0000000002.blobs"));
  }
}

// A segment that counts without its state would lose what older ones held; one that counts and was
// not told to the writer would hide records that follow in the older one.
TEST_F(LogWriterTest, ASegmentBeginsWholeOrNotAtAll) {
  for (const int error : {ENOSPC, EIO}) {
    options_.folder = dir_.Path(absl::StrCat(error));
    uint64_t next = 2, segment = 1;
    const auto writer = Open();
    for (int64_t call = 0; call < 12; ++call) {
      files_.FailFrom(call, error);
      const absl::StatusOr<uint64_t> started = writer->StartSegment(StateRecord(next));
      if (started.ok()) {
        EXPECT_EQ(*started, ++segment);
        ++next;
      }
      files_.Heal();
      const absl::StatusOr<uint64_t> appended = writer->Append(PlainRecord(next));
      // Only where it could not be removed again.
      if (!appended.ok()) {
        EXPECT_EQ(error, EIO);
        break;
      }
      EXPECT_EQ(*appended, next++);
      EXPECT_EQ(ReadWhole(options_.folder)->end.next_sequence, next);
    }
    EXPECT_EQ(ReadWhole(options_.folder)->end.next_sequence, next);
  }
}

}  // namespace log_writer_test
}  // namespace emberd::log
