#include "server/ops/http.h"

#include <exception>
#include <utility>
#include <vector>

#include <CivetServer.h>
#include <prometheus/exposer.h>

#include "absl/strings/str_cat.h"
#include "server/ops/address.h"

namespace emberd::ops {

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              const Metrics& metrics) {
  absl::StatusOr<HostPort> parsed = ParseAddress(address);
  if (!parsed.ok()) return parsed.status();
  // The web server takes numbers only.
  if (parsed->host == "localhost") parsed->host = "127.0.0.1";
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(FormatAddress(parsed->host, parsed->port));
    for (const auto& collectable : metrics.collectables()) {
      exposer->RegisterCollectable(collectable);
    }
    const std::vector<int> ports = exposer->GetListeningPorts();
    if (ports.empty()) return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
    return std::unique_ptr<HttpServer>(new HttpServer(
        std::move(exposer), FormatAddress(parsed->host, ports.front()), ports.front()));
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, " for HTTP: ", error.what()));
  }
}

HttpServer::HttpServer(std::unique_ptr<prometheus::Exposer> exposer, std::string address, int port)
    : exposer_(std::move(exposer)), address_(std::move(address)), port_(port) {}

HttpServer::~HttpServer() = default;

}  // namespace emberd::ops
