#include "server/coordinator/programs/values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/floats.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/step/request_reader.h"

namespace emberd::coordinator {

int64_t TensorBytes(const v1::NamedTensor& tensor) {
  // The messages, their strings and arrays, and the places that point to them.
  constexpr int64_t kObjects = 256;
  return kObjects + static_cast<int64_t>(tensor.name().size() + tensor.tensor().data().size() +
                                         sizeof(int64_t) * tensor.tensor().shape_size());
}

int64_t Value::bytes() const {
  int64_t bytes = 0;
  for (const auto& share : shares) bytes += share->bytes();
  for (const auto& tensor : tensors) bytes += TensorBytes(*tensor);
  for (const auto& element : elements) bytes += element->bytes();
  return bytes;
}

absl::StatusOr<ValuePtr> ElementOf(const ValuePtr& value, int output_index,
                                   const std::string& what) {
  if (output_index == 0) return value;
  const auto count = static_cast<int>(value->tensors.size() + value->elements.size());
  if (output_index < 0 || output_index > count) {
    return absl::InvalidArgumentError(absl::StrCat("output_index ", output_index, " of ", what,
                                                   value->prepared.has_value()
                                                       ? ", which is a batch, is not 0"
                                                       : absl::StrCat(" is not in 0 .. ", count)));
  }
  if (value->tensors.empty()) return value->elements[output_index - 1];
  auto element = std::make_shared<Value>();
  element->tensors = {value->tensors[output_index - 1]};
  element->looked_up = value->looked_up;
  element->batch = value->batch;
  if (!value->places.empty()) element->places = {value->places[output_index - 1]};
  element->statistics = value->statistics;
  element->shares = value->shares;
  return element;
}

ValuePtr BatchAlone(const Value& found) {
  auto batch = std::make_shared<Value>();
  batch->looked_up = found.looked_up;
  batch->batch = found.batch;
  batch->statistics = found.statistics;
  batch->shares = {found.shares.front()};
  return batch;
}

ValuePtr Renewed(const Value& value, const Value& found) {
  if (value.tensors.empty()) return std::make_shared<const Value>(found);  // of a batch alone
  auto now = std::make_shared<Value>(found);
  now->tensors = value.tensors;
  now->places = value.places;
  for (size_t i = 0; i < now->places.size(); ++i) {
    if (now->places[i] >= 0) now->tensors[i] = found.tensors[now->places[i]];
  }
  return now;
}

namespace {

// The tensor, whose share goes with it, whatever values have it meanwhile.
Tensors::value_type WithShare(Tensors::value_type tensor, rpc::BudgetShare share) {
  struct Charged {
    rpc::BudgetShare share;
    Tensors::value_type tensor;  // goes first
  };
  const auto* const bare = tensor.get();
  return {std::make_shared<Charged>(Charged{std::move(share), std::move(tensor)}), bare};
}

}  // namespace

absl::StatusOr<std::shared_ptr<Value>> MakeTuple(step::BatchStore* store, Tensors tensors) {
  std::vector<int64_t> bytes;
  for (const auto& tensor : tensors) bytes.push_back(TensorBytes(*tensor));
  return MakeTuple(store, bytes, [&]() -> absl::StatusOr<Tensors> { return std::move(tensors); });
}

absl::StatusOr<std::shared_ptr<Value>> MakeTuple(
    step::BatchStore* store, const std::vector<int64_t>& bytes,
    absl::FunctionRef<absl::StatusOr<Tensors>()> make) {
  auto value = std::make_shared<Value>();
  ASSIGN_OR_RETURN(auto own, store->Reserve(kValueBytes));
  value->shares.push_back(std::move(own));
  std::vector<rpc::BudgetShare> shares;
  for (const int64_t tensor : bytes) {
    ASSIGN_OR_RETURN(shares.emplace_back(), store->Reserve(tensor));
  }
  ASSIGN_OR_RETURN(value->tensors, make());
  for (size_t i = 0; i < shares.size(); ++i) {
    value->tensors[i] = WithShare(std::move(value->tensors[i]), std::move(shares[i]));
  }
  return value;
}

// What is done with each part of a tuple calls itself for each level.
constexpr int kMaxLevels = 16;

absl::StatusOr<std::shared_ptr<Value>> ReadTuple(step::BatchStore* store, Handles* handles,
                                                 v1::Literal literal) {
  if (literal.features_size() > 0) {
    return absl::InvalidArgumentError("a tuple has tensors; it was given features");
  }
  if (literal.elements_size() > 0 && literal.tensors_size() > 0) {
    return absl::InvalidArgumentError("a tuple has tensors or elements; it was given both");
  }
  if (literal.elements_size() > 0) {
    ASSIGN_OR_RETURN(auto tuple, MakeTuple(store, Tensors()));
    ASSIGN_OR_RETURN(auto share, store->Reserve(kValueBytes * literal.elements_size()));
    tuple->shares.push_back(std::move(share));
    for (v1::ProgramArgument& argument : *literal.mutable_elements()) {
      const std::string path = absl::StrCat("elements[", tuple->elements.size(), "]");
      absl::StatusOr<ValuePtr> element;
      if (argument.has_literal()) {
        element = ReadTuple(store, handles, std::move(*argument.mutable_literal()));
      } else {
        element = handles->Find(argument.handle());
      }
      if (element.ok()) element = ElementAt(*element, argument, "it");
      if (!element.ok()) return Annotate(element.status(), path);
      tuple->parts += (*element)->parts;
      tuple->levels = std::max(tuple->levels, (*element)->levels + 1);
      if (tuple->parts > kMaxTupleTensors || tuple->levels > kMaxLevels) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": a tuple has at most ", kMaxLevels,
                                                       " levels of elements, and ",
                                                       kMaxTupleTensors, " parts in all"));
      }
      tuple->elements.push_back(*std::move(element));
    }
    return tuple;
  }
  Tensors tensors;
  for (v1::NamedTensor& tensor : *literal.mutable_tensors()) {
    const std::string path = absl::StrCat("tensors[", tensors.size(), "] '", tensor.name(), "'");
    RETURN_IF_ERROR(step::CheckedSize(tensor.tensor(), path).status());
    tensors.push_back(std::make_shared<const v1::NamedTensor>(std::move(tensor)));
  }
  return MakeTuple(store, std::move(tensors));
}

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
      int64_t elements = 1;  // in the order in which CheckedSize has counted them
      for (const int64_t extent : whole.shape()) elements *= std::min(extent, n);
      bytes.push_back(TensorBytes(*tensor) - static_cast<int64_t>(whole.data().size()) +
                      elements * step::ElementSize(whole.dtype()));
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

namespace {

constexpr int kOwnerBits = 12;

absl::Status NoHandle(uint64_t handle) {
  return absl::NotFoundError(absl::StrCat("memory handle not found: ", handle));
}

void LeaveToShards(const Value& value) {
  if (value.looked_up != nullptr) value.looked_up->LeaveToShards();
  for (const ValuePtr& element : value.elements) LeaveToShards(*element);
}

}  // namespace

uint64_t NewHandle(int coordinator) {
  thread_local absl::BitGen generator;
  constexpr int kRandomBits = 64 - kOwnerBits;
  const auto owner = static_cast<uint64_t>(coordinator + 1) & ((uint64_t{1} << kOwnerBits) - 1);
  return owner << kRandomBits | absl::Uniform<uint64_t>(generator, 1, uint64_t{1} << kRandomBits);
}

Handles::~Handles() {
  absl::MutexLock lock(&mutex_);
  for (auto& [handle, entry] : entries_) LeaveToShards(*entry.value);
}

uint64_t Handles::Insert(const std::string& client, ValuePtr value, rpc::BudgetShare share) {
  absl::MutexLock lock(&mutex_);
  heard_[client] = SteadyNow();
  while (true) {
    const uint64_t handle = NewHandle(coordinator_);
    if (entries_.try_emplace(handle, Entry{client, value, share}).second) return handle;
  }
}

absl::StatusOr<ValuePtr> Handles::Find(uint64_t handle) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return NoHandle(handle);
  heard_[found->second.client] = SteadyNow();
  return found->second.value;
}

void Handles::Replace(uint64_t handle, ValuePtr value) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(handle);
  if (found != entries_.end()) found->second.value.swap(value);
}

absl::Status Handles::CheckRelease(const std::vector<uint64_t>& handles) const {
  absl::MutexLock lock(&mutex_);
  absl::flat_hash_set<uint64_t> seen;
  for (const uint64_t handle : handles) {
    if (!entries_.contains(handle) || !seen.insert(handle).second) return NoHandle(handle);
  }
  return absl::OkStatus();
}

int64_t Handles::Release(const std::vector<uint64_t>& handles) {
  std::vector<ValuePtr> taken;
  absl::MutexLock lock(&mutex_);
  for (const uint64_t handle : handles) {
    const auto found = entries_.find(handle);
    if (found == entries_.end()) continue;
    heard_[found->second.client] = SteadyNow();
    taken.push_back(std::move(found->second.value));
    entries_.erase(found);
  }
  return static_cast<int64_t>(taken.size());
}

template <typename Gone>
int64_t Handles::ReleaseClients(const Gone& gone) {
  std::vector<ValuePtr> taken;  // they may take time to go: outside of the lock
  absl::MutexLock lock(&mutex_);
  absl::flat_hash_set<std::string> clients;
  absl::erase_if(heard_, [&](const auto& entry) {
    return gone(entry.first, entry.second) && clients.insert(entry.first).second;
  });
  if (clients.empty()) return 0;
  absl::erase_if(entries_, [&](auto& entry) {
    if (!clients.contains(entry.second.client)) return false;
    taken.push_back(std::move(entry.second.value));
    return true;
  });
  return static_cast<int64_t>(taken.size());
}

int64_t Handles::ReleaseClient(const std::string& client) {
  return ReleaseClients([&](const auto& owner, absl::Time) { return owner == client; });
}

void Handles::Renew(const std::string& client) {
  absl::MutexLock lock(&mutex_);
  const auto found = heard_.find(client);
  if (found != heard_.end()) found->second = SteadyNow();
}

int64_t Handles::Sweep(absl::Time now) {
  {
    absl::MutexLock lock(&mutex_);
    const absl::Duration standstill = clock_.Standstill(now);
    for (auto& [client, heard] : heard_) heard = std::min(heard + standstill, now);
  }
  return ReleaseClients([&](const auto&, absl::Time heard) { return heard + lease_ <= now; });
}

int64_t Handles::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(entries_.size());
}

}  // namespace emberd::coordinator
