#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/group/rendezvous.h"
#include "server/host/promise.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_host.h"

namespace emberd::host {
namespace {

class LocalGather final : public GatherCall {
 public:
  LocalGather(ShardHost* host, GatherCommand command, std::string name) : name_(std::move(name)) {
    host->Gather(std::move(command), result_.Setter());
  }
  absl::StatusOr<GatherResult> Wait() override {
    absl::StatusOr<GatherResult>& result = result_.Wait();
    if (!result.ok()) return Annotate(result.status(), name_);
    return std::move(result);
  }

 private:
  const std::string name_;
  Promise<absl::StatusOr<GatherResult>> result_;
};

class LocalApply final : public ApplyCall {
 public:
  LocalApply(ShardHost* host, ApplyCommand command, std::string name)
      : host_(host), name_(std::move(name)) {
    host_->Stage(std::move(command), staged_.Setter());
  }
  absl::StatusOr<StageOutcome> WaitStaged() override {
    absl::StatusOr<ShardHost::StagedApply>& staged = staged_.Wait();
    if (!staged.ok()) return Annotate(staged.status(), name_);
    return staged->outcome;
  }
  void Decide(bool commit) override {
    const ShardHost::StagedApply& staged = *staged_.Wait();
    if (commit) {
      host_->Commit(staged, done_.Setter());
    } else {
      host_->Discard(staged);
      done_.Setter()(RowCounts());
    }
  }
  absl::StatusOr<RowCounts> WaitDone() override {
    absl::StatusOr<RowCounts>& rows = done_.Wait();
    return rows.ok() ? rows : Annotate(rows.status(), name_);
  }

 private:
  ShardHost* const host_;
  const std::string name_;
  Promise<absl::StatusOr<ShardHost::StagedApply>> staged_;
  Promise<absl::StatusOr<RowCounts>> done_;
};

class LocalShard final : public ShardBackend {
 public:
  LocalShard(std::unique_ptr<ShardHost> host, int index)
      : name_(absl::StrCat("shard ", index)), host_(std::move(host)) {}

  const std::string& name() const override { return name_; }
  const std::string& address() const override { return address_; }

  std::unique_ptr<GatherCall> Gather(GatherCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalGather>(host_.get(), std::move(command), name_);
  }
  bool Lend(const NamedRegion&) override { return true; }  // it is mapped here
  std::unique_ptr<ApplyCall> Apply(ApplyCommand command, rpc::CallContext*) override {
    return std::make_unique<LocalApply>(host_.get(), std::move(command), name_);
  }

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    const absl::Status status = verbs_.Call(verb, request, response, context);
    return IsOfGroup(verb, status) ? status : Annotate(status, name_);
  }

  const std::string name_;
  const std::string address_ = "in-process";
  const std::unique_ptr<ShardHost> host_;
  group::Rendezvous rendezvous_;
  ShardVerbs verbs_{host_.get(), &rendezvous_};
};

}  // namespace

absl::StatusOr<std::shared_ptr<ShardBackend>> MakeLocalShard(const v1::ClusterConfig& cluster,
                                                             int shard_index, ops::Metrics* metrics,
                                                             ThreadPools* threads) {
  ASSIGN_OR_RETURN(std::unique_ptr<ShardHost> host,
                   ShardHost::Create(cluster, shard_index, metrics, threads));
  host->WaitUntilReady();
  RETURN_IF_ERROR(Annotate(host->CheckReady(), absl::StrCat("shard ", shard_index)));
  return std::make_shared<LocalShard>(std::move(host), shard_index);
}

}  // namespace emberd::host
