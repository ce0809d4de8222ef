// Shards that are killed and come back from their logs, all processes at once, disks that lose what
// was not synced, and full ones.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <signal.h>

#include "absl/strings/match.h"
#include "base/status.h"
#include "server/log/testing/forgetful_files.h"
#include "tests/chaos/chaos.h"
#include "tests/chaos/small_disk.h"

namespace emberd::chaos {

void Chaos::TearTail(int shard) {
  // shard-0002
  const std::string log =
      absl::StrCat(storage(), "/shard-", absl::Dec(shard, absl::kZeroPad4), "/log");
  std::string newest;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(log, error)) {
    const std::string path = entry.path().string();
    if (entry.path().extension() == ".records") newest = std::max(newest, path);
  }
  if (newest.empty()) return;
  // Behind what was set aside: as if half a record had reached the disk there.
  std::ofstream file(newest, std::ios::binary | std::ios::app);
  std::string bytes = "LREC";
  for (int i = Below(5000); i > 0; --i) bytes.push_back(static_cast<char>(Below(256)));
  file << bytes;
}

bool Chaos::KillShard(int shard) {
  if (!disturbed_.insert(absl::StrCat("shard ", shard)).second) return false;
  cluster_->KillShard(shard);
  ++kills_;
  if (!options_.power && Below(4) == 0) TearTail(shard);
  Begin(absl::StrCat("kill shard ", shard), Between(0, 1000),
        [this, shard] { return BringBack(shard); });
  return true;
}

absl::Status Chaos::BringBack(int shard) {
  if (Below(4) == 0) {
    RETURN_IF_ERROR(cluster_->LaunchShard(shard));
    absl::SleepFor(Between(0, 300));
    Say(absl::StrCat("kill shard ", shard, " again as it comes back"));
    cluster_->KillShard(shard);
    ++kills_;
  }
  return cluster_->RestartShard(shard);
}

bool Chaos::TakeAll() {
  for (const std::string& what : disturbed_) {
    // Others are at work on them.
    if (absl::StartsWith(what, "shard ") || absl::StartsWith(what, "coordinator ")) return false;
  }
  for (int i = 0; i < kShards; ++i) disturbed_.insert(absl::StrCat("shard ", i));
  for (int i = 0; i < kCoordinators; ++i) disturbed_.insert(absl::StrCat("coordinator ", i));
  return true;
}

bool Chaos::StopAll() {
  // A full disk may keep a shard from ending its log well; links that are cut keep answers from it.
  if (!disturbed_.empty() || !TakeAll()) return false;
  if (const absl::Status status = cluster_->Stop(kPatience); !status.ok()) {
    Say(absl::StrCat("a clean stop failed: ", status.ToString()));
    ++damage_.stuck;
  }
  ++clean_stops_;
  Begin("stop everything by SIGTERM", Between(0, 1000),
        [this] { return BringAllBack(/*trainers=*/false); });
  return true;
}

bool Chaos::KillAll() {
  bool trainers = Below(3) == 0;
  for (const Trainer& trainer : trainers_) trainers &= disturbed_.count(trainer.name()) == 0;
  if (!TakeAll()) return false;
  for (Trainer& trainer : trainers_) {
    if (!trainers) break;
    disturbed_.insert(trainer.name());
    trainer.process->Signal(SIGKILL);
  }
  cluster_->KillAll();
  kills_ += kShards + kCoordinators + (trainers ? static_cast<int64_t>(trainers_.size()) : 0);
  std::string what = trainers ? "kill everything, trainers too" : "kill everything";
  if (options_.power) {
    const auto loss = log::LosePower(machine(), random_());
    if (loss.ok()) {
      ++power_losses_;
      lost_bytes_ += loss->lost_bytes;
      absl::StrAppend(&what, ", and lose ", loss->lost_bytes, " bytes with the power");
    } else {
      Say(loss.status().ToString());
      ++damage_.stuck;
    }
  }
  Begin(what, Between(0, 1000), [this, trainers] { return BringAllBack(trainers); });
  return true;
}

absl::Status Chaos::BringAllBack(bool trainers) {
  for (int i = 0; i < kShards; ++i) RETURN_IF_ERROR(cluster_->LaunchShard(i));
  if (Below(3) == 0) {
    absl::SleepFor(Between(0, 300));
    const int again = Below(kShards);
    Say(absl::StrCat("kill shard ", again, " again as all come back"));
    cluster_->KillShard(again);
    ++kills_;
    RETURN_IF_ERROR(cluster_->LaunchShard(again));
  }
  for (int i = 0; i < kCoordinators; ++i) RETURN_IF_ERROR(cluster_->RestartCoordinator(i));
  for (int i = 0; i < kShards; ++i) RETURN_IF_ERROR(cluster_->AwaitShard(i));
  for (Trainer& trainer : trainers_) {
    if (!trainers) break;
    trainer.process->WaitFor(absl::Seconds(10));
    RETURN_IF_ERROR(StartTrainer(&trainer));
  }
  return absl::OkStatus();
}

bool Chaos::FillDisk() {
  if (!small_disk_ || !disturbed_.insert("disk").second) return false;
  const std::string filler = storage() + "/filler";
  Fill(filler);
  ++full_disks_;
  Begin("fill the disk", Pause(), [filler] {
    std::filesystem::remove(filler);
    return absl::OkStatus();
  });
  return true;
}

}  // namespace emberd::chaos
