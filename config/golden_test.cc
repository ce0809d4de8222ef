// Cases of TensorFlow's own tests of its TPU embedding configs that hold for emberd too. Those
// about Python objects, gradient accumulation and refused weight decay (emberd has it) do not.
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"
#include "config/config.h"

namespace emberd::config {
namespace golden_test {

nlohmann::json GoldenCase(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/tf/13_config_validation.json"));
  const nlohmann::json golden = nlohmann::json::parse(file);
  for (const nlohmann::json& entry : golden.at("cases")) {
    if (entry.at("name") == name) return entry;
  }
  ADD_FAILURE() << "no golden case " << name;
  return {};
}

absl::StatusOr<v1::ModelConfig> GoldenModel(const std::string& table,
                                            const std::string& optimizer) {
  return ParseModel(absl::StrCat("name: 'm' tables { name: 'table' ", table,
                                 " } features { name: 'f' table: 'table' } optimizer { ", optimizer,
                                 " }"));
}
constexpr char kTable[] = "vocabulary_size: 2 embedding_dim: 4";

TEST(Golden, QuantizationNeedsTwoBuckets) {
  const nlohmann::json golden = GoldenCase("test_quantization_config_num_buckets");
  const auto model =
      GoldenModel(absl::StrCat(kTable, " quantization { lower: ", golden["lower"].get<int>(),
                               " upper: ", golden["upper"].get<int>(),
                               " num_buckets: ", golden["num_buckets"].get<int>(), " }"),
                  "");
  EXPECT_THAT(std::string(model.status().message()),
              testing::HasSubstr(golden["message_contains"].get<std::string>()));
}

TEST(Golden, QuantizationAndTableAreTaken) {
  const nlohmann::json quantization = GoldenCase("test_quantization_config_repr");
  const nlohmann::json table = GoldenCase("test_table_config_repr");
  const auto model = GoldenModel(
      absl::StrCat("vocabulary_size: ", table["vocabulary_size"].get<int>(),
                   " embedding_dim: ", table["dim"].get<int>(),
                   " combiner: ", absl::AsciiStrToUpper(table["combiner"].get<std::string>()),
                   " quantization { num_buckets: ", quantization["num_buckets"].get<int>(),
                   " lower: ", quantization["lower"].get<float>(),
                   " upper: ", quantization["upper"].get<float>(), " }"),
      "");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->tables(0).combiner(), v1::SUM);
  EXPECT_EQ(model->tables(0).quantization().num_buckets(), 10);
}

// A bound that is not given stays absent, also where the other one is given.
TEST(Golden, GradientClipBounds) {
  for (const char* name : {"test_grad_clip_with_tuple", "test_grad_clip_with_single_value",
                           "test_grad_clip_with_tuple_and_none"}) {
    const nlohmann::json golden = GoldenCase(name);
    for (const nlohmann::json& kind : golden["optimizers"]) {
      std::string optimizer = absl::AsciiStrToLower(kind.get<std::string>()) + " {}";
      for (const auto& [field, value] : golden["expected"].items()) {
        if (!value.is_null()) absl::StrAppend(&optimizer, " ", field, ": ", value.get<float>());
      }
      const auto model = GoldenModel(kTable, optimizer);
      ASSERT_TRUE(model.ok()) << model.status();
      const v1::OptimizerConfig& complete = model->tables(0).optimizer();
      EXPECT_EQ(complete.has_clip_gradient_min(),
                !golden["expected"]["clip_gradient_min"].is_null());
      EXPECT_EQ(complete.has_clip_gradient_max(),
                !golden["expected"]["clip_gradient_max"].is_null());
    }
  }
}

TEST(Golden, OptimizersAreEqualIfTheirSettingsAre) {
  const nlohmann::json golden = GoldenCase("test_equal_and_hash_function");
  for (const nlohmann::json& kind : golden["optimizers"]) {
    std::vector<uint64_t> hashes;
    for (const nlohmann::json& rate : golden["learning_rates"]) {
      const auto model =
          GoldenModel(kTable, absl::StrCat("learning_rate: ", rate.get<float>(), " ",
                                           absl::AsciiStrToLower(kind.get<std::string>()), " {}"));
      ASSERT_TRUE(model.ok()) << model.status();
      hashes.push_back(ModelFingerprint(*model));
    }
    for (const nlohmann::json& pair : golden["equal"]) {
      EXPECT_EQ(hashes[pair[0].get<int>()], hashes[pair[1].get<int>()]);
    }
    for (const nlohmann::json& pair : golden["not_equal"]) {
      EXPECT_NE(hashes[pair[0].get<int>()], hashes[pair[1].get<int>()]);
    }
  }
}

}  // namespace golden_test
}  // namespace emberd::config
