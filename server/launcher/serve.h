// The life of one server process: bind, serve, say so, drain on SIGTERM.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"
#include "server/coordinator/coordinator_server.h"
#include "server/launcher/files.h"
#include "server/ops/http.h"
#include "server/ops/lifecycle.h"
#include "server/ops/metrics.h"
#include "server/security/security.h"

namespace emberd::launcher {

struct ServeOptions {
  v1::ClusterConfig cluster;  // complete (config::CompleteCluster)
  int index = 0;              // of cluster.shards or cluster.coordinators; in range
  bool insecure = false;      // listen beyond the loopback interface, although strangers may call
  std::string ready_file;     // empty: none
};

// Both block until SIGTERM or SIGINT and then drain; call them from main before other threads
// exist. INVALID_ARGUMENT: the options are wrong. Other codes: it could not start, or could not
// save what had changed.
absl::Status ServeShard(const ServeOptions& options);
absl::Status ServeCoordinator(const ServeOptions& options);

// CheckBindAllowed for both addresses of a process (the second may be empty); `path` is its place
// in the cluster, e.g. "shards[2]". Warns in the log if strangers on the network reach them.
absl::Status CheckAddresses(const std::string& path, const std::string& address,
                            const std::string& http_address, const v1::SecurityConfig& security,
                            bool insecure);
// `routes` on `address`, protected as `security` says, or null if `address` is empty.
absl::StatusOr<std::unique_ptr<ops::HttpServer>> StartHttp(const std::string& address,
                                                           std::vector<ops::HttpRoute> routes,
                                                           const security::Security& security);
// Watches the certificates and tokens of `security` from now on, for `http` (null: none) too, which
// must outlive it.
std::unique_ptr<security::CredentialsWatch> WatchCredentials(security::Security* security,
                                                             ops::HttpServer* http);
// What the web server of a coordinator serves: metrics, health (not while the coordinator drains),
// and the status page, which shows the other coordinators of `cluster`, too. `serving` is what
// /healthz says. All arguments, and what `serving` refers to, must outlive the web server.
std::vector<ops::HttpRoute> CoordinatorPages(const std::string& name, int index,
                                             const v1::ClusterConfig& cluster,
                                             const security::Security& security,
                                             coordinator::CoordinatorServer* coordinator,
                                             const ops::Metrics& metrics,
                                             std::function<bool()> serving);

// Waits until the process is asked to stop, then calls `end` with the time that it may take
// (timeouts.drain_ms), and returns its status. The process is cut off if it takes
// kDrainMarginSeconds longer.
absl::Status DrainOnSignal(const ops::ShutdownSignal& shutdown, const v1::TimeoutConfig& timeouts,
                           const std::function<absl::Status(absl::Duration)>& end);
inline constexpr int kDrainMarginSeconds = 5;

}  // namespace emberd::launcher
