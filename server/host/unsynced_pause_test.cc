// A pause, and a drop, on a shard whose disk has failed. A failure here means that a checkpoint
// makes a step on the other shards, because this one still holds parts that it may not have after
// its restart; or that a checkpoint is deleted which the log still begins with.
//
// Covers: shard_checkpoints.cc, log/shard_log.cc, hosted_models.cc
#include <cerrno>
#include <string>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "server/host/testing_groups.h"
#include "server/log/testing/faulty_files.h"

namespace emberd {
namespace log {
namespace {

FaultyFiles& Faults() {
  static auto* const files = new FaultyFiles(DiskLogFiles());
  return *files;
}

}  // namespace

// Instead of those of log_files.cc.
LogFiles& SystemLogFiles() { return Faults(); }

}  // namespace log

namespace host {
namespace unsynced_pause_test {

class UnsyncedPauseTest : public GroupStepsTest {
 protected:
  UnsyncedPauseTest() : GroupStepsTest(Synced().c_str()) {}
  ~UnsyncedPauseTest() override { log::Faults().Heal(); }

  static std::string Synced() {
    static const TempDir storage = *TempDir::Create();
    return absl::StrCat(kCluster, " storage { directory: '", storage.path(),
                        "' durability: LOG fsync: ALWAYS }");
  }
};

// The coordinator that pauses makes what all shards hold: it asks nobody else.
TEST_F(UnsyncedPauseTest, TellsOfNothingThatTheDiskMayNotHave) {
  ASSERT_TRUE(Open(1, 1).ok());
  ASSERT_TRUE(Gather(1).ok());
  log::Faults().FailSyncs(EIO);
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 1, 0};
  const absl::Status staged = Stage(std::move(command)).status();
  EXPECT_TRUE(absl::IsUnavailable(staged)) << staged;
  internal::v1::PauseChangesRequest pause;
  pause.set_model_id(5);
  pause.set_history(kHistory);
  pause.set_pause_id(7);
  pause.set_lease_ms(60'000);
  const absl::Status paused = host_->checkpoints().PauseChanges(pause).status();
  EXPECT_TRUE(absl::IsUnavailable(paused)) << paused;
}

// Its checkpoint may be deleted as soon as somebody hears of it, and the log must not need that
// then.
class UnsyncedDropTest : public TestHost {
 protected:
  UnsyncedDropTest() : TestHost(Unsynced().c_str()) {}
  ~UnsyncedDropTest() override { log::Faults().Heal(); }

  static std::string Unsynced() {
    static const TempDir storage = *TempDir::Create();
    return absl::StrCat(kCluster, " storage { directory: '", storage.path(),
                        "' durability: LOG fsync: NEVER }");
  }
};

TEST_F(UnsyncedDropTest, TellsOfNoDropThatTheDiskMayNotHave) {
  log::Faults().FailSyncs(EIO);
  internal::v1::DropModelRequest drop;
  drop.set_model_id(5);
  drop.set_history(kHistory);
  const absl::Status dropped = host_->DropModel(drop);
  EXPECT_TRUE(absl::IsUnavailable(dropped)) << dropped;
}

}  // namespace unsynced_pause_test
}  // namespace host
}  // namespace emberd
