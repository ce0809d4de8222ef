// How a Client reaches the cluster.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace emberd::client {

// How floats travel between trainer and coordinator; in memory they are always float32.
enum class WireType {
  kFloat32,
  kBfloat16,  // half the bytes; rounded to nearest even
};

// How ids, activations and gradients travel between trainer and coordinator.
enum class TransportKind {
  kAuto,    // large ones through shared memory, where both are on one machine; else by TCP
  kTcp,     // all by TCP
  kShared,  // as kAuto, but small ones too: for tests
};

// Connections are encrypted, and coordinators must show a certificate for the host of their
// address. PEM files, read by Connect.
struct TlsOptions {
  std::string ca_file =
      {};  // who signs coordinators' certificates; empty: this system's authorities
  // Where coordinators ask for a certificate (mutual TLS): both, or none.
  std::string certificate_file = {};
  std::string key_file = {};
  // The name that certificates must have instead of the host; empty: the host.
  std::string server_name = {};
};

struct ClientOptions {
  // "host:port" of the coordinators. The first that answers is used; the others are turned to when
  // it is unreachable.
  std::vector<std::string> addresses;

  std::optional<TlsOptions> tls = std::nullopt;  // none: plain text
  // Sent with each call, or the file that holds it in one line; at most one of them. Addresses
  // beyond the loopback interface need `tls` then.
  std::string token = {};
  std::string token_file = {};

  // How long Connect tries before it gives up.
  absl::Duration connect_timeout = absl::Seconds(10);
  // Of every call, all its retries included. Calls may set their own.
  absl::Duration deadline = absl::Seconds(30);

  // A call that fails with UNAVAILABLE is sent again, but for what drops, resets or deletes; at
  // most this often in all, while its deadline lasts. 1: never again. The n-th pause lasts
  // initial_backoff * 2^(n-1), at most max_backoff, times a random factor in [1 - jitter, 1 +
  // jitter].
  int max_attempts = 6;
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(2);
  double jitter = 0.2;

  // Names this client in the records that make its updates happen exactly once: no other client may
  // use the same, ever. Empty: a new random UUID.
  std::string client_id;

  WireType activation_type = WireType::kFloat32;
  WireType gradient_type = WireType::kFloat32;

  // If it is kAuto, the environment's EMBERD_TRANSPORT (AUTO, TCP or SHARED) decides.
  TransportKind transport = TransportKind::kAuto;

  // INVALID_ARGUMENT names the first field that is out of its range.
  absl::Status Validate() const;
  // What `transport` is with the environment. INVALID_ARGUMENT if that says something else.
  absl::StatusOr<TransportKind> ChosenTransport() const;
};

// A random UUID (version 4), for example "0f8fad5b-d9cb-469f-a165-70867728950e". From the system's
// random numbers, so that forked and cloned processes differ.
std::string RandomUuid();

}  // namespace emberd::client
