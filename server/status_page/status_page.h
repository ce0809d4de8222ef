// The page that shows a cluster at work, and the figures behind it, on a coordinator's HTTP port:
//
//   /             the page; it asks for the rest, every second
//   /status.json  {"name", "version", "models": [{"model_id", "name"}], "stats": GetStatsResponse}
//   /models.json  {"models": [DescribeModelResponse]}
//
// Messages are in protobuf's JSON, with the names of the .proto files and with every field.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/ops/http.h"

namespace emberd::status_page {

// Where the figures come from. The functions are called from several threads at once.
struct Source {
  std::string name;  // of the process: "coordinator-0"
  std::function<absl::StatusOr<v1::GetStatsResponse>(const v1::GetStatsRequest&)> stats;
  std::function<absl::StatusOr<v1::DescribeModelResponse>(const v1::DescribeModelRequest&)> model;
};

// However many look at the page, the cluster is asked only this often.
inline constexpr absl::Duration kMaxAge = absl::Milliseconds(500);

// What Source says must outlive the server. Figures that cannot be had are 503 with the reason.
std::vector<ops::HttpRoute> Routes(const Source& source);

}  // namespace emberd::status_page
