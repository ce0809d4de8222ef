#include "server/coordinator/incoming_update.h"

#include <algorithm>
#include <utility>

namespace emberd::server {

void IncomingUpdate::Add(std::shared_ptr<const v1::ApplyGradientsRequest> part,
                         std::vector<rpc::SharedPieces> data, bool last) {
  parts_.push_back({std::move(part), std::move(data)});
  if (!begun()) return;
  const Part& added = parts_.back();
  reader_->Add(*added.request, added.data);
  const auto& gradients = added.request->gradients();
  // What lies in shared memory is read there by the shards, or all at once.
  if (std::any_of(gradients.begin(), gradients.end(),
                  [](const v1::FeatureGradient& gradient) { return gradient.has_shared(); })) {
    sums_.clear();
  }
  // Those of the last part are made by several threads, when it is known that it is the last.
  if (!reader_->ok() || last || gradients.empty()) return;
  for (const auto& sums : sums_) sums->Advance(reader_->input());
}

void IncomingUpdate::Begin(std::shared_ptr<const KeptBatch> batch, const RegionServer* regions,
                           Fanout* fanout) {
  batch_ = std::move(batch);
  reader_.emplace(batch_, regions, fanout->cpu());
  for (const Part& part : parts_) reader_->Add(*part.request, part.data);
  // What came before its batch is summed in one go, by several threads.
  if (!sum_rows_ || !parts_.empty()) return;
  for (int shard = 0; shard < static_cast<int>(fanout->shards().size()); ++shard) {
    sums_.push_back(fanout->SumRows(*batch_, shard));
  }
}

absl::StatusOr<GradientInput> IncomingUpdate::Finish() {
  auto input = reader_->Finish();
  if (input.ok()) input->sums = std::move(sums_);
  return input;
}

}  // namespace emberd::server
