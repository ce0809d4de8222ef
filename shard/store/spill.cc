// Rows of a store and of a model on their way to a spill file and back.
#include <algorithm>

#include "base/status.h"
#include "shard/store/model.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {

absl::Status StackStore::ForTouchedBytes(
    absl::FunctionRef<absl::Status(absl::Span<char> bytes)> fn) const {
  const auto visit = [&](char* data, int64_t row_bytes) -> absl::Status {
    const int64_t chunks = ((rows() - 1) >> chunk_shift_) + 1;
    for (int64_t begin = 0; begin < chunks;) {
      int64_t end = begin;
      while (end < chunks && ChunkTouched(end)) ++end;
      if (end > begin) {
        const int64_t first = begin << chunk_shift_;
        const int64_t last = std::min(rows(), end << chunk_shift_);
        RETURN_IF_ERROR(fn(absl::MakeSpan(data + first * row_bytes, (last - first) * row_bytes)));
      }
      begin = end + 1;
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(visit(weights_.data(), static_cast<int64_t>(row_bytes())));
  for (const Slot& slot : slots_) {
    RETURN_IF_ERROR(visit(slot.memory.data(), slot.columns * static_cast<int64_t>(sizeof(float))));
  }
  return absl::OkStatus();
}

absl::Status StackStore::Spill(SpillFile& file) const {
  return ForTouchedBytes([&](absl::Span<char> bytes) { return file.Write(bytes); });
}

void StackStore::DropRows() {
  weights_.Clear();
  for (Slot& slot : slots_) slot.memory.Clear();
}

absl::Status StackStore::Fetch(SpillFile& file) {
  return ForTouchedBytes([&](absl::Span<char> bytes) { return file.Read(bytes); });
}

absl::Status Model::Spill(SpillFile& file) {
  for (const auto& stack : stacks_) {
    if (stack->spec().resource.empty()) RETURN_IF_ERROR(stack->Spill(file));
  }
  return absl::OkStatus();
}

void Model::DropRows() {
  for (const auto& stack : stacks_) {
    if (stack->spec().resource.empty()) stack->DropRows();
  }
}

absl::Status Model::Fetch(SpillFile& file) {
  file.Rewind();
  absl::Status status;
  for (const auto& stack : stacks_) {
    if (status.ok() && stack->spec().resource.empty()) status = stack->Fetch(file);
  }
  if (status.ok()) status = file.CheckRead();
  if (!status.ok()) DropRows();
  return status;
}

absl::StatusOr<MemoryManager::Use> Model::Hold() const {
  if (room_ == nullptr) return MemoryManager::Use();
  return memory_->Hold(room_);
}

}  // namespace emberd::shard
