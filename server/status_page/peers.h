// The other coordinators of a cluster, asked for what they do.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "server/security/security.h"
#include "server/status_page/figures.h"

namespace emberd::status_page {

// Asks by AdminService.GetStats, with the certificate and the token that coordinators show to
// shards. Thread-safe.
class Peers {
 public:
  // A coordinator that takes longer does not answer.
  static constexpr absl::Duration kPatience = absl::Seconds(1);

  // Of all coordinators of a complete description but number `self`. Those whose address says only
  // where to listen (0.0.0.0, port 0) cannot be asked and are left out.
  Peers(const v1::ClusterConfig& cluster, int self, const security::Security& security);

  ClusterFigures Ask() const;

 private:
  struct Peer {
    std::string name;
    std::string address;
    std::string http_address;
    std::unique_ptr<v1::AdminService::Stub> stub;
  };
  std::vector<Peer> peers_;
};

}  // namespace emberd::status_page
