#include "server/security/method_roles.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"

namespace emberd::security {
namespace {

using v1::Token;

// ReleaseBatch takes any batch of the model, also one that a trainer waits to apply.
constexpr MethodRole kMethodRoles[] = {
    {"/emberd.v1.EmbeddingService/DeclareModel", Token::TRAINER},
    {"/emberd.v1.EmbeddingService/DescribeModel", Token::READER},
    {"/emberd.v1.EmbeddingService/Lookup", Token::READER},
    {"/emberd.v1.EmbeddingService/ApplyGradients", Token::TRAINER},
    {"/emberd.v1.EmbeddingService/Train", Token::TRAINER},
    {"/emberd.v1.EmbeddingService/ReleaseBatch", Token::TRAINER},
    {"/emberd.v1.EmbeddingService/ReadRows", Token::READER},
    {"/emberd.v1.EmbeddingService/AssignRows", Token::ADMIN},
    {"/emberd.v1.EmbeddingService/ExportTable", Token::READER},

    {"/emberd.v1.AdminService/GetStatus", Token::READER},
    {"/emberd.v1.AdminService/GetLimits", Token::READER},
    {"/emberd.v1.AdminService/GetStats", Token::READER},
    {"/emberd.v1.AdminService/Drain", Token::ADMIN},

    {"/emberd.internal.v1.ShardService/CreateModel", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/FindModel", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/DropModel", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/Gather", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/Apply", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/OpenGroup", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/DecideStep", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/ReleaseBatch", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/ReadRows", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/AssignRows", Token::CLUSTER},
    {"/emberd.internal.v1.ShardService/GetStatus", Token::CLUSTER},

    {"/emberd.internal.v1.CollectiveService/Join", Token::CLUSTER},
    {"/emberd.internal.v1.CollectiveService/AllGather", Token::CLUSTER},
    {"/emberd.internal.v1.CollectiveService/Advance", Token::CLUSTER},
    {"/emberd.internal.v1.CollectiveService/Leave", Token::CLUSTER},
    {"/emberd.internal.v1.CollectiveService/Watch", Token::CLUSTER},
};

}  // namespace

absl::Span<const MethodRole> MethodRoles() { return kMethodRoles; }

bool IsOpen(absl::string_view method) {
  return absl::StartsWith(method, "/grpc.health.v1.Health/") ||
         absl::StartsWith(method, "/grpc.reflection.");
}

v1::Token::Role LeastRole(absl::string_view method) {
  static const auto* const roles = [] {
    auto* map = new absl::flat_hash_map<absl::string_view, Token::Role>;
    for (const MethodRole& entry : kMethodRoles) map->emplace(entry.method, entry.role);
    return map;
  }();
  const auto found = roles->find(method);
  return found == roles->end() ? Token::ADMIN : found->second;
}

bool Suffices(v1::Token::Role role, v1::Token::Role least) {
  if (role == Token::CLUSTER || least == Token::CLUSTER) return role == least;
  return role >= least;
}

}  // namespace emberd::security
