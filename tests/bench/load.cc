#include "tests/bench/load.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/barrier.h"
#include "absl/time/clock.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/session.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"

namespace emberd::bench {
namespace {

// Enough that rows do not stay in the caches, few enough that the ids of a client take little
// memory.
constexpr int64_t kMostBatches = 16;
constexpr int64_t kMostIds = int64_t{1} << 20;

}  // namespace

int64_t DrawId(double uniform, int64_t vocabulary, double exponent) {
  const auto size = static_cast<double>(vocabulary);
  if (exponent == 0) return std::min(static_cast<int64_t>(uniform * size), vocabulary - 1);
  // Inverse of the distribution with density x^-exponent on [1, vocabulary + 1).
  const double power = 1 - exponent;
  const double x = std::abs(power) < 1e-9
                       ? std::exp(uniform * std::log(size + 1))
                       : std::pow(1 + uniform * (std::pow(size + 1, power) - 1), 1 / power);
  const auto rank = std::clamp<int64_t>(static_cast<int64_t>(x) - 1, 0, vocabulary - 1);
  constexpr uint64_t kScatter = 2654435761u;
  return static_cast<int64_t>(static_cast<uint64_t>(rank) * kScatter %
                              static_cast<uint64_t>(vocabulary));
}

LoadBatches::LoadBatches(const client::Model& model, const LoadShape& shape, uint64_t seed) {
  const auto features = static_cast<int64_t>(model.features.size());
  const int64_t ids_of_feature = shape.batch * shape.ids_per_sample;
  const int64_t count = std::clamp<int64_t>(
      kMostIds / std::max<int64_t>(features * ids_of_feature, 1), 1, kMostBatches);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  batches_.resize(count);
  for (Batch& batch : batches_) {
    batch.ids.reserve(features);
    for (const client::FeatureInfo& feature : model.features) {
      const int64_t vocabulary = model.FindTable(feature.table)->vocabulary_size;
      std::vector<int64_t>& ids = batch.ids.emplace_back(ids_of_feature);
      for (int64_t& id : ids) id = DrawId(uniform(random), vocabulary, shape.zipf);
      batch.features.push_back({feature.name, client::DenseIds{ids, shape.ids_per_sample}});
    }
  }
  int64_t widest = 0;
  for (const client::FeatureInfo& feature : model.features) {
    widest = std::max<int64_t>(widest, feature.embedding_dim);
  }
  gradient_.assign(shape.batch * widest, 1e-3f);
  for (const client::FeatureInfo& feature : model.features) {
    gradients_.push_back({feature.name,
                          absl::MakeConstSpan(gradient_).first(shape.batch * feature.embedding_dim),
                          shape.batch});
  }
}

const std::vector<client::FeatureIds>& LoadBatches::Next() {
  return batches_[next_++ % batches_.size()].features;
}

void LoadResult::AddError(const absl::Status& status) {
  ++errors[absl::StatusCodeToString(status.code())];
  first_error.Update(status);
}

void LoadResult::Add(const LoadResult& more) {
  lookups.insert(lookups.end(), more.lookups.begin(), more.lookups.end());
  updates.insert(updates.end(), more.updates.begin(), more.updates.end());
  steps.insert(steps.end(), more.steps.begin(), more.steps.end());
  for (const auto& [code, count] : more.errors) errors[code] += count;
  first_error.Update(more.first_error);
}

int64_t LoadResult::error_count() const {
  int64_t count = 0;
  for (const auto& [code, times] : errors) count += times;
  return count;
}

float LatencyQuantile(std::vector<float>* latencies, double fraction) {
  if (latencies->empty()) return 0;
  const double wanted = std::ceil(fraction * static_cast<double>(latencies->size()));
  const auto place = static_cast<int64_t>(std::max(wanted, 1.0)) - 1;
  std::nth_element(latencies->begin(), latencies->begin() + place, latencies->end());
  return (*latencies)[place];
}

namespace {

using emberctl::Bytes;
using emberctl::Counted;
using emberctl::Json;
using emberctl::PrintColumns;
using emberctl::PrintJson;
using emberctl::Quantity;
using emberctl::Seconds;
using emberctl::Session;
using emberctl::Table;

struct LoadOptions {
  std::string model;   // a declared one; empty: that of `config`
  std::string config;  // a ModelConfig, declared if need be
  bool update = false;
  LoadShape shape;
  int clients = 1;
  double seconds = 10;
};

// What a model may be called whose rows may be changed.
constexpr char kScratchPrefix[] = "bench";

// All clients, on a thread each.
class Load {
 public:
  Load(const Session& session, const LoadOptions& options) : session_(session), options_(options) {}

  // Connects and finds the model.
  absl::Status Prepare();
  // Steps until the time is over; `live` is called about once a second.
  template <typename Live>
  void Run(const Live& live);

  const client::Model& model() const { return *model_; }
  LoadResult& result() { return result_; }
  double seconds() const { return seconds_; }
  int64_t steps_so_far() const { return steps_.load(); }
  int64_t errors_so_far() const { return errors_.load(); }

 private:
  absl::StatusOr<std::unique_ptr<client::Client>> Connect(int number) const;
  absl::StatusOr<client::Model> FindModel(client::Client& client) const;
  void RunClient(int number, absl::Barrier* prepared, LoadResult* result);
  absl::Status Step(client::Client& client, LoadBatches* batches, LoadResult* result);

  const Session& session_;
  const LoadOptions& options_;
  std::vector<std::unique_ptr<client::Client>> clients_;
  std::optional<client::Model> model_;
  LoadResult result_;
  double seconds_ = 0;
  std::atomic<bool> over_ = false;
  std::atomic<int64_t> steps_ = 0;
  std::atomic<int64_t> errors_ = 0;
  std::atomic<int64_t> next_step_ = 0;  // of the optimizers
};

absl::StatusOr<std::unique_ptr<client::Client>> Load::Connect(int number) const {
  client::ClientOptions options = session_.client_options();
  // Clients spread over the coordinators.
  std::rotate(options.addresses.begin(),
              options.addresses.begin() + number % options.addresses.size(),
              options.addresses.end());
  options.max_attempts = 1;  // errors are to be seen
  return client::Client::Connect(options);
}

absl::StatusOr<client::Model> Load::FindModel(client::Client& client) const {
  if (options_.config.empty()) return client.DescribeModel(options_.model);
  ASSIGN_OR_RETURN(const v1::ModelConfig config, config::LoadModel(options_.config));
  if (options_.update && !absl::StartsWith(config.name(), kScratchPrefix)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--update: not allowed for model \"", config.name(),
        "\": it changes rows, so the name of the model must begin with \"", kScratchPrefix, "\""));
  }
  return client.DeclareModelFile(options_.config);
}

absl::Status Load::Prepare() {
  for (int i = 0; i < options_.clients; ++i) {
    ASSIGN_OR_RETURN(auto client, Connect(i));
    clients_.push_back(std::move(client));
  }
  ASSIGN_OR_RETURN(auto model, FindModel(*clients_.front()));
  model_ = std::move(model);
  return absl::OkStatus();
}

template <typename Live>
void Load::Run(const Live& live) {
  std::vector<LoadResult> results(clients_.size());
  std::vector<std::thread> threads;
  auto* prepared = new absl::Barrier(static_cast<int>(clients_.size()) + 1);
  for (size_t i = 0; i < clients_.size(); ++i) {
    threads.emplace_back(
        [&, i, prepared] { RunClient(static_cast<int>(i), prepared, &results[i]); });
  }
  if (prepared->Block()) delete prepared;
  const absl::Time began = absl::Now();
  const absl::Time end = began + absl::Seconds(options_.seconds);
  for (absl::Time now = began; now < end; now = absl::Now()) {
    absl::SleepFor(std::min(absl::Seconds(1), end - now));
    live(absl::ToDoubleSeconds(absl::Now() - began));
  }
  over_ = true;
  for (std::thread& thread : threads) thread.join();
  seconds_ = absl::ToDoubleSeconds(absl::Now() - began);
  for (const LoadResult& result : results) result_.Add(result);
}

void Load::RunClient(int number, absl::Barrier* prepared, LoadResult* result) {
  constexpr absl::Duration kPauseAfterError = absl::Milliseconds(20);
  client::Client& client = *clients_[number];
  LoadBatches batches(*model_, options_.shape, /*seed=*/static_cast<uint64_t>(number) + 1);
  // The first step pays for connections and fresh memory.
  LoadResult warm_up;
  Step(client, &batches, &warm_up).IgnoreError();
  if (prepared->Block()) delete prepared;
  while (!over_) {
    const absl::Status status = Step(client, &batches, result);
    if (status.ok()) {
      ++steps_;
      continue;
    }
    ++errors_;
    result->AddError(status);
    absl::SleepFor(kPauseAfterError);
  }
}

absl::Status Load::Step(client::Client& client, LoadBatches* batches, LoadResult* result) {
  const absl::Time began = absl::Now();
  ASSIGN_OR_RETURN(const auto found,
                   client.Lookup(*model_, batches->Next(), {.inference = !options_.update}));
  const absl::Time looked_up = absl::Now();
  if (options_.update) {
    client::ApplyOptions apply;
    apply.step = next_step_++;
    RETURN_IF_ERROR(
        (client.ApplyGradients(*model_, found.batch, batches->gradients(), apply)).status());
    result->updates.push_back(static_cast<float>(absl::ToDoubleSeconds(absl::Now() - looked_up)));
  }
  result->lookups.push_back(static_cast<float>(absl::ToDoubleSeconds(looked_up - began)));
  result->steps.push_back(static_cast<float>(absl::ToDoubleSeconds(absl::Now() - began)));
  return absl::OkStatus();
}

// Payload of one step.
struct StepBytes {
  int64_t sent = 0;
  int64_t received = 0;
};
StepBytes BytesOf(const client::Model& model, const LoadOptions& options) {
  int64_t columns = 0;
  for (const client::FeatureInfo& feature : model.features) columns += feature.embedding_dim;
  const int64_t floats = options.shape.batch * columns * static_cast<int64_t>(sizeof(float));
  const int64_t ids = static_cast<int64_t>(model.features.size()) * options.shape.batch *
                      options.shape.ids_per_sample * static_cast<int64_t>(sizeof(int64_t));
  return {ids + (options.update ? floats : 0), floats};
}

using Latencies = std::vector<std::pair<const char*, std::vector<float>*>>;

Latencies LatenciesOf(LoadResult& result) {
  Latencies latencies = {{"lookup", &result.lookups}};
  if (!result.updates.empty()) {
    latencies.emplace_back("update", &result.updates);
    latencies.emplace_back("step", &result.steps);
  }
  return latencies;
}

void Print(Load& load, const LoadOptions& options, std::ostream& out) {
  LoadResult& result = load.result();
  const auto steps = static_cast<double>(result.steps.size());
  const StepBytes bytes = BytesOf(load.model(), options);
  const auto rate = [&](int64_t step_bytes) {
    return Bytes(static_cast<int64_t>(static_cast<double>(step_bytes) * steps / load.seconds()));
  };
  out << load.model().name << ": " << (options.update ? "complete steps" : "lookups") << " of "
      << Counted(options.shape.batch, "sample") << " x "
      << Counted(static_cast<int64_t>(load.model().features.size()), "feature") << " x "
      << Counted(options.shape.ids_per_sample, "id") << ", Zipf " << options.shape.zipf << ", "
      << Counted(options.clients, "client") << ", "
      << absl::StrFormat("%.1f s\n\n", load.seconds());
  PrintColumns({{"EXAMPLES/S", "STEPS/S", "SENT/S", "RECEIVED/S", "STEPS", "ERRORS"},
                {Quantity(steps * static_cast<double>(options.shape.batch) / load.seconds()),
                 Quantity(steps / load.seconds()), rate(bytes.sent), rate(bytes.received),
                 result.steps.size(), result.error_count()}},
               out);
  out << "\n";
  Table lines = {{"LATENCY", "P50", "P90", "P99", "MAX"}};
  for (const auto& [what, latencies] : LatenciesOf(result)) {
    emberctl::CellLine& line = lines.emplace_back(1, what);
    for (const double fraction : {0.5, 0.9, 0.99, 1.0}) {
      line.push_back(Seconds(LatencyQuantile(latencies, fraction)));
    }
  }
  PrintColumns(lines, out);
  for (const auto& [code, count] : result.errors) out << "\n" << code << ": " << count;
  if (!result.errors.empty()) out << "\n";
}

absl::Status PrintLoadJson(Load& load, const LoadOptions& options, std::ostream& out) {
  LoadResult& result = load.result();
  const auto per_second = [&](int64_t count) {
    return static_cast<float>(static_cast<double>(count) / load.seconds());
  };
  const auto steps = static_cast<int64_t>(result.steps.size());
  const StepBytes bytes = BytesOf(load.model(), options);
  Json json = {{"model", load.model().name},
               {"update", options.update},
               {"batch", options.shape.batch},
               {"ids_per_sample", options.shape.ids_per_sample},
               {"zipf", static_cast<float>(options.shape.zipf)},
               {"clients", options.clients},
               {"seconds", static_cast<float>(load.seconds())},
               {"steps", steps},
               {"steps_per_second", per_second(steps)},
               {"examples_per_second", per_second(steps * options.shape.batch)},
               {"sent_bytes_per_second", per_second(steps * bytes.sent)},
               {"received_bytes_per_second", per_second(steps * bytes.received)},
               {"errors", result.errors}};
  for (const auto& [what, latencies] : LatenciesOf(result)) {
    json[absl::StrCat(what, "_seconds")] = {{"p50", LatencyQuantile(latencies, 0.5)},
                                            {"p90", LatencyQuantile(latencies, 0.9)},
                                            {"p99", LatencyQuantile(latencies, 0.99)},
                                            {"max", LatencyQuantile(latencies, 1)}};
  }
  return PrintJson(json, out);
}

absl::Status PutLoad(Session& session, const LoadOptions& options) {
  Load load(session, options);
  RETURN_IF_ERROR(load.Prepare());
  const bool live = session.terminal && !session.json;
  load.Run([&](double seconds) {
    if (!live) return;
    const auto steps = static_cast<double>(load.steps_so_far());
    session.out << "\r"
                << absl::StrFormat(
                       "%.0f s: %s examples/s, %s steps/s, %d errors", seconds,
                       Quantity(steps * static_cast<double>(options.shape.batch) / seconds),
                       Quantity(steps / seconds), load.errors_so_far())
                << "   " << std::flush;
  });
  if (live) session.out << "\n\n";
  if (session.json) {
    RETURN_IF_ERROR(PrintLoadJson(load, options, session.out));
  } else {
    Print(load, options, session.out);
  }
  const LoadResult& result = load.result();
  if (result.errors.empty()) return absl::OkStatus();
  const int64_t failed = result.error_count();
  if (result.steps.empty()) return result.first_error;
  return absl::AbortedError(
      absl::StrCat(failed, " of ", failed + static_cast<int64_t>(result.steps.size()),
                   " steps failed; the first: ", std::string(result.first_error.message())));
}

void AddOptions(CLI::App& app, LoadOptions& options) {
  CLI::Option_group* subject = app.add_option_group("subject");
  subject->add_option("--model", options.model, "Name of a declared model");
  CLI::Option* config = subject->add_option(
      "--config", options.config,
      "ModelConfig as text proto or JSON; the model is declared, and stays declared");
  subject->require_option(1);
  app.add_flag("--update", options.update,
               "Complete steps: lookup and update. The model's name must begin with \"bench\"")
      ->needs(config);
  app.add_option("--batch", options.shape.batch, "Samples of every feature")
      ->check(Within(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--ids-per-sample", options.shape.ids_per_sample, "Ids of every sample")
      ->check(Within(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  app.add_option("--zipf", options.shape.zipf,
                 "Exponent of the ids' distribution; 0: all ids are equally frequent")
      ->check(Within(0.0, 10.0))
      ->capture_default_str();
  app.add_option("--clients", options.clients, "Connections, each with one call at a time")
      ->check(Within(1, 256))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds, "Seconds to run")
      ->check(Within(0.1, 3600.0))
      ->capture_default_str();
}

}  // namespace

int RunLoad(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  emberctl::Session session(out);
  session.terminal = &out == &std::cout && isatty(STDOUT_FILENO) == 1;
  LoadOptions options;
  CLI::App app(
      "Put load on a running cluster and report how fast it answers. Lookups do not change a "
      "declared model; --update changes rows and needs a model of its own. Exit status 1 if a step "
      "failed",
      "load");
  emberctl::AddCommonOptions(app, session);
  AddOptions(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help, out, err);
  } catch (const CLI::ParseError& error) {
    err << CommandLineError(app, error) << "\n";
    return 2;
  }
  const absl::Status status = PutLoad(session, options);
  if (!status.ok()) err << status << "\n";
  return status.ok() ? 0 : 1;
}

}  // namespace emberd::bench
