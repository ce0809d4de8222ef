#include "shard/store/row_access.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "shard/store/stored_row.h"

namespace emberd::shard {
namespace {

const RowRange& RangeOf(const StackStore& store, int64_t local_row) {
  return *std::upper_bound(store.ranges().begin(), store.ranges().end(), local_row,
                           [](int64_t row, const RowRange& range) { return row < range.end; });
}

absl::StatusOr<const StackStore::Slot*> FindSlot(const StackStore& store, const std::string& name) {
  if (name.empty()) return nullptr;
  for (const StackStore::Slot& slot : store.slots()) {
    if (slot.info.name == name) return &slot;
  }
  return absl::InvalidArgumentError(absl::StrCat("slot \"", name, "\": stack ", store.spec().name,
                                                 " has no such optimizer slot"));
}

// Resolves rows and strands.
absl::Status AddRows(const ModelSpec& spec, const RowSelection& selection, bool writing,
                     RowTarget& target) {
  std::vector<bool> touched(spec.partition_count);
  const int64_t limit = target.store->rows_per_partition();
  for (size_t i = 0; i < selection.partitions.size(); ++i) {
    const int k = selection.partitions[i] - spec.first_partition;
    const int64_t local = selection.local_rows[i];
    if (selection.partitions[i] < spec.first_partition || k >= spec.partition_count || local < 0 ||
        local >= limit) {
      return absl::OutOfRangeError(
          absl::StrCat("row ", i, ": partition ", selection.partitions[i], ", local row ", local,
                       " must be in [", spec.first_partition, ", ",
                       spec.first_partition + spec.partition_count, ") and [0, ", limit, ")"));
    }
    const int live = RangeOf(*target.store, local).columns;
    if (writing && (live == 0 || (target.slot == nullptr || target.slot->columns > 1)) &&
        selection.columns > live) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", i, ": columns ", selection.columns, " must be in [1, ", live, "]"));
    }
    target.rows.push_back(k * limit + local);
    if (!touched[k]) target.strands.push_back(&target.store->strand(k));
    touched[k] = true;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RowTarget> ResolveRows(const Model& model, const RowSelection& selection,
                                      size_t value_count, bool writing) {
  if (selection.stack < 0 || selection.stack >= model.stack_count()) {
    return absl::OutOfRangeError(
        absl::StrCat("stack ", selection.stack, " must be in [0, ", model.stack_count(), ")"));
  }
  RowTarget target;
  target.store = &model.stack(selection.stack);
  absl::StatusOr<const StackStore::Slot*> slot = FindSlot(*target.store, selection.slot);
  if (!slot.ok()) return slot.status();
  target.slot = *slot;
  target.columns = selection.columns;
  const int width = target.slot != nullptr ? target.slot->columns : target.store->width();
  if (selection.columns < 1 || selection.columns > width) {
    return absl::InvalidArgumentError(
        absl::StrCat("columns ", selection.columns, " must be in [1, ", width, "]"));
  }
  const size_t rows = selection.partitions.size();
  if (selection.local_rows.size() != rows || value_count != rows * selection.columns) {
    return absl::InvalidArgumentError(absl::StrCat(
        rows, " partitions, ", selection.local_rows.size(), " local rows and ", value_count,
        " values for ", selection.columns, " columns do not fit together"));
  }
  if (absl::Status status = AddRows(model.spec(), selection, writing, target); !status.ok())
    return status;
  return target;
}

void CopyRowsOut(const RowTarget& target, int64_t begin, int64_t end, float* values) {
  StackStore& store = *target.store;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = target.rows[i];
    float* out = values + i * target.columns;
    store.EnsureRow(row);
    if (target.slot != nullptr) {
      std::copy_n(target.slot->data() + row * target.slot->columns, target.columns, out);
    } else {
      ReadStoredRow(store.dtype(), store.weights() + row * store.row_bytes(),
                    absl::MakeSpan(out, target.columns));
    }
  }
}

void CopyRowsIn(const RowTarget& target, int64_t begin, int64_t end, const float* values) {
  StackStore& store = *target.store;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = target.rows[i];
    const float* in = values + i * target.columns;
    store.EnsureRow(row);
    if (target.slot != nullptr) {
      std::copy_n(in, target.columns, target.slot->data() + row * target.slot->columns);
    } else {
      WriteStoredRow(store.dtype(), absl::MakeSpan(in, target.columns),
                     store.weights() + row * store.row_bytes());
    }
  }
}

}  // namespace emberd::shard
