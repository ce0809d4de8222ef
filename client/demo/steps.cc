#include "client/demo/steps.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace emberd::demo {

void Steps::Add(int64_t step, std::shared_ptr<const Batch> batch,
                std::shared_ptr<const DenseStep> gradients) {
  pending_.push_back({step, std::move(batch), std::move(gradients)});
}

absl::Status Steps::Join(int64_t next) {
  stream_.reset();
  absl::StatusOr<std::unique_ptr<client::TrainStream>> stream = embeddings_->Train(options_);
  if (!stream.ok()) return stream.status();
  const int64_t first = (*stream)->next_step();
  while (!pending_.empty() && pending_.front().step < first) pending_.pop_front();
  const int64_t expected = pending_.empty() ? next : pending_.front().step;
  if (first != expected) {
    return absl::OutOfRangeError(absl::StrCat("group \"", options_.group, "\" stands at step ",
                                              first, "; this trainer can go on from ", expected));
  }
  stream_ = *std::move(stream);
  next_lookup_ = next_update_ = first;
  unwanted_lookups_ = static_cast<int>(pending_.size());
  for (const Pending& pending : pending_) {
    if (auto s = SendLookup(pending.step, *pending.batch); !s.ok()) return s;
    if (auto s = SendUpdates(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

uint64_t Steps::generation() const {
  const bool dependent = options_.consistency == client::Consistency::kSync;
  return dependent && joined() ? stream_->generation() : 0;
}

absl::Status Steps::SendLookup(int64_t step, const Batch& batch) {
  if (step < next_lookup_) return absl::OkStatus();
  if (auto s = embeddings_->SendLookup(stream_.get(), step, batch); !s.ok()) return s;
  next_lookup_ = step + 1;
  return absl::OkStatus();
}

absl::StatusOr<client::TrainLookupResult> Steps::ReceiveLookup() {
  for (; unwanted_lookups_ > 0; --unwanted_lookups_) {
    if (auto s = stream_->ReceiveLookup().status(); !s.ok()) return s;
  }
  return stream_->ReceiveLookup();
}

absl::Status Steps::SendUpdates() {
  for (const Pending& pending : pending_) {
    if (pending.step < next_update_ || pending.step >= next_lookup_) continue;
    const auto status = embeddings_->SendUpdate(stream_.get(), pending.step, pending.batch->size,
                                                pending.gradients);
    if (!status.ok()) return status;
    next_update_ = pending.step + 1;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<client::TrainUpdateResult>> Steps::AwaitUpdates(size_t most) {
  std::vector<client::TrainUpdateResult> results;
  while (pending_.size() > most) {
    absl::StatusOr<client::TrainUpdateResult> result = stream_->ReceiveUpdate();
    if (!result.ok()) return result.status();
    pending_.pop_front();
    results.push_back(*std::move(result));
  }
  return results;
}

}  // namespace emberd::demo
