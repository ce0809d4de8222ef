#include "client/demo/demo.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include <poll.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/demo/cluster.h"
#include "client/demo/curve.h"
#include "client/demo/plain_trainer.h"
#include "client/demo/summary.h"
#include "client/demo/training.h"

namespace emberd::demo {

namespace {

// The initial rows of all tables, in their order.
absl::StatusOr<std::vector<std::vector<float>>> ReadTables(Embeddings* embeddings) {
  std::vector<std::vector<float>> tables;
  for (const client::TableInfo& table : embeddings->model().tables) {
    std::vector<float>& rows = tables.emplace_back();
    const auto add = [&rows](int64_t, absl::Span<const float> values, int64_t) {
      rows.insert(rows.end(), values.begin(), values.end());
      return absl::OkStatus();
    };
    if (auto s = embeddings->Export(table.name, add); !s.ok()) return s;
  }
  return tables;
}

class Demo {
 public:
  Demo(const DemoOptions& options, StopSignals* signals)
      : options_(options), signals_(signals), display_(stdout) {}

  absl::StatusOr<bool> Run();

 private:
  absl::Status Prepare();
  absl::Status Train();
  absl::Status Judge();
  absl::StatusOr<double> PlainAuc();
  absl::Status WriteFiles();
  bool GoodEnough();
  void WaitForSignal();
  std::vector<std::string> TrainerCommand(int rank) const;
  std::string Path(const std::string& name) const { return absl::StrCat(options_.out, "/", name); }

  const DemoOptions& options_;
  StopSignals* signals_;
  Display display_;
  Experiment experiment_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Embeddings> embeddings_;
  std::vector<std::vector<float>>
      initial_tables_;  // for the plain run; empty where the optimum is planted
  std::unique_ptr<Monitor> monitor_;
  std::unique_ptr<Training> training_;
  Outcome outcome_;
};

absl::StatusOr<bool> Demo::Run() {
  absl::Status status = Prepare();
  if (status.ok()) status = Train();
  if (status.ok()) status = Judge();
  bool good = false;
  if (status.ok()) {
    display_.Print(SummaryTable(experiment_, embeddings_->model(), options_.coordinators,
                                training_->result(), monitor_->Traffic(), outcome_));
    status = WriteFiles();
  }
  if (status.ok()) {
    good = GoodEnough();
    if (options_.keep_running) {
      display_.Print(absl::StrCat("the cluster stays up until Ctrl-C: ", cluster_->ready_line()));
    }
    display_.Print(LastLine(training_->result(), outcome_));
    if (options_.keep_running) WaitForSignal();
  }
  monitor_.reset();
  embeddings_.reset();
  if (cluster_ != nullptr) cluster_->Stop();
  if (!status.ok()) return status;
  return good;
}

absl::Status Demo::Prepare() {
  absl::StatusOr<Experiment> experiment = MakeExperiment(options_.experiment);
  if (!experiment.ok()) return experiment.status();
  experiment_ = *std::move(experiment);
  std::error_code error;
  std::filesystem::create_directories(options_.out, error);
  if (error)
    return absl::FailedPreconditionError(absl::StrCat(options_.out, ": ", error.message()));
  const Dataset& dataset = *experiment_.dataset;
  display_.Print(dataset.info().description);
  const absl::StatusOr<double> planted = PlantedAuc(dataset, experiment_.held_out);
  if (!planted.ok()) return planted.status();
  outcome_.planted = *planted >= 0;
  outcome_.best_auc = *planted;

  auto cluster = Cluster::Start({options_.emberd, options_.coordinators, options_.shards,
                                 options_.sparsecores, Path("emberd.log")},
                                [this] { return signals_->Requested(); });
  if (!cluster.ok()) return cluster.status();
  cluster_ = *std::move(cluster);
  display_.Print(cluster_->ready_line());
  auto embeddings = Embeddings::Connect(
      cluster_->Coordinators(),
      DescribeModel(dataset.info(), experiment_.parameters, experiment_.schedule.batch_size));
  if (!embeddings.ok()) return embeddings.status();
  embeddings_ = *std::move(embeddings);
  if (outcome_.planted) return absl::OkStatus();
  auto tables = ReadTables(embeddings_.get());
  if (!tables.ok()) return tables.status();
  initial_tables_ = *std::move(tables);
  return absl::OkStatus();
}

std::vector<std::string> Demo::TrainerCommand(int rank) const {
  std::vector<std::string> command = {options_.self,   "trainer",
                                      "--coordinator", cluster_->Field("coordinator"),
                                      "--rank",        absl::StrCat(rank),
                                      "--group",       "demo",
                                      "--hub",         absl::StrCat(kExtraDescriptor)};
  for (std::string& argument : options_.experiment.Arguments())
    command.push_back(std::move(argument));
  return command;
}

absl::Status Demo::Train() {
  monitor_ = std::make_unique<Monitor>([this] { return embeddings_->Status(); });
  training_ = std::make_unique<Training>(
      Training::Setup{.experiment = &experiment_,
                      .embeddings = embeddings_.get(),
                      .monitor = monitor_.get(),
                      .display = &display_,
                      .stop_requested = [this] { return signals_->Requested(); },
                      .cluster_runs = [this] { return cluster_->Running(); },
                      .trainer_command = [this](int rank) { return TrainerCommand(rank); }});
  return training_->Run();
}

absl::Status Demo::Judge() {
  auto held_out = EvaluateHeldOut(*experiment_.dataset, training_->dense(), embeddings_.get(),
                                  experiment_.held_out, [this] { return signals_->Requested(); });
  if (!held_out.ok()) return held_out.status();
  outcome_.held_out = *held_out;
  auto checksum = TableChecksum(embeddings_.get());
  if (!checksum.ok()) return checksum.status();
  outcome_.table_sha256 = *checksum;
  outcome_.restarts = monitor_->Restarts();
  if (outcome_.planted) return absl::OkStatus();
  const absl::StatusOr<double> plain = PlainAuc();
  if (!plain.ok()) return plain.status();
  outcome_.best_auc = *plain;
  return absl::OkStatus();
}

absl::StatusOr<double> Demo::PlainAuc() {
  display_.Print("training the same model in this process by plain loops, with no emberd");
  PlainTrainer plain(experiment_.dataset.get(), experiment_.parameters, experiment_.schedule);
  for (size_t f = 0; f < initial_tables_.size(); ++f)
    plain.tables()[f].weights() = initial_tables_[f];
  for (int64_t round = 0; round < experiment_.schedule.Rounds(); ++round) {
    if (signals_->Requested()) return absl::CancelledError("stopped");
    if (auto s = plain.Round(round, nullptr, nullptr); !s.ok()) return s;
  }
  plain.Finish();
  return plain.Evaluate(experiment_.held_out);
}

absl::Status Demo::WriteFiles() {
  const TrainingResult& training = training_->result();
  const std::string svg =
      CurveSvg(experiment_.dataset->info().description, training.curve, outcome_.best_auc,
               outcome_.planted ? "best reachable AUC" : "AUC of the plain run");
  if (auto s = WriteFile(Path("curve.csv"), CurveCsv(training.curve)); !s.ok()) return s;
  if (auto s = WriteFile(Path("curve.svg"), svg); !s.ok()) return s;
  display_.Print(absl::StrCat("learning curve: ", Path("curve.svg"), ", ", Path("curve.csv"),
                              "; log of the cluster: ", Path("emberd.log")));
  display_.Print(BestAucMeaning(outcome_));
  return absl::OkStatus();
}

bool Demo::GoodEnough() {
  if (outcome_.restarts > 0 || training_->result().replaced_trainers > 0) {
    display_.Print("rows or examples were lost on the way: the AUC is not judged");
    return true;
  }
  const double max_gap = options_.max_gap >= 0 ? options_.max_gap : experiment_.max_gap;
  const double gap = outcome_.best_auc - outcome_.held_out.auc;
  // The plain run must be met from both sides; a planted optimum can be beaten by luck alone.
  if ((outcome_.planted ? gap : std::abs(gap)) <= max_gap) return true;
  display_.Print(
      absl::StrFormat("NOT GOOD ENOUGH: the AUC differs from best_auc by %.4f; allowed are %.4f",
                      std::abs(gap), max_gap));
  return false;
}

void Demo::WaitForSignal() {
  while (!signals_->Requested() && cluster_->Running()) {
    pollfd waiting{signals_->descriptor(), POLLIN, 0};
    poll(&waiting, 1, 500);
  }
}

}  // namespace

absl::StatusOr<bool> RunDemo(const DemoOptions& options, StopSignals* signals) {
  return Demo(options, signals).Run();
}

}  // namespace emberd::demo
