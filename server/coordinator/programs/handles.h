// Values under handles that clients hold. A handle belongs to a client and lives as long as this
// client is heard of: a trainer that died releases nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/coordinator/programs/values.h"

namespace emberd::server {

// Random, never 0, with the number of the coordinator in the highest 12 bits.
uint64_t NewHandle(int coordinator);

// Thread-safe.
class Handles {
 public:
  Handles(int coordinator, absl::Duration lease) : coordinator_(coordinator), lease_(lease) {}
  // Leaves batches to the shards, where they expire: telling each might take long.
  ~Handles();

  uint64_t Insert(const std::string& client, ValuePtr value);
  // Also renews the lease of its client. NOT_FOUND: memory handle not found.
  absl::StatusOr<ValuePtr> Find(uint64_t handle);
  // Nothing happens if it is gone.
  void Replace(uint64_t handle, ValuePtr value);
  // NOT_FOUND if one of them is unknown, or named twice.
  absl::Status CheckRelease(const std::vector<uint64_t>& handles) const;
  // Those that are unknown are left out. Returns how many there were.
  int64_t Release(const std::vector<uint64_t>& handles);
  int64_t ReleaseClient(const std::string& client);

  // Something was heard of the client.
  void Renew(const std::string& client);
  // Releases what belongs to clients who were silent for the lease; returns how many there were.
  int64_t Sweep(absl::Time now);

  int64_t count() const;

 private:
  struct Entry {
    std::string client;
    ValuePtr value;
  };
  // Takes what `gone` says out of the map. Values may take time to go, so they are given to the
  // caller, who lets them go outside of the lock.
  template <typename Gone>
  std::vector<ValuePtr> Take(const Gone& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int coordinator_;
  const absl::Duration lease_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, absl::Time> heard_ ABSL_GUARDED_BY(mutex_);  // by client
};

}  // namespace emberd::server
