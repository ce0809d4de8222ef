#include "client/emberctl/explain/batch_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/suggest.h"
#include "client/emberctl/tensor_file.h"
#include "config/config.h"

namespace emberd::emberctl {

namespace {

template <typename T>
absl::StatusOr<Array> Read(absl::string_view data, std::vector<int64_t> shape) {
  int64_t left = static_cast<int64_t>(data.size() / sizeof(T));
  int64_t count = std::find(shape.begin(), shape.end(), 0) == shape.end() ? 1 : 0;
  for (const int64_t size : shape) {
    if (size > 0 && count > left / size) return MalformedNpy("it is shorter than its shape says");
    count *= size;
  }
  if (count * sizeof(T) != data.size()) {
    return MalformedNpy(
        absl::StrCat("it has ", data.size(), " bytes of data instead of ", count * sizeof(T)));
  }
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), data.data(), data.size());
  return Array{std::move(shape), std::move(values)};
}

using nlohmann::json;

constexpr int kMostDepth = 32;  // more than any output_shape asks for

// A name that an object has twice is refused: which one counts?
absl::StatusOr<json> ParseJson(const std::string& text) {
  std::vector<std::set<std::string>> names;  // by depth
  std::string fault;
  const auto look = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMostDepth) {
      fault = absl::StrCat("it has more than ", kMostDepth, " lists and objects in each other");
      return false;
    }
    if (event == json::parse_event_t::object_start) {
      names.resize(std::max<size_t>(names.size(), depth + 2));
      names[depth + 1].clear();
    }
    if (event == json::parse_event_t::key &&
        !names[depth].insert(parsed.get<std::string>()).second) {
      fault = absl::StrCat("\"", parsed.get<std::string>(), "\" occurs twice in one object");
    }
    return true;
  };
  try {
    json parsed = json::parse(text, look);
    if (!fault.empty()) return absl::InvalidArgumentError(fault);
    return parsed;
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", error.what()));
  }
}

// The elements of a sample: a list, or a single value.
std::vector<json> Elements(const json& sample) {
  if (!sample.is_array()) return {sample};
  return {sample.begin(), sample.end()};
}

absl::StatusOr<int64_t> IdOf(const json& id) {
  if (!id.is_number_integer() || (id.is_number_unsigned() && id.get<uint64_t>() >> 63 != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(id.dump(), " is not a 64-bit integer"));
  }
  return id.get<int64_t>();
}

// Takes the samples out of lists in lists, as `output_shape` has them.
absl::Status Flatten(absl::Span<const int64_t> output_shape, json* samples) {
  if (std::none_of(samples->begin(), samples->end(), [](auto& one) { return one.is_array(); })) {
    return absl::OkStatus();  // single ids, flat
  }
  for (size_t d = 1; d < output_shape.size(); ++d) {
    json inner = json::array();
    for (const json& list : *samples) {
      if (!list.is_array() || static_cast<int64_t>(list.size()) != output_shape[d]) {
        return absl::InvalidArgumentError(absl::StrCat(
            list.dump(), " is not allowed in dimension ", d, "; it must be a list of ",
            output_shape[d], ", as output_shape is [", absl::StrJoin(output_shape, ", "), "]"));
      }
      inner.insert(inner.end(), list.begin(), list.end());
    }
    *samples = std::move(inner);
  }
  return absl::OkStatus();
}

// Ids as a ragged array: `values` and `row_splits`.
absl::Status ReadIds(const json& samples, std::vector<int64_t>* values,
                     std::vector<int64_t>* row_splits) {
  row_splits->push_back(0);
  for (const json& sample : samples) {
    for (const json& element : Elements(sample)) {
      const absl::StatusOr<int64_t> id = IdOf(element);
      RETURN_IF_ERROR(
          Annotate(id.status(), absl::StrCat("ids of sample ", row_splits->size() - 1)));
      values->push_back(*id);
    }
    row_splits->push_back(static_cast<int64_t>(values->size()));
  }
  return absl::OkStatus();
}

absl::Status ReadWeights(const json& samples, const std::vector<int64_t>& row_splits,
                         std::vector<float>* weights) {
  if (!samples.is_array() || samples.size() + 1 != row_splits.size()) {
    return absl::InvalidArgumentError("weights: there must be as many samples as in ids");
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::vector<json> elements = Elements(samples[i]);
    const int64_t ids = row_splits[i + 1] - row_splits[i];
    if (static_cast<int64_t>(elements.size()) != ids) {
      return absl::InvalidArgumentError(absl::StrCat("weights of sample ", i, ": there are ",
                                                     elements.size(), " for ", ids, " ids"));
    }
    for (const json& weight : elements) {
      if (!weight.is_number()) {
        return absl::InvalidArgumentError(
            absl::StrCat("weights of sample ", i, ": ", weight.dump(), " is not a number"));
      }
      weights->push_back(weight.get<float>());
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const json& feature) {
  if (!feature.is_object() || !feature.contains("ids") || !feature["ids"].is_array()) {
    return absl::InvalidArgumentError("it must be an object with \"ids\", a list of samples");
  }
  for (const auto& [key, value] : feature.items()) {
    if (key != "ids" && key != "weights") {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", key, "\" is not known; allowed: \"ids\" and \"weights\""));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<preprocess::IntSpan> IntsOf(const Array& array, bool is_vector) {
  if (is_vector && array.shape.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", array.shape.size(), " dimensions; it must have 1"));
  }
  if (const auto* narrow = std::get_if<std::vector<int32_t>>(&array.values)) {
    return preprocess::IntSpan(absl::MakeConstSpan(*narrow));
  }
  if (const auto* wide = std::get_if<std::vector<int64_t>>(&array.values)) {
    return preprocess::IntSpan(absl::MakeConstSpan(*wide));
  }
  return absl::InvalidArgumentError("it must hold integers");
}

absl::Status SetWeights(const Array& weights, const Array& ids, preprocess::FeatureInput* input) {
  const auto* values = std::get_if<std::vector<float>>(&weights.values);
  if (values == nullptr) return absl::InvalidArgumentError("weights: they must be float32");
  if (values->size() != 1 && weights.shape != ids.shape) {
    return absl::InvalidArgumentError(
        "weights: they must have the shape of the ids, or be a single weight for all");
  }
  input->has_weights = true;
  input->weights = *values;
  return absl::OkStatus();
}

absl::Status Add(const std::string& feature, const std::string& part, Array array,
                 BatchFile* batch) {
  if (batch->arrays[feature].emplace(part, std::move(array)).second) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the ", part, " of feature '", feature, "' are given twice"));
}

absl::Status AddJsonFeature(const std::string& name, json feature, const v1::ModelConfig& model,
                            BatchFile* batch) {
  RETURN_IF_ERROR(CheckFields(feature));
  for (const v1::FeatureConfig& one : model.features()) {
    if (one.name() != name) continue;
    for (json& lists : feature) RETURN_IF_ERROR(Flatten(one.output_shape(), &lists));
  }
  std::vector<int64_t> values, row_splits;
  RETURN_IF_ERROR(ReadIds(feature["ids"], &values, &row_splits));
  std::vector<float> weights;
  const bool weighted = feature.contains("weights");
  if (weighted) RETURN_IF_ERROR(ReadWeights(feature["weights"], row_splits, &weights));
  const auto ids = static_cast<int64_t>(values.size());
  const auto splits = static_cast<int64_t>(row_splits.size());
  RETURN_IF_ERROR(Add(name, "values", {{ids}, std::move(values)}, batch));
  RETURN_IF_ERROR(Add(name, "row_splits", {{splits}, std::move(row_splits)}, batch));
  return weighted ? Add(name, "weights", {{ids}, std::move(weights)}, batch) : absl::OkStatus();
}

absl::Status AddJson(const std::string& text, const v1::ModelConfig& model, BatchFile* batch) {
  ASSIGN_OR_RETURN(json features, ParseJson(text));
  if (!features.is_object()) return absl::InvalidArgumentError("it must be an object of features");
  for (auto& [name, feature] : features.items()) {
    const absl::Status status = AddJsonFeature(name, feature, model, batch);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("feature '", name, "': ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status AddNpy(const std::string& path, BatchFile* batch) {
  // The name of a feature may hold dots: its part is what stands between the last two.
  const std::string stem = std::filesystem::path(path).stem().string();
  const size_t dot = stem.rfind('.');
  const std::string part = dot == std::string::npos ? "" : stem.substr(dot + 1);
  if (part != "ids" && part != "values" && part != "row_splits" && part != "weights") {
    return absl::InvalidArgumentError(
        "its name must be FEATURE.ids.npy, FEATURE.values.npy, FEATURE.row_splits.npy or "
        "FEATURE.weights.npy");
  }
  ASSIGN_OR_RETURN(const std::string content, config::ReadFile(path));
  ASSIGN_OR_RETURN(Array array, ParseNpy(content));
  return Add(stem.substr(0, dot), part, std::move(array), batch);
}

absl::Status AddPath(const std::string& path, const v1::ModelConfig& model, BatchFile* batch) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) {
    if (absl::EndsWith(path, ".npy")) return AddNpy(path, batch);
    ASSIGN_OR_RETURN(const std::string text, config::ReadFile(path));
    return AddJson(text, model, batch);
  }
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".npy") files.push_back(entry->path());
  }
  if (error) return absl::ErrnoToStatus(error.value(), path);
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    const std::string name = std::filesystem::path(file).filename().string();
    RETURN_IF_ERROR(Annotate(AddNpy(file, batch), name));
  }
  return absl::OkStatus();
}

absl::StatusOr<preprocess::FeatureInput> InputOf(const std::map<std::string, Array>& parts,
                                                 const v1::FeatureConfig& config) {
  const bool dense = parts.contains("ids");
  if (dense == parts.contains("values") || dense == parts.contains("row_splits")) {
    return absl::InvalidArgumentError("it needs either ids, or values and row_splits");
  }
  preprocess::FeatureInput input;
  const Array& ids = parts.at(dense ? "ids" : "values");
  const absl::StatusOr<preprocess::IntSpan> values = IntsOf(ids, !dense);
  RETURN_IF_ERROR(Annotate(values.status(), dense ? "ids" : "values"));
  if (dense) {
    const auto read = config::SamplesOf(ids.shape, config.output_shape());
    RETURN_IF_ERROR(Annotate(read.status(), "ids"));
    input.ids = preprocess::DenseInput{*values, read->ids_per_sample, read->samples};
  } else {
    const absl::StatusOr<preprocess::IntSpan> row_splits = IntsOf(parts.at("row_splits"), true);
    RETURN_IF_ERROR(Annotate(row_splits.status(), "row_splits"));
    input.ids = preprocess::RaggedInput{*row_splits, *values};
  }
  const auto weights = parts.find("weights");
  if (weights != parts.end()) {
    RETURN_IF_ERROR(SetWeights(weights->second, ids, &input));
  }
  return input;
}

absl::Status MakeInputs(const v1::ModelConfig& model, BatchFile* batch) {
  const std::vector<std::string> known = config::FeatureNames(model);
  for (const auto& [name, parts] : batch->arrays) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return absl::InvalidArgumentError(absl::StrCat("feature '", name,
                                                     "' of the batch is not in the model; ",
                                                     KnownNames("features", name, known)));
    }
  }
  for (const v1::FeatureConfig& feature : model.features()) {
    const auto found = batch->arrays.find(feature.name());
    if (found == batch->arrays.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("feature '", feature.name(), "' of the model is missing in the batch"));
    }
    absl::StatusOr<preprocess::FeatureInput> input = InputOf(found->second, feature);
    RETURN_IF_ERROR(Annotate(input.status(), absl::StrCat("feature '", feature.name(), "'")));
    RETURN_IF_ERROR(config::CheckSamples(feature, preprocess::SampleCount(*input)));
    batch->inputs.push_back(*std::move(input));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Array> ParseNpy(absl::string_view content) {
  ASSIGN_OR_RETURN(NpyStart start, ReadNpyStart(content));
  content.remove_prefix(start.bytes);
  const std::string& type = start.type;
  if (type == "'<i4'") return Read<int32_t>(content, std::move(start.shape));
  if (type == "'<i8'") return Read<int64_t>(content, std::move(start.shape));
  if (type == "'<f4'") return Read<float>(content, std::move(start.shape));
  return MalformedNpy(absl::StrCat("its type is ", type, "; it must be '<i4', '<i8' or '<f4'"));
}

absl::StatusOr<BatchFile> BatchFile::Load(const std::vector<std::string>& paths,
                                          const v1::ModelConfig& model) {
  BatchFile batch;
  for (const std::string& path : paths) {
    RETURN_IF_ERROR(Annotate(AddPath(path, model, &batch), path));
  }
  RETURN_IF_ERROR(MakeInputs(model, &batch));
  return batch;
}

}  // namespace emberd::emberctl
