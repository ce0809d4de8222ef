#include "tests/bench/step_trainer.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::bench {
namespace {

constexpr int kWarmUp = 2;

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void ComputeFor(Compute compute, double seconds) {
  const absl::Time end = absl::Now() + absl::Seconds(seconds);
  if (compute == Compute::kSleep) absl::SleepFor(absl::Seconds(seconds));
  while (compute == Compute::kSpin && absl::Now() < end) {
  }
}

class RankTrainer {
 public:
  RankTrainer(const client::ClientOptions& client_options, const StepOptions& options, int rank,
              const std::string& group)
      : options_(options) {
    client::ClientOptions own = client_options;
    own.activation_type = own.gradient_type = options.wire;
    auto client = client::Client::Connect(own);
    DieUnless(client.status());
    client_ = *std::move(client);
    auto model = client_->DeclareModel(ModelText(options.shape));
    DieUnless(model.status());
    samples_ = options.shape.batch / options.ranks;
    const int bag = options.shape.bag;
    for (int f = 0; f < options.shape.features; ++f) {
      const std::vector<int32_t> all = MakeIds(options.shape, f);
      const auto first = all.begin() + static_cast<ptrdiff_t>(samples_) * rank * bag;
      ids_.emplace_back(first, first + static_cast<ptrdiff_t>(samples_) * bag);
      names_.push_back(absl::StrCat("f", f));
    }
    for (size_t f = 0; f < ids_.size(); ++f) {
      features_.push_back({names_[f], client::DenseIds{absl::MakeConstSpan(ids_[f]), bag}});
    }
    const client::TrainOptions train = {
        .group = group, .rank = rank, .size = options.ranks, .pipelined = options.pipelined};
    // The model of the last run with this shape goes on; a run has a group of its own.
    auto stream = client_->Train(*model, train);
    DieUnless(stream.status());
    stream_ = *std::move(stream);
    const int64_t floats = samples_ * options.shape.width;
    gradient_ = stream_->AllocateGradients(floats);
    std::fill_n(gradient_.get(), floats, 1e-3f);
    for (const std::string& name : names_) {
      gradients_.push_back({name, absl::MakeConstSpan(gradient_.get(), floats), samples_});
    }
  }

  StepSeconds Run(const std::function<void()>& on_warm, const std::function<void()>& on_end) {
    std::vector<double> steps, lookups, updates;
    StepSeconds sums;
    for (int64_t step = 0; step < options_.steps; ++step) {
      if (step == kWarmUp) {
        on_warm();
        sums = {};
      }
      const absl::Time start = absl::Now();
      Learn(step, &sums, &lookups);
      const absl::Time learned = absl::Now();
      Update(step, &sums);
      updates.push_back(SecondsSince(learned));
      steps.push_back(SecondsSince(start));
      sums.total += steps.back();
    }
    on_end();
    DieUnless(stream_->Finish());
    for (std::vector<double>* all : {&steps, &lookups, &updates}) {
      all->erase(all->begin(), all->begin() + kWarmUp);
    }
    const double count = options_.steps - kWarmUp;
    return {.step = Median(steps),
            .lookup = Median(lookups),
            .update = Median(updates),
            .preprocess = sums.preprocess / count,
            .shards = sums.shards / count,
            .combine = sums.combine / count,
            .ranks = sums.ranks / count,
            .total = sums.total,
            .steps = options_.steps - kWarmUp};
  }

 private:
  static void Add(const client::StepTimes& times, StepSeconds* sums) {
    sums->preprocess += absl::ToDoubleSeconds(times.preprocess);
    sums->shards += absl::ToDoubleSeconds(times.shards);
    sums->combine += absl::ToDoubleSeconds(times.combine);
    sums->ranks += absl::ToDoubleSeconds(times.wait_for_ranks);
  }
  void SendLookup(int64_t step) {
    if (step < next_lookup_ || step == options_.steps) return;
    DieUnless(stream_->SendLookup(step, features_));
    next_lookup_ = step + 1;
  }
  void Learn(int64_t step, StepSeconds* sums, std::vector<double>* lookups) {
    const absl::Time start = absl::Now();
    SendLookup(step);
    auto found = stream_->ReceiveLookup();
    DieUnless(found.status());
    lookups->push_back(SecondsSince(start));
    Add(found->times, sums);
    if (options_.ids_ahead || options_.pipelined) SendLookup(step + 1);
    ComputeFor(options_.compute, options_.compute_seconds);
  }
  void Update(int64_t step, StepSeconds* sums) {
    DieUnless(stream_->SendUpdate(step, gradients_, {.memory = gradient_}));
    if (options_.pipelined && step == 0) return;
    auto updated = stream_->ReceiveUpdate();
    DieUnless(updated.status());
    Add(updated->times, sums);
  }

  const StepOptions& options_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::TrainStream> stream_;  // goes before its client
  int64_t samples_ = 0;
  std::shared_ptr<float> gradient_;  // of each feature
  std::vector<std::vector<int32_t>> ids_;
  std::vector<std::string> names_;
  std::vector<client::FeatureIds> features_;
  std::vector<client::FeatureGradient> gradients_;
  int64_t next_lookup_ = 0;
};

}  // namespace

void DieUnless(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << program_invocation_short_name << ": " << status << "\n";
  std::exit(1);
}

std::string ModelText(const StepShape& shape) {
  std::string text = "name: 'step' optimizer { adagrad {} learning_rate: 0.01 }\n";
  for (int i = 0; i < shape.features; ++i) {
    absl::StrAppend(&text, "tables { name: 't", i, "' vocabulary_size: ", shape.rows,
                    " embedding_dim: ", shape.width,
                    " combiner: SUM initializer { uniform { lower: -0.1 upper: 0.1 } } }\n");
    absl::StrAppend(&text, "features { name: 'f", i, "' table: 't", i,
                    "' batch_size: ", shape.batch, " }\n");
  }
  return text;
}

std::vector<int32_t> MakeIds(const StepShape& shape, int feature) {
  std::mt19937 random(7 + feature);
  // Zipf with exponent near 1, by inversion of its continuous form.
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<int32_t> ids(static_cast<size_t>(shape.batch) * shape.bag);
  for (int32_t& id : ids) {
    id = static_cast<int32_t>(std::pow(shape.rows, uniform(random))) - 1;
  }
  return ids;
}

StepSeconds RunSteps(const client::ClientOptions& client_options, const StepOptions& options,
                     const std::function<void()>& on_warm, const std::function<void()>& on_end) {
  static std::atomic<int> runs = 0;
  const std::string group = absl::StrCat("bench-", runs++);
  StepSeconds result;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < options.ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      RankTrainer trainer(client_options, options, rank, group);
      const StepSeconds seconds =
          rank == 0 ? trainer.Run(on_warm, on_end) : trainer.Run([] {}, [] {});
      if (rank == 0) result = seconds;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return result;
}

}  // namespace emberd::bench
