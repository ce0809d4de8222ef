// CompleteCluster: checks and defaults of a cluster description.
#include <algorithm>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"
#include "config/address.h"
#include "config/config.h"
#include "config/fields.h"
#include "config/security.h"

namespace emberd::config {
namespace {

constexpr int kMaxPartitions = 1024;

// Collects the addresses of a cluster: each may stand once.
class AddressChecker {
 public:
  // Two processes cannot listen at one place, except where the system picks the port, and except
  // that the wildcard host of /metrics means each process's own machine.
  absl::Status Check(const std::string& text, const std::string& path, bool is_http) {
    const absl::StatusOr<Address> address = ParseAddress(text);
    if (!address.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": ", QuotedText(text), " is not allowed; ", address.status().message()));
    }
    if (address->port == 0 || (is_http && address->is_wildcard())) return absl::OkStatus();
    const auto [earlier, inserted] = paths_.emplace(address->ToString(), path);
    if (inserted) return absl::OkStatus();
    return NotAllowed(path, QuotedText(text), absl::StrCat("unique; it is also ", earlier->second));
  }

  // `Process` is a ShardConfig or a CoordinatorConfig.
  template <typename Process>
  absl::Status CheckAll(const google::protobuf::RepeatedPtrField<Process>& processes,
                        absl::string_view list) {
    for (int i = 0; i < processes.size(); ++i) {
      const std::string path = FieldPath("", list, i);
      absl::Status status =
          Check(processes[i].address(), FieldPath(path, "address"), /*is_http=*/false);
      if (status.ok() && !processes[i].http_address().empty()) {
        status = Check(processes[i].http_address(), FieldPath(path, "http_address"),
                       /*is_http=*/true);
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::flat_hash_map<std::string, std::string> paths_;  // address -> first field with it
};

absl::Status CheckPartitions(const v1::ClusterConfig& cluster) {
  const auto is_power_of_two = [](int n) { return absl::has_single_bit(static_cast<unsigned>(n)); };
  const int shards = cluster.shards_size();
  const int sparsecores = cluster.sparsecores_per_shard();
  if (shards == 0) return absl::InvalidArgumentError("shards: empty; at least one is needed");
  if (!is_power_of_two(shards)) {
    return NotAllowed("shards", absl::StrCat("a number of ", shards), "a power of two");
  }
  if (!is_power_of_two(sparsecores)) {
    return NotAllowed("sparsecores_per_shard", absl::StrCat(sparsecores), "a power of two");
  }
  if (int64_t{shards} * sparsecores <= kMaxPartitions) return absl::OkStatus();
  return NotAllowed("shards", absl::StrCat("a number of ", shards),
                    absl::StrCat("at most ", kMaxPartitions / sparsecores, " with ", sparsecores,
                                 " SparseCores per shard (", kMaxPartitions, " partitions)"));
}

int CpuCount() { return std::max(1u, std::thread::hardware_concurrency()); }

}  // namespace

absl::Status CompleteCluster(v1::ClusterConfig* cluster) {
  absl::Status status = CheckFields(*cluster);
  if (!status.ok()) return status;
  v1::ClusterConfig complete = *cluster;
  complete.mutable_budgets();
  complete.mutable_timeouts();
  complete.mutable_logging();
  FillFields(&complete);
  if (complete.shard_threads() == 0) complete.set_shard_threads(CpuCount());
  if (complete.coordinator_threads() == 0) complete.set_coordinator_threads(CpuCount());

  status = CheckPartitions(complete);
  AddressChecker addresses;
  if (status.ok()) status = addresses.CheckAll(complete.shards(), "shards");
  if (status.ok()) status = addresses.CheckAll(complete.coordinators(), "coordinators");
  if (status.ok()) status = CheckSecurity(complete);
  if (status.ok()) *cluster = std::move(complete);
  return status;
}

}  // namespace emberd::config
