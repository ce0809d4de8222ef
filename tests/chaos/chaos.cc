#include "tests/chaos/chaos.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "tests/chaos/small_disk.h"
#include "tests/testing/process.h"

namespace emberd::chaos {
namespace {

constexpr int64_t kLogBytes = int64_t{8} << 20;

}  // namespace

testing::ClusterOptions Chaos::Cluster() const {
  testing::ClusterOptions options;
  options.shards = kShards;
  options.coordinators = kCoordinators;
  options.links = true;
  // A clean stop saves first, however long that takes here.
  options.config = "timeouts { shard_call_ms: 3000 batch_ttl_ms: 5000 drain_ms: 60000 }";
  // What goes past the links cannot be cut.
  if (!options_.one_machine) options.shard_config = "transport: TCP";
  // Checkpoints are saved all the time, and old segments go.
  const std::string durability =
      options_.checkpoint
          ? "CHECKPOINT every_seconds: 2"
          : absl::StrCat("LOG fsync: ", options_.fsync,
                         options_.fsync == "INTERVAL" ? " fsync_interval_ms: 100" : "",
                         " log_bytes: ", kLogBytes);
  if (!options_.log && !options_.checkpoint) return options;
  absl::StrAppend(&options.config, " storage { directory: \"", storage(),
                  "\" durability: ", durability, " }");
  if (options_.power) options.power = machine();
  return options;
}

Chaos::~Chaos() {
  trainers_.clear();
  cluster_.reset();
  if (small_disk_) UnmountDisk(storage());
}

absl::Status Chaos::Start() {
  if (options_.checkpoint) std::filesystem::create_directory(storage());
  if (options_.log) {
    std::filesystem::create_directory(storage());
    // The journals of machines that lose power must never be cut off.
    small_disk_ = !options_.power && MountDisk(storage());
    if (!small_disk_) Say("no disk will be full: none can be mounted, or --power");
  }
  ASSIGN_OR_RETURN(cluster_, testing::Cluster::Start(Cluster()));
  // Before anything is disturbed: a declaration that fails half-way is not what is tested here.
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(cluster_->client_options()));
  for (const Mode mode : kModes) {
    RETURN_IF_ERROR(client->DeclareModel(ModelOf(mode, kRanks)).status());
    for (int rank = 0; rank < kRanks; ++rank) trainers_.push_back({mode, rank, nullptr, ""});
  }
  for (Trainer& trainer : trainers_) RETURN_IF_ERROR(StartTrainer(&trainer));
  return AwaitProgress();
}

absl::Status Chaos::StartTrainer(Trainer* trainer) {
  trainer->log_path = absl::StrCat(folder_, "/", NameOf(trainer->mode), ".", trainer->rank, ".log");
  // Ranks begin at different coordinators.
  const int first = trainer->rank % kCoordinators;
  std::vector<std::string> argv = {program_,
                                   "--trainer",
                                   NameOf(trainer->mode),
                                   "--rank",
                                   absl::StrCat(trainer->rank),
                                   "--control",
                                   folder_,
                                   "--address",
                                   cluster_->client_link(first).address(),
                                   "--address",
                                   cluster_->client_link(1 - first).address()};
  if (trainer->mode == Mode::kBounded && trainer->rank == 0 && !options_.plant.empty()) {
    argv.insert(argv.end(), {"--plant", options_.plant});
  }
  ASSIGN_OR_RETURN(trainer->process, testing::StartProcess(argv, trainer->log_path));
  return absl::OkStatus();
}

void Chaos::ShowEnd(const std::string& name, const std::string& log) const {
  constexpr size_t kLines = 30;
  const std::vector<absl::string_view> lines = absl::StrSplit(log, '\n', absl::SkipEmpty());
  Say(absl::StrCat("the last lines of ", name));
  for (size_t i = lines.size() - std::min(lines.size(), kLines); i < lines.size(); ++i) {
    std::printf("    %s\n", std::string(lines[i]).c_str());
  }
}

std::vector<int64_t> Chaos::Progress() const {
  std::vector<int64_t> progress;
  for (const Trainer& trainer : trainers_) {
    progress.push_back(ReadNumber(folder_, absl::StrCat(NameOf(trainer.mode), ".", trainer.rank)));
  }
  return progress;
}

absl::Status Chaos::AwaitProgress() {
  const std::vector<int64_t> before = Progress();
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline) {
    const std::vector<int64_t> now = Progress();
    bool all = true;
    for (size_t i = 0; i < now.size(); ++i) all = all && now[i] > before[i];
    if (all) return absl::OkStatus();
    for (Trainer& trainer : trainers_) {
      if (trainer.process->Running()) continue;
      return absl::InternalError(absl::StrCat("the trainer of ", trainer.log_path, " ended:\n",
                                              testing::ReadFile(trainer.log_path)));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  ++damage_.stuck;
  std::string who;
  const std::vector<int64_t> now = Progress();
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] > before[i]) continue;
    absl::StrAppend(&who, who.empty() ? "" : ", ", trainers_[i].name(), " at ", now[i]);
    ShowEnd(trainers_[i].name(), testing::ReadFile(trainers_[i].log_path));
  }
  for (int i = 0; i < kCoordinators; ++i) {
    ShowEnd(absl::StrCat("coordinator ", i), cluster_->CoordinatorLog(i));
  }
  for (int i = 0; i < kShards; ++i) ShowEnd(absl::StrCat("shard ", i), cluster_->ShardLog(i));
  return absl::DeadlineExceededError(absl::StrCat("no progress after a fault within ",
                                                  absl::FormatDuration(kPatience), ": ", who));
}

absl::Status Chaos::DisturbOnce() {
  absl::SleepFor(Between(0, 300));
  ++rounds_;
  const int64_t wanted = std::min<int64_t>(1 + Below(kMostFaults), options_.max_faults - faults());
  for (int64_t begun = 0; begun < wanted;) {
    if (!BeginFault()) continue;  // there is one of it already
    ++begun;
    absl::SleepFor(Between(0, 100));
  }
  for (; !faults_.empty(); faults_.erase(faults_.begin())) {
    absl::SleepFor(faults_.begin()->first - absl::Now());
    RETURN_IF_ERROR(faults_.begin()->second());
  }
  disturbed_.clear();
  return absl::OkStatus();
}

absl::Status Chaos::Run() {
  RETURN_IF_ERROR(Start());
  const absl::Time end = absl::Now() + absl::Minutes(options_.minutes);
  while (absl::Now() < end && faults() < options_.max_faults) {
    RETURN_IF_ERROR(DisturbOnce());
    RETURN_IF_ERROR(AwaitProgress());
  }
  RETURN_IF_ERROR(Finish());
  if (damage_.any()) return absl::DataLossError("the tables are not what was acknowledged");
  return absl::OkStatus();
}

void Chaos::PrintSummary() const {
  std::printf("chaos: rounds=%lld kills=%lld stops=%lld cuts=%lld ",
              static_cast<long long>(rounds_), static_cast<long long>(kills_),
              static_cast<long long>(stops_), static_cast<long long>(cuts_));
  if (options_.log || options_.checkpoint) {
    std::printf("clean_stops=%lld ", static_cast<long long>(clean_stops_));
  }
  if (options_.log) {
    std::printf("full_disks=%lld power_losses=%lld lost_bytes=%lld ",
                static_cast<long long>(full_disks_), static_cast<long long>(power_losses_),
                static_cast<long long>(lost_bytes_));
  }
  std::printf("lost=%d doubled=%d torn=%d stuck=%d seed=%llu\n", damage_.lost, damage_.doubled,
              damage_.torn, damage_.stuck, static_cast<unsigned long long>(options_.seed));
}

}  // namespace emberd::chaos
