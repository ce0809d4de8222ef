// A model as a trainer declares it in code, and as the cluster answers. Plain data.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace emberd::client {

// How the rows of the ids of one sample become one activation: see Combiner in model.proto.
enum class Combiner { kMean, kSum, kSqrtn };

// Initial values of a table.
struct Initializer {
  enum class Kind { kDefault, kZeros, kConstant, kUniform, kNormal, kTruncatedNormal, kRowId };
  Kind kind = Kind::kDefault;  // truncated normal, standard deviation 1/sqrt(embedding_dim)
  float a = 0;
  float b = 0;

  static Initializer Zeros() { return {Kind::kZeros}; }
  static Initializer Constant(float value) { return {Kind::kConstant, value}; }
  static Initializer Uniform(float lower, float upper) { return {Kind::kUniform, lower, upper}; }
  static Initializer Normal(float mean, float stddev) { return {Kind::kNormal, mean, stddev}; }
  static Initializer TruncatedNormal(float mean, float stddev) {
    return {Kind::kTruncatedNormal, mean, stddev};
  }
  // Every column of row r is r.
  static Initializer RowId() { return {Kind::kRowId}; }
};

// `name` and the keys of `parameters` are those of OptimizerConfig in model.proto, for example
//   Optimizer{"adam", {{"learning_rate", 0.001}, {"beta1", 0.8}}}
// Flags are 0 or 1. What is not named keeps its default. Decay rates are double in the config, so
// write 0.999 and not 0.999f.
struct Optimizer {
  std::string name = "adagrad";
  std::map<std::string, double> parameters = {};
};

struct TableDescription {
  std::string name;
  int64_t vocabulary_size = 0;
  int32_t embedding_dim = 0;
  Combiner combiner = Combiner::kMean;
  Initializer initializer = {};
  std::optional<Optimizer> optimizer = std::nullopt;  // absent: the model's
  int32_t max_ids_per_partition = 0;                  // 0: no limit
  int32_t max_unique_ids_per_partition = 0;           // 0: no limit
};

struct FeatureDescription {
  std::string name;
  std::string table;
  int64_t batch_size = 1;  // planned samples of a step, of all replicas
};

// The common part of a ModelConfig. Write the whole of it as config text (see Client::DeclareModel)
// if you need more.
struct ModelDescription {
  std::string name;
  std::vector<TableDescription> tables = {};
  std::vector<FeatureDescription> features = {};
  Optimizer optimizer = {};  // of tables that name none
  uint64_t seed = 0;
};

struct DeclareOptions {
  // A model that is not there yet begins with the rows of this checkpoint of a model of its name,
  // instead of initial ones; "newest": the newest.
  std::string restore_from = {};
  absl::Duration deadline = absl::ZeroDuration();  // zero: the client's; with restore_from, a day
  uint64_t filled = 0;  // Model::unfilled of the first declaration: all rows have been assigned
};

struct TableInfo {
  std::string name;
  int64_t vocabulary_size = 0;
  int32_t embedding_dim = 0;
  std::string combiner;  // "mean", "sum" or "sqrtn"
  std::string stack;
  std::string optimizer;           // e.g. "adagrad"
  std::vector<std::string> slots;  // e.g. {"accumulator"}
  // Row e is in partition (e + shard_rotation) mod P of its stack, there at e div P + row_offset.
  int64_t row_offset = 0;
  int32_t shard_rotation = 0;
  std::vector<double> quantization = {};  // lower, upper and num_buckets; empty: off
};

struct FeatureInfo {
  std::string name;
  std::string table;
  int32_t embedding_dim = 0;  // columns of its activations
  // Of its activations without the last dimension, as FeatureConfig says; empty: [samples]. They
  // are received as [samples, embedding_dim] all the same, row-major, so it is the shape to read
  // them in; the first dimension may be any.
  std::vector<int64_t> output_shape = {};
};

struct StackInfo {
  std::string name;
  int32_t embedding_dim = 0;  // padded width
  int64_t rows_per_partition = 0;
  int64_t bytes_per_partition = 0;  // weights and slots
  std::vector<std::string> tables;
};

// A declared model: everything that the other calls need to know of it. Immutable, cheap enough to
// copy.
struct Model {
  uint64_t id = 0;
  std::string name;
  bool created = false;  // false: it was there already
  // Not 0: a table has the initializer `assigned`, and AssignRows with this model gives its first
  // rows; the model is served when it is declared again with this as DeclareOptions::filled.
  uint64_t unfilled = 0;
  std::vector<TableInfo> tables;      // in the order of the config
  std::vector<FeatureInfo> features;  // in the order of the config
  std::vector<StackInfo> stacks;
  int32_t shards = 0;
  int32_t sparsecores_per_shard = 0;
  int64_t table_bytes = 0;            // weights and slots, over all shards
  std::vector<std::string> warnings;  // of the plan: what may not be meant

  // Null if there is none of this name.
  const TableInfo* FindTable(const std::string& name) const;
  const FeatureInfo* FindFeature(const std::string& name) const;
};

}  // namespace emberd::client
