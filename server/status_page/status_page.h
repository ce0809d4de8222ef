// The page that shows a cluster at work, and the figures behind it, on a coordinator's HTTP port:
//
//   /             the page; it asks for the rest, every second, and keeps what its charts show
//   /status.json   {"name", "version", "epoch", "models": [{"model_id", "name", ...}],
//                  "stats": GetStatsResponse,
//                  "coordinators": [{"name", "address", "http_address", "self", "reachable",
//                  "error", "stats": GetStatsResponse without most of its lists}]}
//   /models.json   {"models": [DescribeModelResponse]}
//
// "stats" is the sum over all coordinators that answer; "epoch" is another number when what it
// counts may have become less. Messages are in protobuf's JSON, with the names of the .proto files
// and with every field.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/ops/http.h"
#include "server/security/security.h"

namespace emberd::status_page {

// One of the files of page/, as it was when this was built.
struct PageFile {
  std::string_view name;  // "index.html"
  std::string_view content;
};
std::vector<PageFile> PageFiles();

// What one coordinator of a cluster says of itself. The one that serves the page comes first, and
// it alone tells about shards.
struct CoordinatorFigures {
  std::string name;                 // "coordinator-0"
  std::string address = {};         // of gRPC
  std::string http_address = {};    // of its own page; empty: none
  absl::Status status = {};         // why it does not answer
  v1::GetStatsResponse stats = {};  // if it does
};
using ClusterFigures = std::vector<CoordinatorFigures>;

// The sum over all coordinators that answer; times, shards and whether it is draining are those of
// the first.
v1::GetStatsResponse Merge(const ClusterFigures& figures);

// The other coordinators of a cluster, asked for what they do. Asks by AdminService.GetStats, with
// the certificate and the token that coordinators show to shards. Thread-safe.
class Peers {
 public:
  // A coordinator that takes longer counts as one that does not answer.
  static constexpr absl::Duration kPatience = absl::Seconds(1);

  // Of all coordinators of a complete description but number `self`. Those whose address says only
  // where to listen (0.0.0.0, port 0) cannot be asked and are left out.
  Peers(const v1::ClusterConfig& cluster, int self, const security::Security& security);

  ClusterFigures Ask() const;

 private:
  struct Peer {
    CoordinatorFigures figures;  // without an answer
    std::unique_ptr<v1::AdminService::Stub> stub;
  };
  std::vector<Peer> peers_;
};

// Where the figures come from. The functions are called from several threads at once.
struct Source {
  std::string name;               // of the process: "coordinator-0"
  std::string address = {};       // of its gRPC port
  std::string http_address = {};  // of the page
  std::function<absl::StatusOr<v1::GetStatsResponse>(const v1::GetStatsRequest&)> stats;
  std::function<absl::StatusOr<v1::DescribeModelResponse>(const v1::DescribeModelRequest&)> model;
  // The other coordinators; null: there are none.
  std::function<ClusterFigures()> others = nullptr;
};

// However many look at the page, the cluster is asked only this often.
inline constexpr absl::Duration kMaxAge = absl::Milliseconds(500);

// What Source says must outlive the routes. Figures that cannot be had are 503 with the reason.
std::vector<ops::HttpRoute> Routes(const Source& source);

}  // namespace emberd::status_page
