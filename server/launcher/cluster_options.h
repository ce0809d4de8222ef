// From a command line to a cluster description.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::launcher {

// Values of flags that replace those of the configuration file; empty: the file decides.
struct Overrides {
  std::optional<std::string> address;       // of the process started
  std::optional<std::string> http_address;  // of the process started
  std::optional<int> threads;               // of every shard and coordinator
  std::optional<v1::LoggingConfig::Level> log_level;
  std::optional<v1::LoggingConfig::Format> log_format;
  std::optional<std::string> log_file;
  std::optional<std::string> span_file;
  // storage.directory, made absolute; checkpoints are below it. A cluster that had no `storage`
  // gets the durability CHECKPOINT unless the next field says otherwise.
  std::optional<std::string> data;
  std::optional<v1::StorageConfig::Durability> durability;
};

enum class Role { kShard, kCoordinator };

// A complete cluster from the file `path`, with `overrides` for the process `index` of `role`.
// Errors name the field, or the flag.
absl::StatusOr<v1::ClusterConfig> LoadClusterFor(const std::string& path, Role role, int index,
                                                 const Overrides& overrides);

// For `emberd up` without a file: shards, and coordinators but the first, on ports that the system
// picks.
struct LocalCluster {
  int shards = 1;
  int sparsecores_per_shard = 2;
  int coordinators = 1;
  std::string address = "127.0.0.1:7400";  // of the first coordinator
  std::string http_address =
      "127.0.0.1:7401";  // of the first coordinator; empty: no /metrics anywhere
};
// Complete. Without a number of threads, the shards share this machine's CPUs.
absl::StatusOr<v1::ClusterConfig> MakeLocalCluster(const LocalCluster& local,
                                                   const Overrides& overrides);

}  // namespace emberd::launcher
