#include "server/coordinator/tensor_view.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace emberd::server {
namespace {

absl::Status Invalid(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, what));
}

std::string TypeText(v1::DataType dtype) {
  return v1::DataType_IsValid(dtype) ? v1::DataType_Name(dtype)
                                     : absl::StrCat(static_cast<int>(dtype));
}

// Protobuf allocates strings aligned for any type; a view of odd memory would be undefined
// behaviour, so it is refused rather than assumed away.
template <typename T>
absl::StatusOr<absl::Span<const T>> View(const v1::Tensor& tensor, int64_t size,
                                         const std::string& path) {
  const char* data = tensor.data().data();
  if (reinterpret_cast<uintptr_t>(data) % alignof(T) != 0) {
    return absl::InternalError(absl::StrCat(path, ".data is not aligned in memory"));
  }
  return absl::Span<const T>(reinterpret_cast<const T*>(data), size);
}

}  // namespace

int64_t ElementSize(v1::DataType dtype) {
  switch (dtype) {
    case v1::BFLOAT16:
      return 2;
    case v1::FLOAT32:
    case v1::INT32:
      return 4;
    case v1::INT64:
      return 8;
    default:
      return 0;
  }
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> CheckedSize(const v1::Tensor& tensor, const std::string& path) {
  const int64_t element = ElementSize(tensor.dtype());
  if (element == 0) {
    return Invalid(path, absl::StrCat(".dtype is ", TypeText(tensor.dtype()),
                                      "; it must be set to a known type"));
  }
  int64_t size = 1;
  for (int i = 0; i < tensor.shape_size(); ++i) {
    const int64_t extent = tensor.shape(i);
    if (extent < 0) {
      return Invalid(path, absl::StrCat(".shape[", i, "] is ", extent, "; it must be >= 0"));
    }
    if (__builtin_mul_overflow(size, extent, &size)) size = std::numeric_limits<int64_t>::max();
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(size, element, &bytes) ||
      bytes != static_cast<int64_t>(tensor.data().size())) {
    return Invalid(
        path, absl::StrCat(".data has ", tensor.data().size(), " bytes; shape ",
                           ShapeText(tensor.shape()), " of ", TypeText(tensor.dtype()), " needs ",
                           bytes > 0 ? absl::StrCat(bytes) : absl::StrCat("more than ", size)));
  }
  return size;
}

absl::StatusOr<preprocess::IntSpan> IntsOf(const v1::Tensor& tensor, const std::string& path) {
  if (tensor.dtype() != v1::INT32 && tensor.dtype() != v1::INT64) {
    return Invalid(
        path, absl::StrCat(".dtype is ", TypeText(tensor.dtype()), "; it must be INT32 or INT64"));
  }
  absl::StatusOr<int64_t> size = CheckedSize(tensor, path);
  if (!size.ok()) return size.status();
  if (tensor.dtype() == v1::INT32) {
    auto view = View<int32_t>(tensor, *size, path);
    if (!view.ok()) return view.status();
    return preprocess::IntSpan(*view);
  }
  auto view = View<int64_t>(tensor, *size, path);
  if (!view.ok()) return view.status();
  return preprocess::IntSpan(*view);
}

absl::StatusOr<absl::Span<const float>> FloatsOf(const v1::Tensor& tensor,
                                                 const std::string& path) {
  if (tensor.dtype() != v1::FLOAT32) {
    return Invalid(path,
                   absl::StrCat(".dtype is ", TypeText(tensor.dtype()), "; it must be FLOAT32"));
  }
  absl::StatusOr<int64_t> size = CheckedSize(tensor, path);
  if (!size.ok()) return size.status();
  return View<float>(tensor, *size, path);
}

absl::Status CheckShape(const v1::Tensor& tensor, absl::Span<const int64_t> expected,
                        const std::string& path) {
  if (absl::MakeConstSpan(tensor.shape()) == expected) return absl::OkStatus();
  return Invalid(path, absl::StrCat(".shape is ", ShapeText(tensor.shape()), "; it must be ",
                                    ShapeText(expected)));
}

absl::Status CheckRank(const v1::Tensor& tensor, int rank, const std::string& path) {
  if (tensor.shape_size() == rank) return absl::OkStatus();
  return Invalid(path, absl::StrCat(".shape is ", ShapeText(tensor.shape()), "; it must have ",
                                    rank, " dimension", rank == 1 ? "" : "s"));
}

}  // namespace emberd::server
