// A port of 127.0.0.1 that no other process gets, whether somebody listens on it or not.
#pragma once

#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/file_descriptor.h"

namespace emberd {

class HeldPort {
 public:
  // One that the system picks. A socket that is bound and does not listen keeps it: the system
  // gives it to nobody else, and a server that binds it by its number, with SO_REUSEADDR as servers
  // do, may listen. While none does, connections are refused.
  static absl::StatusOr<std::unique_ptr<HeldPort>> Take() {
    FileDescriptor held(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    setsockopt(held.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in place = {};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(place);
    auto* const address = reinterpret_cast<sockaddr*>(&place);
    if (bind(held.get(), address, size) != 0 || getsockname(held.get(), address, &size) != 0) {
      return absl::ErrnoToStatus(errno, "no port of 127.0.0.1 is free");
    }
    return std::unique_ptr<HeldPort>(
        new HeldPort(std::move(held), absl::StrCat("127.0.0.1:", ntohs(place.sin_port))));
  }
  const std::string& address() const { return address_; }  // 127.0.0.1:12345

 private:
  HeldPort(FileDescriptor socket, std::string address)
      : socket_(std::move(socket)), address_(std::move(address)) {}

  const FileDescriptor socket_;
  const std::string address_;
};

}  // namespace emberd
