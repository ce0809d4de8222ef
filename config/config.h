// Reads model and cluster descriptions, checks them and fills in defaults.
//
// Errors are INVALID_ARGUMENT (NOT_FOUND for a missing file) and start with the path of the field,
// for example
//   tables[2].optimizer.adagrad.initial_accumulator: -1 is not allowed; it must be > 0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

// Parses text proto or JSON (told apart by the first character that is not white space or in a #
// comment: "{" begins JSON) into a config, which is then checked and completed. Unknown fields,
// wrong types and repeats of a singular field are errors that give line and column, or the field.
absl::StatusOr<v1::ModelConfig> ParseModel(absl::string_view text);
absl::StatusOr<v1::ClusterConfig> ParseCluster(absl::string_view text);
absl::StatusOr<v1::TokenFile> ParseTokenFile(absl::string_view text);
// The same from a file; errors begin with the file's path.
absl::StatusOr<v1::ModelConfig> LoadModel(const std::string& path);
absl::StatusOr<v1::ClusterConfig> LoadCluster(const std::string& path);
absl::StatusOr<v1::TokenFile> LoadTokenFile(const std::string& path);
absl::StatusOr<v1::ClusterConfig> ReadCluster(const std::string& path);  // unchecked, as it stands
// All that stands in a file. Errors say why it cannot be read; NOT_FOUND: there is none;
// FAILED_PRECONDITION: the path is right, but the machine cannot read the file.
absl::StatusOr<std::string> ReadFile(const std::string& path);
// Whether a description is JSON, and not text proto.
bool IsJson(absl::string_view text);

// Checks every value and reference, then writes every default into the message: afterwards each
// optional field is present, each table has its own optimizer, initializer, combiner and storage
// type, and no enum is UNSPECIFIED, groups have names (the model-wide `optimizer` is kept too).
// Exceptions: clip bounds, which stay absent for "no bound", quantization, plan.rotation (its
// default depends on the cluster), plan's capacities, seed_name and the 0 of unlimited limits.
// Idempotent.
absl::Status CompleteModel(v1::ModelConfig* model);
absl::Status CompleteCluster(v1::ClusterConfig* cluster);
// The same for a token file, whose digests become lower case.
absl::Status CompleteTokenFile(v1::TokenFile* file);

// Most shards of the cluster that have one host, and so share its memory.
int ShardsOnOneHost(const v1::ClusterConfig& cluster);
// Fills in the budgets, and with `storage` its copy_bytes, that depend on how much memory a machine
// of the cluster has. CompleteCluster does so with that of this one.
void FillBudgets(int64_t memory_bytes, v1::ClusterConfig* cluster);

// Hash of a complete model config: equal on every process and machine, never 0. It is the model_id.
uint64_t ModelFingerprint(const v1::ModelConfig& model);

// How dense ids are read.
struct DenseShape {
  int64_t samples = 0;
  int64_t ids_per_sample = 1;
};
// By their shape, as FeatureConfig.output_shape says. No extents are checked but those that both
// must have; what cannot be counted is the greatest number. Errors have both shapes, and begin with
// "shape".
absl::StatusOr<DenseShape> SamplesOf(absl::Span<const int64_t> ids,
                                     absl::Span<const int64_t> output_shape);
// The samples that one element of the first dimension of the activation stands for.
int64_t SampleBlock(const v1::FeatureConfig& feature);
// Whether so many samples fill the activation's shape.
absl::Status CheckSamples(const v1::FeatureConfig& feature, int64_t samples);

// Whether some table gets its first rows from the client that declares the model.
bool HasAssignedTable(const v1::ModelConfig& model);

// For errors: the names that there are, in their order.
std::vector<std::string> TableNames(const v1::ModelConfig& model);
std::vector<std::string> FeatureNames(const v1::ModelConfig& model);

// Path and both values of the first field, in field order, in which two complete configs differ,
// and which of them each is; empty if none.
std::string FirstDifference(const v1::ModelConfig& declared, const v1::ModelConfig& requested,
                            absl::string_view first = "in the declared model",
                            absl::string_view second = "in the requested one");

// Whether two complete configs are equal but for the samples that their plans are made for,
// batch_size and the first dimension of output_shape, and the seed_name that a shared table was
// given. A model that is there is found by both.
bool DifferInSamplesAlone(const v1::ModelConfig& declared, v1::ModelConfig requested);

}  // namespace emberd::config
