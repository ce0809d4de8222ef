// Trains three groups (synchronous, pipelined, bounded) and two trainers without a group on a
// cluster of processes while coordinators and trainers are killed, coordinators, trainers and
// shards are stopped, and the links between them are cut and held up, up to five at a time, at
// moments that a seed decides. After each round all must go on by themselves. At the end no update
// may be lost, doubled or torn: the synchronous group's tables must equal, to the bit, those of one
// trainer on a cluster that nobody disturbed; every row of the others has counted its own updates.
//
//   emberd_chaos --minutes 10 --seed 7       exit status 0: all of that held
//
// Shards are stopped but not killed: their rows live in memory.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <signal.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/child_process.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "tests/chaos/chaos_trainer.h"
#include "tests/testing/cluster.h"
#include "tests/testing/process.h"
#include "tests/testing/relay.h"
#include "tests/testing/training.h"

namespace emberd::chaos {
namespace {

constexpr int kRanks = 2;
constexpr int kShards = 4;
constexpr int kCoordinators = 2;
constexpr Mode kModes[] = {Mode::kSync, Mode::kPipelined, Mode::kBounded, Mode::kUnary};
constexpr int kMostFaults = 5;  // at once
// A group that makes no progress for this long is stuck.
constexpr absl::Duration kPatience = absl::Seconds(90);

struct Options {
  double minutes = 10;
  int64_t max_faults = 1'000'000;
  uint64_t seed = 0;
  std::string plant;  // of the first rank of the bounded group
};

// What went wrong with updates.
struct Damage {
  int lost = 0;     // rows with fewer updates than were acknowledged
  int doubled = 0;  // rows with more
  int torn = 0;     // ranks whose rows disagree, or tables that differ from the undisturbed ones
  int stuck = 0;    // groups that did not go on
  bool any() const { return lost + doubled + torn + stuck > 0; }
};

struct Trainer {
  Mode mode;
  int rank;
  std::unique_ptr<ChildProcess> process;
  std::string log_path;

  std::string name() const { return absl::StrCat("trainer ", NameOf(mode), ".", rank); }
};

class Chaos {
 public:
  Chaos(const Options& options, std::string program, std::string folder)
      : options_(options),
        program_(std::move(program)),
        folder_(std::move(folder)),
        random_(options.seed) {}

  absl::Status Run();
  void PrintSummary() const {
    std::printf(
        "chaos: rounds=%lld kills=%lld stops=%lld cuts=%lld lost=%d doubled=%d torn=%d stuck=%d "
        "seed=%llu\n",
        static_cast<long long>(rounds_), static_cast<long long>(kills_),
        static_cast<long long>(stops_), static_cast<long long>(cuts_), damage_.lost,
        damage_.doubled, damage_.torn, damage_.stuck,
        static_cast<unsigned long long>(options_.seed));
  }

 private:
  absl::Status Start();
  absl::Status StartTrainer(Trainer* trainer);
  // Some faults at a time, and what heals them.
  absl::Status DisturbOnce();
  // Each begins a fault, which `heal` ends after `pause`. False: there is one in the same place.
  bool BeginFault();
  bool KillCoordinator(int coordinator);
  bool KillTrainer(Trainer* trainer);
  bool Stop(const std::string& what, ChildProcess* process);
  bool Disturb(const std::string& what, testing::Relay* link);
  void Begin(const std::string& what, absl::Duration pause, std::function<absl::Status()> heal);
  absl::Duration Pause();
  int64_t faults() const { return kills_ + stops_ + cuts_; }
  // Until every rank has made a stride, or patience ends.
  absl::Status AwaitProgress();
  absl::Status Finish();
  absl::Status CheckCounts(client::Client& client, Mode mode);
  absl::Status CheckDigest(client::Client& client);
  std::vector<int64_t> Progress() const;
  // Between the two, in milliseconds.
  absl::Duration Between(int low, int high) {
    return absl::Milliseconds(std::uniform_int_distribution<int>(low, high)(random_));
  }
  int Below(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }
  void Say(const std::string& what) const {
    std::printf("%7.1f s  %s\n", absl::ToDoubleSeconds(absl::Now() - began_), what.c_str());
    std::fflush(stdout);
  }

  const Options options_;
  const std::string program_;
  const std::string folder_;
  std::mt19937_64 random_;
  const absl::Time began_ = absl::Now();
  std::unique_ptr<testing::Cluster> cluster_;
  std::vector<Trainer> trainers_;
  int64_t rounds_ = 0;
  int64_t kills_ = 0;
  int64_t stops_ = 0;
  int64_t cuts_ = 0;
  std::multimap<absl::Time, std::function<absl::Status()>> faults_;  // by the end of each
  std::set<std::string> disturbed_;
  int64_t end_ = 0;
  Damage damage_;
};

absl::Status Chaos::Start() {
  testing::ClusterOptions options;
  options.shards = kShards;
  options.coordinators = kCoordinators;
  options.links = true;
  options.config = "timeouts { shard_call_ms: 3000 batch_ttl_ms: 5000 }";
  ASSIGN_OR_RETURN(cluster_, testing::Cluster::Start(options));
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
  std::string where;
  for (const int64_t step : Progress()) absl::StrAppend(&where, " ", step);
  return absl::DeadlineExceededError(
      absl::StrCat("no progress after a fault; ranks are at", where));
}

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

absl::Status Chaos::CheckCounts(client::Client& client, Mode mode) {
  ASSIGN_OR_RETURN(const client::Model model, client.DescribeModel(NameOf(mode)));
  std::vector<int64_t> most(kRanks, 0), least(kRanks, end_);
  RETURN_IF_ERROR(client.ExportTable(
      model, "rows", [&](int64_t first_row, absl::Span<const float> values, int64_t dim) {
        for (int64_t i = 0; i * dim < static_cast<int64_t>(values.size()); ++i) {
          const int64_t rank = (first_row + i) / kRowsPerRank;
          const auto count = static_cast<int64_t>(values[i * dim]);
          most[rank] = std::max(most[rank], count);
          least[rank] = std::min(least[rank], count);
          if (count < end_) ++damage_.lost;
          if (count > end_) ++damage_.doubled;
        }
        return absl::OkStatus();
      }));
  for (int rank = 0; rank < kRanks; ++rank) {
    Say(absl::StrCat(NameOf(mode), ".", rank, ": rows counted ", least[rank], " to ", most[rank],
                     " of ", end_, " updates"));
    if (least[rank] != most[rank]) ++damage_.torn;
  }
  return absl::OkStatus();
}

absl::Status Chaos::CheckDigest(client::Client& client) {
  ASSIGN_OR_RETURN(const client::Model model, client.DescribeModel(NameOf(Mode::kSync)));
  ASSIGN_OR_RETURN(const std::string digest, testing::Digest(client, model));
  Say(absl::StrCat("the same ", end_, " steps, one trainer, undisturbed"));
  ASSIGN_OR_RETURN(
      const auto calm,
      testing::Cluster::Start({.shards = 1, .sparsecores_per_shard = 8, .embedded = true}));
  const std::string folder = absl::StrCat(folder_, "/calm");
  std::filesystem::create_directory(folder);
  WriteNumber(folder, "end", end_);
  RETURN_IF_ERROR(Train({.size = 1, .addresses = {calm->address()}, .control_folder = folder}));
  ASSIGN_OR_RETURN(const auto calm_client, client::Client::Connect(calm->client_options()));
  ASSIGN_OR_RETURN(const client::Model calm_model, calm_client->DescribeModel(NameOf(Mode::kSync)));
  ASSIGN_OR_RETURN(const std::string expected, testing::Digest(*calm_client, calm_model));
  Say(absl::StrCat("table_sha256=", digest, " undisturbed=", expected));
  if (digest != expected) ++damage_.torn;
  return absl::OkStatus();
}

absl::Status Chaos::Finish() {
  // Far enough ahead that no rank gets there before it has been told.
  const std::vector<int64_t> progress = Progress();
  end_ = *std::max_element(progress.begin(), progress.end()) + 8 * kStride;
  WriteNumber(folder_, "end", end_);
  Say(absl::StrCat("every group trains on to step ", end_));
  for (Trainer& trainer : trainers_) {
    const bool in_time = trainer.process->WaitFor(kPatience + absl::Minutes(10));
    if (in_time && trainer.process->exit_status() == 0) continue;
    ++damage_.stuck;
    return absl::InternalError(
        absl::StrCat("a trainer did not end as it should:\n", testing::ReadFile(trainer.log_path)));
  }
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(cluster_->client_options()));
  RETURN_IF_ERROR(CheckCounts(*client, Mode::kPipelined));
  RETURN_IF_ERROR(CheckCounts(*client, Mode::kBounded));
  RETURN_IF_ERROR(CheckCounts(*client, Mode::kUnary));
  return CheckDigest(*client);
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

int RunChaos(const Options& options, const std::string& program) {
  const absl::StatusOr<TempDir> folder = TempDir::Create();
  if (!folder.ok()) {
    std::fprintf(stderr, "chaos: %s\n", folder.status().ToString().c_str());
    return 1;
  }
  Chaos chaos(options, program, folder->path());
  const absl::Status status = chaos.Run();
  if (!status.ok()) std::fprintf(stderr, "chaos: %s\n", status.ToString().c_str());
  chaos.PrintSummary();
  return status.ok() ? 0 : 1;
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Kills, stops and cuts off parts of a cluster under training, and checks that no update is "
      "lost, doubled or torn.");
  Options options;
  options.seed = std::random_device()();
  app.add_option("--minutes", options.minutes, "how long to disturb, in minutes")
      ->check(CLI::Range(0.0, 10000.0))
      ->capture_default_str();
  app.add_option("--faults", options.max_faults, "stop after so many faults, if that comes first")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}));
  app.add_option("--seed", options.seed, "decides faults and moments; default: a random one");
  app.add_option("--plant", options.plant,
                 "make a mistake on purpose, which must be found: an update is lost or doubled")
      ->check(CLI::IsMember({"lost", "doubled"}));
  TrainerOptions trainer;
  std::string mode;
  app.add_option("--trainer", mode, "be a trainer of this group; chaos starts these itself")
      ->group("");
  app.add_option("--rank", trainer.rank)->group("");
  app.add_option("--control", trainer.control_folder)->group("");
  app.add_option("--address", trainer.addresses)->group("");
  CLI11_PARSE(app, argc, argv);
  if (mode.empty()) {
    return RunChaos(options, std::filesystem::canonical("/proc/self/exe").string());
  }
  const std::optional<Mode> found = ModeOf(mode);
  if (!found.has_value()) {
    std::fprintf(stderr, "chaos: there is no group '%s'\n", mode.c_str());
    return 2;
  }
  trainer.mode = *found;
  trainer.size = kRanks;
  if (!options.plant.empty()) {
    trainer.plant = options.plant == "lost" ? Plant::kLost : Plant::kDoubled;
  }
  const absl::Status status = Train(trainer);
  if (!status.ok()) std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace emberd::chaos

int main(int argc, char** argv) { return emberd::chaos::Main(argc, argv); }
