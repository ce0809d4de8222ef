// Mutilated configs. A config comes from a user's editor or, as the body of DeclareModel, from
// anybody who can reach the port: whatever it says, the answer is a complete config or an error
// with a message, never a crash, and a config that is accepted stays accepted. This would catch
// reads beyond a list, unchecked references, defaults that break a rule, and values that slip past
// a check into the fingerprint.
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/paths.h"
#include "base/testing/sanitized.h"
#include "base/testing/seed.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "google/protobuf/stubs/logging.h"

namespace emberd::config {
namespace robustness_test {

constexpr int kRounds = Rounds(4000);  // per test; each round mutates every sample

class RobustnessTest : public ::testing::Test {
 protected:
  RobustnessTest() {
    random_.seed(TestSeed(20240229));
    for (const auto& file : std::filesystem::directory_iterator(SourcePath("config/samples"))) {
      std::stringstream text;
      text << std::ifstream(file.path()).rdbuf();
      // The sample with 26 tables adds time and no new forms.
      if (text.str().size() < 3000) samples_.push_back(text.str());
    }
  }

  size_t Below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  // One small injury: bytes flipped, dropped, repeated or swapped, or a token put where it does not
  // belong.
  std::string Mutate(std::string text) {
    static const char* const kTokens[] = {"{",    "}",    "[",
                                          "]",    ":",    ",",
                                          "\"",   "-",    "1e999",
                                          "nan",  "null", "9223372036854775808",
                                          "#",    "\\",   "\\377",
                                          "true", "0",    "tables",
                                          "inf",  "plan", "adam {}",
                                          "-0.0", "'",    "\n",
                                          "{}",   "\"\"", "18446744073709551615"};
    const size_t at = Below(text.size() + 1);
    const size_t length = Below(std::min<size_t>(text.size() - at + 1, 40));
    switch (Below(5)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(Below(256));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(Below(text.size() + 1), text.substr(at, length));
        break;
      case 3:
        text.insert(at, kTokens[Below(std::size(kTokens))]);
        break;
      default:
        text.replace(at, length, kTokens[Below(std::size(kTokens))]);
        break;
    }
    return text;
  }

  // What every caller does with a model.
  static void Use(const absl::StatusOr<v1::ModelConfig>& model) {
    if (!model.ok()) {
      EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_FALSE(model.status().message().empty());
      return;
    }
    v1::ModelConfig again = *model;
    EXPECT_TRUE(CompleteModel(&again).ok());
    EXPECT_EQ(ModelFingerprint(again), ModelFingerprint(*model));
    EXPECT_EQ(FirstDifference(*model, again), "");
    for (const v1::TableConfig& table : model->tables()) {
      EXPECT_FALSE(OptimizerName(table.optimizer()).empty());
      OptimizerSlots(table.optimizer());
    }
  }

  std::mt19937_64 random_;
  std::vector<std::string> samples_;
};

TEST_F(RobustnessTest, MutatedText) {
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (const std::string& sample : samples_) {
      std::string text = Mutate(sample);
      for (size_t more = Below(4); more > 0; --more) text = Mutate(text);
      SCOPED_TRACE(text);
      const auto model = ParseModel(text);
      Use(model);
      const auto cluster = ParseCluster(text);
      EXPECT_TRUE(cluster.ok() || !cluster.status().message().empty());
      accepted += model.ok() || cluster.ok();
      if (HasFailure()) return;
    }
  }
  // Some injuries are harmless (in a comment, in a number); if none were, nothing beyond the parser
  // was reached.
  EXPECT_GT(accepted, kRounds / 10);
}

// On the wire no parser stands before CompleteModel: any field may hold anything.
TEST_F(RobustnessTest, MutatedWireBytes) {
  std::vector<std::string> wires;
  for (const std::string& sample : samples_) {
    const auto model = ParseModel(sample);
    if (model.ok()) wires.push_back(model->SerializeAsString());
  }
  ASSERT_FALSE(wires.empty());
  google::protobuf::LogSilencer no_reports_of_bad_utf8;
  int decoded = 0, accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (const std::string& wire : wires) {
      v1::ModelConfig model;
      if (!model.ParseFromString(Mutate(wire))) continue;
      ++decoded;
      const absl::Status status = CompleteModel(&model);
      accepted += status.ok();
      Use(status.ok() ? absl::StatusOr<v1::ModelConfig>(model) : status);
      if (HasFailure()) FAIL() << model.ShortDebugString();
    }
  }
  EXPECT_GT(decoded, kRounds / 10);
  EXPECT_GT(accepted, kRounds / 100);
}

}  // namespace robustness_test
}  // namespace emberd::config
