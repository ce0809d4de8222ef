#include "server/checkpoint/merge.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/checkpoint/manifest.h"
#include "server/checkpoint/partition_chain.h"

namespace emberd::server {
namespace {

constexpr int64_t kMergeBlockBytes = int64_t{1} << 20;
constexpr absl::Duration kHeartbeat = absl::Seconds(5);

// (stack, array, partition) of each file to be.
std::set<std::tuple<std::string, std::string, int>> Parts(const CheckpointChain& chain) {
  std::set<std::tuple<std::string, std::string, int>> parts;
  for (const auto& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      parts.insert({file.stack(), file.array(), file.partition()});
    }
  }
  return parts;
}

// All held rows, ascending: so they are the fastest to read.
absl::Status CopyRows(PartitionChain& from, PartitionFileWriter& to,
                      absl::FunctionRef<absl::Status(int64_t)> read) {
  const int64_t row_bytes = from.array().row_bytes();
  const int64_t block_rows = std::max<int64_t>(1, kMergeBlockBytes / row_bytes);
  std::vector<char> block(block_rows * row_bytes);
  for (const LocalRows& range : from.HeldRows()) {
    for (int64_t begin = range.begin; begin < range.end; begin += block_rows) {
      const int64_t rows = std::min<int64_t>(block_rows, range.end - begin);
      for (int64_t i = 0; i < rows; ++i) {
        const auto row = absl::MakeSpan(block.data() + i * row_bytes, row_bytes);
        RETURN_IF_ERROR(from.ReadRow(begin + i, row).status());
      }
      RETURN_IF_ERROR(to.Append(begin, absl::MakeConstSpan(block.data(), rows * row_bytes)));
      RETURN_IF_ERROR(read(0));
    }
  }
  return absl::OkStatus();
}

absl::Status WriteMerged(const CheckpointChain& chain, const std::string& folder,
                         absl::FunctionRef<absl::Status(int64_t)> read,
                         v1::CheckpointManifest* manifest) {
  for (const auto& [stack, array, partition] : Parts(chain)) {
    ASSIGN_OR_RETURN(PartitionChain rows, PartitionChain::Open(chain, stack, array, partition));
    // First, for a row of a damaged file would get a good checksum.
    RETURN_IF_ERROR(rows.Verify(read));
    ASSIGN_OR_RETURN(const auto writer, PartitionFileWriter::Create(folder, rows.array()));
    RETURN_IF_ERROR(CopyRows(rows, *writer, read));
    ASSIGN_OR_RETURN(*manifest->add_files(), writer->Finish());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::CheckpointInfo> MergeCheckpoint(const CheckpointStore& store,
                                                   const std::string& model,
                                                   const std::string& name,
                                                   TransferProgress progress) {
  ASSIGN_OR_RETURN(const CheckpointChain chain, store.Chain(model, name));
  if (chain.size() == 1) return InfoOf(chain.front().manifest());
  ASSIGN_OR_RETURN(const std::string folder, store.BeginMerge(model));
  const absl::Cleanup abandon = [&] { store.Abandon(folder); };

  v1::CheckpointManifest manifest = chain.front().manifest();
  manifest.clear_files();
  manifest.clear_parent();
  manifest.clear_parent_id();
  manifest.clear_chain();
  const int64_t total = BytesOf(chain);
  int64_t bytes = 0;
  absl::Time beat = SteadyNow();
  const auto read = [&](int64_t more) -> absl::Status {
    bytes += more;
    if (SteadyNow() - beat > kHeartbeat) {
      RETURN_IF_ERROR(store.Heartbeat(folder));
      beat = SteadyNow();
    }
    return progress(bytes, total);
  };
  RETURN_IF_ERROR(WriteMerged(chain, folder, read, &manifest));
  RETURN_IF_ERROR(store.CommitMerge(folder, manifest));
  return InfoOf(manifest);
}

}  // namespace emberd::server
