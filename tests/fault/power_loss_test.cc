// Processes write logs and are killed all at once, again and again; most times their machine loses
// power, too, and with it any part of what nobody had synced. Catches: a record that was reported
// durable and is not there, a record before its blob, a log that cannot be read after what may
// happen to it, and a simulation that loses nothing.
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <signal.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "base/testing/seed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/log/testing/forgetful_files.h"
#include "server/log/testing/records.h"
#include "tests/testing/process.h"

namespace emberd::testing {
namespace power_loss_test {

using log::ReadRecord;
using log::WholeLog;

constexpr int kLogs = 2;

// What one log must hold: numbers by sequence.
struct Expected {
  std::map<uint64_t, uint64_t> appended, durable;
};

class PowerLossTest : public ::testing::Test {
 protected:
  void Run(const std::string& fsync, int rounds, const std::string& mistake = "");
  void Round(const std::string& fsync);
  void AwaitFirstRecord(int log, ChildProcess& process);
  void Collect(int log);
  // `promised`: what must be there.
  void Check(int log, const std::map<uint64_t, uint64_t>& promised);
  std::string Folder(int log) { return dir_.Path(absl::StrCat("shard-000", log, "/log")); }
  int Below(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }

  const TempDir dir_ = *TempDir::Create();
  const std::string machine_ = dir_.Path("machine");
  std::mt19937_64 random_;
  std::vector<Expected> expected_{kLogs};
  int64_t reported_ = 0, lost_records_ = 0, lost_bytes_ = 0;
  int missing_ = 0;  // reported, but not there
  std::string mistake_;
};

void PowerLossTest::Collect(int log) {
  const std::string path = dir_.Path(absl::StrCat("told-", log));
  std::vector<std::string> lines = absl::StrSplit(ReadFile(path), '\n');
  lines.pop_back();  // empty, or cut off by the death of the process
  std::remove(path.c_str());
  for (const std::string& line : lines) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() != 3) continue;
    const uint64_t sequence = std::stoull(words[1]), number = std::stoull(words[2]);
    expected_[log].appended[sequence] = number;
    if (words[0] != "durable") continue;
    expected_[log].durable[sequence] = number;
    ++reported_;
  }
}

void PowerLossTest::Check(int log, const std::map<uint64_t, uint64_t>& promised) {
  log::ForgetfulFiles files(machine_);
  const absl::StatusOr<WholeLog> read = log::ReadWhole(Folder(log), files);
  if (!read.ok() && !mistake_.empty()) {
    ++missing_;
    return;
  }
  ASSERT_TRUE(read.ok()) << read.status();
  std::map<uint64_t, const ReadRecord*> found;
  for (const ReadRecord& record : read->records) found[record.position.sequence] = &record;
  const uint64_t first = found.empty() ? 1 : found.begin()->first;
  Expected& expected = expected_[log];
  Buffer<char> buffer;
  for (const auto& [sequence, number] : promised) {
    if (sequence >= first && found.count(sequence) == 0) ++missing_;
  }
  for (const auto& [sequence, number] : expected.appended) {
    if (sequence < first) continue;
    const auto record = found.find(sequence);
    if (record == found.end()) {
      ++lost_records_;
      continue;
    }
    ASSERT_EQ(log::NumberOf(record->second->record), number) << sequence;
    const internal::v1::LogBlob& blob = *log::BlobOf(record->second->record);
    if (blob.segment() < read->end.first_segment) continue;
    const auto bytes = log::ReadBlob(Folder(log), blob, buffer);
    if (!bytes.ok() && !mistake_.empty()) {
      ++missing_;
      continue;
    }
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    ASSERT_EQ(std::string(bytes->begin(), bytes->end()), log::BlobBytes(number, number % 20'000));
  }
  for (auto* numbers : {&expected.appended, &expected.durable}) {
    numbers->erase(numbers->lower_bound(read->end.next_sequence), numbers->end());
  }
}

void PowerLossTest::AwaitFirstRecord(int log, ChildProcess& process) {
  Eventually([&] {
    return !ReadFile(dir_.Path(absl::StrCat("told-", log))).empty() || !process.Running();
  });
}

void PowerLossTest::Round(const std::string& fsync) {
  std::vector<std::unique_ptr<ChildProcess>> processes;
  for (int log = 0; log < kLogs; ++log) {
    auto process = StartProcess({BuildPath("tests/log_load"), Folder(log), fsync},
                                dir_.Path(absl::StrCat("told-", log)));
    ASSERT_TRUE(process.ok()) << process.status();
    processes.push_back(*std::move(process));
  }
  // Some are killed before they have begun; the others not, however busy the machine is.
  for (int log = 0; log < kLogs && Below(5) > 0; ++log) AwaitFirstRecord(log, *processes[log]);
  absl::SleepFor(absl::Milliseconds(Below(80)));
  for (const auto& process : processes) {
    EXPECT_TRUE(process->Running())
        << ReadFile(dir_.Path("told-0")) << ReadFile(dir_.Path("told-1"));
    process->Signal(SIGKILL);
  }
  for (const auto& process : processes) process->WaitFor(absl::InfiniteDuration());
  const bool power_lost = Below(3) > 0;
  if (power_lost) {
    const auto loss = log::LosePower(machine_, random_());
    ASSERT_TRUE(loss.ok()) << loss.status();
    lost_bytes_ += loss->lost_bytes;
  }
  for (int log = 0; log < kLogs; ++log) {
    Collect(log);
    // With INTERVAL and NEVER "durable" is said at once.
    std::map<uint64_t, uint64_t> promised = expected_[log].appended;
    if (power_lost) promised.clear();
    if (power_lost && fsync == "ALWAYS") promised = expected_[log].durable;
    ASSERT_NO_FATAL_FAILURE(Check(log, promised));
  }
}

void PowerLossTest::Run(const std::string& fsync, int rounds, const std::string& mistake) {
  random_.seed(TestSeed());
  mistake_ = mistake;
  { log::ForgetfulFiles made(machine_); }
  setenv("EMBERD_POWER", machine_.c_str(), /*overwrite=*/1);
  setenv("EMBERD_FAILPOINT", mistake.c_str(), /*overwrite=*/1);
  const absl::Cleanup restore = [] {
    unsetenv("EMBERD_POWER");
    unsetenv("EMBERD_FAILPOINT");
  };
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    Round(fsync);
    if (!mistake.empty() && missing_ > 0) return;
  }
  EXPECT_GT(lost_bytes_, 0);
  EXPECT_GT(lost_records_, 0);
}

TEST_F(PowerLossTest, AlwaysLosesNothingThatWasReported) {
  Run("ALWAYS", 30);
  EXPECT_EQ(missing_, 0);
  EXPECT_GT(reported_, 0);
}

// And kills without a loss of power lose nothing at all.
TEST_F(PowerLossTest, IntervalEndsWithAWholeLog) {
  Run("INTERVAL", 10);
  EXPECT_EQ(missing_, 0);
}

TEST_F(PowerLossTest, NeverEndsWithAWholeLog) {
  Run("NEVER", 10);
  EXPECT_EQ(missing_, 0);
}

// The test would notice.
TEST_F(PowerLossTest, ASyncThatIsLeftOutIsFound) {
  Run("ALWAYS", 60, "log.not_synced=mistake");
  EXPECT_GT(missing_, 0);
}

}  // namespace power_loss_test
}  // namespace emberd::testing
