#include "tests/bench/demo/cluster.h"

#include <algorithm>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "tests/bench/demo/dataset.h"

namespace emberd::demo {
namespace {

constexpr absl::Duration kReadyTimeout = absl::Minutes(2);
constexpr absl::Duration kStopTimeout = absl::Seconds(30);  // emberd drains within half of it
constexpr char kReady[] = "emberd: ready ";

// Reads lines from `pipe` until one says that the cluster is ready.
absl::StatusOr<std::string> AwaitReady(int pipe, ChildProcess* child,
                                       const std::function<bool()>& cancelled) {
  std::string output;
  const absl::Time deadline = absl::Now() + kReadyTimeout;
  while (absl::Now() < deadline) {
    if (cancelled()) return absl::CancelledError("stopped while the cluster was starting");
    pollfd waiting{pipe, POLLIN, 0};
    if (poll(&waiting, 1, 100) > 0) {
      char buffer[4096];
      const ssize_t size = read(pipe, buffer, sizeof(buffer));
      if (size > 0) output.append(buffer, size);
    }
    const size_t begin = output.find(kReady), end = output.find('\n', begin);
    if (begin != std::string::npos && end != std::string::npos) {
      return output.substr(begin, end - begin);
    }
    if (!child->Running()) return absl::UnavailableError(absl::StrCat("emberd ", child->End()));
  }
  return absl::DeadlineExceededError("emberd did not become ready");
}

std::string LastLineOf(const std::string& path) {
  const auto lines = TextLines::Open(path);
  if (!lines.ok() || (*lines)->size() == 0) return "no message";
  return std::string((*lines)->Read((*lines)->size() - 1, 1)[0]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(const ClusterOptions& options,
                                                        const std::function<bool()>& cancelled) {
  if (access(options.program.c_str(), X_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat(options.program, ": there is no such program; build it or give --emberd"));
  }
  int pipe[2];
  if (pipe2(pipe, O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no pipe");
  const FileDescriptor reader(pipe[0]), writer(pipe[1]);
  const FileDescriptor log(
      open(options.log_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (log.get() < 0) {
    return absl::FailedPreconditionError(absl::StrCat(options.log_file, ": cannot be written"));
  }
  std::vector<std::string> command = {options.program,
                                      "up",
                                      "--processes",
                                      "--shards",
                                      absl::StrCat(options.shards),
                                      "--sparsecores",
                                      absl::StrCat(options.sparsecores),
                                      "--coordinators",
                                      absl::StrCat(options.coordinators),
                                      "--listen",
                                      "127.0.0.1:0",
                                      "--http",
                                      "127.0.0.1:0"};
  if (!options.data.empty()) {
    // The demo itself says when a checkpoint is saved and restored.
    command.insert(command.end(), {"--data", options.data, "--durability", "memory"});
  }
  ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child,
                   ChildProcess::Start(command, {.output = writer.get(), .error = log.get()}));
  std::unique_ptr<Cluster> cluster(new Cluster);
  cluster->child_ = std::move(child);
  absl::StatusOr<std::string> ready = AwaitReady(reader.get(), cluster->child_.get(), cancelled);
  if (!ready.ok()) {
    cluster->Stop();
    return absl::Status(ready.status().code(),
                        absl::StrCat(ready.status().message(), ": ", LastLineOf(options.log_file),
                                     " (", options.log_file, ")"));
  }
  cluster->ready_line_ = *ready;
  return cluster;
}

std::unique_ptr<Cluster> Cluster::Running(const std::vector<std::string>& coordinators) {
  std::unique_ptr<Cluster> cluster(new Cluster);
  cluster->ready_line_ = absl::StrCat(kReady, "coordinator=", absl::StrJoin(coordinators, ","));
  return cluster;
}

void Cluster::Stop() {
  if (child_ != nullptr) child_->Stop(kStopTimeout);
}

std::string Cluster::Field(const std::string& name) const { return FieldOf(ready_line_, name); }

std::vector<std::string> Cluster::Coordinators() const {
  return absl::StrSplit(Field("coordinator"), ',');
}

std::string FieldOf(const std::string& line, const std::string& name) {
  const std::string key = absl::StrCat(" ", name, "=");
  const size_t begin = line.find(key);
  if (begin == std::string::npos) return "";
  const size_t value = begin + key.size();
  return line.substr(value, line.find(' ', value) - value);
}

void ShardHistory::Add(const client::ClusterStatus& status, absl::Time now,
                       std::vector<std::string>* events) {
  const double seconds = absl::ToDoubleSeconds(now - last_);
  last_ = now;
  traffic_.resize(std::max(traffic_.size(), status.shards.size()));
  seen_.resize(traffic_.size());
  const bool lost = std::any_of(status.models.begin(), status.models.end(),
                                [](const auto& model) { return !model.lost.empty(); });
  for (size_t i = 0; i < status.shards.size(); ++i) {
    const client::ShardStatus& shard = status.shards[i];
    ShardTraffic& traffic = traffic_[i];
    const std::string name = absl::StrCat("shard ", shard.index, " (", shard.address, ")");
    if (traffic.reachable != shard.reachable) {
      events->push_back(shard.reachable ? absl::StrCat(name, " answers again")
                                        : absl::StrCat(name, " does not answer: ", shard.error));
    }
    traffic.reachable = shard.reachable;
    traffic.rows_per_second = 0;
    if (!shard.reachable) continue;
    client::ShardStatus& before = seen_[i];
    if (before.incarnation != shard.incarnation) {
      if (before.incarnation != 0) {
        ++traffic.restarts;
        events->push_back(
            absl::StrCat(name, " has restarted",
                         lost ? " without its rows: emberctl model reset begins again" : ""));
      }
      before = {};  // counts begin anew
    }
    const int64_t gathered = shard.rows_gathered - before.rows_gathered;
    const int64_t updated = shard.rows_updated - before.rows_updated;
    traffic.rows_gathered += gathered;
    traffic.rows_updated += updated;
    if (seconds > 0) traffic.rows_per_second = static_cast<double>(gathered + updated) / seconds;
    before = shard;
  }
}

Monitor::Monitor(std::function<absl::StatusOr<client::ClusterStatus>()> get_status)
    : get_status_(std::move(get_status)), thread_([this] { Run(); }) {}

Monitor::~Monitor() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Monitor::Run() {
  while (true) {
    Ask();
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(&stop_), absl::Seconds(1))) return;
  }
}

void Monitor::Ask() {
  const absl::StatusOr<client::ClusterStatus> status = get_status_();
  absl::MutexLock lock(&mutex_);
  if (status.ok()) {
    history_.Add(*status, absl::Now(), &events_);
  } else if (!failing_) {
    events_.push_back(
        absl::StrCat("the coordinator does not answer: ", status.status().ToString()));
  }
  if (status.ok() && failing_) events_.push_back("the coordinator answers again");
  failing_ = !status.ok();
}

std::vector<ShardTraffic> Monitor::Traffic() const {
  absl::MutexLock lock(&mutex_);
  return history_.traffic();
}

std::vector<std::string> Monitor::TakeEvents() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(events_, {});
}

int Monitor::Restarts() const {
  absl::MutexLock lock(&mutex_);
  int restarts = 0;
  for (const ShardTraffic& traffic : history_.traffic()) restarts += traffic.restarts;
  return restarts;
}

}  // namespace emberd::demo
