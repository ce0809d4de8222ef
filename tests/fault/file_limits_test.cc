// Limits of processes, of the size of files (ulimit -f) and of descriptors (ulimit -n): reached
// anywhere in the life of a model, they are what a full disk is. Catches: a signal that kills, a
// limit that is taken for a fault of the disk, a server that stays broken after the limit is gone.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include <sys/resource.h>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/fault/file_faults_cluster.h"

namespace emberd::testing {
namespace file_limits_test {

// ---- Limits of the processes

class FileLimitsTest : public FileFaultsCluster {
 protected:
  void SetUp() override {
    Start(absl::StrCat("durability: LOG log_bytes: 1048576 fsync: ALWAYS"), 2,
          absl::StrCat("logging { file: \"", dir_.Path("servers.log"), "\" }"));
  }
  void SetLimit(__rlimit_resource resource, rlim_t soft) {
    for (const pid_t pid : cluster_->pids()) {
      rlimit limit;
      ASSERT_EQ(prlimit(pid, resource, nullptr, &limit), 0);
      before_.try_emplace({pid, resource}, limit.rlim_cur);
      limit.rlim_cur = std::min(soft, limit.rlim_max);
      ASSERT_EQ(prlimit(pid, resource, &limit, nullptr), 0);
    }
  }
  void LiftLimits() {
    for (const auto& [key, soft] : before_) {
      rlimit limit;
      if (prlimit(key.first, key.second, nullptr, &limit) != 0) continue;  // it was started again
      limit.rlim_cur = soft;
      EXPECT_EQ(prlimit(key.first, key.second, &limit, nullptr), 0);
    }
    before_.clear();
  }
  void TryWithLimit(const NamedStep& step, __rlimit_resource resource, rlim_t soft) {
    SCOPED_TRACE(absl::StrCat(step.name, " with limit ", static_cast<int>(resource), " at ", soft));
    ASSERT_NO_FATAL_FAILURE(Prepare(step));
    ASSERT_NO_FATAL_FAILURE(SetLimit(resource, soft));
    const absl::Status status = (this->*step.run)();
    ExpectAllRun();
    if (!status.ok()) ExpectSaysWhy(status);
    ExpectNothingOlder();
    LiftLimits();
    const int restarts = restarts_;
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn());
    EXPECT_EQ(restarts_, restarts) << "a limit is no fault of the disk";
    ASSERT_NO_FATAL_FAILURE(ExpectCheckpointsAsTold());
  }

  std::map<std::pair<pid_t, __rlimit_resource>, rlim_t> before_;
};

TEST_F(FileLimitsTest, FilesThatMayNotGrowAreAFullDisk) {
  for (const rlim_t most : {0, 100, 1000, 4096, 20'000, 1 << 20}) {
    for (const NamedStep& step : kLife) {
      ASSERT_NO_FATAL_FAILURE(TryWithLimit(step, RLIMIT_FSIZE, most));
    }
  }
  ASSERT_NO_FATAL_FAILURE(RestartAll());
}

// What a shard needs of its log when it starts may not be written.
TEST_F(FileLimitsTest, AShardThatStartsWaitsForRoomForItsLog) {
  ASSERT_TRUE(Train().ok());
  for (const rlim_t most : {1000, 4096, 100'000}) {
    SCOPED_TRACE(most);
    cluster_->KillShard(0);
    rlimit own;
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &own), 0);
    const rlimit less = {most, own.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
    const absl::Status launched = cluster_->LaunchShard(0);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &own), 0);
    ASSERT_TRUE(launched.ok()) << launched;
    ASSERT_TRUE(cluster_->AwaitShard(0).ok());
    const auto rows = Await([&] { return Rows(); });
    EXPECT_EQ(rows.value_or(-1), made_) << rows.status();
    const absl::Status refused = Train();
    if (!refused.ok()) ExpectSaysWhy(refused);
    ASSERT_NO_FATAL_FAILURE(SetLimit(RLIMIT_FSIZE, RLIM_INFINITY));
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn());
  }
}

TEST_F(FileLimitsTest, DescriptorsThatAreOutAreRefusedAndComeBack) {
  ASSERT_TRUE(Save().ok());
  ASSERT_TRUE(Verify().ok());  // the connection stays
  for (const int free : {0, 1, 3, 8}) {
    for (const NamedStep& step : kLife) {
      size_t most = 0;
      for (const pid_t pid : cluster_->pids()) {
        const std::filesystem::directory_iterator files(absl::StrCat("/proc/", pid, "/fd"));
        most = std::max<size_t>(most, std::distance(begin(files), end(files)));
      }
      ASSERT_NO_FATAL_FAILURE(TryWithLimit(step, RLIMIT_NOFILE, most + free));
      if (HasFailure()) return;
    }
    auto other = client::Client::Connect(cluster_->client_options());
    EXPECT_TRUE(other.ok()) << other.status();
  }
  ASSERT_NO_FATAL_FAILURE(RestartAll());
}

}  // namespace file_limits_test
}  // namespace emberd::testing
