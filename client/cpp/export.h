// Reading a whole table as a stream, across broken connections.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/batch.h"
#include "client/cpp/model.h"
#include "client/cpp/transport.h"
#include "emberd/v1/types.pb.h"

namespace emberd::client {

// Client::ExportTable. A stream that breaks with UNAVAILABLE is taken up at the first row that
// `sink` has not seen.
absl::Status RunExport(
    Transport* transport, const Model& model, const std::string& table,
    const std::function<absl::Status(int64_t, absl::Span<const float>, int64_t)>& sink,
    const ExportOptions& options);

// Columns of rows that a server sent: the table's, or 1 for a slot with one value per row. INTERNAL
// for others.
absl::StatusOr<int64_t> RowWidth(const Model& model, const std::string& table,
                                 const std::string& slot, const v1::Tensor& rows);

}  // namespace emberd::client
