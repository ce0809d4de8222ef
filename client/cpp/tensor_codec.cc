#include "client/cpp/tensor_codec.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/bfloat16.h"

namespace emberd::client {

static_assert(std::endian::native == std::endian::little, "tensors travel in memory order");

namespace {

void SetShape(absl::Span<const int64_t> shape, v1::Tensor* tensor) {
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
}

template <typename T>
void SetData(absl::Span<const T> values, v1::Tensor* tensor, BlockWriter* writer) {
  if (writer != nullptr) {
    writer->Write(values.data(), values.size() * sizeof(T));
  } else {
    tensor->set_data(values.data(), values.size() * sizeof(T));
  }
}

}  // namespace

std::shared_ptr<float> TakeFloats(BufferPool* pool, size_t size) {
  auto block = std::make_shared<PooledArray<float>>(*pool, size);
  float* const floats = block->data();
  return {std::move(block), floats};
}

int64_t ElementBytes(WireType type) { return type == WireType::kBfloat16 ? 2 : 4; }

int64_t Size(const IntSpan& ints) {
  return std::visit([](auto span) { return static_cast<int64_t>(span.size()); }, ints);
}

void EncodeInts(const IntSpan& ints, absl::Span<const int64_t> shape, v1::Tensor* tensor,
                BlockWriter* writer) {
  const bool wide = std::holds_alternative<absl::Span<const int64_t>>(ints);
  tensor->set_dtype(wide ? v1::INT64 : v1::INT32);
  SetShape(shape, tensor);
  std::visit([&](auto span) { SetData(span, tensor, writer); }, ints);
}

void EncodeFloats(absl::Span<const float> floats, absl::Span<const int64_t> shape, WireType type,
                  v1::Tensor* tensor, BlockWriter* writer) {
  tensor->set_dtype(WireDataType(type));
  SetShape(shape, tensor);
  if (type == WireType::kFloat32) {
    SetData(floats, tensor, writer);
    return;
  }
  std::string* data = tensor->mutable_data();
  data->resize(floats.size() * 2);
  ToBfloat16Bytes(floats, data->data());
}

v1::DataType WireDataType(WireType type) {
  return type == WireType::kBfloat16 ? v1::BFLOAT16 : v1::FLOAT32;
}

namespace {

// Whether all dimensions but the last make so many rows, and the last is `dim`.
bool HasRows(const v1::Tensor& tensor, int64_t rows, int64_t dim) {
  const int last = tensor.shape_size() - 1;
  if (last < 1 || tensor.shape(last) != dim) return false;
  int64_t here = 1;
  for (int d = 0; d < last; ++d) {
    const int64_t extent = tensor.shape(d);
    if (extent < 0 || (extent > 0 && here > rows / extent)) return false;
    here *= extent;
  }
  return here == rows;
}

}  // namespace

absl::Status CheckTensorHead(const v1::Tensor& tensor, int64_t rows, int64_t dim, WireType type) {
  const v1::DataType expected = WireDataType(type);
  if (tensor.dtype() != expected) {
    return absl::InternalError(absl::StrCat("dtype: the server sent ",
                                            v1::DataType_Name(tensor.dtype()), "; ",
                                            v1::DataType_Name(expected), " was expected"));
  }
  if (!HasRows(tensor, rows, dim)) {
    return absl::InternalError(absl::StrCat("shape: the server sent [",
                                            absl::StrJoin(tensor.shape(), ", "), "]; [", rows, ", ",
                                            dim, "] was expected"));
  }
  return absl::OkStatus();
}

absl::Status WrongDataSize(size_t bytes) {
  return absl::InternalError(
      absl::StrCat("data: the server sent ", bytes, " bytes, which do not fill that shape"));
}

absl::StatusOr<absl::Span<const float>> DecodeFloats(const v1::Tensor& tensor, int64_t rows,
                                                     int64_t dim, WireType type,
                                                     std::vector<float>* converted) {
  if (absl::Status status = CheckTensorHead(tensor, rows, dim, type); !status.ok()) return status;
  const absl::int128 bytes = absl::int128(rows) * dim * ElementBytes(type);
  if (bytes != absl::int128(tensor.data().size())) return WrongDataSize(tensor.data().size());
  if (type == WireType::kFloat32) {
    // A string's bytes lie at a multiple of 8 at least, so they can be read as floats in place.
    return absl::MakeConstSpan(reinterpret_cast<const float*>(tensor.data().data()), rows * dim);
  }
  converted->resize(rows * dim);
  FromBfloat16Bytes(tensor.data().data(), absl::MakeSpan(*converted));
  return absl::MakeConstSpan(*converted);
}

}  // namespace emberd::client
