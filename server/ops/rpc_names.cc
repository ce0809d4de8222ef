#include "server/ops/rpc_names.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <google/protobuf/descriptor.h>

#include "emberd/internal/v1/shard_service.pb.h"

namespace emberd::ops {
namespace {

// All of them, the control verbs of shards last.
const std::vector<std::string>& RpcNames() {
  static const auto* const kNames = [] {
    auto* names = new std::vector<std::string>{
#define EMBERD_RPC(service, method, ...) #service "Service/" #method,
        EMBERD_PUBLIC_RPCS(EMBERD_RPC) EMBERD_INTERNAL_RPCS(EMBERD_RPC)
#undef EMBERD_RPC
    };
    const google::protobuf::ServiceDescriptor* const shard =
        internal::v1::GatherHeader::descriptor()->file()->FindServiceByName("ShardService");
    for (int i = 0; i < shard->method_count(); ++i) {
      std::string name = "ShardService/" + shard->method(i)->name();
      if (std::count(names->begin(), names->end(), name) == 0) names->push_back(std::move(name));
    }
    names->resize(kRpcCount);
    return names;
  }();
  return *kNames;
}

constexpr std::string_view kStageNames[] = {"decode",  "preprocess",     "gather_wait",
                                            "combine", "encode",         "stage",
                                            "commit",  "wait_for_ranks", "wait_for_update"};
static_assert(std::size(kStageNames) == kStageCount);

}  // namespace

const std::string& RpcName(Rpc rpc) { return RpcNames()[static_cast<size_t>(rpc)]; }

Rpc ShardRpc(std::string_view verb) {
  const std::vector<std::string>& names = RpcNames();
  const auto found = std::find(names.begin(), names.end(), "ShardService/" + std::string(verb));
  return static_cast<Rpc>(found - names.begin());
}

std::string_view StageName(Stage stage) { return kStageNames[static_cast<size_t>(stage)]; }

std::string CodeName(absl::StatusCode code) {
  const std::string name = absl::StatusCodeToString(code);
  return name.empty() ? "UNKNOWN" : name;
}

}  // namespace emberd::ops
