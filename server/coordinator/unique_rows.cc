#include "server/coordinator/unique_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace emberd::server {
namespace {

// Keeps the views of a result alive: of what the shard sent, and of what was made of it.
struct PooledOwner {
  std::shared_ptr<const void> sent;
  std::vector<shard::StackSums> pooled;
};

}  // namespace

absl::Status PoolUniqueRows(const ServedModel& model, const preprocess::PreprocessedBatch& batch,
                            int shard, shard::RowPooler* pooler, GatherResult* result) {
  if (result->rows.empty()) return absl::OkStatus();
  auto owner = std::make_shared<PooledOwner>();
  const std::vector<preprocess::StackBatchView> views = batch.ShardView(shard);
  for (const StackRowsView& rows : result->rows) {
    auto sums = pooler->Pool(views[rows.stack], model.shard_stacks[rows.stack],
                             model.plan.topology.sparsecores_per_shard, rows.rows);
    if (!sums.ok()) return absl::InternalError(sums.status().message());
    owner->pooled.push_back(*std::move(sums));
  }
  for (const shard::StackSums& sums : owner->pooled) result->stacks.push_back(ViewOf(sums));
  std::sort(result->stacks.begin(), result->stacks.end(),
            [](const StackSumsView& a, const StackSumsView& b) { return a.stack < b.stack; });
  // Sums that came as such stay where they were sent to.
  owner->sent = result->stacks.size() == owner->pooled.size() ? nullptr : std::move(result->owner);
  result->rows.clear();
  result->owner = std::move(owner);
  return absl::OkStatus();
}

}  // namespace emberd::server
