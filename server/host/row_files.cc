#include "server/host/row_files.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "config/optimizers.h"
#include "server/checkpoint/chain_work.h"
#include "server/files/files.h"
#include "server/host/mutation_votes.h"

namespace emberd::host {
namespace {

// The arrays of a stack in one partition, as a snapshot orders them.
std::vector<checkpoint::PartitionArray> ArraysOf(const shard::Model& model, int stack, int k) {
  const shard::StackStore& store = model.stack(stack);
  checkpoint::PartitionArray array;
  array.model = model.spec().name;
  array.stack = model.spec().stacks[stack].name;  // that of a shared store is another model's
  array.array = checkpoint::kWeightsArray;
  array.partition = store.first_partition() + k;
  array.partitions = model.spec().partitions;
  array.dtype = store.dtype();
  array.columns = store.width();
  array.rows_per_partition = store.rows_per_partition();
  std::vector<checkpoint::PartitionArray> arrays = {array};
  for (const shard::StackStore::Slot& slot : store.slots()) {
    array.array = slot.info.name;
    array.dtype = v1::FLOAT32;
    array.columns = slot.columns;
    arrays.push_back(array);
  }
  return arrays;
}

// The files of one partition of one stack of one model: rows go into all of them.
class PartitionFiles {
 public:
  // `files`: of the model; it must outlive this.
  absl::Status Create(const std::string& folder,
                      const std::vector<checkpoint::PartitionArray>& arrays,
                      CheckpointFiles* files) {
    files_ = files;
    for (const checkpoint::PartitionArray& array : arrays) {
      ASSIGN_OR_RETURN(auto writer, checkpoint::PartitionFileWriter::Create(folder, array));
      writers_.push_back(std::move(writer));
      row_bytes_.push_back(array.row_bytes());
    }
    return absl::OkStatus();
  }

  absl::Status Append(const shard::SnapshotRows& rows) {
    for (size_t i = 0; i < writers_.size(); ++i) {
      const char* next = rows.arrays[i].data();
      for (const shard::SnapshotRows::Run& run : rows.runs) {
        const auto bytes = static_cast<size_t>(run.count * row_bytes_[i]);
        RETURN_IF_ERROR(writers_[i]->Append(run.first, {next, bytes}));
        next += bytes;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Finish() {
    for (const auto& writer : writers_) {
      ASSIGN_OR_RETURN(*files_->Add(), writer->Finish());
    }
    return absl::OkStatus();
  }

 private:
  CheckpointFiles* files_ = nullptr;
  std::vector<std::unique_ptr<checkpoint::PartitionFileWriter>> writers_;
  std::vector<int64_t> row_bytes_;
};

// Of each model that has the stack, in its folder.
absl::StatusOr<std::vector<PartitionFiles>> FilesOf(const shard::Snapshot& snapshot,
                                                    const shard::SnapshotRows& rows,
                                                    absl::Span<const std::string> folders,
                                                    absl::Span<CheckpointFiles> files) {
  std::vector<PartitionFiles> all;
  for (size_t m = 0; m < folders.size(); ++m) {
    const shard::Model& model = *snapshot.models()[m];
    for (int stack = 0; stack < model.stack_count(); ++stack) {
      if (&model.stack(stack) != snapshot.stores()[rows.stack]) continue;
      RETURN_IF_ERROR(
          all.emplace_back().Create(folders[m], ArraysOf(model, stack, rows.k), &files[m]));
    }
  }
  return all;
}

// How the checkpoint has a table; all that is unset if it has none.
const v1::TableConfig& TableOf(const v1::CheckpointManifest& manifest, const std::string& table) {
  const auto& tables = manifest.config().tables();
  const auto found = absl::c_find_if(tables, [&](const auto& t) { return t.name() == table; });
  return found == tables.end() ? v1::TableConfig::default_instance() : *found;
}

bool SameSlot(const config::SlotInfo& a, const config::SlotInfo& b) {
  return a.name == b.name && a.one_per_row == b.one_per_row;
}

// Optimizers may have slots of one name that are not of one shape.
bool HasSlot(const v1::CheckpointManifest& manifest, const std::string& table,
             const config::SlotInfo& slot) {
  return absl::c_any_of(config::OptimizerSlots(TableOf(manifest, table).optimizer()),
                        [&](const config::SlotInfo& saved) { return SameSlot(saved, slot); });
}

absl::Status GivenUp() { return absl::CancelledError("the restore was cancelled"); }

// Restoring rows into other places than those that they were saved from: another number of
// partitions, other stacks, another storage type, or an optimizer with other slots.

// Rows read at once.
constexpr int64_t kRun = 4096;
// Each file is read for many partitions, but its checksum is compared once.
constexpr bool kVerify = false;

// The rows of one table in one partition, of one array after another.
class TableLoader {
 public:
  TableLoader(shard::StackStore* store, int k, const shard::RowRange& range,
              const shard::StackSpec& spec, const checkpoint::CheckpointChain& chain,
              ShardProgress* progress)
      : store_(store), k_(k), range_(range), spec_(spec), chain_(chain), progress_(progress) {}

  absl::Status LoadWeights() {
    ASSIGN_OR_RETURN(const auto reader,
                     checkpoint::TableReader::Open(&chain_, table().name, "", kVerify));
    const auto row_bytes = static_cast<int64_t>(store_->row_bytes());
    std::vector<char> stored;
    return ForEachHeldRun(*reader, [&](int64_t first, int64_t count, const float* values) {
      stored.assign(count * row_bytes, 0);
      for (int64_t i = 0; i < count; ++i) {
        shard::WriteStoredRow(
            store_->dtype(), absl::MakeConstSpan(values + i * reader->columns(), reader->columns()),
            stored.data() + i * row_bytes);
      }
      store_->LoadWeights(k_, first, stored);
    });
  }

  // Does nothing if the checkpoint has no such slot.
  absl::Status LoadSlot(int index) {
    const shard::StackStore::Slot& slot = store_->slots()[index];
    if (!HasSlot(chain_.front().manifest(), table().name, slot.info)) return absl::OkStatus();
    ASSIGN_OR_RETURN(const auto reader,
                     checkpoint::TableReader::Open(&chain_, table().name, slot.info.name, kVerify));
    const int columns = std::min(slot.columns, reader->columns());
    std::vector<float> padded;
    return ForEachHeldRun(*reader, [&](int64_t first, int64_t count, const float* values) {
      padded.assign(count * slot.columns, 0);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(values + i * reader->columns(), columns, padded.data() + i * slot.columns);
      }
      store_->LoadSlot(k_, index, first, padded);
    });
  }

 private:
  const shard::TableSpec& table() const { return spec_.tables[range_.table]; }

  // Calls use(first local row, count, values [count, columns]) for what the checkpoint holds.
  template <typename Use>
  absl::Status ForEachHeldRun(checkpoint::TableReader& reader, const Use& use) {
    const int64_t partition_rows = k_ * store_->rows_per_partition();
    const int64_t first_id = store_->IdOf(partition_rows + range_.begin);
    const int64_t stride = store_->IdOf(partition_rows + range_.begin + 1) - first_id;
    // Ids beyond the vocabulary pad the table.
    const int64_t rows =
        first_id >= reader.rows() ? 0 : (reader.rows() - 1 - first_id) / stride + 1;
    std::vector<float> values(kRun * reader.columns());
    std::vector<bool> held;
    for (int64_t done = 0; done < rows; done += kRun) {
      if (progress_->cancelled) return GivenUp();
      const int64_t count = std::min(kRun, rows - done);
      RETURN_IF_ERROR(
          reader.ReadHeld({first_id + done * stride, count, stride}, values.data(), &held));
      for (int64_t begin = 0, end; begin < count; begin = end) {
        end = begin + 1;
        while (end < count && held[end] == held[begin]) ++end;
        if (!held[begin]) continue;
        use(range_.begin + done + begin, end - begin, values.data() + begin * reader.columns());
        progress_->bytes += (end - begin) * reader.columns() * static_cast<int64_t>(sizeof(float));
      }
    }
    return absl::OkStatus();
  }

  shard::StackStore* const store_;
  const int k_;
  const shard::RowRange range_;
  const shard::StackSpec& spec_;
  const checkpoint::CheckpointChain& chain_;
  ShardProgress* const progress_;
};

// Reads the rows of the store's k-th partition, by table and id. Columns of padding are 0, and
// slots that the checkpoint does not have keep their initial values. `spec`: the names of the model
// for a store that another one may have made.
absl::Status RemapPartition(shard::StackStore& store, int k, const shard::StackSpec& spec,
                            const checkpoint::CheckpointChain& chain, ShardProgress& progress) {
  for (const shard::RowRange& range : store.ranges()) {
    if (range.table < 0) continue;
    TableLoader loader(&store, k, range, spec, chain, &progress);
    RETURN_IF_ERROR(loader.LoadWeights());
    for (size_t slot = 0; slot < store.slots().size(); ++slot) {
      RETURN_IF_ERROR(loader.LoadSlot(static_cast<int>(slot)));
    }
  }
  return absl::OkStatus();
}

// Reads one partition of one stack: the oldest file first, so that what is newer stays.
absl::Status LoadPartition(shard::StackStore& store, int k, const shard::StackSpec& spec,
                           const checkpoint::CheckpointChain& chain, ShardProgress& progress) {
  const int partition = store.first_partition() + k;
  for (auto source = chain.rbegin(); source != chain.rend(); ++source) {
    for (const v1::CheckpointFile& file : source->manifest().files()) {
      if (file.stack() != spec.name || file.partition() != partition) continue;
      if (progress.cancelled) return GivenUp();
      const auto slot =
          std::find_if(store.slots().begin(), store.slots().end(), [&](const auto& s) {
            return s.info.name == file.array() &&
                   HasSlot(source->manifest(), spec.tables[0].name, s.info);
          });
      const bool weights = file.array() == checkpoint::kWeightsArray;
      if (!weights && slot == store.slots().end()) continue;
      const int slot_index = static_cast<int>(slot - store.slots().begin());
      ASSIGN_OR_RETURN(const checkpoint::PartitionArray array,
                       checkpoint::FindPartitionArray(source->manifest(), file.stack(),
                                                      file.array(), partition));
      ASSIGN_OR_RETURN(const auto reader,
                       checkpoint::PartitionFileReader::Open(source->folder(), file, array));
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

using internal::v1::ShardState;

absl::StatusOr<ShardState> ReadState(const std::string& folder, const v1::CheckpointFile& file) {
  ASSIGN_OR_RETURN(const std::string bytes, files::ReadListedFile(folder, file));
  ShardState state;
  if (state.ParseFromString(bytes)) return state;
  return files::DamagedFile(files::PathIn(folder, file.path()),
                            "cannot be read as the state of a shard");
}

// Makes one state of those of all shards.
class StateMerger {
 public:
  // `count_rows`: the rows of all shards are added up; else there are none.
  explicit StateMerger(bool count_rows) : count_rows_(count_rows) {}

  void Add(const ShardState& state) {
    for (const internal::v1::ClientState& client : state.clients()) AddClient(client);
    for (const internal::v1::GroupState& group : state.groups()) AddGroup(group);
    merged_.set_changes(std::max(merged_.changes(), state.changes()));
    merged_.set_forgotten_generation(
        std::max(merged_.forgotten_generation(), state.forgotten_generation()));
    for (int stack = 0; stack < state.unnumbered_updates_size(); ++stack) {
      if (stack >= merged_.unnumbered_updates_size()) merged_.add_unnumbered_updates(0);
      merged_.set_unnumbered_updates(
          stack, std::max(merged_.unnumbered_updates(stack), state.unnumbered_updates(stack)));
    }
  }
  const ShardState& merged() const { return merged_; }

 private:
  template <typename State>
  void AddRows(const State& from, State* to) const {
    RowCounts rows = RowCountsOf(*to);
    if (count_rows_) rows += RowCountsOf(from);
    SetRowCounts(rows, to);
  }

  void AddClient(const internal::v1::ClientState& from) {
    internal::v1::ClientState*& client = clients_[{from.client_id(), from.name_hash()}];
    if (client == nullptr) client = merged_.add_clients();
    client->set_client_id(from.client_id());
    client->set_name_hash(from.name_hash());
    client->set_forgotten_up_to(std::max(client->forgotten_up_to(), from.forgotten_up_to()));
    for (const internal::v1::MutationState& made : from.mutations()) {
      internal::v1::MutationState*& mutation = mutations_[{from.client_id(), made.sequence()}];
      if (mutation == nullptr) mutation = client->add_mutations();
      mutation->set_sequence(made.sequence());
      mutation->set_tag(made.tag());
      AddRows(made, mutation);
    }
  }

  void AddGroup(const internal::v1::GroupState& from) {
    internal::v1::GroupState*& group = groups_[from.group()];
    if (group == nullptr) {
      group = merged_.add_groups();
      *group = from;
      SetRowCounts(RowCounts(), group);
    }
    group->set_generation(std::max(group->generation(), from.generation()));
    group->set_finished(group->finished() || from.finished());
    AddRows(from, group);
  }

  const bool count_rows_;
  ShardState merged_;
  // Where they stand in merged_.
  std::map<std::pair<std::string, uint64_t>, internal::v1::ClientState*> clients_;
  std::map<std::pair<std::string, uint64_t>, internal::v1::MutationState*> mutations_;
  std::map<std::string, internal::v1::GroupState*> groups_;
};

}  // namespace

absl::Status SaveRows(shard::Snapshot& snapshot, absl::Span<const std::string> folders,
                      ShardProgress& progress, absl::Span<CheckpointFiles> files) {
  // Copies come from any partition at any time, so several may be open at once.
  std::map<std::pair<int, int>, std::vector<PartitionFiles>> open;
  while (true) {
    if (progress.cancelled) return absl::CancelledError("the save was cancelled");
    ASSIGN_OR_RETURN(const std::optional<shard::SnapshotRows> rows, snapshot.Next());
    if (!rows.has_value()) return absl::OkStatus();
    const std::pair partition(rows->stack, rows->k);
    if (rows->runs.empty()) {
      const auto found = open.find(partition);
      if (found == open.end()) continue;
      for (PartitionFiles& to : found->second) RETURN_IF_ERROR(to.Finish());
      open.erase(found);
      continue;
    }
    std::vector<PartitionFiles>& all = open[partition];
    if (all.empty()) {
      ASSIGN_OR_RETURN(all, FilesOf(snapshot, *rows, folders, files));
    }
    for (PartitionFiles& to : all) RETURN_IF_ERROR(to.Append(*rows));
    for (const auto& array : rows->arrays) progress.bytes += static_cast<int64_t>(array.size());
  }
}

absl::Status CheckFiles(const checkpoint::CheckpointChain& chain, int shard, int shards,
                        ShardProgress& progress) {
  const auto report = [&, before = progress.bytes.load()](int64_t bytes, int64_t) {
    progress.bytes = before + bytes;
    return progress.cancelled ? GivenUp() : absl::OkStatus();
  };
  int number = 0;
  return checkpoint::VerifyChain(chain, report, [&] { return number++ % shards == shard; });
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
                                 TableOf(manifest, plan.tables(0).name()).storage_dtype();
                    });
}

bool SameArrays(const shard::Model& model, const v1::CheckpointManifest& manifest) {
  return SamePlaces(model, manifest) &&
         absl::c_all_of(model.spec().stacks, [&](const shard::StackSpec& stack) {
           const v1::TableConfig& saved = TableOf(manifest, stack.tables[0].name);
           return absl::c_equal(config::OptimizerSlots(stack.optimizer),
                                config::OptimizerSlots(saved.optimizer()), SameSlot);
         });
}

int64_t BytesToLoad(const shard::ModelSpec& spec, const checkpoint::CheckpointChain& chain) {
  std::map<std::string, int64_t> element;  // by table
  for (const shard::StackSpec& stack : spec.stacks) {
    for (const auto& t : stack.tables) element[t.name] = config::WeightBytes(stack.storage_dtype);
  }
  int64_t bytes = 0;
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::StackPlan& stack : source.manifest().plan().stacks()) {
      for (const v1::CheckpointFile& file : source.manifest().files()) {
        if (file.stack() != stack.name() || file.array() != checkpoint::kWeightsArray) continue;
        bytes += file.rows() * stack.embedding_dim() * element[stack.tables(0).name()];
      }
    }
  }
  return bytes / spec.partitions * spec.partition_count;
}

absl::Status LoadRows(shard::Model& model, const checkpoint::CheckpointChain& chain,
                      BlockingPool* threads, ShardProgress& progress, uint64_t epoch) {
  const bool same_places = std::all_of(chain.begin(), chain.end(), [&](const auto& source) {
    return SamePlaces(model, source.manifest());
  });
  std::vector<std::pair<int, int>> partitions;
  for (int stack = 0; stack < model.stack_count(); ++stack) {
    shard::StackStore& store = model.stack(stack);
    const bool shared = !store.spec().resource.empty();
    if (shared && epoch > 0 && store.first_epoch() >= epoch) continue;
    for (int k = 0; k < store.partitions(); ++k) partitions.emplace_back(stack, k);
  }
  ReachFailpoint("restore.rows_are_next");
  constexpr int kAtOnce = 4;
  std::atomic<size_t> next{0};
  std::vector<absl::Status> results(kAtOnce);
  threads->RunEach(kAtOnce, [&](int worker) {
    for (size_t i = next++; i < partitions.size() && results[worker].ok(); i = next++) {
      const auto [stack, k] = partitions[i];
      const auto load = same_places ? LoadPartition : RemapPartition;
      results[worker] = load(model.stack(stack), k, model.spec().stacks[stack], chain, progress);
      if (!results[worker].ok()) next = partitions.size();
    }
  });
  for (const absl::Status& status : results) RETURN_IF_ERROR(status);
  for (const auto& [stack, k] : partitions) {
    shard::StackStore& store = model.stack(stack);
    if (!store.spec().resource.empty()) store.set_first_epoch(epoch);
  }
  if (!same_places) return absl::OkStatus();
  for (const auto& [stack, k] : partitions) model.stack(stack).changes(k).Track();
  return absl::OkStatus();
}

// ---- What the shards knew besides rows

absl::StatusOr<ShardState> LoadState(const internal::v1::CheckpointSource& newest, int shard,
                                     int shards) {
  const auto& files = newest.manifest().states();
  if (files.size() == shards) return ReadState(newest.folder(), files[shard]);
  StateMerger merger(/*count_rows=*/shard == 0);
  for (const v1::CheckpointFile& file : files) {
    ASSIGN_OR_RETURN(const ShardState state, ReadState(newest.folder(), file));
    merger.Add(state);
  }
  return merger.merged();
}

}  // namespace emberd::host
