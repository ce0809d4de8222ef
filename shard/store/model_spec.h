// What a shard must know of a model: its stacks, and how their rows begin and learn. No proto, no
// plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/storage.h"
#include "emberd/v1/model.pb.h"

namespace emberd::shard {

// Rows [row_offset, row_offset + padded rows / P) of every partition belong to this table.
// Logical id e: partition (e + shard_rotation) mod P, local row e div P + row_offset.
struct TableSpec {
  std::string name;  // together with the seed: key of the initial values
  int64_t vocabulary_size = 0;
  int64_t padded_vocabulary_size = 0;
  int embedding_dim = 0;  // columns beyond it are padding: always 0
  int64_t row_offset = 0;
  int shard_rotation = 0;
  v1::InitializerConfig initializer;
};

struct StackSpec {
  std::string name;
  int embedding_dim = 0;  // padded width
  int64_t rows_per_partition = 0;
  std::vector<TableSpec> tables;
  v1::OptimizerConfig optimizer;  // complete: every field present
  v1::DataType storage_dtype = v1::FLOAT32;
  bool stochastic_rounding = false;  // of 16-bit weights, in updates
  bool skip_nonfinite = false;       // a row whose summed gradient is not finite; else refused
  v1::ResultMode result_mode = v1::PARTIAL_SUMS;
  bool quantized = false;
  v1::QuantizationConfig quantization;
};

// Bytes of the weights of one row.
inline int64_t RowBytes(const StackSpec& stack) {
  return stack.embedding_dim * config::WeightBytes(stack.storage_dtype);
}

struct ModelSpec {
  uint64_t model_id = 0;
  std::string name;
  uint64_t seed = 0;
  int partitions = 1;       // P, of the whole cluster
  int first_partition = 0;  // this shard owns [first_partition, first_partition + partition_count)
  int partition_count = 1;  // K, a power of two
  std::vector<StackSpec> stacks;
};

}  // namespace emberd::shard
