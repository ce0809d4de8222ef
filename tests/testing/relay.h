// A network link between two processes that can be cut and held up: a TCP port of the loopback that
// passes on what comes, both ways, to another one.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/file_descriptor.h"

namespace emberd::testing {

// Thread-safe.
class Relay {
 public:
  // Passes on to "host:port", an IPv4 address, whether anybody listens there already or not.
  static absl::StatusOr<std::unique_ptr<Relay>> Start(const std::string& target);
  ~Relay();

  // "127.0.0.1:port", where it listens.
  const std::string& address() const { return address_; }

  // Breaks every connection, and each new one at once, until Heal.
  void Cut() { Set(Mode::kCut); }
  // Nothing passes until Heal, and nothing is lost: what was sent meanwhile arrives then.
  void Stall() { Set(Mode::kStalled); }
  void Heal() { Set(Mode::kOpen); }

 private:
  enum class Mode { kOpen, kStalled, kCut, kEnding };
  struct Connection;

  explicit Relay(const std::string& target);
  void Set(Mode mode);
  void Run();
  void Accept(Mode mode);

  const std::string target_;
  std::string address_;
  FileDescriptor listening_;
  FileDescriptor wake_;  // an eventfd
  std::atomic<Mode> mode_ = Mode::kOpen;
  std::list<Connection> connections_;  // of the thread
  std::thread thread_;
};

}  // namespace emberd::testing
