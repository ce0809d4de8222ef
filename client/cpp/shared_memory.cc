#include "client/cpp/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <variant>

#include "base/buffers.h"
#include "base/floats.h"
#include "client/cpp/batch_codec.h"

namespace emberd::client {
namespace {

// Of less, a copy into a message costs no more than to name a place.
constexpr size_t kWorthIt = size_t{64} << 10;

size_t Bytes(const IntSpan& ints) {
  return AlignTensor(std::visit([](auto span) { return span.size() * sizeof(span[0]); }, ints));
}

struct IdBytes {
  size_t operator()(const DenseIds& ids) const { return Bytes(ids.ids); }
  size_t operator()(const SparseIds& ids) const { return Bytes(ids.indices) + Bytes(ids.values); }
  size_t operator()(const RaggedIds& ids) const {
    return Bytes(ids.row_splits) + Bytes(ids.values);
  }
};

}  // namespace

std::shared_ptr<SharedBlock> SharedMemory::Take(size_t bytes, absl::Time deadline) {
  if (bytes == 0 || (kind_ != TransportKind::kShared && bytes < kWorthIt)) return nullptr;
  const std::shared_ptr<SharedArena> arena = Arena(deadline);
  return arena == nullptr ? nullptr : arena->Take(bytes, deadline);
}

void BlockWriter::Write(const void* bytes, size_t size) {
  const size_t begin = AlignTensor(size_);
  if (size > 0) std::memcpy(block_->data() + begin, bytes, size);
  size_ = begin + size;
}

void SetPlace(const SharedBlock& block, uint64_t offset, size_t size, v1::SharedBlock* place) {
  place->set_region(block.region());
  place->set_offset(offset);
  place->set_size(size);
}

size_t BlockBytes(absl::Span<const FeatureIds> features) {
  size_t bytes = 0;
  for (const FeatureIds& feature : features) {
    bytes +=
        std::visit(IdBytes(), feature.ids) + AlignTensor(feature.weights.size() * sizeof(float));
  }
  return bytes;
}

bool IsTogether(const FeatureGradient& gradient, int64_t dim) {
  return gradient.row_stride == 0 || gradient.row_stride == dim;
}

void CopyGradient(const FeatureGradient& gradient, int64_t dim, WireType type, char* to) {
  // In rows, or all at once.
  const bool together = IsTogether(gradient, dim);
  const size_t run = together ? gradient.values.size() : dim;
  for (size_t begin = 0; begin < gradient.values.size();
       begin += together ? run : gradient.row_stride, to += run * ElementBytes(type)) {
    const absl::Span<const float> some = gradient.values.subspan(begin, run);
    if (type == WireType::kBfloat16) {
      ToBfloat16Bytes(some, to);
    } else {
      std::memcpy(to, some.data(), some.size() * sizeof(float));
    }
  }
}

std::shared_ptr<SharedBlock> SharedGradients::Find(const FeatureGradient& gradient, int64_t dim,
                                                   WireType type) const {
  if (type != WireType::kFloat32 || !IsTogether(gradient, dim)) return nullptr;
  const auto found = std::find_if(own_.begin(), own_.end(), [&](const auto& block) {
    return !block->parted() &&
           block->Holds(gradient.values.data(), gradient.values.size() * sizeof(float));
  });
  return found == own_.end() ? nullptr : *found;
}

void SharedGradients::Reserve(absl::Span<const FeatureGradient> gradients,
                              absl::Span<const int64_t> dims, WireType type, absl::Time deadline) {
  size_t copied = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const size_t bytes = gradients[i].samples * dims[i] * ElementBytes(type);
    found_.push_back(bytes == 0 ? nullptr : Find(gradients[i], dims[i], type));
    if (found_.back() == nullptr) copied += AlignTensor(bytes);
  }
  if (memory_ != nullptr) copies_ = memory_->Take(copied, deadline);
  if (copies_ != nullptr) used_.push_back(copies_);
}

bool SharedGradients::Put(const FeatureGradient& gradient, int64_t dim, WireType type,
                          v1::FeatureGradient* message) {
  const size_t bytes = gradient.samples * dim * ElementBytes(type);
  std::shared_ptr<SharedBlock> block = std::move(found_[put_++]);
  uint64_t offset = 0;
  if (block != nullptr) {
    offset = block->OffsetOf(gradient.values.data());
    if (std::find(used_.begin(), used_.end(), block) == used_.end()) used_.push_back(block);
  } else if (copies_ != nullptr) {
    block = copies_;
    CopyGradient(gradient, dim, type, block->data() + copied_);
    offset = block->offset() + copied_;
    copied_ += AlignTensor(bytes);
  } else {
    return false;
  }
  SetPlace(*block, offset, bytes, message->mutable_shared());
  SetHead(WireDataType(type), {gradient.samples, dim}, message->mutable_gradient());
  return true;
}

void SharedGradients::Lend() {
  for (const auto& block : used_) block->Lend();
}

void SharedGradients::Settle() {
  for (const auto& block : used_) block->Settle();
}

void SharedGradients::Part() {
  for (const auto& block : used_) {
    if (block != copies_) block->Part();
  }
}

}  // namespace emberd::client
