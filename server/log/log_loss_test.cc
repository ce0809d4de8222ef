// A log that is written, killed, cut off and robbed of what was not synced, again and again,
// against a model of what it must hold. Catches: a record that was lost though it was acknowledged
// or reported durable, one that comes back after it was left out, one before its blob, and a
// segment that is dropped before the next one can replace it.
// Covers: log_writer.cc, testing/lose_power.cc

#include <atomic>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/seed.h"
#include "server/files/files.h"
#include "server/log/testing/forgetful_files.h"
#include "server/log/testing/records.h"

namespace emberd::log {
namespace log_loss_test {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

enum class End { kClosed, kKilled, kPowerLost };

class LogLossTest : public ::testing::TestWithParam<v1::StorageConfig::Fsync> {
 protected:
  void Round();
  void Open();
  void Work();
  void AppendOne();
  void EndProcess();
  void Check();
  void CheckBlobs(const WholeLog& log);
  void CutOffTail(const WholeLog& log);
  LogRecord State() {
    LogRecord state = StateRecord(next_number_);
    state.mutable_state()->set_begins(begins_);
    return state;
  }
  int Below(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }

  const TempDir dir_ = *TempDir::Create();
  const std::string machine_ = dir_.Path("machine");
  const std::string folder_ = dir_.Path("log");
  std::mt19937_64 random_;
  std::map<uint64_t, uint64_t> model_;  // numbers by sequence
  uint64_t next_number_ = 1;
  std::unique_ptr<ForgetfulFiles> files_;
  std::unique_ptr<LogWriter> writer_;
  WholeLog read_;
  // Of this process.
  uint64_t begins_ = 0;  // the log's first segment, as its records say
  End end_ = End::kClosed;
  uint64_t known_durable_ = 0;         // as the writer said before it was killed
  std::atomic<uint64_t> reported_{0};  // by WhenDurable
  std::optional<LogBlob> old_blob_;    // for a later record
  int64_t lost_bytes_ = 0, lost_names_ = 0, cut_logs_ = 0;
};

void LogLossTest::Open() {
  files_ = std::make_unique<ForgetfulFiles>(machine_);
  LogOptions options;
  options.folder = folder_;
  options.fsync = GetParam();
  options.interval = absl::Milliseconds(1);
  options.segment_bytes = 20'000;
  options.record_bytes = 5'000;
  options.reserve_bytes = 4096;
  options.older_blobs = read_.end.older_blobs;
  options.files = files_.get();
  const uint64_t sequence = read_.end.next_sequence;
  begins_ = read_.end.first_segment == 0 ? read_.end.next_segment : read_.end.first_segment;
  auto writer = LogWriter::Open(options, read_.end.next_segment, sequence, State());
  ASSERT_TRUE(writer.ok()) << writer.status();
  writer_ = *std::move(writer);
  model_[sequence] = next_number_++;
  known_durable_ = 0;
  reported_ = 0;
  old_blob_.reset();
}

void LogLossTest::AppendOne() {
  const uint64_t number = next_number_++;
  LogRecord record = PlainRecord(number, Below(200));
  if (Below(2) == 0) {
    const absl::StatusOr<LogBlob> appended = AppendBytes(*writer_, BlobBytes(number, Below(4000)));
    if (files_->dead()) return;
    ASSERT_TRUE(appended.ok()) << appended.status();
    const LogBlob& blob = *appended;
    record = VoteRecord(number, blob);
    if (old_blob_.has_value() && Below(4) == 0) {
      // In a segment that may have been closed since.
      record = VoteRecord(number, *old_blob_);
    }
    old_blob_ = blob;
  }
  const absl::StatusOr<uint64_t> sequence = writer_->Append(record);
  if (files_->dead()) {
    if (sequence.ok()) model_[*sequence] = number;
    return;
  }
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  model_[*sequence] = number;
  if (Below(3) != 0) return;
  writer_->WhenDurable(*sequence, [this, sequence = *sequence](const absl::Status& status) {
    if (status.ok() && reported_ < sequence) reported_ = sequence;
  });
}

void LogLossTest::Work() {
  if (Below(2) == 0) files_->DieAfter(Below(150));
  for (int left = Below(60); left > 0; --left) {
    AppendOne();
    if (files_->dead()) return;
    if (writer_->SegmentFull() || Below(20) == 0) {
      const absl::StatusOr<uint64_t> started = writer_->StartSegment(State());
      if (started.ok()) model_[writer_->records()] = next_number_++;
      if (files_->dead()) return;
      ASSERT_TRUE(started.ok()) << started.status();
    }
    if (Below(20) == 0) {
      const uint64_t segment =
          writer_->segment() - std::min<uint64_t>(writer_->segment(), Below(3));
      // A blob that no record named by now may be gone.
      if (old_blob_.has_value() && old_blob_->segment() < segment) old_blob_.reset();
      if (segment > begins_) {
        LogRecord begins;
        begins.mutable_begins()->set_segment(begins_ = segment);
        const absl::StatusOr<uint64_t> said = writer_->Append(begins);
        if (said.ok()) model_[*said] = NumberOf(begins);
        if (files_->dead()) return;
        ASSERT_TRUE(said.ok()) << said.status();
      }
      const absl::Status dropped = writer_->DropBefore(segment);
      if (files_->dead()) return;
      ASSERT_TRUE(dropped.ok()) << dropped;
    }
    if (Below(20) == 0) {
      const absl::Status synced = writer_->Sync();
      if (files_->dead()) return;
      ASSERT_TRUE(synced.ok()) << synced;
    }
    if (Below(10) == 0) std::this_thread::yield();
  }
}

void LogLossTest::EndProcess() {
  end_ = static_cast<End>(Below(3));
  if (files_->dead() && end_ == End::kClosed) end_ = End::kKilled;
  if (end_ == End::kClosed) {
    writer_.reset();
    return;
  }
  files_->Die();
  known_durable_ = writer_->durable();
  writer_.reset();
  if (end_ != End::kPowerLost) return;
  const absl::StatusOr<PowerLoss> loss = LosePower(machine_, random_());
  ASSERT_TRUE(loss.ok()) << loss.status();
  lost_bytes_ += loss->lost_bytes;
  lost_names_ += loss->lost_names;
}

void LogLossTest::CheckBlobs(const WholeLog& log) {
  Buffer<char> buffer;
  for (const ReadRecord& read : log.records) {
    const LogBlob* const blob = BlobOf(read.record);
    if (blob == nullptr) continue;
    const auto bytes = ReadBlob(folder_, *blob, buffer);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
  }
}

void LogLossTest::Check() {
  files_ = std::make_unique<ForgetfulFiles>(machine_);
  absl::StatusOr<WholeLog> log = ReadWhole(folder_, *files_);
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_FALSE(log->records.empty());
  const uint64_t next = log->end.next_sequence;
  const uint64_t all = model_.rbegin()->first + 1;
  EXPECT_LE(next, all);
  if (end_ != End::kPowerLost) {
    EXPECT_EQ(next, all);
  }
  if (GetParam() == v1::StorageConfig::ALWAYS) {
    EXPECT_GT(next, reported_);
  }
  EXPECT_GT(next, known_durable_);
  if (next < all) ++cut_logs_;
  for (const ReadRecord& read : log->records) {
    ASSERT_EQ(NumberOf(read.record), model_[read.position.sequence]);
  }
  EXPECT_EQ(log->records.back().position.sequence + 1, next);
  CheckBlobs(*log);
  model_.erase(model_.lower_bound(next), model_.end());
  read_ = *std::move(log);
}

void LogLossTest::Round() {
  Open();
  Work();
  EndProcess();
  Check();
}

TEST_P(LogLossTest, HoldsWhatItPromised) {
  random_.seed(TestSeed());
  for (int round = 0; round < 150 && !HasFailure(); ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    Round();
  }
  // That the test had something to find.
  EXPECT_GT(lost_bytes_, 0);
  EXPECT_GT(lost_names_, 0);
  EXPECT_GT(cut_logs_, 0);
}

INSTANTIATE_TEST_SUITE_P(Fsync, LogLossTest,
                         ::testing::Values(v1::StorageConfig::NEVER, v1::StorageConfig::INTERVAL,
                                           v1::StorageConfig::ALWAYS),
                         [](const auto& test) {
                           return v1::StorageConfig::Fsync_Name(test.param);
                         });

// The power goes while a log is begun, once and again: nobody was told of anything, so whatever the
// disk has of it is a log that can be read and gone on with.
TEST(LogBeginTest, MayLoseThePowerAtEveryStep) {
  int lost_names = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937_64 random(seed);
    const TempDir dir = *TempDir::Create();
    LogOptions options;
    options.folder = dir.Path("log");
    options.reserve_bytes = 4096;
    options.fsync = v1::StorageConfig::ALWAYS;
    for (int life = 0; life < 3; ++life) {
      ForgetfulFiles files(dir.Path("machine"));
      options.files = &files;
      const absl::StatusOr<WholeLog> log = ReadWhole(options.folder, files);
      ASSERT_TRUE(log.ok()) << log.status();
      files.DieAfter(static_cast<int64_t>(random() % 12));
      LogWriter::Open(options, log->end.next_segment, log->end.next_sequence, StateRecord(1))
          .IgnoreError();
      files.Die();
      const absl::StatusOr<PowerLoss> loss = LosePower(dir.Path("machine"), random());
      ASSERT_TRUE(loss.ok()) << loss.status();
      lost_names += static_cast<int>(loss->lost_names);
    }
  }
  EXPECT_GT(lost_names, 0);
}

}  // namespace log_loss_test
}  // namespace emberd::log
