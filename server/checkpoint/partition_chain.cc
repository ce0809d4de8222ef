#include "server/checkpoint/partition_chain.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace emberd::server {

absl::StatusOr<PartitionChain> PartitionChain::Open(const CheckpointChain& chain,
                                                    absl::string_view stack,
                                                    absl::string_view array, int partition) {
  PartitionChain opened;
  ASSIGN_OR_RETURN(opened.array_,
                   FindPartitionArray(chain.front().manifest(), stack, array, partition));
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      if (file.partition() != partition || file.stack() != stack || file.array() != array) continue;
      ASSIGN_OR_RETURN(auto reader,
                       PartitionFileReader::Open(source.folder(), file, opened.array_));
      opened.readers_.push_back(std::move(reader));
    }
  }
  return opened;
}

absl::Status PartitionChain::Verify(absl::FunctionRef<absl::Status(int64_t)> read) {
  for (const auto& reader : readers_) RETURN_IF_ERROR(reader->Verify(read));
  return absl::OkStatus();
}

std::vector<LocalRows> PartitionChain::HeldRows() const {
  std::vector<LocalRows> all;
  for (const auto& reader : readers_) {
    all.insert(all.end(), reader->ranges().begin(), reader->ranges().end());
  }
  std::sort(all.begin(), all.end(),
            [](const LocalRows& a, const LocalRows& b) { return a.begin < b.begin; });
  std::vector<LocalRows> held;
  for (const LocalRows& range : all) {
    if (held.empty() || range.begin > held.back().end) {
      held.push_back(range);
    } else {
      held.back().end = std::max(held.back().end, range.end);
    }
  }
  return held;
}

absl::StatusOr<bool> PartitionChain::ReadRow(int64_t row, absl::Span<char> out) {
  for (const auto& reader : readers_) {
    ASSIGN_OR_RETURN(const bool found, reader->ReadRow(row, out));
    if (found) return true;
  }
  return false;
}

}  // namespace emberd::server
