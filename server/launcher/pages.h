// What the web server of a process serves.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/coordinator/coordinator_server.h"
#include "server/ops/http.h"
#include "server/ops/metrics.h"

namespace emberd::launcher {

// `serving` is what /healthz says. All arguments, and what `serving` refers to, must outlive the
// web server.

// Metrics, health, and an index of the two. `name`: "shard-0".
std::vector<ops::HttpRoute> ShardPages(const std::string& name, const ops::Metrics& metrics,
                                       std::function<bool()> serving);

// Metrics, health (not while the coordinator drains), and the status page.
std::vector<ops::HttpRoute> CoordinatorPages(const std::string& name,
                                             server::CoordinatorServer* coordinator,
                                             const ops::Metrics& metrics,
                                             std::function<bool()> serving);

}  // namespace emberd::launcher
