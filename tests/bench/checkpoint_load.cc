#include "tests/bench/checkpoint_load.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::bench {

TrainingLoad::TrainingLoad(const client::ClientOptions& options, const StepShape& shape)
    : shape_(shape) {
  auto client = client::Client::Connect(options);
  DieUnless(client.status());
  client_ = *std::move(client);
  auto model = client_->DeclareModel(ModelText(shape));
  DieUnless(model.status());
  for (int batch = 0; batch < kBatches; ++batch) {
    for (int f = 0; f < shape.features; ++f) {
      ids_.push_back(MakeIds(shape, batch * shape.features + f));
    }
  }
  for (int f = 0; f < shape.features; ++f) names_.push_back(absl::StrCat("f", f));
  auto stream = client_->Train(*model, {.group = client_->client_id()});
  DieUnless(stream.status());
  stream_ = *std::move(stream);
  thread_ = std::thread([this] { Run(); });
}

TrainingLoad::~TrainingLoad() {
  stop_ = true;
  thread_.join();
}

void TrainingLoad::Run() {
  const std::vector<float> gradient(static_cast<size_t>(shape_.batch) * shape_.width, 1e-3f);
  std::vector<client::FeatureGradient> gradients;
  for (const std::string& name : names_) gradients.push_back({name, gradient, shape_.batch});
  for (int64_t step = 0; !stop_; ++step) {
    const absl::Time start = absl::Now();
    std::vector<client::FeatureIds> features;
    for (int f = 0; f < shape_.features; ++f) {
      const std::vector<int32_t>& ids = ids_[step % kBatches * shape_.features + f];
      features.push_back({names_[f], client::DenseIds{absl::MakeConstSpan(ids), shape_.bag}});
    }
    DieUnless(stream_->SendLookup(step, features));
    DieUnless(stream_->ReceiveLookup().status());
    DieUnless(stream_->SendUpdate(step, gradients));
    DieUnless(stream_->ReceiveUpdate().status());
    const absl::MutexLock lock(&mutex_);
    steps_.push_back(absl::ToDoubleSeconds(absl::Now() - start));
  }
  DieUnless(stream_->Finish());
}

std::vector<double> TrainingLoad::TakeSteps() {
  const absl::MutexLock lock(&mutex_);
  return std::exchange(steps_, {});
}

}  // namespace emberd::bench
