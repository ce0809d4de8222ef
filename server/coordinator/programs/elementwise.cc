#include "server/coordinator/programs/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/bfloat16.h"
#include "base/status.h"
#include "server/step/request_reader.h"

namespace emberd::coordinator {
namespace {

using v1::ElementwiseOutput;

template <typename T>
struct Arithmetic {
  using Sum = T;
  static T Read(T value) { return value; }
  static T Write(T value) { return value; }
};
struct Bfloat16Bits {
  uint16_t bits;
};
template <>
struct Arithmetic<Bfloat16Bits> {
  using Sum = float;
  static float Read(Bfloat16Bits value) { return FromBfloat16(value.bits); }
  static Bfloat16Bits Write(float value) { return {ToBfloat16(value)}; }
};

// Integers wrap around, which only unsigned ones may.
template <typename Sum>
Sum Scaled(Sum a, Sum b, float scale, ElementwiseOutput::Operation operation) {
  if constexpr (std::is_integral_v<Sum>) {
    using Wide = std::make_unsigned_t<Sum>;
    const auto x = static_cast<Wide>(a), y = static_cast<Wide>(b);
    const auto factor = static_cast<Wide>(static_cast<int64_t>(scale));
    const Wide sum = operation == ElementwiseOutput::ADD        ? x + y
                     : operation == ElementwiseOutput::SUBTRACT ? x - y
                                                                : x;
    return static_cast<Sum>(factor * sum);
  } else {
    return scale * (operation == ElementwiseOutput::ADD        ? a + b
                    : operation == ElementwiseOutput::SUBTRACT ? a - b
                                                               : a);
  }
}

// `b` is null for a COPY.
template <typename T>
void Combine(const ElementwiseOutput& output, const v1::Tensor& a, const v1::Tensor* b,
             v1::Tensor* to) {
  const size_t bytes = a.data().size();
  std::string result(bytes, '\0');
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T x, y{};
    std::memcpy(&x, a.data().data() + at, sizeof(T));
    if (b != nullptr) std::memcpy(&y, b->data().data() + at, sizeof(T));
    const T z = Arithmetic<T>::Write(Scaled<typename Arithmetic<T>::Sum>(
        Arithmetic<T>::Read(x), Arithmetic<T>::Read(y), output.scale(), output.operation()));
    std::memcpy(result.data() + at, &z, sizeof(T));
  }
  *to->mutable_shape() = a.shape();
  to->set_dtype(a.dtype());
  to->set_data(std::move(result));
}

// The first n of every dimension.
v1::Tensor Cut(const v1::Tensor& from, int64_t n) {
  v1::Tensor to;
  to.set_dtype(from.dtype());
  int64_t elements = 1;
  for (const int64_t extent : from.shape()) {
    to.add_shape(std::min(extent, n));
    elements *= std::min(extent, n);
  }
  const int64_t size = step::ElementSize(from.dtype());
  std::string data(elements * size, '\0');
  for (int64_t i = 0; i < elements; ++i) {
    int64_t rest = i, offset = 0, stride = 1;
    for (int d = from.shape_size() - 1; d >= 0; --d) {
      offset += rest % to.shape(d) * stride;
      rest /= to.shape(d);
      stride *= from.shape(d);
    }
    std::memcpy(data.data() + i * size, from.data().data() + offset * size, size);
  }
  to.set_data(std::move(data));
  return to;
}

Tensors OperandTensors(const v1::Operand& operand, const std::vector<Tensors>& arguments) {
  const Tensors& tensors = arguments[operand.argument()];
  if (operand.output_index() == 0) return tensors;
  return {tensors[operand.output_index() - 1]};
}

absl::StatusOr<int64_t> SizeOf(const ElementwiseOutput& output, int index,
                               const std::vector<Tensors>& arguments) {
  const std::string at = absl::StrCat("outputs[", index, "].size");
  const Tensors tensors = OperandTensors(output.size(), arguments);
  if (tensors.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(at, " is ", tensors.size(), " tensors; it must be one scalar"));
  }
  ASSIGN_OR_RETURN(const preprocess::IntSpan values, step::IntsOf(tensors[0]->tensor(), at));
  if (step::IntCount(values) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(at, " has ", step::IntCount(values), " elements; it must be a scalar"));
  }
  int64_t n = 0;
  if (__builtin_add_overflow(step::IntAt(values, 0), output.size_offset(), &n) || n < 0) {
    return absl::InvalidArgumentError(absl::StrCat(at, " is ", n, "; it must be >= 0"));
  }
  return n;
}

absl::Status CombineInto(const ElementwiseOutput& output, const v1::Tensor& a, const v1::Tensor* b,
                         v1::Tensor* to) {
  const bool whole = std::trunc(output.scale()) == output.scale() &&
                     std::abs(output.scale()) < static_cast<float>(int64_t{1} << 62);
  switch (a.dtype()) {
    case v1::FLOAT32:
      Combine<float>(output, a, b, to);
      return absl::OkStatus();
    case v1::BFLOAT16:
      Combine<Bfloat16Bits>(output, a, b, to);
      return absl::OkStatus();
    case v1::INT32:
      if (whole) Combine<int32_t>(output, a, b, to);
      break;
    case v1::INT64:
      if (whole) Combine<int64_t>(output, a, b, to);
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat("dtype ", v1::DataType_Name(a.dtype()),
                                                     " cannot be computed with; allowed: FLOAT32, "
                                                     "BFLOAT16, INT32, INT64"));
  }
  if (whole) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("scale is ", output.scale(), "; for integers it must be a whole number"));
}

}  // namespace

int64_t TensorBytes(const v1::NamedTensor& tensor) {
  // The messages, their strings and arrays, and the places that point to them.
  constexpr int64_t kObjects = 256;
  return kObjects + static_cast<int64_t>(tensor.name().size() + tensor.tensor().data().size() +
                                         sizeof(int64_t) * tensor.tensor().shape_size());
}

absl::StatusOr<Tensors> Compute(const v1::ProgramSpec& spec,
                                const std::vector<Tensors>& arguments) {
  Tensors results;
  for (int i = 0; i < spec.outputs_size(); ++i) {
    const ElementwiseOutput& output = spec.outputs(i);
    const bool copy = output.operation() == ElementwiseOutput::COPY;
    const Tensors a = OperandTensors(output.a(), arguments);
    const Tensors b = copy ? Tensors() : OperandTensors(output.b(), arguments);
    for (size_t k = 0; k < a.size(); ++k) {
      const v1::Tensor& x = a[k]->tensor();
      const v1::Tensor* y = copy ? nullptr : &b[k]->tensor();
      if (y != nullptr && (x.dtype() != y->dtype() ||
                           absl::MakeConstSpan(x.shape()) != absl::MakeConstSpan(y->shape()))) {
        return absl::InvalidArgumentError(absl::StrCat("outputs[", i, "]: a is ", TensorText(x),
                                                       ", b is ", TensorText(*y),
                                                       "; they must be equal"));
      }
      auto result = std::make_shared<v1::NamedTensor>();
      result->set_name(a[k]->name());
      RETURN_IF_ERROR(Annotate(CombineInto(output, x, y, result->mutable_tensor()),
                               absl::StrCat("outputs[", i, "]")));
      if (output.has_size()) {
        ASSIGN_OR_RETURN(const int64_t n, SizeOf(output, i, arguments));
        *result->mutable_tensor() = Cut(result->tensor(), n);
      }
      results.push_back(std::move(result));
    }
  }
  return results;
}

absl::StatusOr<std::vector<int64_t>> ResultBytes(const v1::ProgramSpec& spec,
                                                 const std::vector<Tensors>& arguments) {
  std::vector<int64_t> bytes;
  for (int i = 0; i < spec.outputs_size(); ++i) {
    const ElementwiseOutput& output = spec.outputs(i);
    int64_t n = std::numeric_limits<int64_t>::max();
    if (output.has_size()) {
      ASSIGN_OR_RETURN(n, SizeOf(output, i, arguments));
    }
    for (const auto& tensor : OperandTensors(output.a(), arguments)) {
      const v1::Tensor& whole = tensor->tensor();
      int64_t data = step::ElementSize(whole.dtype());
      for (const int64_t extent : whole.shape()) data *= std::min(extent, n);
      bytes.push_back(TensorBytes(*tensor) - static_cast<int64_t>(whole.data().size()) + data);
    }
  }
  return bytes;
}

absl::StatusOr<int> CountResults(const v1::ProgramSpec& spec, const std::vector<int>& counts) {
  int64_t results = 0;
  for (int i = 0; i < spec.outputs_size(); ++i) {
    const ElementwiseOutput& output = spec.outputs(i);
    const bool copy = output.operation() == ElementwiseOutput::COPY;
    std::vector<const v1::Operand*> operands = {&output.a(), copy ? &output.a() : &output.b()};
    if (output.has_size()) operands.push_back(&output.size());
    std::vector<int> sizes;
    for (const v1::Operand* operand : operands) {
      const int count = counts[operand->argument()];
      if (operand->output_index() > count) {
        return absl::InvalidArgumentError(
            absl::StrCat("outputs[", i, "]: output_index ", operand->output_index(),
                         " of argument[", operand->argument(), "] is not in 0 .. ", count));
      }
      sizes.push_back(operand->output_index() == 0 ? count : 1);
    }
    if (sizes[0] != sizes[1]) {
      return absl::InvalidArgumentError(absl::StrCat("outputs[", i, "]: a is a tuple of ", sizes[0],
                                                     " tensors, b of ", sizes[1]));
    }
    results += sizes[0];
  }
  if (results > kMaxTupleTensors) {
    return absl::InvalidArgumentError(absl::StrCat("outputs: the result would have ", results,
                                                   " tensors; a tuple has at most ",
                                                   kMaxTupleTensors));
  }
  return static_cast<int>(results);
}

}  // namespace emberd::coordinator
