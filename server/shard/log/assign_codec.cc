#include "server/shard/log/assign_codec.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "emberd/internal/v1/shard_service.pb.h"

namespace emberd::server {
namespace {

template <typename T>
std::string Pack(absl::Span<const T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Unpack(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

struct Arrays {
  std::vector<int32_t> partitions;
  std::vector<int64_t> local_rows;
  std::vector<float> values;
};

}  // namespace

std::string EncodeAssign(const AssignCommand& command) {
  internal::v1::AssignShardRowsRequest request;
  request.set_model_id(command.rows.model_id);
  request.set_history(command.rows.history);
  request.set_stack(command.rows.stack);
  request.set_slot(command.rows.slot);
  request.set_columns(command.rows.columns);
  request.set_partitions(Pack(command.rows.partitions));
  request.set_local_rows(Pack(command.rows.local_rows));
  request.set_values(Pack(command.values));
  return request.SerializeAsString();
}

absl::StatusOr<AssignCommand> DecodeAssign(absl::Span<const char> bytes) {
  internal::v1::AssignShardRowsRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::InvalidArgumentError("the assignment of rows in the log cannot be read");
  }
  auto arrays = std::make_shared<Arrays>();
  arrays->partitions = Unpack<int32_t>(request.partitions());
  arrays->local_rows = Unpack<int64_t>(request.local_rows());
  arrays->values = Unpack<float>(request.values());
  const size_t floats = arrays->partitions.size() * static_cast<size_t>(request.columns());
  if (arrays->partitions.size() != arrays->local_rows.size() || arrays->values.size() != floats) {
    return absl::InvalidArgumentError("the assignment of rows in the log contradicts itself");
  }
  AssignCommand command;
  command.rows = {request.model_id(), request.stack(),   request.slot(),   arrays->partitions,
                  arrays->local_rows, request.columns(), request.history()};
  command.values = arrays->values;
  command.owner = arrays;
  return command;
}

}  // namespace emberd::server
