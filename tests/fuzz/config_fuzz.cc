// Model and cluster configs. Catches: text that crashes the parser, a config that is accepted but
// cannot be planned in bounded time, and a completed config that does not read back as itself.
#include <string>

#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>

#include "config/config.h"
#include "preprocess/plan/plan.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace config_fuzz {

using fuzz::Require;

// The protobuf library writes what it refuses to standard error.
const google::protobuf::LogSilencer kSilence;

void TryModel(const std::string& text) {
  const absl::StatusOr<v1::ModelConfig> model = config::ParseModel(text);
  if (!model.ok()) {
    Require(!model.status().message().empty(), "an error says what is wrong");
    return;
  }
  fuzz::accepted = true;
  std::string printed;
  google::protobuf::TextFormat::PrintToString(*model, &printed);
  const absl::StatusOr<v1::ModelConfig> again = config::ParseModel(printed);
  Require(again.ok(), "a complete model is a valid one");
  Require(config::ModelFingerprint(*model) == config::ModelFingerprint(*again),
          "completing is idempotent");
  Require(config::FirstDifference(*model, *again).empty(), "equal models do not differ");
  const absl::StatusOr<preprocess::Plan> plan = preprocess::MakePlan(*model, {2, 4});
  if (!plan.ok()) return;
  Require(preprocess::PlanToProto(*model, *plan).table_bytes() > 0, "a plan has a size");
}

void TryCluster(const std::string& text) {
  const absl::StatusOr<v1::ClusterConfig> cluster = config::ParseCluster(text);
  if (!cluster.ok()) return;
  fuzz::accepted = true;
  std::string printed;
  google::protobuf::TextFormat::PrintToString(*cluster, &printed);
  const absl::StatusOr<v1::ClusterConfig> again = config::ParseCluster(printed);
  Require(again.ok() && again->SerializeAsString() == cluster->SerializeAsString(),
          "a complete cluster reads back as itself");
}

EMBERD_FUZZ_TARGET(config, data, size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  TryModel(text);
  TryCluster(text);
  return 0;
}

}  // namespace config_fuzz
}  // namespace emberd
