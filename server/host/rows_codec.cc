#include "server/host/rows_codec.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "server/group/group_rules.h"

namespace emberd::host {
namespace {

constexpr int kMaxColumns = 8192;

template <typename T>
std::string Pack(absl::Span<const T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

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
Request EncodeSelection(const shard::RowSelection& selection) {
  Request request;
  request.set_model_id(selection.model_id);
  request.set_history(selection.history);
  request.set_stack(selection.stack);
  request.set_slot(selection.slot);
  request.set_partitions(Pack(selection.partitions));
  request.set_local_rows(Pack(selection.local_rows));
  request.set_columns(selection.columns);
  return request;
}

template <typename Request>
absl::Status DecodeSelection(const Request& request, NamedRows* rows) {
  ASSIGN_OR_RETURN(rows->partitions, Unpack<int32_t>(request.partitions(), "partitions"));
  ASSIGN_OR_RETURN(rows->local_rows, Unpack<int64_t>(request.local_rows(), "local_rows"));
  if (rows->partitions.size() != rows->local_rows.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("partitions has ", rows->partitions.size(), " values, but local_rows ",
                     rows->local_rows.size(), "; each row needs one of each"));
  }
  RETURN_IF_ERROR(group::CheckInRange("columns", request.columns(), 1, kMaxColumns));
  rows->selection = {request.model_id(), request.stack(),   request.slot(),   rows->partitions,
                     rows->local_rows,   request.columns(), request.history()};
  return absl::OkStatus();
}

}  // namespace

internal::v1::ReadShardRowsRequest EncodeRead(const shard::RowSelection& selection) {
  return EncodeSelection<internal::v1::ReadShardRowsRequest>(selection);
}

internal::v1::AssignShardRowsRequest EncodeAssign(const AssignCommand& command) {
  auto request = EncodeSelection<internal::v1::AssignShardRowsRequest>(command.rows);
  request.set_values(Pack(command.values));
  return request;
}

absl::Status DecodeRead(const internal::v1::ReadShardRowsRequest& request, NamedRows* rows) {
  return DecodeSelection(request, rows);
}

absl::StatusOr<AssignCommand> DecodeAssign(const internal::v1::AssignShardRowsRequest& request,
                                           rpc::MemoryRoom room) {
  const auto rows = std::make_shared<NamedRows>();
  rows->room = std::move(room);
  RETURN_IF_ERROR(DecodeSelection(request, rows.get()));
  ASSIGN_OR_RETURN(rows->values, Unpack<float>(request.values(), "values"));
  if (rows->values.size() != rows->floats()) {
    return absl::InvalidArgumentError(
        absl::StrCat("values has ", rows->values.size(), " floats; ", rows->partitions.size(),
                     " rows of ", rows->selection.columns, " columns need ", rows->floats()));
  }
  AssignCommand command;
  command.rows = rows->selection;
  command.values = rows->values;
  command.owner = rows;
  return command;
}

}  // namespace emberd::host
