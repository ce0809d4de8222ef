// State of a cluster as plain data: see admin_service.proto.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emberd::client {

struct ModelStatus {
  uint64_t id = 0;
  std::string name;
  int32_t tables = 0;
  int32_t stacks = 0;
  int64_t table_bytes = 0;
  std::string lost;  // if shards have lost its rows: what every call on it fails with
};

struct ShardStatus {
  int32_t index = 0;
  std::string address;
  bool reachable = false;
  std::string error;         // why not
  uint64_t incarnation = 0;  // new with every start of the process; 0 if not reachable
  int64_t uptime_ms = 0;
  int32_t models = 0;
  int64_t table_bytes = 0;
  int32_t batches = 0;
  int64_t batch_bytes = 0;
  int64_t rows_gathered = 0;  // since start
  int64_t rows_updated = 0;   // since start
};

struct ClusterStatus {
  std::string version;
  int64_t uptime_ms = 0;  // of the coordinator that answered
  std::vector<ModelStatus> models;
  std::vector<ShardStatus> shards;
  int32_t batches = 0;  // kept between Lookup and ApplyGradients
  int64_t batch_bytes = 0;
};

}  // namespace emberd::client
