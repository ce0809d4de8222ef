#include "client/emberctl/cluster_shape.h"

#include "config/config.h"

namespace emberd::emberctl {

absl::StatusOr<v1::ClusterConfig> ClusterOf(const ClusterShape& shape) {
  if (!shape.file.empty()) return config::LoadCluster(shape.file);
  v1::ClusterConfig cluster;
  cluster.set_sparsecores_per_shard(shape.sparsecores_per_shard);
  for (int i = 0; i < shape.shards; ++i) cluster.add_shards()->set_address("localhost:0");
  cluster.add_coordinators()->set_address("localhost:0");
  if (absl::Status status = config::CompleteCluster(&cluster); !status.ok()) return status;
  return cluster;
}

void AddClusterShapeOptions(CLI::App* command, CLI::Option* needed, ClusterShape* shape) {
  constexpr int kMaxPartitions = 1024;  // as in a ClusterConfig
  CLI::Option* const cluster =
      command->add_option("--cluster", shape->file, "ClusterConfig that gives both numbers")
          ->needs(needed);
  command->add_option("--shards", shape->shards, "Shards of the cluster")
      ->check(CLI::Range(1, kMaxPartitions))
      ->excludes(cluster)
      ->capture_default_str();
  command->add_option("--sparsecores", shape->sparsecores_per_shard, "SparseCores of each shard")
      ->check(CLI::Range(1, kMaxPartitions))
      ->excludes(cluster)
      ->capture_default_str();
}

}  // namespace emberd::emberctl
