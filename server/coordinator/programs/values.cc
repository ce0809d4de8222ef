#include "server/coordinator/programs/values.h"

#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/coordinator/programs/elementwise.h"
#include "server/coordinator/request_reader.h"

namespace emberd::server {

absl::StatusOr<std::shared_ptr<const BudgetShare>> BudgetShare::Take(BatchStore* store,
                                                                     int64_t bytes) {
  RETURN_IF_ERROR(store->Reserve(bytes));
  return absl::WrapUnique(new BudgetShare(store, bytes));
}

int64_t Value::bytes() const {
  int64_t bytes = 0;
  for (const auto& share : shares) bytes += share->bytes();
  return bytes;
}

std::vector<const v1::NamedTensor*> Value::TensorList() const {
  std::vector<const v1::NamedTensor*> list;
  for (const auto& tensor : tensors) list.push_back(tensor.get());
  return list;
}

absl::StatusOr<ValuePtr> ElementOf(const ValuePtr& value, int output_index,
                                   const std::string& what) {
  if (output_index == 0) return value;
  const auto count = static_cast<int>(value->tensors.size());
  if (output_index < 0 || output_index > count) {
    return absl::InvalidArgumentError(absl::StrCat("output_index ", output_index, " of ", what,
                                                   value->prepared.has_value()
                                                       ? ", which is a batch, is not 0"
                                                       : absl::StrCat(" is not in 0 .. ", count)));
  }
  auto element = std::make_shared<Value>();
  element->tensors = {value->tensors[output_index - 1]};
  element->looked_up = value->looked_up;
  element->statistics = value->statistics;
  element->shares = value->shares;
  return element;
}

ValuePtr BatchAlone(const Value& found) {
  auto batch = std::make_shared<Value>();
  batch->looked_up = found.looked_up;
  batch->statistics = found.statistics;
  batch->shares = {found.shares.front()};
  return batch;
}

absl::StatusOr<std::shared_ptr<Value>> MakeTuple(
    BatchStore* store, std::vector<std::shared_ptr<const v1::NamedTensor>> tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += TensorBytes(*tensor);
  return MakeTuple(store, bytes,
                   [&]() -> absl::StatusOr<std::vector<std::shared_ptr<const v1::NamedTensor>>> {
                     return std::move(tensors);
                   });
}

absl::StatusOr<std::shared_ptr<Value>> MakeTuple(
    BatchStore* store, int64_t bytes,
    absl::FunctionRef<absl::StatusOr<std::vector<std::shared_ptr<const v1::NamedTensor>>>()> make) {
  auto value = std::make_shared<Value>();
  ASSIGN_OR_RETURN(auto share, BudgetShare::Take(store, kValueBytes + bytes));
  value->shares.push_back(std::move(share));
  ASSIGN_OR_RETURN(value->tensors, make());
  return value;
}

absl::StatusOr<std::shared_ptr<Value>> ReadTuple(BatchStore* store, v1::Literal literal) {
  if (literal.features_size() > 0) {
    return absl::InvalidArgumentError("a tuple has tensors; it was given features");
  }
  std::vector<std::shared_ptr<const v1::NamedTensor>> tensors;
  for (v1::NamedTensor& tensor : *literal.mutable_tensors()) {
    const std::string path = absl::StrCat("tensors[", tensors.size(), "] '", tensor.name(), "'");
    RETURN_IF_ERROR(CheckedSize(tensor.tensor(), path).status());
    tensors.push_back(std::make_shared<const v1::NamedTensor>(std::move(tensor)));
  }
  return MakeTuple(store, std::move(tensors));
}

}  // namespace emberd::server
