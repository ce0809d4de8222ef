// A real cluster for tests: the emberd binary, as coordinator and shard processes or as one
// embedded process, on ports of the loopback that the system picks. Nothing of it is left behind,
// whatever becomes of the test.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/temp_dir.h"
#include "base/testing/held_port.h"
#include "client/cpp/client.h"
#include "tests/testing/process.h"
#include "tests/testing/relay.h"

namespace emberd::testing {

struct ClusterOptions {
  int shards = 2;
  int sparsecores_per_shard = 2;
  int coordinators = 1;
  // True: `emberd up`, coordinator and shards in one process; kills and restarts of shards are not
  // possible.
  bool embedded = false;
  // More fields of the ClusterConfig, as text proto, e.g. "budgets { max_batches: 2 }".
  std::string config = {};
  // More of them, in the description that the shards alone read.
  std::string shard_config = {};
  // Whether coordinators reach shards, and clients coordinators, through links of their own.
  bool links = false;
  // By name of a process ("coordinator-0"): the failpoint that its first life has, see
  // acting_failpoints.cc. Behind "every life: ", that all its lives have.
  std::map<std::string, std::string> failpoints = {};
  // Not empty: the shards are processes of one machine that can lose power, and this is its folder
  // (see power_loss.cc).
  std::string power = {};
  // Not empty: the files of all processes can fail, see FileFaults::environment.
  std::string file_faults = {};
  // How client_options() connects.
  std::optional<client::TlsOptions> tls = std::nullopt;
  std::string token = {};
};

// Not thread-safe, but for the const methods. Belongs to the main thread (see ChildProcess).
class Cluster {
 public:
  // Returns when every process serves.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const ClusterOptions& options);
  // Kills every process. If the running test has failed, prints what they logged.
  ~Cluster();

  const std::string& address(int coordinator = 0) const {
    return coordinators_[coordinator].address;
  }
  const std::string& shard_address(int shard) const { return shards_[shard].address; }
  // "host:port" of /metrics.
  const std::string& http_address(int coordinator = 0) const {
    return coordinators_[coordinator].http_address;
  }
  const std::string& shard_http_address(int shard) const { return shards_[shard].http_address; }

  // With ClusterOptions.links: between a coordinator and a shard, and between clients and a
  // coordinator.
  Relay& shard_link(int coordinator, int shard) { return *coordinators_[coordinator].links[shard]; }
  Relay& client_link(int coordinator) { return *coordinators_[coordinator].client_link; }

  // A client of the first coordinator, or of all of them in turn.
  client::ClientOptions client_options(bool all_coordinators = false) const;
  std::unique_ptr<client::Client> Connect()
      const;  // null, and the test fails, if that does not work

  ChildProcess* coordinator_process(int coordinator) {
    return coordinators_[coordinator].process.get();
  }
  ChildProcess* shard_process(int shard) { return shards_[shard].process.get(); }

  // kill -9.
  void KillCoordinator(int coordinator);
  void KillShard(int shard);
  // Everything, at once.
  void KillAll();
  // Starts a killed process on its old port; returns when it serves.
  absl::Status RestartCoordinator(int coordinator);
  absl::Status RestartShard(int shard);
  // Its two halves.
  absl::Status LaunchShard(int shard);
  absl::Status AwaitShard(int shard);
  // Starts one more coordinator, with a cluster description of its own; returns its number when it
  // serves.
  absl::StatusOr<int> StartStranger(const std::string& description);
  // SIGSTOP and SIGCONT: between them the process is there but does nothing.
  void SuspendShard(int shard);
  void SuspendCoordinator(int coordinator);
  void ResumeShard(int shard);
  void ResumeCoordinator(int coordinator);
  // Whether it comes to a failpoint that stops it.
  bool AwaitStandstill(int coordinator) const;
  bool AwaitShardStandstill(int shard) const;
  // SIGTERM to everything, coordinators first; OK if all ended with exit status 0 within `timeout`.
  absl::Status Stop(absl::Duration timeout);

  // What the process has logged so far.
  std::string CoordinatorLog(int coordinator = 0) const;
  std::string ShardLog(int shard) const;
  // Every process that was started and still runs.
  std::vector<pid_t> pids();

 private:
  struct Member {
    std::string name;  // "shard-0"
    std::string address;
    std::string http_address;
    std::string config_path;
    std::string log_path;
    std::unique_ptr<ChildProcess> process;
    bool started_before = false;
    // Its own also between its lives.
    std::unique_ptr<HeldPort> grpc_port, http_port;
    std::vector<std::unique_ptr<Relay>> links;  // of a coordinator: to each shard
    std::unique_ptr<Relay> client_link;
  };

  Cluster(ClusterOptions options, TempDir directory);
  absl::Status StartProcesses();
  absl::Status StartEmbedded();
  // Runs `emberd ROLE --index i`, on the same address in each life.
  absl::Status Launch(const std::string& role, int index, Member* member);
  absl::Status WaitReady(Member* member);
  void Kill(Member* member);
  // Writes the config, with the addresses that are known by now; each coordinator that has links
  // gets one of its own, and so do shards with a shard_config.
  void WriteConfig();
  std::string Description(const std::vector<std::string>& shard_addresses) const;
  absl::Status MakeLinks();
  absl::Status MakeClientLinks();

  const ClusterOptions options_;
  const TempDir directory_;
  std::vector<Member> coordinators_;
  std::vector<Member> shards_;
};

}  // namespace emberd::testing
