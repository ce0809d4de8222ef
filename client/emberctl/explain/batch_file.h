// A batch in files, for looking at it without a server: JSON, or arrays in NumPy's .npy format.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/feature_input.h"

namespace emberd::emberctl {

struct Array {
  std::vector<int64_t> shape;
  std::variant<std::vector<int32_t>, std::vector<int64_t>, std::vector<float>> values;
};

// Reads the content of a file that ReadNpyStart accepts, of little-endian int32, int64 or float32.
// INVALID_ARGUMENT for anything else.
absl::StatusOr<Array> ParseNpy(absl::string_view content);

// Owns what its inputs refer to.
class BatchFile {
 public:
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
  BatchFile(BatchFile&&) = default;

  // By index in the config.
  const std::vector<preprocess::FeatureInput>& inputs() const { return inputs_; }

 private:
  BatchFile() = default;
  using Parts = std::map<std::string, Array>;  // "ids", "values", "row_splits", "weights"

  absl::Status AddPath(const std::string& path, const v1::ModelConfig& model);
  absl::Status AddJson(const std::string& text, const v1::ModelConfig& model);
  absl::Status AddJsonFeature(const std::string& name, nlohmann::json feature,
                              const v1::ModelConfig& model);
  absl::Status AddNpy(const std::string& path);
  absl::Status Add(const std::string& feature, const std::string& part, Array array);
  static absl::StatusOr<preprocess::FeatureInput> InputOf(const Parts& parts,
                                                          const v1::FeatureConfig& config);
  absl::Status MakeInputs(const v1::ModelConfig& model);

  std::map<std::string, Parts> features_;  // its arrays stay where they are when the map moves
  std::vector<preprocess::FeatureInput> inputs_;
};

}  // namespace emberd::emberctl
