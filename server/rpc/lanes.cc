#include "server/rpc/lanes.h"

#include <utility>

#include <grpc/grpc_security_constants.h>
#include <grpcpp/server_context.h>

#include "absl/strings/str_cat.h"
#include "base/steady_time.h"
#include "server/ops/logging.h"
#include "server/security/callers.h"

namespace emberd::rpc {
namespace {

std::unique_ptr<LaneServer> StartLanes(const v1::ClusterConfig& cluster, const char* peers,
                                       LaneServer::Options options, LaneServer::Handler handler) {
  if (cluster.transport() == v1::ClusterConfig::TCP) return nullptr;
  auto server = LaneServer::Start(std::move(options), std::move(handler));
  if (server.ok()) return *std::move(server);
  ops::Log(ops::LogLevel::kWarning, absl::StrCat("all calls of ", peers, " go by gRPC"),
           {{"reason", std::string(server.status().message())}});
  return nullptr;
}

}  // namespace

std::unique_ptr<LaneServer> StartClientLanes(const v1::ClusterConfig& cluster,
                                             LaneServer::Handler handler) {
  return StartLanes(cluster, "clients",
                    {.name = "emberd-lane", .any_user = cluster.share_with_any_user()},
                    std::move(handler));
}

std::unique_ptr<LaneServer> StartShardLanes(const v1::ClusterConfig& cluster,
                                            LaneServer::Handler handler) {
  return StartLanes(cluster, "coordinators", {.name = "emberd-shard-lane"}, std::move(handler));
}

LanePeer LanePeerOf(const grpc::ServerContextBase& context) {
  LanePeer peer{.address = security::PeerAddress(context.peer()), .certificate = {}, .agent = {}};
  const auto agent = context.client_metadata().find("user-agent");
  if (agent != context.client_metadata().end()) {
    peer.agent = std::string(agent->second.data(), agent->second.size());
  }
  const auto connection = context.auth_context();
  if (connection == nullptr) return peer;
  const auto names = connection->FindPropertyValues(GRPC_X509_CN_PROPERTY_NAME);
  if (!names.empty()) peer.certificate = std::string(names.front().data(), names.front().size());
  return peer;
}

void InviteToLane(LaneServer* lanes, LanePeer peer,
                  absl::StatusOr<v1::ShareMemoryResponse>* response) {
  if (lanes == nullptr) return;
  if (!response->ok()) *response = v1::ShareMemoryResponse();  // no memory, but a lane
  LaneInvitation invitation = lanes->Invite(std::move(peer));
  (*response)->set_lane_socket(std::move(invitation.socket));
  (*response)->set_lane_ticket(std::move(invitation.ticket));
}

absl::Status CheckLaneCall(const security::Security* security, absl::string_view method,
                           const LaneCall& call) {
  if (security == nullptr) return absl::OkStatus();
  security::CallHeaders headers{.method = method,
                                .authorization = {},
                                .agent = call.peer().agent,
                                .certificate = call.peer().certificate};
  if (!call.request().authorization.empty()) {
    headers.authorization.push_back(call.request().authorization);
  }
  return security->CheckCall(headers);
}

absl::Status UnknownLaneMethod(const LaneCall& call) {
  return absl::UnimplementedError(
      absl::StrCat("no call of number ", call.request().method, " is made on lanes"));
}

absl::Time DeadlineOf(const LaneCall& call, absl::Duration default_patience) {
  const absl::Duration patience = call.request().patience;
  return SteadyNow() + (patience == absl::InfiniteDuration() ? default_patience : patience);
}

}  // namespace emberd::rpc
