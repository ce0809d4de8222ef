// The pages that every server process has.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/ops/http.h"
#include "server/ops/metrics.h"

namespace emberd::ops {

// /metrics, in the text format of Prometheus. `metrics` must outlive the server.
HttpRoute MetricsRoute(const Metrics& metrics);

// /healthz: 200 while `serving` says so, else 503.
HttpRoute HealthRoute(std::function<bool()> serving);

// `/`: the name of the process and links to `paths`.
HttpRoute IndexRoute(const std::string& name, const std::vector<std::string>& paths);

}  // namespace emberd::ops
