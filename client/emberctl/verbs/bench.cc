#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/barrier.h"
#include "absl/time/clock.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/bench_load.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"

namespace emberd::emberctl {
namespace {

struct BenchOptions {
  std::string model;   // a declared one; empty: that of `config`
  std::string config;  // a ModelConfig, declared if need be
  bool update = false;
  LoadShape shape;
  int clients = 1;
  double seconds = 10;
};

// What a model may be called whose rows the bench is allowed to change.
constexpr char kScratchPrefix[] = "bench";

// All clients of a bench, on a thread each.
class Bench {
 public:
  Bench(const Session& session, const BenchOptions& options)
      : session_(session), options_(options) {}

  // Connects and finds the model.
  absl::Status Prepare();
  // Steps until the time is over; `live` is called about once a second.
  template <typename Live>
  void Run(const Live& live);

  const client::Model& model() const { return *model_; }
  BenchResult& result() { return result_; }
  double seconds() const { return seconds_; }
  int64_t steps_so_far() const { return steps_.load(); }
  int64_t errors_so_far() const { return errors_.load(); }

 private:
  absl::StatusOr<std::unique_ptr<client::Client>> Connect(int number) const;
  absl::StatusOr<client::Model> FindModel(client::Client& client) const;
  void RunClient(int number, absl::Barrier* prepared, BenchResult* result);
  absl::Status Step(client::Client& client, BenchBatches* batches, BenchResult* result);

  const Session& session_;
  const BenchOptions& options_;
  std::vector<std::unique_ptr<client::Client>> clients_;
  std::optional<client::Model> model_;
  BenchResult result_;
  double seconds_ = 0;
  std::atomic<bool> over_ = false;
  std::atomic<int64_t> steps_ = 0;
  std::atomic<int64_t> errors_ = 0;
  std::atomic<int64_t> next_step_ = 0;  // of the optimizers
};

absl::StatusOr<std::unique_ptr<client::Client>> Bench::Connect(int number) const {
  client::ClientOptions options = session_.client_options();
  // Clients spread over the coordinators.
  std::rotate(options.addresses.begin(),
              options.addresses.begin() + number % options.addresses.size(),
              options.addresses.end());
  options.max_attempts = 1;  // errors are to be seen
  return client::Client::Connect(options);
}

absl::StatusOr<client::Model> Bench::FindModel(client::Client& client) const {
  if (options_.config.empty()) return client.DescribeModel(options_.model);
  ASSIGN_OR_RETURN(const v1::ModelConfig config, config::LoadModel(options_.config));
  if (options_.update && !absl::StartsWith(config.name(), kScratchPrefix)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--update: not allowed for model \"", config.name(),
        "\": it changes rows, so the name of the model must begin with \"", kScratchPrefix, "\""));
  }
  return client.DeclareModelFile(options_.config);
}

absl::Status Bench::Prepare() {
  for (int i = 0; i < options_.clients; ++i) {
    ASSIGN_OR_RETURN(auto client, Connect(i));
    clients_.push_back(std::move(client));
  }
  ASSIGN_OR_RETURN(auto model, FindModel(*clients_.front()));
  model_ = std::move(model);
  return absl::OkStatus();
}

template <typename Live>
void Bench::Run(const Live& live) {
  std::vector<BenchResult> results(clients_.size());
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
  for (const BenchResult& result : results) result_.Add(result);
}

void Bench::RunClient(int number, absl::Barrier* prepared, BenchResult* result) {
  constexpr absl::Duration kPauseAfterError = absl::Milliseconds(20);
  client::Client& client = *clients_[number];
  BenchBatches batches(*model_, options_.shape, /*seed=*/static_cast<uint64_t>(number) + 1);
  // The first step pays for connections and fresh memory.
  BenchResult warm_up;
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

absl::Status Bench::Step(client::Client& client, BenchBatches* batches, BenchResult* result) {
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
StepBytes BytesOf(const client::Model& model, const BenchOptions& options) {
  int64_t columns = 0;
  for (const client::FeatureInfo& feature : model.features) columns += feature.embedding_dim;
  const int64_t floats = options.shape.batch * columns * static_cast<int64_t>(sizeof(float));
  const int64_t ids = static_cast<int64_t>(model.features.size()) * options.shape.batch *
                      options.shape.ids_per_sample * static_cast<int64_t>(sizeof(int64_t));
  return {ids + (options.update ? floats : 0), floats};
}

using Latencies = std::vector<std::pair<const char*, std::vector<float>*>>;

Latencies LatenciesOf(BenchResult& result) {
  Latencies latencies = {{"lookup", &result.lookups}};
  if (!result.updates.empty()) {
    latencies.emplace_back("update", &result.updates);
    latencies.emplace_back("step", &result.steps);
  }
  return latencies;
}

void Print(Bench& bench, const BenchOptions& options, std::ostream& out) {
  BenchResult& result = bench.result();
  const auto steps = static_cast<double>(result.steps.size());
  const StepBytes bytes = BytesOf(bench.model(), options);
  const auto rate = [&](int64_t step_bytes) {
    return Bytes(static_cast<int64_t>(static_cast<double>(step_bytes) * steps / bench.seconds()));
  };
  out << bench.model().name << ": " << (options.update ? "complete steps" : "lookups") << " of "
      << Counted(options.shape.batch, "sample") << " x "
      << Counted(static_cast<int64_t>(bench.model().features.size()), "feature") << " x "
      << Counted(options.shape.ids_per_sample, "id") << ", Zipf " << options.shape.zipf << ", "
      << Counted(options.clients, "client") << ", "
      << absl::StrFormat("%.1f s\n\n", bench.seconds());
  PrintColumns({{"EXAMPLES/S", "STEPS/S", "SENT/S", "RECEIVED/S", "STEPS", "ERRORS"},
                {Quantity(steps * static_cast<double>(options.shape.batch) / bench.seconds()),
                 Quantity(steps / bench.seconds()), rate(bytes.sent), rate(bytes.received),
                 absl::StrCat(result.steps.size()), absl::StrCat(result.error_count())}},
               out);
  out << "\n";
  std::vector<std::vector<std::string>> lines = {{"LATENCY", "P50", "P90", "P99", "MAX"}};
  for (const auto& [what, latencies] : LatenciesOf(result)) {
    std::vector<std::string>& line = lines.emplace_back(1, what);
    for (const double fraction : {0.5, 0.9, 0.99, 1.0}) {
      line.push_back(Seconds(LatencyQuantile(latencies, fraction)));
    }
  }
  PrintColumns(lines, out);
  for (const auto& [code, count] : result.errors) out << "\n" << code << ": " << count;
  if (!result.errors.empty()) out << "\n";
}

void PrintBenchJson(Bench& bench, const BenchOptions& options, std::ostream& out) {
  BenchResult& result = bench.result();
  const auto per_second = [&](int64_t count) {
    return static_cast<float>(static_cast<double>(count) / bench.seconds());
  };
  const auto steps = static_cast<int64_t>(result.steps.size());
  const StepBytes bytes = BytesOf(bench.model(), options);
  Json json = {{"model", bench.model().name},
               {"update", options.update},
               {"batch", options.shape.batch},
               {"ids_per_sample", options.shape.ids_per_sample},
               {"zipf", static_cast<float>(options.shape.zipf)},
               {"clients", options.clients},
               {"seconds", static_cast<float>(bench.seconds())},
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
  out << json.dump(1) << "\n";
}

absl::Status RunBench(Session& session, const BenchOptions& options) {
  Bench bench(session, options);
  RETURN_IF_ERROR(bench.Prepare());
  const bool live = session.terminal && !session.json;
  bench.Run([&](double seconds) {
    if (!live) return;
    const auto steps = static_cast<double>(bench.steps_so_far());
    session.out << "\r"
                << absl::StrFormat(
                       "%.0f s: %s examples/s, %s steps/s, %d errors", seconds,
                       Quantity(steps * static_cast<double>(options.shape.batch) / seconds),
                       Quantity(steps / seconds), bench.errors_so_far())
                << "   " << std::flush;
  });
  if (live) session.out << "\n\n";
  if (session.json) {
    PrintBenchJson(bench, options, session.out);
  } else {
    Print(bench, options, session.out);
  }
  const BenchResult& result = bench.result();
  if (result.errors.empty()) return absl::OkStatus();
  const int64_t failed = result.error_count();
  if (result.steps.empty()) return result.first_error;
  return absl::AbortedError(
      absl::StrCat(failed, " of ", failed + static_cast<int64_t>(result.steps.size()),
                   " steps failed; the first: ", std::string(result.first_error.message())));
}

}  // namespace

void AddBench(CLI::App& app, Session& session, Command& command) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* bench = app.add_subcommand(
      "bench",
      "Put load on a running cluster and report how fast it answers. Lookups do not change a "
      "declared model; --update changes rows and needs a model of its own. Exit status 1 if a "
      "step failed");
  CLI::Option_group* subject = bench->add_option_group("subject");
  subject->add_option("--model", options->model, "Name of a declared model");
  CLI::Option* config = subject->add_option(
      "--config", options->config,
      "ModelConfig as text proto or JSON; the model is declared, and stays declared");
  subject->require_option(1);
  bench
      ->add_flag("--update", options->update,
                 "Complete steps: lookup and update. The model's name must begin with \"bench\"")
      ->needs(config);
  bench->add_option("--batch", options->shape.batch, "Samples of every feature")
      ->check(Within(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  bench->add_option("--ids-per-sample", options->shape.ids_per_sample, "Ids of every sample")
      ->check(Within(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  bench
      ->add_option("--zipf", options->shape.zipf,
                   "Exponent of the ids' distribution; 0: all ids are equally frequent")
      ->check(Within(0.0, 10.0))
      ->capture_default_str();
  bench->add_option("--clients", options->clients, "Connections, each with one call at a time")
      ->check(Within(1, 256))
      ->capture_default_str();
  bench->add_option("--seconds", options->seconds, "Seconds to run")
      ->check(Within(0.1, 3600.0))
      ->capture_default_str();
  SetExample(bench, "emberctl bench --model my_model --clients 4 --batch 4096 --seconds 10");
  bench->callback([options, &session, &command] {
    command = [options, &session] { return RunBench(session, *options); };
  });
}

}  // namespace emberd::emberctl
