// The cluster that a command without a server works for: a file's, or of so many shards.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::emberctl {

struct ClusterShape {
  std::string file;  // a ClusterConfig; empty: the two numbers below
  int shards = 1;
  int sparsecores_per_shard = 2;
};

// Complete, with the default budgets if there is no file. The numbers are checked like a file's.
absl::StatusOr<v1::ClusterConfig> ClusterOf(const ClusterShape& shape);

// Adds --cluster, --shards and --sparsecores, which all need `needed`.
void AddClusterShapeOptions(CLI::App* command, CLI::Option* needed, ClusterShape* shape);

}  // namespace emberd::emberctl
