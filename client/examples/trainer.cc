// An example to copy: trainers of a click model whose embeddings live in a cluster of emberd. Read
// it from top to bottom; README.md says how to build and run it.
//
// The model: three categorical features are looked up in emberd, one table each, and go together
// with four numbers through a small network (the dense part, on Eigen) that predicts a click. To
// emberd the trainers are the ranks of one synchronous group: their batches make one global batch,
// and each row that any of them touched gets one update a step, from the sum of all gradients.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <Eigen/Core>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "client/cpp/client.h"

namespace {

namespace client = emberd::client;
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;

constexpr int kBatch = 256;  // examples of a trainer in a step
constexpr int kDim = 8;      // columns of an embedding
constexpr int kNumbers = 4, kHidden = 32;
constexpr int kFeatures = 3;
constexpr int kInputs = kFeatures * kDim + kNumbers;
constexpr float kLearningRate = 0.05f, kInitialAccumulator = 0.1f;
constexpr int64_t kUsers = 50'000, kItems = 5'000, kTags = 500;
constexpr int kMaxTags = 5;  // of an item, at least one

// ---- Data: put your own reader here. This one makes examples up; example i depends on i alone.

struct Batch {
  std::vector<int32_t> users, items;  // one id per example
  std::vector<int32_t> tags,
      tag_splits = {0};              // example i has tags[tag_splits[i] : tag_splits[i + 1]]
  Matrix numbers;                    // [examples, kNumbers]
  std::vector<float> labels;         // 1: a click
  std::vector<float> probabilities;  // by which the labels were drawn
};

// In (0, 1), a function of the key (the finalizer of SplitMix64).
double Uniform(uint64_t key) {
  key += 0x9e3779b97f4a7c15;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9;
  key = (key ^ (key >> 27)) * 0x94d049bb133111eb;
  return (static_cast<double>((key ^ (key >> 31)) >> 11) + 0.5) * 0x1p-53;
}

// What an id adds to the logit of a click: the truth that the embeddings have to find.
double Effect(uint64_t feature, uint64_t id) {
  return 3 * Uniform(feature << 56 ^ id << 8 ^ 0xeffec7) - 1.5;
}

// Few ids are frequent, most are rare.
int32_t DrawId(double uniform, int64_t vocabulary) {
  return static_cast<int32_t>(static_cast<double>(vocabulary) * uniform * uniform * uniform);
}

Batch MakeBatch(int64_t first, int count) {
  Batch batch;
  batch.numbers.resize(count, kNumbers);
  for (int i = 0; i < count; ++i) {
    uint64_t key = static_cast<uint64_t>(first + i) << 8;
    const auto draw = [&key] { return Uniform(++key); };
    const int32_t user = batch.users.emplace_back(DrawId(draw(), kUsers));
    const int32_t item = batch.items.emplace_back(DrawId(draw(), kItems));
    double logit = -0.5 + Effect(1, user) + Effect(2, item);
    const int tags = 1 + static_cast<int>(kMaxTags * draw());
    for (int t = 0; t < tags; ++t) {
      logit += Effect(3, batch.tags.emplace_back(DrawId(draw(), kTags))) / tags;
    }
    batch.tag_splits.push_back(static_cast<int32_t>(batch.tags.size()));
    for (int n = 0; n < kNumbers; ++n) batch.numbers(i, n) = static_cast<float>(2 * draw() - 1);
    logit += batch.numbers(i, 0) - batch.numbers(i, 1);
    batch.probabilities.push_back(static_cast<float>(1 / (1 + std::exp(-logit))));
    batch.labels.push_back(draw() < batch.probabilities.back() ? 1.0f : 0.0f);
  }
  return batch;
}

double LogLoss(const std::vector<float>& probabilities, const std::vector<float>& labels) {
  double sum = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const double p = std::clamp<double>(probabilities[i], 1e-7, 1 - 1e-7);
    sum -= std::log(labels[i] > 0.5f ? p : 1 - p);
  }
  return sum / static_cast<double>(labels.size());
}

// ---- Embeddings: what emberd has to know of them, and the ids of a batch.

client::ModelDescription Describe() {
  client::ModelDescription model;
  model.name = "example_clicks";
  model.optimizer = {
      "adagrad", {{"learning_rate", kLearningRate}, {"initial_accumulator", kInitialAccumulator}}};
  const std::pair<const char*, int64_t> features[kFeatures] = {
      {"user", kUsers}, {"item", kItems}, {"tags", kTags}};
  for (const auto& [name, vocabulary] : features) {
    model.tables.push_back({.name = name,
                            .vocabulary_size = vocabulary,
                            .embedding_dim = kDim,
                            .combiner = client::Combiner::kMean,
                            .initializer = client::Initializer::Uniform(-0.05f, 0.05f)});
    model.features.push_back({.name = name, .table = name, .batch_size = kBatch});
  }
  return model;
}

// Refers to the batch.
std::vector<client::FeatureIds> IdsOf(const Batch& batch) {
  return {{"user", client::DenseIds{batch.users}},
          {"item", client::DenseIds{batch.items}},
          {"tags", client::RaggedIds{batch.tag_splits, batch.tags}}};
}

// ---- The dense part: input -> ReLU layer -> logit. Every trainer keeps an equal replica.

class DenseModel {
 public:
  DenseModel()
      : parameters_(kParameters), accumulator_(Vector::Constant(kParameters, kInitialAccumulator)) {
    for (int i = 0; i < kParameters; ++i) {
      parameters_[i] = static_cast<float>(0.4 * Uniform(i) - 0.2);
    }
  }

  // What a batch's forward and backward pass gave. Gradients are sums over the examples.
  struct Step {
    std::vector<float> probabilities;
    Vector gradient;                                      // of the parameters
    std::vector<std::vector<float>> embedding_gradients;  // per feature, [examples, kDim]
  };
  Step Run(const Batch& batch, const std::vector<client::Activation>& activations) const {
    const auto count = static_cast<int64_t>(batch.labels.size());
    Matrix input(count, kInputs);
    for (int f = 0; f < kFeatures; ++f) {
      input.middleCols(f * kDim, kDim) =
          Eigen::Map<const Matrix>(activations[f].values.data(), count, kDim);
    }
    input.rightCols(kNumbers) = batch.numbers;
    const Matrix hidden = ((input * Weights()).rowwise() + Biases().transpose()).cwiseMax(0.0f);
    const Vector logits = (hidden * Output()).array() + parameters_[kParameters - 1];
    const Vector clicks = 1.0f / (1.0f + (-logits.array()).exp());

    Step step;
    step.probabilities.assign(clicks.begin(), clicks.end());
    const Vector by_logit = clicks - Eigen::Map<const Vector>(batch.labels.data(), count);
    Matrix by_hidden = by_logit * Output().transpose();
    by_hidden.array() *= (hidden.array() > 0.0f).cast<float>();
    step.gradient.resize(kParameters);
    Eigen::Map<Matrix>(step.gradient.data(), kInputs, kHidden) = input.transpose() * by_hidden;
    step.gradient.segment(kBiases, kHidden) = by_hidden.colwise().sum().transpose();
    step.gradient.segment(kOutput, kHidden) = hidden.transpose() * by_logit;
    step.gradient[kParameters - 1] = by_logit.sum();
    const Matrix by_input = by_hidden * Weights().transpose();
    for (int f = 0; f < kFeatures; ++f) {
      std::vector<float>& gradient = step.embedding_gradients.emplace_back(count * kDim);
      Eigen::Map<Matrix>(gradient.data(), count, kDim) = by_input.middleCols(f * kDim, kDim);
    }
    return step;
  }

  // Adagrad, as emberd does it for the embeddings.
  void Update(const Vector& gradient) {
    accumulator_.array() += gradient.array().square();
    parameters_.array() -= kLearningRate * gradient.array() / accumulator_.array().sqrt();
  }

 private:
  // All parameters lie in one vector, so that they can be summed over the trainers in one piece.
  static constexpr int kBiases = kInputs * kHidden, kOutput = kBiases + kHidden;
  static constexpr int kParameters = kOutput + kHidden + 1;
  Eigen::Map<const Matrix> Weights() const { return {parameters_.data(), kInputs, kHidden}; }
  Eigen::Map<const Vector> Biases() const { return {parameters_.data() + kBiases, kHidden}; }
  Eigen::Map<const Vector> Output() const { return {parameters_.data() + kOutput, kHidden}; }

  Vector parameters_, accumulator_;
};

// ---- The trainers are threads here. Between processes or machines this is MPI_Allreduce, NCCL or
// gloo: all that matters is that every replica gets the same sum.

class AllReduce {
 public:
  explicit AllReduce(int trainers) : gradients_(trainers), barrier_(trainers) {}

  Vector Sum(int rank, Vector gradient) {
    gradients_[rank] = std::move(gradient);
    barrier_.arrive_and_wait();
    Vector sum = gradients_[0];
    for (size_t r = 1; r < gradients_.size(); ++r) sum += gradients_[r];
    barrier_.arrive_and_wait();  // nobody puts in the next gradient before all have read this one
    return sum;
  }

 private:
  std::vector<Vector> gradients_;
  std::barrier<> barrier_;
};

// ---- The loop.

struct Options {
  std::vector<std::string> coordinators;
  int trainers = 2;
  int64_t steps = 400;
  std::string group;  // a group that goes on keeps its name; a new run needs a new one
};

// Looks held-out examples up, which changes nothing, and says how well they are predicted.
absl::Status Evaluate(client::Client& client, const client::Model& model, const DenseModel& dense) {
  constexpr int64_t kHeldOut = int64_t{1} << 40;  // no training step gets there
  const Batch batch = MakeBatch(kHeldOut, 20'000);
  const auto found = client.Lookup(model, IdsOf(batch), {.inference = true});
  if (!found.ok()) return found.status();
  const DenseModel::Step step = dense.Run(batch, found->activations);
  std::printf("example: held_out_loss=%.4f best_loss=%.4f\n",
              LogLoss(step.probabilities, batch.labels),
              LogLoss(batch.probabilities, batch.labels));
  return absl::OkStatus();
}

absl::Status Train(const Options& options, int rank, AllReduce* all_reduce) {
  client::ClientOptions client_options;
  client_options.addresses = options.coordinators;
  const auto client = client::Client::Connect(client_options);
  if (!client.ok()) return client.status();
  // The first trainer makes the tables, the others find them.
  const absl::StatusOr<client::Model> model = (*client)->DeclareModel(Describe());
  if (!model.ok()) return model.status();
  const auto joined =
      (*client)->Train(*model, {.group = options.group, .rank = rank, .size = options.trainers});
  if (!joined.ok()) return joined.status();
  client::TrainStream& stream = **joined;

  const auto batch_of = [&](int64_t step) {
    return MakeBatch((step * options.trainers + rank) * kBatch, kBatch);
  };
  DenseModel dense;
  Batch batch = batch_of(0);
  if (absl::Status s = stream.SendLookup(0, IdsOf(batch)); !s.ok()) return s;
  for (int64_t step = 0; step < options.steps; ++step) {
    const absl::StatusOr<client::TrainLookupResult> found = stream.ReceiveLookup();
    if (!found.ok()) return found.status();
    // The next step's ids are sent ahead: the cluster prepares them while this step computes.
    Batch next;
    if (step + 1 < options.steps) {
      next = batch_of(step + 1);
      if (absl::Status s = stream.SendLookup(step + 1, IdsOf(next)); !s.ok()) return s;
    }
    DenseModel::Step result = dense.Run(batch, found->activations);
    dense.Update(all_reduce->Sum(rank, std::move(result.gradient)) /
                 static_cast<float>(kBatch * options.trainers));
    std::vector<client::FeatureGradient> gradients;
    for (int f = 0; f < kFeatures; ++f) {
      gradients.push_back({model->features[f].name, result.embedding_gradients[f], kBatch});
    }
    if (absl::Status s = stream.SendUpdate(step, gradients); !s.ok()) return s;
    const absl::StatusOr<client::TrainUpdateResult> updated = stream.ReceiveUpdate();
    if (!updated.ok()) return updated.status();
    if (rank == 0 && (step + 1) % 100 == 0) {
      std::printf("step %lld: loss %.4f, %lld rows updated\n", static_cast<long long>(step) + 1,
                  LogLoss(result.probabilities, batch.labels),
                  static_cast<long long>(updated->rows_updated));
    }
    batch = std::move(next);
  }
  if (absl::Status s = stream.Finish(); !s.ok()) return s;
  return rank == 0 ? Evaluate(**client, *model, dense) : absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  options.coordinators = absl::StrSplit(argc > 1 ? argv[1] : "127.0.0.1:7400", ',');
  if (argc > 2) options.trainers = std::atoi(argv[2]);
  if (argc > 3) options.steps = std::atoll(argv[3]);
  options.group = "example-" + std::to_string(getpid());
  if (argc > 4 || options.trainers < 1 || options.steps < 1) {
    std::fprintf(stderr, "usage: %s [COORDINATOR[,COORDINATOR...] [TRAINERS [STEPS]]]\n", argv[0]);
    return 2;
  }
  AllReduce all_reduce(options.trainers);
  std::vector<std::thread> trainers;
  for (int rank = 0; rank < options.trainers; ++rank) {
    trainers.emplace_back([&, rank] {
      const absl::Status status = Train(options, rank, &all_reduce);
      if (status.ok()) return;
      // The others wait for this rank. A trainer that is to outlive a shard's death opens a new
      // stream instead and goes on from its next_step(): see tests/bench/demo/trainer.cc.
      std::fprintf(stderr, "trainer %d: %s\n", rank, status.ToString().c_str());
      std::_Exit(1);
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  return 0;
}
