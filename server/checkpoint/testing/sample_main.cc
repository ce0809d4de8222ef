// Writes files of rows for a test in another language: write_checkpoint_sample FOLDER.
#include <iostream>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/checkpoint/partition_file.h"
#include "shard/store/stack_store.h"

namespace emberd::checkpoint {
namespace {

// Rows 3 to 5 and then 1 of ten; column c of row r is 16 * r + c.
absl::Status WriteSample(const std::string& folder, v1::DataType dtype, const std::string& stack) {
  const PartitionArray array{.model = "m",
                             .stack = stack,
                             .array = kWeightsArray,
                             .partition = 1,
                             .partitions = 2,
                             .dtype = dtype,
                             .columns = 16,
                             .rows_per_partition = 10};
  ASSIGN_OR_RETURN(const auto writer, PartitionFileWriter::Create(folder, array));
  for (const int row : {3, 4, 5, 1}) {
    std::vector<float> values;
    for (int c = 0; c < array.columns; ++c) values.push_back(static_cast<float>(16 * row + c));
    std::vector<char> stored(array.row_bytes());
    shard::WriteStoredRow(dtype, values, stored.data());
    RETURN_IF_ERROR(writer->Append(row, stored));
  }
  return writer->Finish().status();
}

// Nobody has touched a row of it.
absl::Status WriteEmpty(const std::string& folder) {
  ASSIGN_OR_RETURN(const auto writer,
                   PartitionFileWriter::Create(folder, {.model = "m",
                                                        .stack = "empty",
                                                        .array = "accumulator",
                                                        .columns = 1,
                                                        .rows_per_partition = 10}));
  return writer->Finish().status();
}

absl::Status WriteAll(const std::string& folder) {
  RETURN_IF_ERROR(WriteSample(folder, v1::FLOAT32, "float32"));
  RETURN_IF_ERROR(WriteSample(folder, v1::BFLOAT16, "bfloat16"));
  RETURN_IF_ERROR(WriteSample(folder, v1::FLOAT16, "float16"));
  return WriteEmpty(folder);
}

}  // namespace
}  // namespace emberd::checkpoint

int main(int argc, char** argv) {
  const absl::Status status = emberd::checkpoint::WriteAll(argv[argc - 1]);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
