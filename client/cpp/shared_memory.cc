#include "client/cpp/shared_memory.h"

#include <cstring>
#include <utility>
#include <variant>

#include "client/cpp/tensor_codec.h"

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

}  // namespace emberd::client
