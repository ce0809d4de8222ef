// emberd_demo: the demo itself, and its parts as subcommands.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "absl/status/status.h"
#include "client/demo/click_log.h"
#include "client/demo/criteo.h"
#include "client/demo/demo.h"
#include "client/demo/experiment.h"
#include "client/demo/group.h"
#include "client/demo/signals.h"
#include "client/demo/solo_group.h"
#include "client/demo/trainer.h"

namespace emberd::demo {
namespace {

constexpr char kDescription[] =
    "Trains a model whose embeddings live in a cluster of emberd processes: 2 coordinators and 4 "
    "shards on\n"
    "this machine, with 2 trainer processes beside them. To emberd the trainers are the ranks of "
    "one "
    "synchronous\n"
    "group: their batches make one global batch, and every row gets one update a step. Their dense "
    "part, a small\n"
    "MLP, are equal replicas, whose gradients are summed (all-reduce). A run repeats bit by bit: "
    "equal options\n"
    "give an equal table_sha256, and so does one trainer with twice the batch.";

constexpr char kExamples[] =
    "Examples:\n"
    "  emberd_demo                           a generated click log whose best reachable AUC is "
    "known\n"
    "  emberd_demo --quick                   the same, in less than a minute\n"
    "  emberd_demo --data ml-100k            MovieLens-100K; its AUC is held against a plain run\n"
    "  emberd_demo --data train.txt --examples 1000000\n"
    "                                        a click log in Criteo's TSV layout\n"
    "  emberd_demo --keep-running            leave the cluster up afterwards, to look around with "
    "emberctl\n"
    "  emberd_demo generate --out log.tsv --examples 100000\n"
    "  emberd_demo trainer --coordinator 127.0.0.1:7400\n"
    "                                        one trainer against a cluster that runs already\n"
    "\n"
    "The last line is: demo: auc=0.xxxx best_auc=0.xxxx examples_per_s=N table_sha256=...\n"
    "best_auc: for the generated log the AUC of the probabilities that drew the labels; for files "
    "the AUC of\n"
    "the same model trained by plain loops with no emberd. Exit status 1 means that the AUC is too "
    "far from\n"
    "it (--max-gap), or an error; 130 that a signal stopped the run.";

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

void AddDemo(CLI::App* app, DemoOptions* options) {
  options->experiment.AddTo(app);
  app->add_option("--coordinators", options->coordinators,
                  "Coordinator processes; trainer r uses the r-th, as far as there are so many")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app->add_option("--shards", options->shards, "Shard processes, a power of two")
      ->capture_default_str();
  app->add_option(
         "--sparsecores", options->sparsecores,
         "SparseCores of a shard, a power of two; the tables depend on shards x SparseCores alone")
      ->capture_default_str();
  app->add_option("--out", options->out, "Directory for curve.svg, curve.csv and emberd.log")
      ->capture_default_str();
  app->add_option(
      "--max-gap", options->max_gap,
      "How far the AUC may end from best_auc (default: 0.01 for a full run on the generated log, "
      "0.03 for a quick one, 0.003 for files)");
  app->add_flag("--keep-running", options->keep_running, "Leave the cluster up until Ctrl-C");
  app->add_option("--emberd", options->emberd, "The server's program")->capture_default_str();
}

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
                   "host:port, or several, divided by commas")
      ->delimiter(',')
      ->required();
  command->add_option("--rank", options->setup.rank, "Which trainer of the group this is")
      ->capture_default_str();
  command->add_option("--group", options->setup.group_name,
                      "Name of the group in emberd (default: one that nobody else has)");
  command->add_option(
      "--hub", options->hub,
      "File descriptor to the process that sums the trainers' dense gradients (default: none, a "
      "trainer by itself)");
  options->experiment.AddTo(command);
  return command;
}

absl::Status Generate(const GenerateOptions& options) {
  return WriteCriteoFile(ClickLog(options.seed, options.examples, 0), options.examples,
                         options.out);
}

absl::Status Train(TrainerOptions options) {
  const bool alone = options.hub < 0;
  if (alone) options.experiment.trainers = 1;
  const absl::StatusOr<Experiment> experiment = MakeExperiment(options.experiment);
  std::unique_ptr<Group> group;
  if (alone) {
    group = std::make_unique<SoloGroup>();
  } else {
    group = std::make_unique<SocketGroup>(options.hub);
  }
  const absl::Status status =
      experiment.ok() ? RunTrainer(*experiment, options.setup, group.get()) : experiment.status();
  if (!status.ok()) group->Report("gives up: " + status.ToString());
  if (alone) static_cast<SoloGroup&>(*group).Print();
  return status;
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
  AddDemo(&app, &demo);
  CLI::App* generate_command = AddGenerate(&app, &generate);
  CLI::App* trainer_command = AddTrainer(&app, &trainer);
  app.require_subcommand(0, 1);
  CLI11_PARSE(app, argc, argv);

  absl::Status status;
  if (generate_command->parsed()) {
    status = Generate(generate);
  } else if (trainer_command->parsed()) {
    status = Train(trainer);
    if (!status.ok() && trainer.hub >= 0) return 1;  // the group has been told
  } else {
    StopSignals signals;
    const absl::StatusOr<bool> good = RunDemo(demo, &signals);
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
