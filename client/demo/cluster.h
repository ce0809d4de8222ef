// The cluster under the demo: `emberd up --processes`, which starts the coordinators and the shards
// on free ports of this machine, watches over them, and starts them again when they die.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/child.h"

namespace emberd::demo {

struct ClusterOptions {
  std::string program;  // path of emberd
  int coordinators = 1;
  int shards = 4;
  int sparsecores = 2;   // per shard
  std::string log_file;  // of all its processes
};

// Not thread-safe; belongs to the main thread.
class Cluster {
 public:
  // Blocks until everything serves, or `cancelled` says so (CANCELLED). Other errors name the log
  // file.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const ClusterOptions& options,
                                                        const std::function<bool()>& cancelled);

  std::vector<std::string> Coordinators() const;
  // The line by which emberd says that it is ready, and fields of it: "coordinator", "http",
  // "pids", ...
  const std::string& ready_line() const { return ready_line_; }
  std::string Field(const std::string& name) const;

  // False if `emberd up` itself has ended.
  bool Running() { return child_->Running(); }
  std::string End() const { return child_->End(); }
  void Stop();

 private:
  Cluster() = default;

  std::unique_ptr<Child> child_;
  std::string ready_line_;
};

// The value of " name=value" in a line, or empty; values of several processes stand between commas.
std::string FieldOf(const std::string& line, const std::string& name);

}  // namespace emberd::demo
