// Between spans and the Tensor message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "client/cpp/batch.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_memory.h"
#include "emberd/v1/types.pb.h"

namespace emberd::client {

int64_t Size(const IntSpan& ints);

// `size` floats of any value at a multiple of 64 bytes; they go back to the pool, which may be gone
// by then, with the last reference.
std::shared_ptr<float> TakeFloats(BufferPool* pool, size_t size);

// The shape must fit the number of elements. Where there is a `writer`, the elements of ints and of
// float32 go there, and the tensor has no data.
void EncodeInts(const IntSpan& ints, absl::Span<const int64_t> shape, v1::Tensor* tensor,
                BlockWriter* writer = nullptr);
void EncodeFloats(absl::Span<const float> floats, absl::Span<const int64_t> shape, WireType type,
                  v1::Tensor* tensor, BlockWriter* writer = nullptr);

v1::DataType WireDataType(WireType type);
int64_t ElementBytes(WireType type);

// INTERNAL if a tensor that a server sent, its data aside, is not [rows, dim] of `type`; the
// message says what it is instead.
absl::Status CheckTensorHead(const v1::Tensor& tensor, int64_t rows, int64_t dim, WireType type);
absl::Status WrongDataSize(size_t bytes);

// The elements of a tensor that a server sent, which must be [rows, dim] of `type`; otherwise
// INTERNAL says what it is instead. float32 is returned where it lies in the tensor; bfloat16 is
// converted into `converted`.
absl::StatusOr<absl::Span<const float>> DecodeFloats(const v1::Tensor& tensor, int64_t rows,
                                                     int64_t dim, WireType type,
                                                     std::vector<float>* converted);

}  // namespace emberd::client
