// emberd_demo: one command that starts a cluster and trainers, trains a model, judges it, and stops
// everything; and its parts as subcommands.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "tests/bench/demo/click_log.h"
#include "tests/bench/demo/cluster.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/demo_options.h"
#include "tests/bench/demo/display.h"
#include "tests/bench/demo/experiment.h"
#include "tests/bench/demo/group.h"
#include "tests/bench/demo/metrics.h"
#include "tests/bench/demo/plain_trainer.h"
#include "tests/bench/demo/saved_run.h"
#include "tests/bench/demo/trainer.h"
#include "tests/bench/demo/training.h"

namespace emberd::demo {
namespace {

// Ctrl-C and SIGTERM as something to look at, instead of an interruption. Make one in main, before
// any thread starts: threads inherit what is blocked. Not thread-safe.
class StopSignals {
 public:
  StopSignals() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    descriptor_ = FileDescriptor(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  int descriptor() const { return descriptor_.get(); }  // readable when a signal has come
  // True once a signal has come.
  bool Requested() {
    signalfd_siginfo info;
    requested_ = requested_ || read(descriptor_.get(), &info, sizeof(info)) == sizeof(info);
    return requested_;
  }

 private:
  FileDescriptor descriptor_;
  bool requested_ = false;
};

// The initial rows of all tables, in their order.
absl::StatusOr<std::vector<std::vector<float>>> ReadTables(Embeddings* embeddings) {
  std::vector<std::vector<float>> tables;
  for (const client::TableInfo& table : embeddings->model().tables) {
    std::vector<float>& rows = tables.emplace_back();
    const auto add = [&rows](int64_t, absl::Span<const float> values, int64_t) {
      rows.insert(rows.end(), values.begin(), values.end());
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(embeddings->Export(table.name, add));
  }
  return tables;
}

class Demo {
 public:
  Demo(const DemoOptions& options, StopSignals* signals)
      : options_(options),
        signals_(signals),
        saved_run_(options.CheckpointFolder()),
        display_(stdout) {}

  // The last line on standard output is
  //   demo: auc=0.xxxx best_auc=0.xxxx examples_per_s=N table_sha256=...
  // False: the model came out worse than it may, as has been said. CANCELLED: stopped by a signal.
  absl::StatusOr<bool> Run();

 private:
  absl::Status Prepare();
  absl::Status StartCluster();
  absl::Status CheckUntrained(const std::string& model);
  // Gives the cluster the rows of the newest checkpoint, and the trainers the step after it.
  absl::Status Resume();
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
  const SavedRun saved_run_;
  Display display_;
  Experiment experiment_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Embeddings> embeddings_;
  // For the plain run; empty where the optimum is planted.
  std::vector<std::vector<float>> initial_tables_;
  Position start_;
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
    display_.Print(SummaryTable(experiment_, embeddings_->model(),
                                static_cast<int>(cluster_->Coordinators().size()),
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
  RETURN_IF_ERROR(CheckCheckpointOptions(options_));
  ASSIGN_OR_RETURN(experiment_, MakeExperiment(options_.experiment));
  std::error_code error;
  std::filesystem::create_directories(options_.out, error);
  if (error)
    return absl::FailedPreconditionError(absl::StrCat(options_.out, ": ", error.message()));
  const Dataset& dataset = *experiment_.dataset;
  display_.Print(dataset.info().description);
  ASSIGN_OR_RETURN(outcome_.best_auc, PlantedAuc(dataset, experiment_.held_out));
  outcome_.planted = outcome_.best_auc >= 0;
  RETURN_IF_ERROR(StartCluster());
  ASSIGN_OR_RETURN(embeddings_,
                   Embeddings::Connect(cluster_->Coordinators(),
                                       DescribeModel(dataset.info(), experiment_.parameters,
                                                     experiment_.schedule.batch_size)));
  if (!outcome_.planted) {
    ASSIGN_OR_RETURN(initial_tables_, ReadTables(embeddings_.get()));
  }
  return options_.resume ? Resume() : absl::OkStatus();
}

// Rows that somebody has trained before would not give the numbers of a run.
absl::Status Demo::CheckUntrained(const std::string& model) {
  client::ClientOptions options;
  options.addresses = options_.cluster;
  ASSIGN_OR_RETURN(const auto client, client::Client::Connect(options));
  ASSIGN_OR_RETURN(const client::ClusterStatus status, client->GetStatus());
  for (const client::ModelStatus& known : status.models) {
    if (known.name != model) continue;
    return absl::AlreadyExistsError(absl::StrCat("the cluster has a model ", model,
                                                 " already; remove it first: emberctl model drop ",
                                                 model));
  }
  return absl::OkStatus();
}

absl::Status Demo::StartCluster() {
  if (!options_.cluster.empty()) {
    cluster_ = Cluster::Running(options_.cluster);
    return CheckUntrained(experiment_.dataset->info().name);
  }
  const bool saves = options_.checkpoint_every > 0;
  if (saves && !options_.resume) RETURN_IF_ERROR(saved_run_.Begin(options_.Arguments()));
  ASSIGN_OR_RETURN(
      cluster_,
      Cluster::Start({options_.emberd, options_.coordinators, options_.shards, options_.sparsecores,
                      Path("emberd.log"), saves || options_.resume ? saved_run_.data_folder() : ""},
                     [this] { return signals_->Requested(); }));
  display_.Print(cluster_->ready_line());
  for (absl::string_view page : absl::StrSplit(cluster_->Field("http"), ',')) {
    display_.Print(absl::StrCat("watch: http://", page, "/"));
  }
  return absl::OkStatus();
}

absl::Status Demo::Resume() {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, embeddings_->Checkpoints());
  for (const std::string& name : names) {  // newest first
    absl::StatusOr<Position> position = saved_run_.LoadDense(name);
    absl::Status status = position.status();
    if (status.ok()) status = embeddings_->Restore(name);
    if (status.ok()) {
      start_ = *std::move(position);
      display_.Print(absl::StrCat("goes on from checkpoint ", name, " of ",
                                  experiment_.schedule.Rounds(), " steps"));
      return absl::OkStatus();
    }
    if (!absl::IsDataLoss(status) && !absl::IsNotFound(status)) return status;
    display_.Print(absl::StrCat("checkpoint ", name, " cannot be used: ", status.ToString()));
  }
  return absl::NotFoundError(
      absl::StrCat(saved_run_.folder(), ": there is no checkpoint to go on from"));
}

std::vector<std::string> Demo::TrainerCommand(int rank) const {
  std::vector<std::string> command = {
      options_.self,   "trainer",
      "--coordinator", cluster_->Field("coordinator"),
      "--rank",        absl::StrCat(rank),
      "--group",       "demo",
      "--hub",         absl::StrCat(ChildProcess::kExtraDescriptor)};
  if (rank == 0 && options_.checkpoint_every > 0) {
    command.insert(command.end(), {"--checkpoint-every", absl::StrCat(options_.checkpoint_every),
                                   "--checkpoints", saved_run_.folder()});
  }
  for (std::string& argument : options_.experiment.Arguments())
    command.push_back(std::move(argument));
  return command;
}

absl::Status Demo::Train() {
  monitor_ = std::make_unique<Monitor>([this] { return embeddings_->Status(); });
  training_ = std::make_unique<Training>(
      Training::Setup{.experiment = &experiment_,
                      .embeddings = embeddings_.get(),
                      .start = start_,
                      .monitor = monitor_.get(),
                      .display = &display_,
                      .stop_requested = [this] { return signals_->Requested(); },
                      .cluster_runs = [this] { return cluster_->Runs(); },
                      .trainer_command = [this](int rank) { return TrainerCommand(rank); }});
  return training_->Run();
}

absl::Status Demo::Judge() {
  ASSIGN_OR_RETURN(outcome_.held_out,
                   EvaluateHeldOut(*experiment_.dataset, training_->dense(), embeddings_.get(),
                                   experiment_.held_out, [this] { return signals_->Requested(); }));
  ASSIGN_OR_RETURN(outcome_.table_sha256, TableChecksum(embeddings_.get()));
  outcome_.restarts = monitor_->Restarts();
  if (!outcome_.planted) {
    ASSIGN_OR_RETURN(outcome_.best_auc, PlainAuc());
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Demo::PlainAuc() {
  display_.Print("training the same model in this process by plain loops, with no emberd");
  PlainTrainer plain(experiment_.dataset.get(), experiment_.parameters, experiment_.schedule);
  for (size_t f = 0; f < initial_tables_.size(); ++f)
    plain.tables()[f].weights() = initial_tables_[f];
  for (int64_t round = 0; round < experiment_.schedule.Rounds(); ++round) {
    if (signals_->Requested()) return absl::CancelledError("stopped");
    RETURN_IF_ERROR(plain.Round(round, nullptr, nullptr));
  }
  plain.Finish();
  return plain.Evaluate(experiment_.held_out);
}

absl::Status Demo::WriteFiles() {
  const TrainingResult& training = training_->result();
  const std::string svg =
      CurveSvg(experiment_.dataset->info().description, training.curve, outcome_.best_auc,
               outcome_.planted ? "best reachable AUC" : "AUC of the plain run");
  RETURN_IF_ERROR(WriteFile(Path("curve.csv"), CurveCsv(training.curve)));
  RETURN_IF_ERROR(WriteFile(Path("curve.svg"), svg));
  display_.Print(
      absl::StrCat("learning curve: ", Path("curve.svg"), ", ", Path("curve.csv"),
                   options_.cluster.empty() ? "; log of the cluster: " + Path("emberd.log") : ""));
  display_.Print(BestAucMeaning(outcome_));
  return absl::OkStatus();
}

bool Demo::GoodEnough() {
  // Of a cluster that the demo did not start, the rows may have come back with the shard.
  const bool rows_lost = options_.cluster.empty() && outcome_.restarts > 0;
  if (rows_lost || training_->result().replaced_trainers > 0) {
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
  while (!signals_->Requested() && cluster_->Runs()) {
    pollfd waiting{signals_->descriptor(), POLLIN, 0};
    poll(&waiting, 1, 500);
  }
}

constexpr char kDescription[] =
    R"(Trains a model whose embeddings live in a cluster of emberd processes on this machine:
2 coordinators and 4 shards, with 2 trainer processes beside them. To emberd the trainers are the
ranks of one synchronous group: their batches make one global batch, and every row that it touches
gets one update per step. The dense part, a small MLP, is a replica in each trainer; the replicas'
gradients are summed (all-reduce). A run repeats bit by bit: equal options give an equal
table_sha256, and so does one trainer with twice the batch.)";

constexpr char kExamples[] = R"(Examples:
  emberd_demo                           a generated click log whose best reachable AUC is known
  emberd_demo --quick                   the same, in less than a minute
  emberd_demo --data ml-100k            MovieLens-100K, compared with a run without emberd
  emberd_demo --data train.txt --examples 1000000
                                        a click log in Criteo's TSV layout
  emberd_demo --cluster 127.0.0.1:7400  on a cluster that is running already
  emberd_demo --keep-running            keep the cluster running afterwards, for emberctl
  emberd_demo --checkpoint-every 100    save checkpoints on the way; after a crash, or Ctrl-C:
  emberd_demo --resume                  go on, and end with the tables of an uninterrupted run
  emberd_demo generate --out log.tsv --examples 100000
  emberd_demo trainer --coordinator 127.0.0.1:7400
                                        one trainer, on a cluster that is running already

The last line is: demo: auc=0.xxxx best_auc=0.xxxx examples_per_s=N table_sha256=...
best_auc: for the generated log, the AUC of the probabilities that drew the labels; for files, the
AUC of the same model trained by plain loops without emberd. Exit status: 1 if the AUC is too far
from best_auc (--max-gap), or for an error; 130 if a signal has stopped the run.)";

struct GenerateOptions {
  std::string out;
  int64_t examples = 100'000;
  uint64_t seed = 1;
};

struct TrainerOptions {
  ExperimentOptions experiment;
  TrainerSetup setup;
  int hub = -1;
};

CLI::App* AddGenerate(CLI::App* app, GenerateOptions* options) {
  CLI::App* command =
      app->add_subcommand("generate", "Write the generated click log as Criteo's TSV");
  command->add_option("--out", options->out, "File to write")->required();
  command->add_option("--examples", options->examples, "Lines")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "The same seed gives the same log")
      ->capture_default_str();
  return command;
}

CLI::App* AddTrainer(CLI::App* app, TrainerOptions* options) {
  CLI::App* command =
      app->add_subcommand("trainer", "One trainer process against a running cluster");
  command
      ->add_option("--coordinator", options->setup.coordinators,
                   "host:port, or several, separated by commas")
      ->delimiter(',')
      ->required();
  command->add_option("--rank", options->setup.rank, "Which trainer of the group this is")
      ->capture_default_str();
  command->add_option("--group", options->setup.group_name,
                      "Name of the group in emberd (default: a name of its own)");
  command->add_option(
      "--hub", options->hub,
      "File descriptor to the process that sums the trainers' dense gradients (default: none, a "
      "trainer by itself)");
  CLI::Option* every = command
                           ->add_option("--checkpoint-every", options->setup.checkpoint_every,
                                        "Ask for a checkpoint after every N-th step (0: never)")
                           ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
                           ->type_name("N")
                           ->capture_default_str();
  CLI::Option* folder = command->add_option("--checkpoints", options->setup.checkpoint_folder,
                                            "Folder of the run: the dense part is saved in its "
                                            "subfolder dense, under the checkpoint's name");
  every->needs(folder);
  options->experiment.AddTo(command);
  return command;
}

absl::Status Generate(const GenerateOptions& options) {
  return WriteCriteoFile(ClickLog(options.seed, options.examples, 0), options.examples,
                         options.out);
}

absl::Status RunAlone(TrainerOptions* options) {
  options->experiment.trainers = 1;
  ASSIGN_OR_RETURN(const Experiment experiment, MakeExperiment(options->experiment));
  SoloGroup group;
  const absl::Status status = RunTrainer(experiment, options->setup, &group);
  group.Print();
  return status;
}

// The error goes to the hub, which shows it.
absl::Status RunInGroup(const TrainerOptions& options) {
  SocketGroup group(options.hub);
  const absl::StatusOr<Experiment> experiment = MakeExperiment(options.experiment);
  const absl::Status status =
      experiment.ok() ? RunTrainer(*experiment, options.setup, &group) : experiment.status();
  if (!status.ok()) group.Report("gives up: " + status.ToString());
  return status;
}

absl::StatusOr<bool> RunDemo(DemoOptions options, const DemoOptions& defaults,
                             const std::vector<std::string>& command_line, StopSignals* signals) {
  if (options.resume) {
    ASSIGN_OR_RETURN(const std::vector<std::string> saved,
                     SavedRun(options.CheckpointFolder()).Arguments());
    ASSIGN_OR_RETURN(options, ResumedOptions(defaults, saved, command_line));
  }
  return Demo(options, signals).Run();
}

int Main(int argc, char** argv) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  DemoOptions demo;
  demo.self = self.string();
  demo.emberd = (self.parent_path() / "emberd").string();
  GenerateOptions generate;
  TrainerOptions trainer;

  CLI::App app(kDescription);
  app.footer(kExamples);
  const DemoOptions defaults = demo;
  demo.AddTo(&app);
  CLI::App* generate_command = AddGenerate(&app, &generate);
  CLI::App* trainer_command = AddTrainer(&app, &trainer);
  app.require_subcommand(0, 1);
  CLI11_PARSE(app, argc, argv);

  absl::Status status;
  if (generate_command->parsed()) {
    status = Generate(generate);
  } else if (trainer_command->parsed()) {
    if (trainer.hub >= 0) return RunInGroup(trainer).ok() ? 0 : 1;
    status = RunAlone(&trainer);
  } else {
    StopSignals signals;
    const absl::StatusOr<bool> good = RunDemo(demo, defaults, {argv + 1, argv + argc}, &signals);
    if (good.ok()) return *good ? 0 : 1;
    status = good.status();
    if (absl::IsCancelled(status) && signals.Requested()) {
      std::fprintf(stderr, "emberd_demo: stopped\n");
      return 130;
    }
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "emberd_demo: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace emberd::demo

int main(int argc, char** argv) { return emberd::demo::Main(argc, argv); }
