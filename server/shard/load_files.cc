#include "server/shard/load_files.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/optimizers.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/partition_file.h"
#include "server/shard/remap_rows.h"

namespace emberd::server {
namespace {

absl::Status GivenUp() { return absl::CancelledError("the restore was cancelled"); }

// Reads one partition of one stack: the oldest file first, so that what is newer stays.
absl::Status LoadPartition(shard::StackStore& store, int k, const CheckpointChain& chain,
                           ShardProgress& progress) {
  const int partition = store.first_partition() + k;
  for (auto source = chain.rbegin(); source != chain.rend(); ++source) {
    for (const v1::CheckpointFile& file : source->manifest().files()) {
      if (file.stack() != store.spec().name || file.partition() != partition) continue;
      if (progress.cancelled) return GivenUp();
      const auto slot = std::find_if(store.slots().begin(), store.slots().end(),
                                     [&](const auto& s) { return s.info.name == file.array(); });
      const bool weights = file.array() == kWeightsArray;
      if (!weights && slot == store.slots().end()) continue;
      const int slot_index = static_cast<int>(slot - store.slots().begin());
      ASSIGN_OR_RETURN(
          const PartitionArray array,
          FindPartitionArray(source->manifest(), file.stack(), file.array(), partition));
      ASSIGN_OR_RETURN(const auto reader, PartitionFileReader::Open(source->folder(), file, array));
      RETURN_IF_ERROR(reader->Stream([&](int64_t first, absl::Span<const char> rows) {
        if (progress.cancelled) return GivenUp();
        if (weights) {
          store.LoadWeights(k, first, rows);
        } else {
          store.LoadSlot(
              k, slot_index, first,
              {reinterpret_cast<const float*>(rows.data()), rows.size() / sizeof(float)});
        }
        progress.bytes += static_cast<int64_t>(rows.size());
        return absl::OkStatus();
      }));
    }
  }
  return absl::OkStatus();
}

bool SameStack(const shard::StackSpec& stack, const v1::StackPlan& plan) {
  if (stack.name != plan.name() || stack.embedding_dim != plan.embedding_dim() ||
      stack.rows_per_partition != plan.rows_per_partition() ||
      static_cast<int>(stack.tables.size()) != plan.tables_size()) {
    return false;
  }
  return std::equal(stack.tables.begin(), stack.tables.end(), plan.tables().begin(),
                    [](const shard::TableSpec& a, const v1::TablePlan& b) {
                      return a.name == b.name() && a.vocabulary_size == b.vocabulary_size() &&
                             a.embedding_dim == b.embedding_dim() &&
                             a.row_offset == b.row_offset() &&
                             a.shard_rotation == b.shard_rotation();
                    });
}

v1::DataType DtypeOf(const v1::ModelConfig& config, const std::string& table) {
  for (const v1::TableConfig& found : config.tables()) {
    if (found.name() == table) return found.storage_dtype();
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

}  // namespace

absl::Status CheckFiles(const CheckpointChain& chain, int shard, int shards,
                        ShardProgress& progress) {
  int number = 0;
  const auto mine = [&] { return number++ % shards == shard; };
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      if (!mine()) continue;
      ASSIGN_OR_RETURN(
          const PartitionArray array,
          FindPartitionArray(source.manifest(), file.stack(), file.array(), file.partition()));
      ASSIGN_OR_RETURN(const auto reader, PartitionFileReader::Open(source.folder(), file, array));
      RETURN_IF_ERROR(reader->Verify([&](int64_t bytes) {
        progress.bytes += bytes;
        return progress.cancelled ? GivenUp() : absl::OkStatus();
      }));
    }
  }
  for (const v1::CheckpointFile& file : chain[0].manifest().states()) {
    if (mine()) RETURN_IF_ERROR(ReadListedFile(chain[0].folder(), file).status());
  }
  return absl::OkStatus();
}

bool SamePlaces(const shard::Model& model, const v1::CheckpointManifest& manifest) {
  const auto& stacks = model.spec().stacks;
  if (model.spec().partitions != manifest.plan().partitions() ||
      static_cast<int>(stacks.size()) != manifest.plan().stacks_size()) {
    return false;
  }
  return std::equal(stacks.begin(), stacks.end(), manifest.plan().stacks().begin(),
                    [&](const shard::StackSpec& stack, const v1::StackPlan& plan) {
                      return SameStack(stack, plan) &&
                             stack.storage_dtype ==
                                 DtypeOf(manifest.config(), plan.tables(0).name());
                    });
}

int64_t BytesToLoad(const shard::ModelSpec& spec, const CheckpointChain& chain) {
  const int64_t element = config::WeightBytes(spec.stacks.front().storage_dtype);
  int64_t bytes = 0;
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::StackPlan& stack : source.manifest().plan().stacks()) {
      for (const v1::CheckpointFile& file : source.manifest().files()) {
        if (file.stack() != stack.name() || file.array() != kWeightsArray) continue;
        bytes += file.rows() * stack.embedding_dim() * element;
      }
    }
  }
  return bytes / spec.partitions * spec.partition_count;
}

absl::Status LoadRows(shard::Model& model, const CheckpointChain& chain, BlockingPool* threads,
                      ShardProgress& progress) {
  const bool same_places = std::all_of(chain.begin(), chain.end(), [&](const auto& source) {
    return SamePlaces(model, source.manifest());
  });
  std::vector<std::pair<shard::StackStore*, int>> partitions;
  for (int stack = 0; stack < model.stack_count(); ++stack) {
    for (int k = 0; k < model.stack(stack).partitions(); ++k) {
      partitions.emplace_back(&model.stack(stack), k);
    }
  }
  constexpr int kAtOnce = 4;
  std::atomic<size_t> next{0};
  std::vector<absl::Status> results(kAtOnce);
  threads->RunEach(kAtOnce, [&](int worker) {
    for (size_t i = next++; i < partitions.size() && results[worker].ok(); i = next++) {
      const auto [store, k] = partitions[i];
      results[worker] = same_places ? LoadPartition(*store, k, chain, progress)
                                    : RemapPartition(*store, k, chain, progress);
      if (!results[worker].ok()) next = partitions.size();
    }
  });
  for (const absl::Status& status : results) RETURN_IF_ERROR(status);
  if (!same_places) return absl::OkStatus();
  for (const auto& [store, k] : partitions) store->changes(k).Track();
  return absl::OkStatus();
}

}  // namespace emberd::server
