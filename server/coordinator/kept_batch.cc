#include "server/coordinator/kept_batch.h"

#include <utility>

#include "absl/random/random.h"

namespace emberd::server {

uint64_t NewBatchHandle() {
  thread_local absl::BitGen generator;
  return absl::Uniform<uint64_t>(generator, 1, ~uint64_t{0});
}

KeptBatch::KeptBatch(std::shared_ptr<const ServedModel> served,
                     const preprocess::PreprocessedBatch& batch,
                     absl::Span<const GatherResult> results)
    : model(std::move(served)),
      feature_samples(batch.feature_samples().begin(), batch.feature_samples().end()),
      feature_sample_begin(batch.feature_sample_begin().begin(),
                           batch.feature_sample_begin().end()) {
  for (const GatherResult& result : results) {
    KeptShard& shard = shards.emplace_back();
    shard.incarnation = result.incarnation;
    for (const StackSumsView& stack : result.stacks) {
      shard.samples.emplace_back(stack.samples.begin(), stack.samples.end());
    }
  }
}

int64_t KeptBatch::bytes() const {
  int64_t bytes = sizeof(*this);
  for (const KeptShard& shard : shards) {
    for (const std::vector<int32_t>& samples : shard.samples) {
      bytes += static_cast<int64_t>(samples.size() * sizeof(int32_t));
    }
  }
  return bytes;
}

}  // namespace emberd::server
