// For tests: a shard that does no more than host groups, in this process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/group/rendezvous.h"
#include "server/host/shard_backend.h"
#include "server/host/verbs.h"

namespace emberd::host {

class MeetingShard : public ShardBackend {
 public:
  // It must outlive the shard.
  explicit MeetingShard(group::Rendezvous* rendezvous) : verbs_(/*host=*/nullptr, rendezvous) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return name_; }
  std::unique_ptr<GatherCall> Gather(GatherCommand, rpc::CallContext*) override { return nullptr; }
  std::unique_ptr<ApplyCall> Apply(ApplyCommand, rpc::CallContext*) override { return nullptr; }

 protected:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    return verbs_.Call(verb, request, response, context);
  }

 private:
  const std::string name_ = "here";
  ShardVerbs verbs_;
};

// One for each.
inline std::vector<std::shared_ptr<ShardBackend>> MeetingShards(
    const std::vector<group::Rendezvous*>& hosts) {
  std::vector<std::shared_ptr<ShardBackend>> shards;
  for (group::Rendezvous* host : hosts) shards.push_back(std::make_shared<MeetingShard>(host));
  return shards;
}

}  // namespace emberd::host
