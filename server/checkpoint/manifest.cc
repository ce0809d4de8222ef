#include "server/checkpoint/manifest.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "config/config.h"
#include "config/shared_tables.h"
#include "google/protobuf/util/json_util.h"
#include "server/checkpoint/partition_file.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace {

constexpr size_t kLongestCheckpointName = 128;

// What follows the bytes that it is the checksum of.
std::string ChecksumField(absl::string_view before) {
  return absl::StrFormat(",\n \"crc32c\": \"%08x\"\n}\n", ExtendCrc32c(0, before));
}

absl::Status CheckFiles(const v1::CheckpointManifest& manifest) {
  std::set<std::string> paths;
  std::set<std::tuple<std::string, std::string, int>> arrays;
  const auto check = [&](const v1::CheckpointFile& file) -> absl::Status {
    RETURN_IF_ERROR(files::CheckFileName(file.path()));
    if (file.path() == kManifestFile || file.bytes() < 0 || file.rows() < 0 ||
        !paths.insert(file.path()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("its entry of file ", file.path(), " is wrong"));
    }
    return absl::OkStatus();
  };
  for (const v1::CheckpointFile& state : manifest.states()) RETURN_IF_ERROR(check(state));
  for (const v1::CheckpointFile& file : manifest.files()) {
    RETURN_IF_ERROR(check(file));
    RETURN_IF_ERROR(
        FindPartitionArray(manifest, file.stack(), file.array(), file.partition()).status());
    if (file.partition() < 0 || file.partition() >= manifest.plan().partitions() ||
        !arrays.insert({file.stack(), file.array(), file.partition()}).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "its entry of file ", file.path(), " names partition ", file.partition(), " of ",
          manifest.plan().partitions(), "; it must exist and belong to one file only"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTable(const v1::TablePlan& table, const v1::StackPlan& stack,
                        int64_t partitions) {
  const int64_t rows = table.padded_vocabulary_size() / partitions;
  if (table.padded_vocabulary_size() % partitions != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("table ", table.name(),
                     ": first dim of the table should be multiple of number of "
                     "sparse cores, but it is ",
                     table.padded_vocabulary_size(), ", and there are ", partitions));
  }
  if (table.vocabulary_size() < 1 || table.vocabulary_size() > table.padded_vocabulary_size() ||
      table.embedding_dim() < 1 || table.embedding_dim() > stack.embedding_dim() ||
      table.row_offset() < 0 || table.row_offset() > stack.rows_per_partition() - rows ||
      table.shard_rotation() < 0 || table.shard_rotation() >= partitions) {
    return absl::InvalidArgumentError(
        absl::StrCat("table ", table.name(), " does not fit its stack ", stack.name()));
  }
  return absl::OkStatus();
}

absl::Status CheckPlan(const v1::ModelPlan& plan) {
  if (plan.partitions() < 1) return absl::InvalidArgumentError("its plan has no partitions");
  for (const v1::StackPlan& stack : plan.stacks()) {
    const int64_t rows = stack.rows_per_partition();
    if (rows < 1 || rows > std::numeric_limits<int32_t>::max() || stack.embedding_dim() < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("stack ", stack.name(), " has no rows or too many"));
    }
    if (stack.vocabulary_size() != rows * plan.partitions()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stack ", stack.name(), ": Only evenly sharding across devices is supported, but ",
          plan.partitions(), " partitions of ", rows, " rows are not ", stack.vocabulary_size()));
    }
    for (const v1::TablePlan& table : stack.tables()) {
      RETURN_IF_ERROR(CheckTable(table, stack, plan.partitions()));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckManifest(const v1::CheckpointManifest& manifest) {
  RETURN_IF_ERROR(CheckCheckpointName(manifest.name()));
  if (manifest.chain() < 0 || (manifest.chain() > 0) != !manifest.parent().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("chain ", manifest.chain(), " and parent \"",
                                                   manifest.parent(), "\" contradict each other"));
  }
  if (!manifest.parent().empty()) {
    RETURN_IF_ERROR(CheckCheckpointName(manifest.parent()));
    if (manifest.parent() == manifest.name()) {
      return absl::InvalidArgumentError("it names itself as its parent");
    }
  }
  RETURN_IF_ERROR(CheckPlan(manifest.plan()));
  return CheckFiles(manifest);
}

}  // namespace

absl::Status CheckCheckpointName(absl::string_view name) {
  bool good =
      !name.empty() && name.size() <= kLongestCheckpointName && absl::ascii_isalnum(name[0]);
  for (const char c : name) good = good && (absl::ascii_isalnum(c) || absl::StrContains("_-.", c));
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "checkpoint name \"", name.substr(0, kLongestCheckpointName + 1), "\" must be 1 to ",
      kLongestCheckpointName, " letters, digits and _-., beginning with a letter or digit"));
}

absl::Status CheckNewCheckpointName(absl::string_view name) {
  RETURN_IF_ERROR(CheckCheckpointName(name));
  if (name != kNewestCheckpoint) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "checkpoint name \"newest\": it stands for the newest checkpoint, whatever its name; no "
      "checkpoint can be saved or deleted under it: give a name of its own");
}

absl::StatusOr<std::string> EncodeManifest(const v1::CheckpointManifest& manifest) {
  if (absl::Status status = CheckManifest(manifest); !status.ok()) {
    return absl::InternalError(absl::StrCat("manifest: ", status.message()));
  }
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto printed = google::protobuf::util::MessageToJsonString(manifest, &json, options);
  absl::string_view text = json;
  if (!printed.ok() || !absl::ConsumeSuffix(&text, "\n}\n")) {
    return absl::InternalError(absl::StrCat("manifest: ", printed.ToString()));
  }
  return absl::StrCat(text, ChecksumField(text));
}

absl::StatusOr<v1::CheckpointManifest> ParseManifest(absl::string_view text) {
  const size_t length = ChecksumField("").size();
  const absl::string_view json = text.substr(0, text.size() - std::min(text.size(), length));
  if (absl::StrCat(json, ChecksumField(json)) != text) {
    return absl::DataLossError("its checksum is wrong: it was cut off or changed");
  }
  v1::CheckpointManifest manifest;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;  // of a later version, which is told below
  const auto parsed =
      google::protobuf::util::JsonStringToMessage(absl::StrCat(json, "\n}\n"), &manifest, options);
  if (!parsed.ok())
    return absl::DataLossError(absl::StrCat("it cannot be read: ", parsed.ToString()));
  if (manifest.format_version() != kManifestVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("its format_version is ", manifest.format_version(),
                     ", but this emberd reads ", kManifestVersion));
  }
  if (absl::Status status = CheckManifest(manifest); !status.ok()) {
    return absl::DataLossError(status.message());
  }
  return manifest;
}

absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& folder) {
  const std::string path = files::PathIn(folder, kManifestFile);
  absl::StatusOr<std::string> text = files::ReadFileWhole(path);
  if (absl::IsNotFound(text.status())) {
    return files::DamagedFile(path, "is missing: a folder without a manifest is not a checkpoint");
  }
  RETURN_IF_ERROR(text.status());
  absl::StatusOr<v1::CheckpointManifest> manifest = ParseManifest(*text);
  if (!manifest.ok()) return Annotate(manifest.status(), path);
  const std::filesystem::path names = folder;
  if (names.filename().string() != manifest->name() ||
      names.parent_path().filename().string() != files::EscapeFileName(manifest->model())) {
    return files::DamagedFile(path,
                              absl::StrCat("it is the manifest of checkpoint \"", manifest->name(),
                                           "\" of model \"", manifest->model(), "\""));
  }
  return manifest;
}

bool SameLayout(const v1::CheckpointManifest& a, const v1::CheckpointManifest& b) {
  if (a.plan().partitions() != b.plan().partitions() ||
      a.plan().stacks_size() != b.plan().stacks_size()) {
    return false;
  }
  for (int i = 0; i < a.plan().stacks_size(); ++i) {
    const v1::StackPlan& x = a.plan().stacks(i);
    const v1::StackPlan& y = b.plan().stacks(i);
    const auto same = [&](absl::string_view array) {
      const auto in_a = FindPartitionArray(a, x.name(), array, 0);
      const auto in_b = FindPartitionArray(b, x.name(), array, 0);
      if (!in_a.ok() || !in_b.ok()) return in_a.ok() == in_b.ok();
      return in_a->dtype == in_b->dtype && in_a->columns == in_b->columns;
    };
    if (x.name() != y.name() || x.embedding_dim() != y.embedding_dim() ||
        x.rows_per_partition() != y.rows_per_partition() || x.tables_size() != y.tables_size() ||
        !same(kWeightsArray) || !absl::c_equal(x.slots(), y.slots()) ||
        !absl::c_all_of(x.slots(), same)) {
      return false;
    }
    for (int t = 0; t < x.tables_size(); ++t) {
      if (x.tables(t).SerializeAsString() != y.tables(t).SerializeAsString()) return false;
    }
  }
  return true;
}

absl::Status CheckSameTables(const v1::CheckpointManifest& manifest,
                             const v1::ModelConfig& config) {
  using Shape = std::pair<int64_t, int64_t>;
  const auto shapes = [](const v1::ModelConfig& model) {
    std::map<std::string, Shape> shapes;
    for (const v1::TableConfig& table : model.tables()) {
      shapes[table.name()] = {table.vocabulary_size(), table.embedding_dim()};
    }
    return shapes;
  };
  const auto text = [](const std::map<std::string, Shape>& shapes, const std::string& table) {
    const auto found = shapes.find(table);
    return found == shapes.end() ? std::string("absent")
                                 : absl::StrCat(found->second.first, " x ", found->second.second);
  };
  const auto saved = shapes(manifest.config());
  const auto wanted = shapes(config);
  for (const auto& [from, to] : {std::pair(&saved, &wanted), std::pair(&wanted, &saved)}) {
    for (const auto& [table, shape] : *from) {
      const auto found = to->find(table);
      if (found != to->end() && found->second == shape) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("Layouts in checkpoint and embedding must have the same keys: table \"",
                       table, "\" is ", text(saved, table), " in checkpoint \"", manifest.name(),
                       "\", and ", text(wanted, table), " in the model"));
    }
  }
  for (const v1::TableConfig& table : config.tables()) {
    const std::string& stored = config::StoredTable(config, table).name();
    if (config::StoredName(manifest.config(), table.name()) ==
        config::StoredName(manifest.config(), stored)) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrCat("tables \"", stored, "\" and \"", table.name(),
                     "\" have one resource in the model, but rows of their own in checkpoint \"",
                     manifest.name(), "\""));
  }
  // Rows that nobody had touched are in no file.
  v1::ModelConfig adopted = config;
  config::AdoptSeedNames(manifest.config(), &adopted);
  const auto beginning = [](const v1::ModelConfig& model, const std::string& name) {
    const auto table =
        absl::c_find_if(model.tables(), [&](const auto& t) { return t.name() == name; });
    const v1::InitializerConfig& rows = table->initializer();
    const bool drawn = rows.has_uniform() || rows.has_normal() || rows.has_truncated_normal();
    return absl::StrCat(drawn ? absl::StrCat("seed ", model.seed(), ", seed_name \"",
                                             config::SeedName(model, *table), "\", ")
                              : "",
                        "initializer { ", rows.ShortDebugString(), " }");
  };
  for (const v1::TableConfig& table : manifest.config().tables()) {
    const std::string saved = beginning(manifest.config(), table.name());
    const std::string wanted = beginning(adopted, table.name());
    if (saved == wanted || table.initializer().has_assigned()) continue;  // those are all there
    return absl::FailedPreconditionError(
        absl::StrCat("initial rows of table \"", table.name(), "\" have ", wanted,
                     "; they must have those of checkpoint \"", manifest.name(), "\": ", saved));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ModelConfig> RestoredConfig(const v1::CheckpointManifest& manifest,
                                               const v1::RestoreCheckpointRequest& request) {
  if (!request.has_config()) return manifest.config();
  v1::ModelConfig config = request.config();
  RETURN_IF_ERROR(config::CompleteModel(&config));
  if (config.name() != manifest.model()) {
    return absl::InvalidArgumentError(absl::StrCat("config.name is '", config.name(),
                                                   "'; the checkpoint is of model '",
                                                   manifest.model(), "'"));
  }
  RETURN_IF_ERROR(CheckSameTables(manifest, config));
  config::AdoptSeedNames(manifest.config(), &config);
  return config;
}

v1::CheckpointInfo InfoOf(const v1::CheckpointManifest& manifest) {
  v1::CheckpointInfo info;
  info.set_model(manifest.model());
  info.set_name(manifest.name());
  info.set_saved_at_ms(manifest.saved_at_ms());
  info.set_parent(manifest.parent());
  info.set_chain(manifest.chain());
  info.set_automatic(manifest.automatic());
  info.set_changes(manifest.changes());
  *info.mutable_groups() = manifest.groups();
  int64_t bytes = 0;
  int64_t rows = 0;
  for (const v1::CheckpointFile& file : manifest.files()) {
    bytes += file.bytes();
    if (file.array() == kWeightsArray) rows += file.rows();
  }
  for (const v1::CheckpointFile& file : manifest.states()) bytes += file.bytes();
  info.set_bytes(bytes);
  info.set_rows(rows);
  return info;
}

}  // namespace emberd::checkpoint
