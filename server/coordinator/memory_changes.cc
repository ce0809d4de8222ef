// What operators do with the memory of the shards' SparseCores: each shard does it, and a pin that
// one of them refuses is taken back on the others.
#include <string>
#include <vector>

#include "base/status.h"
#include "base/steady_time.h"
#include "server/coordinator/coordinator.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

constexpr absl::Duration kUnpinDeadline = absl::Seconds(2);

}  // namespace

absl::StatusOr<v1::ChangeMemoryResponse> Coordinator::ChangeMemory(
    const v1::ChangeMemoryRequest& request, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckMemoryChange(request));
  v1::ChangeMemoryResponse response;
  for (size_t i = 0; i < shards_.size(); ++i) response.add_shards();
  const std::vector<int> all = ShardsFrom(0, shards_.size());
  const absl::Status status = FirstError(ForEachShard(&threads_->blocking, all, [&](int shard) {
    const auto change = shards_[shard]->ChangeMemory(request, context);
    if (change.ok()) *response.mutable_shards(shard) = *change;
    return change.status();
  }));
  if (status.ok()) return response;
  // In the words of all other calls, if nobody has declared it.
  if (absl::IsNotFound(status)) {
    RETURN_IF_ERROR(registry_.FindByName(request.model(), context).status());
  }
  if (request.operation() == v1::ChangeMemoryRequest::PIN) TakePinBack(request, response, context);
  return status;
}

void Coordinator::TakePinBack(const v1::ChangeMemoryRequest& pin,
                              const v1::ChangeMemoryResponse& done, rpc::CallContext* caller) {
  v1::ChangeMemoryRequest unpin = pin;
  unpin.set_operation(v1::ChangeMemoryRequest::UNPIN);
  std::vector<int> pinned;
  for (int shard = 0; shard < done.shards_size(); ++shard) {
    if (done.shards(shard).changed()) pinned.push_back(shard);
  }
  rpc::CallContext context(SteadyNow() + kUnpinDeadline, caller->trace());
  ForEachShard(&threads_->blocking, pinned, [&](int shard) {
    const absl::Status status = shards_[shard]->ChangeMemory(unpin, &context).status();
    if (!status.ok()) {
      ops::Log(ops::LogLevel::kWarning, "a model stays pinned on a shard, though not on all",
               {{"model", pin.model()}, {"reason", std::string(status.message())}});
    }
    return status;
  });
}

}  // namespace emberd::server
