// The cluster under the demo: `emberd up --processes`, which starts the coordinators and the shards
// on free ports of this machine, watches over them, and starts them again when they die; or one
// that somebody else runs.
//
// Watches the shards while the demo trains: how much each does, and whether it is there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/child_process.h"
#include "client/cpp/status.h"

namespace emberd::demo {

struct ClusterOptions {
  std::string program;  // path of emberd
  int coordinators = 1;
  int shards = 4;
  int sparsecores = 2;    // per shard
  std::string log_file;   // of all its processes
  std::string data = {};  // folder for checkpoints; empty: there are none
};

// Not thread-safe; belongs to the main thread.
class Cluster {
 public:
  // Blocks until everything serves, or `cancelled` says so (CANCELLED). Other errors name the log
  // file.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const ClusterOptions& options,
                                                        const std::function<bool()>& cancelled);

  // A cluster that is running already, and that goes on afterwards. Does not look whether it is
  // there.
  static std::unique_ptr<Cluster> Running(const std::vector<std::string>& coordinators);

  std::vector<std::string> Coordinators() const;
  // The line by which emberd says that it is ready, and fields of it: "coordinator", "http",
  // "pids", ...
  const std::string& ready_line() const { return ready_line_; }
  std::string Field(const std::string& name) const;

  // False if `emberd up` itself has ended.
  bool Runs() { return child_ == nullptr || child_->Running(); }
  void Stop();

 private:
  Cluster() = default;

  std::unique_ptr<ChildProcess> child_;  // null if somebody else runs it
  std::string ready_line_;
};

// The value of " name=value" in a line, or empty; values of several processes stand between commas.
std::string FieldOf(const std::string& line, const std::string& name);

struct ShardTraffic {
  bool reachable = true;
  int64_t rows_gathered = 0, rows_updated = 0;  // since the demo began, over restarts
  double rows_per_second = 0;                   // both together, lately
  int restarts = 0;
};

// What follows from one status after the other. Not thread-safe.
class ShardHistory {
 public:
  // Takes the next status in; what people should know of it is appended to *events.
  void Add(const client::ClusterStatus& status, absl::Time now, std::vector<std::string>* events);
  const std::vector<ShardTraffic>& traffic() const { return traffic_; }

 private:
  absl::Time last_ = absl::InfinitePast();
  std::vector<client::ShardStatus> seen_;  // the latest in which each shard answered
  std::vector<ShardTraffic> traffic_;
};

// Asks for the status once a second, on a thread of its own. Thread-safe.
class Monitor {
 public:
  explicit Monitor(std::function<absl::StatusOr<client::ClusterStatus>()> get_status);
  ~Monitor();

  std::vector<ShardTraffic> Traffic() const;
  // What happened since the last call.
  std::vector<std::string> TakeEvents();
  int Restarts() const;

 private:
  void Run();
  void Ask();

  const std::function<absl::StatusOr<client::ClusterStatus>()> get_status_;
  mutable absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool failing_ ABSL_GUARDED_BY(mutex_) = false;
  ShardHistory history_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> events_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace emberd::demo
