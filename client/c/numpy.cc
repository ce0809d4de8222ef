#include <cstring>

#include "client/c/emberd.h"

namespace {

// How an array begins in CPython: the head of every object, then what NumPy's C API calls
// PyArrayObject_fields, which has been the same since NumPy 1.7.
struct NumpyArray {
  int64_t references;
  const void* type;
  char* data;
  int32_t dims;
  const int64_t* shape;
  const int64_t* strides;
  const void* base;
  const void* dtype;
  int32_t flags;
};
constexpr int32_t kArrayInOnePiece = 1;  // NPY_ARRAY_C_CONTIGUOUS

bool IsOf(const emberd_numpy_kind& kind, const NumpyArray& array) {
  if (array.type != kind.type || array.dtype != kind.dtype) return false;
  if (array.dims != kind.dims || array.dims > 2) return false;
  for (int32_t i = 0; i < array.dims; ++i) {
    if (array.shape[i] != kind.shape[i]) return false;
  }
  return (array.flags & kArrayInOnePiece) != 0 && kind.alignment > 0 &&
         reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(kind.alignment) == 0;
}

}  // namespace

int32_t emberd_numpy_addresses(const void* const* arrays, const emberd_numpy_kind* kinds,
                               int32_t count, void* records, int64_t record_bytes, int64_t offset) {
  char* to = static_cast<char*>(records) + offset;
  for (int32_t i = 0; i < count; ++i, to += record_bytes) {
    const auto& array = *static_cast<const NumpyArray*>(arrays[i]);
    if (!IsOf(kinds[i], array)) return 0;
    std::memcpy(to, &array.data, sizeof(array.data));
  }
  return 1;
}
