#include "server/launcher/pages.h"

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/coordinator/administration.h"
#include "server/coordinator/coordinator.h"
#include "server/ops/http_routes.h"
#include "server/rpc/call_context.h"
#include "server/status_page/status_page.h"

namespace emberd::launcher {
namespace {

// How long a page waits for shards that do not answer.
constexpr absl::Duration kPatience = absl::Seconds(3);

}  // namespace

std::vector<ops::HttpRoute> ShardPages(const std::string& name, const ops::Metrics& metrics,
                                       std::function<bool()> serving) {
  return {ops::MetricsRoute(metrics), ops::HealthRoute(std::move(serving)),
          ops::IndexRoute(name, {"/metrics", "/healthz"})};
}

std::vector<ops::HttpRoute> CoordinatorPages(const std::string& name,
                                             server::CoordinatorServer* coordinator,
                                             const ops::Metrics& metrics,
                                             std::function<bool()> serving) {
  const auto stats = [coordinator](const v1::GetStatsRequest& request) {
    rpc::CallContext context(absl::Now() + kPatience);
    return coordinator->administration()->GetStats(request, &context);
  };
  const auto model = [coordinator](const v1::DescribeModelRequest& request) {
    rpc::CallContext context(absl::Now() + kPatience);
    return coordinator->coordinator()->DescribeModel(request, &context);
  };
  std::vector<ops::HttpRoute> routes = status_page::Routes({name, stats, model});
  routes.push_back(ops::MetricsRoute(metrics));
  routes.push_back(ops::HealthRoute([coordinator, serving = std::move(serving)] {
    return serving() && !coordinator->administration()->draining();
  }));
  return routes;
}

}  // namespace emberd::launcher
