// LookupRequests, decoded and preprocessed. The first byte picks a model. Catches: a request that
// crashes, one that is accepted although its limits do not hold, and results that depend on the
// number of threads.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include <google/protobuf/stubs/logging.h>

#include "absl/strings/str_cat.h"
#include "config/config.h"
#include "preprocess/batch/chip_cost.h"
#include "preprocess/batch/cuts.h"
#include "server/step/request_reader.h"
#include "server/step/served_model.h"
#include "tests/fuzz/canonical.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace lookup_fuzz {

using fuzz::Require;
using step::ServedModel;

// The protobuf library writes what it refuses to standard error.
const google::protobuf::LogSilencer kSilence;

// For 2 x 2 partitions; every combiner; limits that a handful of ids exceed.
constexpr char kModel[] = R"(
  name: "fuzzed"
  tables { name: "a" vocabulary_size: 40 embedding_dim: 4 combiner: SUM
           max_ids_per_partition: 4 max_unique_ids_per_partition: 3 }
  tables { name: "b" vocabulary_size: 1000 embedding_dim: 8 combiner: MEAN
           max_ids_per_partition: 6 }
  tables { name: "c" vocabulary_size: 2147480000 embedding_dim: 8 combiner: SQRTN
           max_unique_ids_per_partition: 2 }
  features { name: "x" table: "a" }
  features { name: "y" table: "b" }
  features { name: "z" table: "c" }
  features { name: "w" table: "a" }
  optimizer { sgd {} }
)";
constexpr std::array<const char*, 6> kPlans = {
    "groups { tables: \"a\" tables: \"b\" }",
    "allow_id_dropping: true groups { tables: \"a\" tables: \"b\" }",
    "sample_layout: STACK_THEN_SPLIT bucket_hash: LOCAL_ROW_MODULO auto_stack: false",
    "rules: TENSORFLOW sample_layout: STACK_THEN_SPLIT bucket_hash: ID_RANGE auto_stack: false",
    "rules: TENSORFLOW bucket_hash: ID_MODULO allow_id_dropping: true auto_stack: false",
    "rotation: 0 auto_stack: false"};
constexpr int64_t kMaxActivationBytes = 1 << 18;

std::shared_ptr<const ServedModel> MakeModel(const char* plan, CpuPool* cpu) {
  auto config = config::ParseModel(absl::StrCat(kModel, "plan {", plan, "}"));
  Require(config.ok(), "the model is valid");
  auto model = std::make_shared<ServedModel>();
  model->config = *std::move(config);
  auto placed = preprocess::MakePlan(model->config, {2, 2});
  Require(placed.ok(), "the model can be planned");
  model->plan = *std::move(placed);
  model->preprocessor =
      std::make_shared<preprocess::Preprocessor>(&model->config, &model->plan, cpu);
  for (int i = 0; i < model->config.features_size(); ++i) {
    model->features[model->config.features(i).name()] = i;
  }
  for (int i = 0; i < model->config.tables_size(); ++i) {
    model->tables[model->config.tables(i).name()] = i;
  }
  return model;
}

struct Models {
  std::shared_ptr<const ServedModel> one_thread, two_threads;
};

const Models& ModelOf(uint8_t choice) {
  static const auto* const models = [] {
    auto* all = new std::vector<Models>;
    auto* const cpu = new CpuPool(2);
    for (const char* plan : kPlans)
      all->push_back({MakeModel(plan, nullptr), MakeModel(plan, cpu)});
    return all;
  }();
  return (*models)[choice % models->size()];
}

using BatchOr = absl::StatusOr<std::shared_ptr<const preprocess::PreprocessedBatch>>;

// `whole`: nothing was dropped when the request was parsed.
BatchOr Preprocess(const v1::LookupRequest& request, bool whole, const ServedModel& model) {
  auto input = step::DecodeLookup(request, model, kMaxActivationBytes);
  if (!input.ok()) return input.status();
  // Even if no mini-batch can be within the limits.
  fuzz::accepted |= whole && !request.features().empty();
  return model.preprocessor->Run(input->features);
}

void CheckLimits(const ServedModel& model, const preprocess::PreprocessedBatch& batch) {
  const auto costs = preprocess::BatchCost(model.plan, batch);
  for (size_t k = 0; k < costs.size(); ++k) {
    const preprocess::PartitionLimits& limits = model.plan.stacks[k].limits;
    for (const preprocess::MinibatchCost& minibatch : costs[k].minibatches) {
      Require(!limits.Exceeded(minibatch.max_ids, minibatch.max_unique_ids),
              "every mini-batch is within its limits");
    }
    Require(model.config.plan().allow_id_dropping() || costs[k].statistics.dropped_ids() == 0,
            "nothing is dropped unless it is allowed");
  }
}

EMBERD_FUZZ_TARGET(lookup, data, size) {
  if (size == 0) return 0;
  const Models& models = ModelOf(data[0]);
  v1::LookupRequest request;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (!request.ParseFromString(bytes)) return 0;
  const bool whole = fuzz::Canonical<v1::LookupRequest>(bytes) == bytes;
  const BatchOr batch = Preprocess(request, whole, *models.one_thread);
  const BatchOr other = Preprocess(request, whole, *models.two_threads);
  Require(batch.status() == other.status(), "errors do not depend on the number of threads");
  if (!batch.ok()) {
    Require(!batch.status().message().empty(), "an error says what is wrong");
    return 0;
  }
  CheckLimits(*models.one_thread, **batch);
  Require((*batch)->statistics().SerializeAsString() == (*other)->statistics().SerializeAsString(),
          "statistics do not depend on the number of threads");
  return 0;
}

}  // namespace lookup_fuzz
}  // namespace emberd
