#include "server/launcher/cluster_options.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.h"

namespace emberd::launcher {
namespace {

// `Process` is a ShardConfig or a CoordinatorConfig.
template <typename Process>
void OverrideProcess(const Overrides& overrides, Process* process) {
  if (overrides.address.has_value()) process->set_address(*overrides.address);
  if (overrides.http_address.has_value()) process->set_http_address(*overrides.http_address);
}

void OverrideCommon(const Overrides& overrides, v1::ClusterConfig* cluster) {
  if (overrides.threads.has_value()) {
    cluster->set_shard_threads(*overrides.threads);
    cluster->set_coordinator_threads(*overrides.threads);
  }
  v1::LoggingConfig* const logging = cluster->mutable_logging();
  if (overrides.log_level.has_value()) logging->set_level(*overrides.log_level);
  if (overrides.log_format.has_value()) logging->set_format(*overrides.log_format);
  if (overrides.log_file.has_value()) logging->set_file(*overrides.log_file);
  if (overrides.span_file.has_value()) logging->set_span_file(*overrides.span_file);
}

absl::Status OverrideStorage(const Overrides& overrides, v1::ClusterConfig* cluster) {
  if (overrides.data.has_value()) {
    if (!cluster->has_storage()) {
      cluster->mutable_storage()->set_durability(v1::StorageConfig::CHECKPOINT);
    }
    v1::StorageConfig* const storage = cluster->mutable_storage();
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::absolute(*overrides.data, error);
    if (error) {
      return absl::InvalidArgumentError(absl::StrCat("--data ", *overrides.data,
                                                     ": the working directory is gone (",
                                                     error.message(), "); give the whole path"));
    }
    storage->set_directory(folder.lexically_normal().string());
    storage->clear_checkpoints();
  }
  if (!overrides.durability.has_value()) return absl::OkStatus();
  if (!cluster->has_storage()) {
    return absl::InvalidArgumentError(
        "--durability: there is no folder to write to; name one with --data DIR, or with "
        "storage.directory in the configuration");
  }
  cluster->mutable_storage()->set_durability(*overrides.durability);
  return absl::OkStatus();
}

absl::Status CheckIndex(const char* kind, int index, int count) {
  if (index >= 0 && index < count) return absl::OkStatus();
  if (count == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(kind, ": the configuration lists none; add at least one"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--index: ", index, " is not allowed; it must be in [0, ", count - 1,
                   "], the number of one of the configuration's ", kind));
}

}  // namespace

absl::StatusOr<v1::ClusterConfig> LoadClusterFor(const std::string& path, Role role, int index,
                                                 const Overrides& overrides) {
  ASSIGN_OR_RETURN(v1::ClusterConfig cluster, config::ReadCluster(path));
  OverrideCommon(overrides, &cluster);
  // Which fields the durability allows is known only now.
  RETURN_IF_ERROR(OverrideStorage(overrides, &cluster));
  RETURN_IF_ERROR(Annotate(config::CompleteCluster(&cluster), path));
  RETURN_IF_ERROR(role == Role::kShard
                      ? CheckIndex("shards", index, cluster.shards_size())
                      : CheckIndex("coordinators", index, cluster.coordinators_size()));
  // Budgets stay those of the addresses in the file, which all processes know.
  if (role == Role::kShard) {
    OverrideProcess(overrides, cluster.mutable_shards(index));
  } else {
    OverrideProcess(overrides, cluster.mutable_coordinators(index));
  }
  RETURN_IF_ERROR(config::CompleteCluster(&cluster));
  return cluster;
}

absl::StatusOr<v1::ClusterConfig> MakeLocalCluster(const LocalCluster& local,
                                                   const Overrides& overrides) {
  v1::ClusterConfig cluster;
  cluster.set_sparsecores_per_shard(local.sparsecores_per_shard);
  v1::CoordinatorConfig* const coordinator = cluster.add_coordinators();
  coordinator->set_address(local.address);
  coordinator->set_http_address(local.http_address);
  OverrideProcess(overrides, coordinator);
  const bool http = !coordinator->http_address().empty();
  for (int i = 1; i < local.coordinators; ++i) {
    v1::CoordinatorConfig* const other = cluster.add_coordinators();
    other->set_address("127.0.0.1:0");
    if (http) other->set_http_address("127.0.0.1:0");
  }
  for (int i = 0; i < local.shards; ++i) {
    v1::ShardConfig* const shard = cluster.add_shards();
    shard->set_address("127.0.0.1:0");
    if (http) shard->set_http_address("127.0.0.1:0");
  }
  const int cpus = static_cast<int>(std::thread::hardware_concurrency());
  cluster.set_shard_threads(std::max(1, cpus / std::max(1, local.shards)));
  OverrideCommon(overrides, &cluster);
  RETURN_IF_ERROR(OverrideStorage(overrides, &cluster));
  RETURN_IF_ERROR(config::CompleteCluster(&cluster));
  return cluster;
}

}  // namespace emberd::launcher
