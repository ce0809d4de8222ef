// CompleteCluster and CompleteTokenFile: checks and defaults of a cluster description and of the
// list of tokens that it names.
#include <algorithm>
#include <string>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/numeric/bits.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/machine_memory.h"
#include "base/status.h"
#include "config/address.h"
#include "config/config.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

constexpr int kMaxPartitions = 1024;
constexpr int kDigestDigits = 64;
// Bounds of budgets that are shares of a machine's memory.
constexpr int64_t kMinBudget = int64_t{1} << 20;
constexpr int64_t kMaxBatchBytes = int64_t{1} << 30;
constexpr int64_t kMaxInFlightBytes = int64_t{4} << 30;
constexpr int64_t kMaxCopyBytes = int64_t{1} << 30;

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
      RETURN_IF_ERROR(Check(processes[i].address(), FieldPath(path, "address"), /*is_http=*/false));
      if (processes[i].http_address().empty()) continue;
      RETURN_IF_ERROR(
          Check(processes[i].http_address(), FieldPath(path, "http_address"), /*is_http=*/true));
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
    return NotAllowed("shards", absl::StrCat("a count of ", shards), "a power of two");
  }
  if (!is_power_of_two(sparsecores)) {
    return NotAllowed("sparsecores_per_shard", absl::StrCat(sparsecores), "a power of two");
  }
  if (int64_t{shards} * sparsecores <= kMaxPartitions) return absl::OkStatus();
  return NotAllowed("shards", absl::StrCat("a count of ", shards),
                    absl::StrCat("at most ", kMaxPartitions / sparsecores, " with ", sparsecores,
                                 " SparseCores per shard (", kMaxPartitions, " partitions)"));
}

// INVALID_ARGUMENT if the path `value` is empty, because `reason`.
absl::Status CheckPresent(absl::string_view field, const std::string& value,
                          absl::string_view reason) {
  if (!value.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("security.", field, ": empty; ", reason));
}

absl::Status CheckTls(const v1::TlsConfig& tls) {
  RETURN_IF_ERROR(CheckPresent("tls.certificate_file", tls.certificate_file(),
                               "TLS needs the certificate of the process"));
  RETURN_IF_ERROR(CheckPresent("tls.key_file", tls.key_file(), "TLS needs the certificate's key"));
  return CheckPresent("tls.ca_file", tls.ca_file(),
                      "TLS needs the authorities that coordinators trust for shards");
}

// Whoever listens on the way reads a token that travels in plain text. gRPC, which sees to that,
// takes connections over these addresses alone, and not over the rest of 127.0.0.0/8.
bool MayCarryPlainTokens(const std::string& host) {
  return host == "127.0.0.1" || host == "[::1]" || host == "localhost";
}

template <typename Process>
absl::Status CheckPlainTokens(const google::protobuf::RepeatedPtrField<Process>& processes,
                              absl::string_view list) {
  for (int i = 0; i < processes.size(); ++i) {
    for (const auto& [field, text] : {std::pair("address", processes[i].address()),
                                      std::pair("http_address", processes[i].http_address())}) {
      if (text.empty()) continue;
      ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
      if (MayCarryPlainTokens(address.host)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          FieldPath(FieldPath("", list, i), field), ": ", QuotedText(text),
          " is not 127.0.0.1, [::1] or localhost, and tokens would travel there in plain text; "
          "security.tokens_file needs security.tls"));
    }
  }
  return absl::OkStatus();
}

// Checks `security` of a cluster whose addresses have been checked. The files that it names are not
// opened.
absl::Status CheckSecurity(const v1::ClusterConfig& cluster) {
  const v1::SecurityConfig& security = cluster.security();
  if (security.has_tls()) RETURN_IF_ERROR(CheckTls(security.tls()));
  const bool tokens = !security.tokens_file().empty();
  if (tokens) {
    RETURN_IF_ERROR(CheckPresent("cluster_token_file", security.cluster_token_file(),
                                 "with tokens_file, coordinators need a token for shards"));
  }
  if (!security.cluster_token_file().empty()) {
    RETURN_IF_ERROR(CheckPresent("tokens_file", security.tokens_file(),
                                 "it must list the token of cluster_token_file"));
  }
  if (!tokens || security.has_tls()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPlainTokens(cluster.shards(), "shards"));
  return CheckPlainTokens(cluster.coordinators(), "coordinators");
}

using Storage = v1::StorageConfig;
// Fields of `storage` that some durabilities ignore, with those that do not; the first is advised.
constexpr std::pair<absl::string_view, Storage::Durability> kUsedBy[] = {
    {"every_seconds", Storage::CHECKPOINT},
    {"every_steps", Storage::CHECKPOINT},
    {"keep", Storage::CHECKPOINT},
    {"keep", Storage::MEMORY},
    {"fsync", Storage::LOG},
    {"fsync_interval_ms", Storage::LOG},
    {"log_bytes", Storage::LOG}};

// `storage` is complete; what stands there as its default was perhaps not asked for.
absl::Status CheckUsed(const Storage& storage) {
  Storage defaults;
  FillFields(&defaults);
  for (const auto& [name, user] : kUsedBy) {
    const auto& field = *storage.GetDescriptor()->FindFieldByName(std::string(name));
    const std::string value = ValueText(storage, field);
    const bool used = absl::c_linear_search(kUsedBy, std::pair(name, storage.durability()));
    if (used || value == ValueText(defaults, field)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("storage.", name, ": ", value, " would be ignored with durability ",
                     Storage::Durability_Name(storage.durability()),
                     "; remove it, or write durability: ", Storage::Durability_Name(user)));
  }
  if (storage.fsync() == Storage::INTERVAL ||
      storage.fsync_interval_ms() == defaults.fsync_interval_ms()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "storage.fsync_interval_ms: ", storage.fsync_interval_ms(), " would be ignored with fsync ",
      Storage::Fsync_Name(storage.fsync()), "; remove it, or write fsync: INTERVAL"));
}

// Checks `storage` and fills in its paths. What is there is not looked at: other machines read the
// description, too.
absl::Status CompleteStorage(v1::StorageConfig* storage) {
  if (storage->directory().empty()) {
    return absl::InvalidArgumentError(
        "storage.directory: empty; name the folder that emberd may write to");
  }
  if (storage->checkpoints().empty()) {
    storage->set_checkpoints(
        absl::StrCat(absl::StripSuffix(storage->directory(), "/"), "/checkpoints"));
  }
  return CheckUsed(*storage);
}

absl::Status CheckDigest(const std::string& path, const v1::Token& token) {
  const bool hex = absl::c_all_of(
      token.sha256(), [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
  if (hex && token.sha256().size() == kDigestDigits) return absl::OkStatus();
  // Not shown: it may be the token itself, by mistake.
  return absl::InvalidArgumentError(
      absl::StrCat(FieldPath(path, "sha256"), ": a text of ", token.sha256().size(),
                   " characters is not allowed; it must be 64 hex digits, the SHA-256 of the "
                   "token"));
}

int CpuCount() { return std::max(1u, std::thread::hardware_concurrency()); }

}  // namespace

int ShardsOnOneHost(const v1::ClusterConfig& cluster) {
  absl::flat_hash_map<std::string, int> shards;  // by host
  int most = 1;
  for (const v1::ShardConfig& shard : cluster.shards()) {
    const absl::StatusOr<Address> address = ParseAddress(shard.address());
    if (address.ok()) most = std::max(most, ++shards[address->host]);
  }
  return most;
}

// Half of the memory is for tables. The other half is for batches and requests of all processes,
// for what they need themselves, and for whatever else runs there.
void FillBudgets(int64_t memory_bytes, v1::ClusterConfig* cluster) {
  v1::BudgetConfig& budgets = *cluster->mutable_budgets();
  const auto fill = [&budgets](const char* name, int64_t value) {
    const auto& field = *budgets.GetDescriptor()->FindFieldByName(name);
    const auto& reflection = *budgets.GetReflection();
    if (reflection.GetInt64(budgets, &field) == 0) reflection.SetInt64(&budgets, &field, value);
  };
  const int64_t partitions =
      int64_t{ShardsOnOneHost(*cluster)} * std::max(1, cluster->sparsecores_per_shard());
  fill("bytes_per_sparsecore", std::max(kMinBudget, memory_bytes / 2 / partitions));
  fill("batch_bytes", std::clamp(memory_bytes / 16, kMinBudget, kMaxBatchBytes));
  fill("in_flight_bytes", std::clamp(memory_bytes / 8, kMinBudget, kMaxInFlightBytes));
  fill("shared_memory_bytes", std::clamp(memory_bytes / 8, kMinBudget, kMaxInFlightBytes));
  if (cluster->has_storage() && cluster->storage().copy_bytes() == 0) {
    cluster->mutable_storage()->set_copy_bytes(
        std::clamp(memory_bytes / 16 / ShardsOnOneHost(*cluster), kMinBudget, kMaxCopyBytes));
  }
}

absl::Status CompleteCluster(v1::ClusterConfig* cluster) {
  RETURN_IF_ERROR(CheckFields(*cluster));
  v1::ClusterConfig complete = *cluster;
  if (complete.sparsecores_per_shard() == 0) complete.set_sparsecores_assumed(true);
  complete.mutable_budgets();
  complete.mutable_timeouts();
  complete.mutable_logging();
  FillFields(&complete);
  FillBudgets(ReadMachineMemory().limit, &complete);
  if (complete.shard_threads() == 0) complete.set_shard_threads(CpuCount());
  if (complete.coordinator_threads() == 0) complete.set_coordinator_threads(CpuCount());

  RETURN_IF_ERROR(CheckPartitions(complete));
  AddressChecker addresses;
  RETURN_IF_ERROR(addresses.CheckAll(complete.shards(), "shards"));
  RETURN_IF_ERROR(addresses.CheckAll(complete.coordinators(), "coordinators"));
  RETURN_IF_ERROR(CheckSecurity(complete));
  if (const auto& log = complete.logging(); !log.file().empty() && log.file() == log.span_file()) {
    return NotAllowed("logging.span_file", QuotedText(log.file()), "another than logging.file");
  }
  if (complete.has_storage()) RETURN_IF_ERROR(CompleteStorage(complete.mutable_storage()));
  if (complete.has_eviction() && complete.eviction().spill_folder().empty()) {
    return absl::InvalidArgumentError(
        "eviction.spill_folder: empty; name a folder for the rows that leave memory");
  }
  *cluster = std::move(complete);
  return absl::OkStatus();
}

absl::Status CompleteTokenFile(v1::TokenFile* file) {
  RETURN_IF_ERROR(CheckFields(*file));
  if (file->tokens().empty()) {
    return absl::InvalidArgumentError("tokens: empty; at least one is needed");
  }
  v1::TokenFile complete = *file;
  absl::flat_hash_map<std::string, std::string> names;    // name -> path of the token
  absl::flat_hash_map<std::string, std::string> digests;  // the same for digests
  for (int i = 0; i < complete.tokens_size(); ++i) {
    v1::Token& token = *complete.mutable_tokens(i);
    const std::string path = FieldPath("", "tokens", i);
    if (token.role() == v1::Token::ROLE_UNSPECIFIED) {
      return NotAllowed(FieldPath(path, "role"), v1::Token::Role_Name(token.role()),
                        "one of READER, TRAINER, LOADER, ADMIN, CLUSTER");
    }
    RETURN_IF_ERROR(CheckDigest(path, token));
    absl::AsciiStrToLower(token.mutable_sha256());
    if (const auto [earlier, inserted] = names.emplace(token.name(), path); !inserted) {
      return NotAllowed(FieldPath(path, "name"), QuotedText(token.name()),
                        absl::StrCat("unique; it is also ", earlier->second, ".name"));
    }
    if (const auto [earlier, inserted] = digests.emplace(token.sha256(), path); !inserted) {
      return absl::InvalidArgumentError(
          absl::StrCat(FieldPath(path, "sha256"), ": the token is also that of ", earlier->second,
                       "; give each name its own token"));
    }
  }
  *file = std::move(complete);
  return absl::OkStatus();
}

}  // namespace emberd::config
