#include "client/cpp/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "base/bfloat16.h"
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

std::shared_ptr<SharedBlock> SharedMemory::Take(size_t bytes) {
  if (bytes == 0 || (kind_ != TransportKind::kShared && bytes < kWorthIt)) return nullptr;
  const std::shared_ptr<SharedArena> arena = Arena();
  return arena == nullptr ? nullptr : arena->Take(bytes);
}

void BlockWriter::Write(const void* bytes, size_t size) {
  const size_t begin = AlignTensor(size_);
  if (size > 0) std::memcpy(block_->data() + begin, bytes, size);
  size_ = begin + size;
}

v1::SharedBlock BlockWriter::place() const {
  v1::SharedBlock place;
  place.set_region(block_->region());
  place.set_offset(block_->offset());
  place.set_size(size_);
  return place;
}

size_t BlockBytes(absl::Span<const FeatureIds> features) {
  size_t bytes = 0;
  for (const FeatureIds& feature : features) {
    bytes +=
        std::visit(IdBytes(), feature.ids) + AlignTensor(feature.weights.size() * sizeof(float));
  }
  return bytes;
}

namespace {

bool IsTogether(const FeatureGradient& gradient, int64_t dim) {
  return gradient.row_stride == 0 || gradient.row_stride == dim;
}

void CopyFloats(absl::Span<const float> from, WireType type, char* to) {
  if (type == WireType::kBfloat16) {
    ToBfloat16Bytes(from, to);
  } else if (!from.empty()) {
    std::memcpy(to, from.data(), from.size() * sizeof(float));
  }
}

void CopyGradient(const FeatureGradient& gradient, int64_t dim, WireType type, char* to) {
  if (IsTogether(gradient, dim)) return CopyFloats(gradient.values, type, to);
  for (int64_t row = 0; row < gradient.samples; ++row, to += dim * ElementBytes(type)) {
    CopyFloats(gradient.values.subspan(row * gradient.row_stride, dim), type, to);
  }
}

}  // namespace

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
                              absl::Span<const int64_t> dims, WireType type) {
  if (memory_ == nullptr) return;
  size_t bytes = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (Find(gradients[i], dims[i], type) != nullptr) continue;
    bytes += AlignTensor(gradients[i].samples * dims[i] * ElementBytes(type));
  }
  copies_ = memory_->Take(bytes);
  if (copies_ != nullptr) used_.push_back(copies_);
}

bool SharedGradients::Put(const FeatureGradient& gradient, int64_t dim, WireType type,
                          v1::FeatureGradient* message) {
  const size_t bytes = gradient.samples * dim * ElementBytes(type);
  std::shared_ptr<SharedBlock> block = bytes == 0 ? nullptr : Find(gradient, dim, type);
  v1::SharedBlock* const place = message->mutable_shared();
  if (block != nullptr) {
    place->set_offset(block->OffsetOf(gradient.values.data()));
    if (std::find(used_.begin(), used_.end(), block) == used_.end()) used_.push_back(block);
  } else if (copies_ != nullptr) {
    block = copies_;
    CopyGradient(gradient, dim, type, block->data() + copied_);
    place->set_offset(block->offset() + copied_);
    copied_ += AlignTensor(bytes);
  } else {
    return false;
  }
  place->set_region(block->region());
  place->set_size(bytes);
  v1::Tensor* const tensor = message->mutable_gradient();
  tensor->set_dtype(WireDataType(type));
  tensor->add_shape(gradient.samples);
  tensor->add_shape(dim);
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
