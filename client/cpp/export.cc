#include "client/cpp/export.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/coordinator.h"
#include "client/cpp/tensor_codec.h"

namespace emberd::client {
namespace {

// One export over all its tries.
struct Export {
  const Model& model;
  const std::string& table;
  const std::function<absl::Status(int64_t, absl::Span<const float>, int64_t)>& sink;
  const ExportOptions& options;
  int64_t next = 0;  // first row not yet delivered
  int64_t end = 0;
  absl::Status failure;  // of the sink, or of what the server sent

  absl::Status Deliver(const v1::ExportTableResponse& part);
  grpc::Status Try(const Coordinator& coordinator, grpc::ClientContext* context);
};

absl::Status Export::Deliver(const v1::ExportTableResponse& part) {
  const v1::Tensor& values = part.values();
  absl::StatusOr<int64_t> dim = RowWidth(model, table, options.slot, values);
  if (!dim.ok()) return dim.status();
  const int64_t rows = values.shape(0);
  if (part.first_row() != next || rows < 0 || rows > end - next) {
    return absl::InternalError(absl::StrCat("the server sent ", rows, " rows from row ",
                                            part.first_row(), "; rows in [", next, ", ", end,
                                            ") were expected"));
  }
  absl::StatusOr<absl::Span<const float>> floats =
      DecodeFloats(values, rows, *dim, WireType::kFloat32, nullptr);
  if (!floats.ok()) return floats.status();
  next += rows;
  return sink(part.first_row(), *floats, *dim);
}

grpc::Status Export::Try(const Coordinator& coordinator, grpc::ClientContext* context) {
  if (next == end) return grpc::Status::OK;  // broken after the last row
  v1::ExportTableRequest request;
  request.set_model_id(model.id);
  request.set_table(table);
  request.set_slot(options.slot);
  request.set_first_row(next);
  request.set_row_count(end - next);
  const auto reader = coordinator.Read<v1::ExportTableResponse>(
      "/emberd.v1.EmbeddingService/ExportTable", request, context);
  v1::ExportTableResponse part;
  while (failure.ok() && reader->Read(&part)) failure = Deliver(part);
  if (!failure.ok()) context->TryCancel();
  const grpc::Status status = reader->Finish();
  // A failure of our own ends the retries.
  return failure.ok() ? status : grpc::Status::OK;
}

}  // namespace

absl::StatusOr<int64_t> RowWidth(const Model& model, const std::string& table,
                                 const std::string& slot, const v1::Tensor& rows) {
  const TableInfo* info = model.FindTable(table);
  if (rows.shape_size() == 2) {
    const int64_t width = rows.shape(1);
    if (info != nullptr && width == info->embedding_dim) return width;
    if (!slot.empty() && width == 1) return width;
  }
  return absl::InternalError(absl::StrCat("values: the server sent the shape [",
                                          absl::StrJoin(rows.shape(), ", "),
                                          "], which are not rows of table \"", table, "\""));
}

absl::Status RunExport(
    Transport* transport, const Model& model, const std::string& table,
    const std::function<absl::Status(int64_t, absl::Span<const float>, int64_t)>& sink,
    const ExportOptions& options) {
  const TableInfo* info = model.FindTable(table);
  if (info == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("table: the model \"", model.name, "\" has no table \"", table, "\""));
  }
  const int64_t left = info->vocabulary_size - options.first_row;
  if (options.first_row < 0 || left < 0 || options.row_count < 0 || options.row_count > left) {
    return absl::OutOfRangeError(absl::StrCat("rows: ", options.row_count, " rows from row ",
                                              options.first_row, " on do not lie in [0, ",
                                              info->vocabulary_size, ")"));
  }
  const int64_t count = options.row_count != 0 ? options.row_count : left;
  Export state{model, table, sink, options, options.first_row, options.first_row + count, {}};
  absl::Status status =
      transport->Call({options.deadline}, [&](const Coordinator& coordinator, auto* context) {
        return state.Try(coordinator, context);
      });
  if (!state.failure.ok()) return state.failure;
  if (status.ok() && state.next != state.end) {
    return absl::InternalError(
        absl::StrCat("the server ended the export at row ", state.next, " of ", state.end));
  }
  return status;
}

}  // namespace emberd::client
