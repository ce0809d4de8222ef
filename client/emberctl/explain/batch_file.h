// A batch in files, for looking at it without a server: JSON, or arrays in NumPy's .npy format.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/sort_and_merge.h"

namespace emberd::emberctl {

struct Array {
  std::vector<int64_t> shape;
  std::variant<std::vector<int32_t>, std::vector<int64_t>, std::vector<float>> values;
};

// Reads the content of a file that ReadNpyStart accepts, of little-endian int32, int64 or float32.
// INVALID_ARGUMENT for anything else.
absl::StatusOr<Array> ParseNpy(absl::string_view content);

struct BatchFile {
  // Each path is one of
  //   a JSON file {"FEATURE": {"ids": [[1, 2], [], 3], "weights": [[0.5, 1], [], 2]}, ...}:
  //     one element per sample, a list of ids or a single id, in lists as output_shape has them, or
  //     single ids in one list; weights are optional;
  //   FEATURE.ids.npy, integers of a shape as FeatureConfig.output_shape says;
  //   FEATURE.values.npy with FEATURE.row_splits.npy, ragged: sample i has values[row_splits[i] :
  //     row_splits[i + 1]];
  //   FEATURE.weights.npy, optional float32: of the shape of the ids or values, or one for all;
  //   a directory of such .npy files.
  // Together they must hold every feature of the model once. INVALID_ARGUMENT names file, feature
  // and sample; values are left to the preprocessor's checks.
  static absl::StatusOr<BatchFile> Load(const std::vector<std::string>& paths,
                                        const v1::ModelConfig& model);
  BatchFile() = default;
  BatchFile(BatchFile&&) = default;  // the inputs of a copy would refer to the original

  std::vector<preprocess::FeatureInput> inputs;  // by index in the config
  // By feature and part ("ids", "values", "row_splits", "weights"): what the inputs refer to. Each
  // stays where it is when the maps move.
  std::map<std::string, std::map<std::string, Array>> arrays;
};

}  // namespace emberd::emberctl
