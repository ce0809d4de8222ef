#include "server/coordinator/served_model.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "config/config.h"
#include "server/shard/hosted_models.h"

namespace emberd::server {

void ServedModel::Observe(const preprocess::PreprocessedBatch& batch) const {
  const absl::Span<const int64_t> samples = batch.feature_samples();
  if (!samples.empty()) metrics->AddExamples(*std::max_element(samples.begin(), samples.end()));
  metrics->ObserveBatch(batch.statistics());
  observed->Observe(batch.statistics());
}

absl::StatusOr<std::shared_ptr<const ServedModel>> MakeServedModel(
    v1::ModelConfig config, const preprocess::Topology& topology, int threads,
    ops::Metrics* metrics) {
  auto model = std::make_shared<ServedModel>();
  model->id = config::ModelFingerprint(config);
  model->config = std::move(config);
  absl::StatusOr<preprocess::Plan> plan = preprocess::MakePlan(model->config, topology);
  if (!plan.ok()) return plan.status();
  model->plan = *std::move(plan);
  model->shard_stacks = ModelSpecFromPlan(model->id, model->config, model->plan, 0).stacks;
  auto preprocessor =
      preprocess::Preprocessor::Create(&model->config, &model->plan, {.threads = threads});
  if (!preprocessor.ok()) return preprocessor.status();
  model->preprocessor = *std::move(preprocessor);
  for (int i = 0; i < model->config.features_size(); ++i)
    model->features[model->config.features(i).name()] = i;
  for (int i = 0; i < model->config.tables_size(); ++i)
    model->tables[model->config.tables(i).name()] = i;
  std::vector<std::string> stacks;
  for (const preprocess::StackPlan& stack : model->plan.stacks) stacks.push_back(stack.name);
  model->observed = std::make_unique<ObservedCounts>(stacks.size());
  model->metrics = metrics->Model(model->config.name(), stacks);
  for (size_t i = 0; i < model->plan.stacks.size(); ++i) {
    const preprocess::StackPlan& stack = model->plan.stacks[i];
    model->metrics->SetLimits(static_cast<int>(i), stack.max_ids_per_partition,
                              stack.max_unique_ids_per_partition);
  }
  return model;
}

}  // namespace emberd::server
