#include "tests/golden/jax_device_buffer.h"

#include <algorithm>
#include <limits>

namespace emberd::preprocess {
namespace {

class Writer {
 public:
  Writer(JaxDeviceBuffer* buffer) : buffer_(buffer) {}

  // From here on cells [begin, end) are written.
  void StartPart(int64_t begin, int64_t end) {
    index_ = begin;
    end_ = end;
  }

  // One mini-batch of one slot; row pointers are relative to `origin`.
  void WriteSegment(const SlotCsr& slot, int minibatch, int64_t origin) {
    const size_t pointers = std::max(slot.partitions, kCsrAlignment);
    const size_t first_pointer = buffer_->row_pointers.size();
    int64_t left = 0;
    for (int p = 0; p < slot.partitions; ++p) {
      left += slot.End(minibatch, p) - slot.Begin(minibatch, p);
    }
    for (int p = 0; p < slot.partitions; ++p) {
      for (int64_t cell = slot.Begin(minibatch, p); cell < slot.End(minibatch, p); ++cell) {
        if (index_ >= end_) break;
        Put(slot.embedding_ids.data()[cell], slot.sample_ids.data()[cell], slot.gains.data()[cell]);
        --left;
      }
      buffer_->row_pointers.push_back(static_cast<int32_t>(index_ - origin));
      while (index_ < end_ && index_ % kCsrAlignment != 0) {
        Put(kCsrPadId, kCsrPadId, std::numeric_limits<float>::quiet_NaN());
      }
    }
    buffer_->row_pointers.resize(first_pointer + pointers, static_cast<int32_t>(index_ - origin));
    buffer_->dropped += left;
  }

 private:
  void Put(int32_t embedding_id, int32_t sample_id, float gain) {
    const size_t cells = index_ + 1;
    buffer_->embedding_ids.resize(cells);
    buffer_->sample_ids.resize(cells);
    buffer_->gains.resize(cells);
    buffer_->written.resize(cells);
    buffer_->embedding_ids[index_] = embedding_id;
    buffer_->sample_ids[index_] = sample_id;
    buffer_->gains[index_] = gain;
    buffer_->written[index_] = true;
    ++index_;
  }

  JaxDeviceBuffer* buffer_;
  int64_t index_ = 0;
  int64_t end_ = 0;
};

}  // namespace

JaxDeviceBuffer FillJaxDeviceBuffer(absl::Span<const SlotCsr> slots, int64_t capacity,
                                    bool minibatching) {
  JaxDeviceBuffer buffer;
  Writer writer(&buffer);
  const int64_t part = capacity / static_cast<int64_t>(slots.size());
  writer.StartPart(0, capacity);
  for (size_t s = 0; s < slots.size(); ++s) {
    const int64_t begin = static_cast<int64_t>(s) * part;
    if (!minibatching) writer.StartPart(begin, begin + part);
    for (int m = 0; m < slots[s].minibatches; ++m) {
      writer.WriteSegment(slots[s], m, minibatching ? 0 : begin);
    }
  }
  return buffer;
}

}  // namespace emberd::preprocess
