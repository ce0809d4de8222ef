// `emberd up`: a whole cluster on this machine.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "emberd/v1/cluster.pb.h"
#include "server/launcher/files.h"

namespace emberd::launcher {

struct UpOptions {
  v1::ClusterConfig cluster;  // complete; at least one coordinator
  bool insecure = false;      // listen beyond the loopback interface, although strangers may call
  bool restart = true;        // with processes: start again what dies
  bool stop_on_eof = false;   // stop when standard input ends, too
  std::string program;        // with processes: path of the emberd to run
};

// Both block until SIGTERM or SIGINT and then stop everything in order; call them from main before
// other threads exist. INVALID_ARGUMENT: the options are wrong. Other codes: the cluster could not
// start, or died.
//
// Embedded: coordinator and shards in this process, with no network between them.
absl::Status UpEmbedded(const UpOptions& options);
// A process for every shard and coordinator, watched over by this one. None outlives it.
absl::Status UpProcesses(const UpOptions& options);

// A cluster that serves, for people and for scripts.
struct ClusterInfo {
  v1::ClusterConfig cluster;
  std::vector<ReadyInfo> coordinators = {};
  std::vector<ReadyInfo> shards = {};  // empty if they have no processes of their own
};
// What both print when everything listens: several lines for people, to standard error unless the
// log goes there as JSON: what runs where, and how to stop it.
std::string Banner(const ClusterInfo& info);
// And one line for scripts, to standard output:
// "emberd: ready coordinator=HOST:PORT http=HOST:PORT shards=N pids=N,...". Several coordinators
// are separated by commas; pids are those of the coordinators, then those of the shards. Shards
// that are processes also give shard_grpc=HOST:PORT,... and shard_http=HOST:PORT,...
std::string ReadyLine(const ClusterInfo& info);

}  // namespace emberd::launcher
