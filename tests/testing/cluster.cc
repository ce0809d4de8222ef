#include "tests/testing/cluster.h"

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <utility>

#include <signal.h>
#include <sys/wait.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "gtest/gtest.h"

namespace emberd::testing {
namespace {

constexpr char kAnyPort[] = "127.0.0.1:0";
const std::string kProgram = BuildPath("bin/emberd");
const std::string kFaultyProgram = BuildPath("tests/emberd_faulty");
constexpr char kFailpoint[] = "EMBERD_FAILPOINT";     // see acting_failpoints.cc
constexpr char kPower[] = "EMBERD_POWER";             // see power_loss.cc
constexpr char kFileFaults[] = "EMBERD_FILE_FAULTS";  // see failing_files.cc
constexpr char kEveryLife[] = "every life: ";

// The value of "key=value" among words that are separated by white space; empty if it is not there.
std::string FindValue(const std::string& text, absl::string_view key) {
  for (absl::string_view word : absl::StrSplit(text, absl::ByAnyChar(" \n"))) {
    if (absl::ConsumePrefix(&word, absl::StrCat(key, "="))) return std::string(word);
  }
  return "";
}

bool AwaitStop(pid_t pid) {
  return Eventually([pid] {
    siginfo_t seen = {};
    return waitid(P_PID, pid, &seen, WSTOPPED | WNOHANG | WNOWAIT) == 0 && seen.si_pid == pid;
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(const ClusterOptions& options) {
  ASSIGN_OR_RETURN(TempDir directory, TempDir::Create());
  std::unique_ptr<Cluster> cluster(new Cluster(options, std::move(directory)));
  RETURN_IF_ERROR(options.embedded ? cluster->StartEmbedded() : cluster->StartProcesses());
  return cluster;
}

Cluster::Cluster(ClusterOptions options, TempDir directory)
    : options_(std::move(options)), directory_(std::move(directory)) {
  coordinators_.resize(options_.coordinators);
  if (!options_.embedded) shards_.resize(options_.shards);
  for (size_t i = 0; i < shards_.size(); ++i) shards_[i].name = absl::StrCat("shard-", i);
  for (size_t i = 0; i < coordinators_.size(); ++i) {
    coordinators_[i].name = absl::StrCat("coordinator-", i);
  }
  for (std::vector<Member>* members : {&shards_, &coordinators_}) {
    for (Member& member : *members) {
      member.config_path = directory_.Path("cluster.textproto");
      member.log_path = directory_.Path(member.name + ".log");
    }
  }
  if (options_.shard_config.empty()) return;
  for (Member& shard : shards_) shard.config_path = directory_.Path("shards.textproto");
}

Cluster::~Cluster() {
  for (std::vector<Member>* members : {&coordinators_, &shards_}) {
    for (Member& member : *members) {
      member.process.reset();
      if (!::testing::Test::HasFailure()) continue;
      std::cerr << "---- log of " << member.name << "\n" << ReadFile(member.log_path) << "----\n";
    }
  }
}

absl::Status Cluster::StartProcesses() {
  WriteConfig();
  // Shards first, so that the coordinators' config can hold their real addresses.
  for (auto [role, members] :
       {std::pair("shard", &shards_), std::pair("coordinator", &coordinators_)}) {
    for (size_t i = 0; i < members->size(); ++i) {
      RETURN_IF_ERROR(Launch(role, static_cast<int>(i), &(*members)[i]));
    }
    for (Member& member : *members) {
      RETURN_IF_ERROR(WaitReady(&member));
    }
    if (options_.links) {
      RETURN_IF_ERROR(members == &shards_ ? MakeLinks() : MakeClientLinks());
    }
    WriteConfig();
  }
  return absl::OkStatus();
}

absl::Status Cluster::MakeLinks() {
  for (Member& coordinator : coordinators_) {
    coordinator.config_path = directory_.Path(coordinator.name + ".textproto");
    for (const Member& shard : shards_) {
      ASSIGN_OR_RETURN(coordinator.links.emplace_back(), Relay::Start(shard.address));
    }
  }
  return absl::OkStatus();
}

absl::Status Cluster::MakeClientLinks() {
  for (Member& coordinator : coordinators_) {
    ASSIGN_OR_RETURN(coordinator.client_link, Relay::Start(coordinator.address));
  }
  return absl::OkStatus();
}

absl::Status Cluster::StartEmbedded() {
  WriteConfig();
  Member& member = coordinators_[0];
  ASSIGN_OR_RETURN(member.process,
                   StartProcess({kProgram, "up", "--config", directory_.Path("cluster.textproto"),
                                 "--listen", kAnyPort, "--http", kAnyPort},
                                member.log_path));
  std::string log;
  Eventually([&] {
    log = ReadFile(member.log_path);
    // The line is complete when the field behind these has been written.
    return !FindValue(log, "pids").empty() || !member.process->Running();
  });
  member.address = FindValue(log, "coordinator");
  member.http_address = FindValue(log, "http");
  if (!FindValue(log, "pids").empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("`emberd up` did not get ready:\n", ReadFile(member.log_path)));
}

absl::Status Cluster::Launch(const std::string& role, int index, Member* member) {
  for (auto* const port : {&member->grpc_port, &member->http_port}) {
    if (*port != nullptr) continue;
    ASSIGN_OR_RETURN(*port, HeldPort::Take());
  }
  member->address = member->grpc_port->address();
  member->http_address = member->http_port->address();
  const std::string ready = directory_.Path(member->name + ".ready");
  std::filesystem::remove(ready);
  const auto failpoint = options_.failpoints.find(member->name);
  const bool first_life = !std::exchange(member->started_before, true);
  absl::string_view armed;
  if (failpoint != options_.failpoints.end()) armed = failpoint->second;
  const bool every_life = absl::ConsumePrefix(&armed, kEveryLife);
  const bool faulty = failpoint != options_.failpoints.end() && (first_life || every_life);
  const bool loses_power = !options_.power.empty() && role == "shard";
  if (faulty) setenv(kFailpoint, std::string(armed).c_str(), /*overwrite=*/1);
  if (loses_power) setenv(kPower, options_.power.c_str(), /*overwrite=*/1);
  if (!options_.file_faults.empty()) setenv(kFileFaults, options_.file_faults.c_str(), 1);
  const absl::Cleanup disarm = [] {
    unsetenv(kFailpoint);
    unsetenv(kPower);
    unsetenv(kFileFaults);
  };
  const bool own_build = faulty || loses_power || !options_.file_faults.empty();
  ASSIGN_OR_RETURN(
      member->process,
      StartProcess({own_build ? kFaultyProgram : kProgram, role, "--config", member->config_path,
                    "--index", absl::StrCat(index), "--address", member->address, "--http-address",
                    member->http_address, "--ready-file", ready},
                   member->log_path));
  return absl::OkStatus();
}

absl::Status Cluster::WaitReady(Member* member) {
  const std::string ready = directory_.Path(member->name + ".ready");
  Eventually([&] { return !ReadFile(ready).empty() || !member->process->Running(); });
  if (!ReadFile(ready).empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(member->name, " did not get ready:\n", ReadFile(member->log_path)));
}

void Cluster::WriteConfig() {
  std::vector<std::string> shards(options_.shards, kAnyPort);
  // With links, coordinators know shards by other addresses than shards know each other.
  for (size_t i = 0; i < shards_.size() && !options_.links; ++i) {
    if (!shards_[i].address.empty()) shards[i] = shards_[i].address;
  }
  WriteFile(directory_.Path("cluster.textproto"), Description(shards));
  WriteFile(directory_.Path("shards.textproto"), Description(shards) + options_.shard_config);
  for (const Member& coordinator : coordinators_) {
    if (coordinator.links.empty()) continue;
    std::vector<std::string> links;
    for (const auto& link : coordinator.links) links.push_back(link->address());
    WriteFile(coordinator.config_path, Description(links));
  }
}

std::string Cluster::Description(const std::vector<std::string>& shard_addresses) const {
  std::string config =
      absl::StrCat("sparsecores_per_shard: ", options_.sparsecores_per_shard, "\n");
  for (const std::string& address : shard_addresses) {
    absl::StrAppend(&config, "shards { address: \"", address, "\" }\n");
  }
  for (const Member& coordinator : coordinators_) {
    absl::StrAppend(&config, "coordinators { address: \"",
                    coordinator.address.empty() ? kAnyPort : coordinator.address, "\" }\n");
  }
  absl::StrAppend(&config, options_.config, "\n");
  return config;
}

client::ClientOptions Cluster::client_options(bool all_coordinators) const {
  client::ClientOptions options;
  for (const Member& coordinator : coordinators_) {
    if (all_coordinators || options.addresses.empty()) {
      options.addresses.push_back(coordinator.address);
    }
  }
  options.tls = options_.tls;
  options.token = options_.token;
  options.connect_timeout = absl::Seconds(30);
  options.deadline = absl::Seconds(60);
  return options;
}

std::unique_ptr<client::Client> Cluster::Connect() const {
  absl::StatusOr<std::unique_ptr<client::Client>> client =
      client::Client::Connect(client_options());
  if (client.ok()) return *std::move(client);
  ADD_FAILURE() << client.status();
  return nullptr;
}

absl::StatusOr<int> Cluster::StartStranger(const std::string& description) {
  const int number = static_cast<int>(coordinators_.size());
  Member& member = coordinators_.emplace_back();
  member.name = absl::StrCat("stranger-", number);
  member.config_path = directory_.Path(member.name + ".textproto");
  member.log_path = directory_.Path(member.name + ".log");
  WriteFile(member.config_path, description);
  RETURN_IF_ERROR(Launch("coordinator", 0, &member));
  RETURN_IF_ERROR(WaitReady(&member));
  return number;
}

void Cluster::KillCoordinator(int coordinator) { Kill(&coordinators_[coordinator]); }
void Cluster::KillShard(int shard) { Kill(&shards_[shard]); }

absl::Status Cluster::RestartCoordinator(int coordinator) {
  Member* member = &coordinators_[coordinator];
  absl::Status status = Launch("coordinator", coordinator, member);
  return status.ok() ? WaitReady(member) : status;
}

absl::Status Cluster::RestartShard(int shard) {
  const absl::Status status = LaunchShard(shard);
  return status.ok() ? AwaitShard(shard) : status;
}

absl::Status Cluster::LaunchShard(int shard) { return Launch("shard", shard, &shards_[shard]); }
absl::Status Cluster::AwaitShard(int shard) { return WaitReady(&shards_[shard]); }

void Cluster::Kill(Member* member) {
  member->process->Signal(SIGKILL);
  member->process->WaitFor(absl::InfiniteDuration());
}

void Cluster::KillAll() {
  for (std::vector<Member>* members : {&coordinators_, &shards_}) {
    for (Member& member : *members) member.process->Signal(SIGKILL);
  }
  for (std::vector<Member>* members : {&coordinators_, &shards_}) {
    for (Member& member : *members) Kill(&member);
  }
}

void Cluster::SuspendShard(int shard) { shards_[shard].process->Suspend(); }
void Cluster::SuspendCoordinator(int coordinator) { coordinators_[coordinator].process->Suspend(); }
void Cluster::ResumeCoordinator(int coordinator) {
  coordinators_[coordinator].process->Signal(SIGCONT);
}
void Cluster::ResumeShard(int shard) { shards_[shard].process->Signal(SIGCONT); }

bool Cluster::AwaitStandstill(int coordinator) const {
  return AwaitStop(coordinators_[coordinator].process->pid());
}
bool Cluster::AwaitShardStandstill(int shard) const {
  return AwaitStop(shards_[shard].process->pid());
}

absl::Status Cluster::Stop(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (std::vector<Member>* members : {&coordinators_, &shards_}) {
    for (Member& member : *members) member.process->Signal(SIGTERM);
    for (Member& member : *members) {
      if (!member.process->WaitFor(deadline - absl::Now())) {
        return absl::DeadlineExceededError(absl::StrCat(member.name, " does not stop"));
      }
      if (member.process->exit_status() != 0) {
        return absl::InternalError(
            absl::StrCat(member.name, " ended with ", member.process->exit_status()));
      }
    }
  }
  return absl::OkStatus();
}

std::string Cluster::CoordinatorLog(int coordinator) const {
  return ReadFile(coordinators_[coordinator].log_path);
}
std::string Cluster::ShardLog(int shard) const { return ReadFile(shards_[shard].log_path); }

std::vector<pid_t> Cluster::pids() {
  std::vector<pid_t> pids;
  for (std::vector<Member>* members : {&coordinators_, &shards_}) {
    for (Member& member : *members) {
      if (member.process != nullptr && member.process->Running()) {
        pids.push_back(member.process->pid());
      }
    }
  }
  return pids;
}

}  // namespace emberd::testing
