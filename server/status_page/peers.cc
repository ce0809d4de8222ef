#include "server/status_page/peers.h"

#include <chrono>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "base/steady_time.h"
#include "config/address.h"

namespace emberd::status_page {
namespace {

// One that comes back is found soon.
constexpr int kFirstReconnectMs = 200;
constexpr int kMaxReconnectMs = 2000;

bool CanBeAsked(const std::string& text) {
  const auto address = config::ParseAddress(text);
  if (!address.ok() || address->port == 0) return false;
  return !address->is_wildcard();
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                       const security::Security& security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  // Several clusters may live in one process: connections are not shared.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return security.Connect(address, arguments);
}

}  // namespace

Peers::Peers(const v1::ClusterConfig& cluster, int self, const security::Security& security) {
  for (int i = 0; i < cluster.coordinators_size(); ++i) {
    const v1::CoordinatorConfig& coordinator = cluster.coordinators(i);
    if (i == self || !CanBeAsked(coordinator.address())) continue;
    peers_.push_back({.name = absl::StrCat("coordinator-", i),
                      .address = coordinator.address(),
                      .http_address = coordinator.http_address(),
                      .stub = v1::AdminService::NewStub(Connect(coordinator.address(), security))});
  }
}

ClusterFigures Peers::Ask() const {
  ClusterFigures figures(peers_.size());
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  v1::GetStatsRequest request;
  request.set_without_shards(true);
  absl::BlockingCounter waiting(static_cast<int>(peers_.size()));
  const auto deadline = ToSystemTime(SteadyNow() + kPatience);
  for (size_t i = 0; i < peers_.size(); ++i) {
    figures[i] = {.name = peers_[i].name,
                  .address = peers_[i].address,
                  .http_address = peers_[i].http_address};
    grpc::ClientContext* const context =
        contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get();
    context->set_deadline(deadline);
    CoordinatorFigures* const answer = &figures[i];
    peers_[i].stub->async()->GetStats(
        context, &request, &answer->stats, [answer, &waiting](const grpc::Status& status) {
          answer->status = absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                                        status.error_message());
          waiting.DecrementCount();
        });
  }
  waiting.Wait();
  return figures;
}

}  // namespace emberd::status_page
