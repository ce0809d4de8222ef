// Processes that are killed or stopped and links that are cut.
#include <utility>

#include <signal.h>

#include "tests/chaos/chaos.h"

namespace emberd::chaos {

absl::Duration Chaos::Pause() {
  // Some are longer than any timeout of a call, of a step or of a batch.
  return Below(8) == 0 ? Between(5500, 8000) : Between(20, 2500);
}

void Chaos::Begin(const std::string& what, absl::Duration pause,
                  std::function<absl::Status()> heal) {
  Say(absl::StrCat(what, " for ", absl::FormatDuration(pause)));
  faults_.emplace(absl::Now() + pause, std::move(heal));
}

bool Chaos::KillCoordinator(int coordinator) {
  if (!disturbed_.insert(absl::StrCat("coordinator ", coordinator)).second) return false;
  cluster_->KillCoordinator(coordinator);
  ++kills_;
  Begin(absl::StrCat("kill coordinator ", coordinator), Between(0, 1000),
        [this, coordinator] { return cluster_->RestartCoordinator(coordinator); });
  return true;
}

bool Chaos::KillTrainer(Trainer* trainer) {
  if (!disturbed_.insert(trainer->name()).second) return false;
  trainer->process->Signal(SIGKILL);
  trainer->process->WaitFor(absl::Seconds(10));
  ++kills_;
  Begin(absl::StrCat("kill ", trainer->name()), Between(0, 500),
        [this, trainer] { return StartTrainer(trainer); });
  return true;
}

bool Chaos::Stop(const std::string& what, ChildProcess* process) {
  if (!disturbed_.insert(what).second) return false;
  process->Suspend();
  ++stops_;
  Begin(absl::StrCat("stop ", what), Pause(), [process] {
    process->Signal(SIGCONT);
    return absl::OkStatus();
  });
  return true;
}

bool Chaos::Disturb(const std::string& what, testing::Relay* link) {
  if (!disturbed_.insert(what).second) return false;
  const bool cut = Below(2) == 0;
  cut ? link->Cut() : link->Stall();
  ++cuts_;
  Begin(absl::StrCat(cut ? "cut " : "hold up ", what), Pause(), [link] {
    link->Heal();
    return absl::OkStatus();
  });
  return true;
}

bool Chaos::BeginFault() {
  const int coordinator = Below(kCoordinators);
  const int shard = Below(kShards);
  Trainer& trainer = trainers_[Below(static_cast<int>(trainers_.size()))];
  // Most rounds of such a run are about that.
  if (options_.power && disturbed_.empty() && Below(4) != 0) return KillAll();
  if (options_.log && disturbed_.empty() && Below(4) == 0) return StopAll();
  if (options_.checkpoint && disturbed_.empty() && Below(2) == 0) return StopAll();
  if (options_.log) {
    switch (Below(12)) {
      case 0:
      case 1:
        return KillShard(shard);
      case 2:
        return KillAll();
      case 3:
        return FillDisk();
      default:
        break;
    }
  }
  switch (Below(10)) {
    case 0:
    case 1:
      return KillCoordinator(coordinator);
    case 2:
    case 3:
      return KillTrainer(&trainer);
    case 4:
      return Stop(trainer.name(), trainer.process.get());
    case 5:
      return Stop(absl::StrCat("coordinator ", coordinator),
                  cluster_->coordinator_process(coordinator));
    case 6:
      return Stop(absl::StrCat("shard ", shard), cluster_->shard_process(shard));
    case 7:
      return Disturb(absl::StrCat("trainers' link to coordinator ", coordinator),
                     &cluster_->client_link(coordinator));
    default:
      return Disturb(absl::StrCat("link of coordinator ", coordinator, " to shard ", shard),
                     &cluster_->shard_link(coordinator, shard));
  }
}

}  // namespace emberd::chaos
