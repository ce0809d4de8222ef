#include "server/checkpoint/partition_array.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/safetensors.h"
#include "base/status.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "preprocess/plan/placement.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace {

constexpr char kFormat[] = "emberd.checkpoint.1";
constexpr char kValues[] = "values";
constexpr char kRowRanges[] = "row_ranges";
constexpr int64_t kRangeBytes = 2 * sizeof(int32_t);
constexpr int64_t kPage = 4096;

const char* TypeName(v1::DataType dtype) {
  return dtype == v1::BFLOAT16 ? "BF16" : dtype == v1::FLOAT16 ? "F16" : "F32";
}

// The partition as a slice of the variable that all of them make, in TensorFlow's terms.
std::map<std::string, std::string> Metadata(const PartitionArray& array) {
  const int64_t all_rows = array.rows_per_partition * array.partitions;
  const int64_t first_row = array.rows_per_partition * array.partition;
  return {
      {"format", kFormat},
      {"model", array.model},
      {"stack", array.stack},
      {"array", array.array},
      {"partition", absl::StrCat(array.partition)},
      {"partitions", absl::StrCat(array.partitions)},
      {"variable",
       array.array == kWeightsArray ? array.stack : absl::StrCat(array.stack, "/", array.array)},
      {"full_shape", absl::StrCat("[", all_rows, ", ", array.columns, "]")},
      {"slice_spec", absl::StrCat(all_rows, " ", array.columns, " ", first_row, ",",
                                  array.rows_per_partition, ":0,", array.columns)},
  };
}

SafetensorsHeader Header(const PartitionArray& array, const PartitionHeader& header) {
  const int64_t values = header.rows * array.row_bytes();
  return {
      .metadata = Metadata(array),
      .tensors = {
          {kValues, TypeName(array.dtype), {header.rows, array.columns}, 0, values},
          {kRowRanges, "I32", {header.ranges, 2}, values, values + header.ranges * kRangeBytes}}};
}

}  // namespace

int64_t PartitionArray::row_bytes() const { return columns * config::WeightBytes(dtype); }

absl::StatusOr<PartitionArray> FindPartitionArray(const v1::CheckpointManifest& manifest,
                                                  absl::string_view stack, absl::string_view array,
                                                  int partition) {
  for (const v1::StackPlan& plan : manifest.plan().stacks()) {
    if (plan.name() != stack || plan.tables().empty()) continue;
    PartitionArray found{.model = manifest.model(),
                         .stack = plan.name(),
                         .array = std::string(array),
                         .partition = partition,
                         .partitions = manifest.plan().partitions(),
                         .columns = plan.embedding_dim(),
                         .rows_per_partition = plan.rows_per_partition()};
    const auto& tables = manifest.config().tables();
    const auto table = std::find_if(tables.begin(), tables.end(), [&](const v1::TableConfig& t) {
      return t.name() == plan.tables(0).name();
    });
    if (table == tables.end()) break;
    if (array == kWeightsArray) {
      found.dtype = table->storage_dtype();
      return found;
    }
    for (const config::SlotInfo& slot : config::OptimizerSlots(table->optimizer())) {
      if (slot.name != array) continue;
      if (slot.one_per_row) found.columns = 1;
      return found;
    }
    break;
  }
  return absl::NotFoundError(absl::StrCat("checkpoint \"", manifest.name(), "\" of model \"",
                                          manifest.model(), "\" has no array \"", array,
                                          "\" of a stack \"", stack, "\""));
}

std::string PartitionFileName(const PartitionArray& array) {
  return absl::StrFormat("%s.%s.p%04d.safetensors", files::EscapeFileName(array.stack),
                         files::EscapeFileName(array.array), array.partition);
}

int64_t PartitionHeaderSize(const PartitionArray& array) {
  const PartitionHeader longest = {array.rows_per_partition, array.rows_per_partition};
  const std::string header = EncodeSafetensorsHeader(Header(array, longest));
  // Rows begin with a page.
  return preprocess::RoundUp(static_cast<int64_t>(header.size()), kPage);
}

std::string EncodePartitionHeader(const PartitionArray& array, const PartitionHeader& header) {
  return EncodeSafetensorsHeader(Header(array, header), PartitionHeaderSize(array));
}

absl::StatusOr<PartitionHeader> ParsePartitionHeader(absl::string_view text,
                                                     const PartitionArray& array,
                                                     int64_t data_bytes) {
  ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensorsHeader(text, data_bytes));
  for (const auto& [name, value] : Metadata(array)) {
    if (header.metadata[name] == value) continue;
    return absl::InvalidArgumentError(absl::StrCat("its ", name, " is \"", header.metadata[name],
                                                   "\", not \"", value,
                                                   "\": it is the wrong file"));
  }
  const auto tensor = [&](size_t i, absl::string_view name, absl::string_view dtype,
                          int64_t columns) {
    const SafetensorsTensor& found = header.tensors[i];
    return found.name == name && found.dtype == dtype && found.shape.size() == 2 &&
           found.shape[1] == columns;
  };
  if (header.tensors.size() != 2) {
    return absl::InvalidArgumentError("it does not hold the two tensors values and row_ranges");
  }
  if (!tensor(0, kValues, TypeName(array.dtype), array.columns)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "its first tensor is not values, ", TypeName(array.dtype), " [rows, ", array.columns, "]"));
  }
  if (!tensor(1, kRowRanges, "I32", 2)) {
    return absl::InvalidArgumentError("its second tensor is not row_ranges, I32 [ranges, 2]");
  }
  return PartitionHeader{header.tensors[0].shape[0], header.tensors[1].shape[0]};
}

}  // namespace emberd::checkpoint
