#include "server/ops/http.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <CivetServer.h>
#include <netdb.h>
#include <prometheus/exposer.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "config/address.h"

namespace emberd::ops {
namespace {

// Connects and hangs up. `host` is numeric, IPv6 in brackets.
void Knock(const std::string& host, int port) {
  const bool brackets = host.front() == '[';
  const std::string numeric = brackets ? host.substr(1, host.size() - 2) : host;
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* address = nullptr;
  if (getaddrinfo(numeric.c_str(), std::to_string(port).c_str(), &hints, &address) != 0) return;
  const int fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    (void)connect(fd, address->ai_addr, address->ai_addrlen);
    close(fd);
  }
  freeaddrinfo(address);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              const Metrics& metrics) {
  absl::StatusOr<config::Address> parsed = config::ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", address, "\" is not allowed; ", parsed.status().message()));
  }
  // The web server takes numbers only.
  if (parsed->host == "localhost") parsed->host = "127.0.0.1";
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(parsed->ToString());
    for (const auto& collectable : metrics.collectables()) {
      exposer->RegisterCollectable(collectable);
    }
    const std::vector<int> ports = exposer->GetListeningPorts();
    if (ports.empty()) return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
    return std::unique_ptr<HttpServer>(
        new HttpServer(std::move(exposer), parsed->host, ports.front()));
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, " for HTTP: ", error.what()));
  }
}

HttpServer::HttpServer(std::unique_ptr<prometheus::Exposer> exposer, std::string host, int port)
    : exposer_(std::move(exposer)), host_(std::move(host)), port_(port) {}

// The web server waits for connections and notices only every two seconds that it shall stop; a
// connection wakes it.
HttpServer::~HttpServer() {
  std::atomic<bool> stopped = false;
  std::thread waker([this, &stopped] {
    while (!stopped) {
      Knock(host_, port_);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  exposer_.reset();
  stopped = true;
  waker.join();
}

std::string HttpServer::address() const { return absl::StrCat(host_, ":", port_); }

}  // namespace emberd::ops
