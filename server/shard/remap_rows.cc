#include "server/shard/remap_rows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/checkpoint/table_reader.h"

namespace emberd::server {
namespace {

// Rows read at once.
constexpr int64_t kRun = 4096;
// Each file is read for many partitions, but its checksum is compared once.
constexpr TableReaderOptions kVerified = {.verify = false};

// The rows of one table in one partition, of one array after another.
class TableLoader {
 public:
  TableLoader(shard::StackStore* store, int k, const shard::RowRange& range,
              const CheckpointChain& chain, ShardProgress* progress)
      : store_(store), k_(k), range_(range), chain_(chain), progress_(progress) {}

  absl::Status LoadWeights() {
    ASSIGN_OR_RETURN(const auto reader, TableReader::Open(&chain_, table().name, "", kVerified));
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
    auto reader = TableReader::Open(&chain_, table().name, slot.info.name, kVerified);
    if (absl::IsNotFound(reader.status())) return absl::OkStatus();
    RETURN_IF_ERROR(reader.status());
    const int columns = std::min(slot.columns, (*reader)->columns());
    std::vector<float> padded;
    return ForEachHeldRun(**reader, [&](int64_t first, int64_t count, const float* values) {
      padded.assign(count * slot.columns, 0);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(values + i * (*reader)->columns(), columns, padded.data() + i * slot.columns);
      }
      store_->LoadSlot(k_, index, first, padded);
    });
  }

 private:
  const shard::TableSpec& table() const { return store_->spec().tables[range_.table]; }

  // Calls use(first local row, count, values [count, columns]) for what the checkpoint holds.
  template <typename Use>
  absl::Status ForEachHeldRun(TableReader& reader, const Use& use) {
    const int64_t partition_rows = k_ * store_->rows_per_partition();
    const int64_t first_id = store_->IdOf(partition_rows + range_.begin);
    const int64_t stride = store_->IdOf(partition_rows + range_.begin + 1) - first_id;
    // Ids beyond the vocabulary pad the table.
    const int64_t rows =
        first_id >= reader.rows() ? 0 : (reader.rows() - 1 - first_id) / stride + 1;
    std::vector<float> values(kRun * reader.columns());
    std::vector<bool> held;
    for (int64_t done = 0; done < rows; done += kRun) {
      if (progress_->cancelled) return absl::CancelledError("the restore was cancelled");
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
  const CheckpointChain& chain_;
  ShardProgress* const progress_;
};

}  // namespace

absl::Status RemapPartition(shard::StackStore& store, int k, const CheckpointChain& chain,
                            ShardProgress& progress) {
  for (const shard::RowRange& range : store.ranges()) {
    if (range.table < 0) continue;
    TableLoader loader(&store, k, range, chain, &progress);
    RETURN_IF_ERROR(loader.LoadWeights());
    for (size_t slot = 0; slot < store.slots().size(); ++slot) {
      RETURN_IF_ERROR(loader.LoadSlot(static_cast<int>(slot)));
    }
  }
  return absl::OkStatus();
}

}  // namespace emberd::server
