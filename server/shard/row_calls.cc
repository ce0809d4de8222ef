#include "server/shard/row_calls.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/group/group_rules.h"

namespace emberd::server {
namespace {

constexpr int kMaxColumns = 8192;

template <typename T>
absl::StatusOr<std::vector<T>> Unpack(const std::string& bytes, absl::string_view what) {
  if (bytes.size() % sizeof(T) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", bytes.size(), " bytes, not a multiple of ", sizeof(T)));
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <typename Request>
absl::Status ReadSelection(const Request& request, RowsCall* call) {
  ASSIGN_OR_RETURN(call->partitions, Unpack<int32_t>(request.partitions(), "partitions"));
  ASSIGN_OR_RETURN(call->local_rows, Unpack<int64_t>(request.local_rows(), "local_rows"));
  if (call->partitions.size() != call->local_rows.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("partitions has ", call->partitions.size(), " values, but local_rows ",
                     call->local_rows.size(), "; each row needs one of each"));
  }
  RETURN_IF_ERROR(CheckInRange("columns", request.columns(), 1, kMaxColumns));
  call->selection = {request.model_id(), request.stack(),   request.slot(),   call->partitions,
                     call->local_rows,   request.columns(), request.history()};
  return absl::OkStatus();
}

// Before memory is taken for the values.
absl::Status MakeRoom(const rpc::MemoryBudget& memory, size_t bytes, absl::string_view what,
                      RowsCall* call) {
  ASSIGN_OR_RETURN(call->room, memory.Take(static_cast<int64_t>(bytes), what));
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadRequest(const internal::v1::ReadShardRowsRequest& request,
                         const rpc::MessageLimits& limits, RowsCall* call) {
  RETURN_IF_ERROR(ReadSelection(request, call));
  const size_t bytes = call->floats() * sizeof(float);
  if (bytes > static_cast<size_t>(limits.max_bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("the rows asked for have ", bytes,
                                                     " bytes; budgets.max_message_bytes is ",
                                                     limits.max_bytes));
  }
  // Where they lie, the rows, and the message that is made of them.
  const size_t places = request.partitions().size() + request.local_rows().size();
  RETURN_IF_ERROR(MakeRoom(limits.memory, places + 2 * bytes, "the answer", call));
  call->values.resize(call->floats());
  return absl::OkStatus();
}

absl::Status ReadRequest(const internal::v1::AssignShardRowsRequest& request,
                         const rpc::MessageLimits& limits, RowsCall* call) {
  RETURN_IF_ERROR(ReadSelection(request, call));
  RETURN_IF_ERROR(MakeRoom(limits.memory, request.values().size(), "a request", call));
  RETURN_IF_ERROR(MutationOf(request.mutation()).status());
  RETURN_IF_ERROR(CheckAttempt(request.attempt()));
  ASSIGN_OR_RETURN(call->values, Unpack<float>(request.values(), "values"));
  if (call->values.size() == call->floats()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("values has ", call->values.size(), " floats; ", call->partitions.size(),
                   " rows of ", call->selection.columns, " columns need ", call->floats()));
}

}  // namespace emberd::server
