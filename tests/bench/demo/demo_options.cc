#include "tests/bench/demo/demo_options.h"

#include <algorithm>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace emberd::demo {
namespace {

// Sets what the arguments say; leaves all else as it is.
absl::Status Override(std::vector<std::string> arguments, DemoOptions* options) {
  CLI::App app;
  options->AddTo(&app);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return absl::OkStatus();
}

}  // namespace

void DemoOptions::AddTo(CLI::App* app) {
  experiment.AddTo(app);
  CLI::Option* running = app->add_option("--cluster", cluster,
                                         "Train on a cluster that is running already: host:port of "
                                         "its coordinators, separated by commas")
                             ->delimiter(',')
                             ->type_name("ADDRESS");
  app->add_option("--coordinators", coordinators,
                  "Coordinator processes; trainer r uses the r-th of them, if there are that many")
      ->check(CLI::Range(1, 64))
      ->excludes(running)
      ->capture_default_str();
  app->add_option("--shards", shards, "Shard processes, a power of two")
      ->excludes(running)
      ->capture_default_str();
  app->add_option("--sparsecores", sparsecores,
                  "SparseCores of a shard, a power of two; the tables depend only on shards x "
                  "SparseCores")
      ->excludes(running)
      ->capture_default_str();
  app->add_option("--out", out,
                  "Directory for curve.svg, curve.csv, emberd.log and, in the folder checkpoints, "
                  "what --resume needs")
      ->capture_default_str();
  app->add_option(
      "--max-gap", max_gap,
      "How far the AUC may end from best_auc (default: 0.01 for a full run on the generated log, "
      "0.03 for a quick one, 0.003 for files)");
  app->add_flag("--keep-running", keep_running, "Leave the cluster up until Ctrl-C")
      ->excludes(running);
  app->add_option(
         "--checkpoint-every", checkpoint_every,
         "Save a checkpoint after every N-th step, tables and dense part, while training "
         "goes on (0: none). Starts a new run: checkpoints of an earlier run in --out are deleted")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->excludes(running)
      ->type_name("N")
      ->capture_default_str();
  app->add_flag("--resume", resume,
                "Go on from the newest checkpoint in --out, with the options of the run that saved "
                "it; ends with the tables of a run that was never interrupted")
      ->excludes(running);
  app->add_option("--emberd", emberd, "Path of the server's program")->capture_default_str();
}

std::vector<std::string> DemoOptions::Arguments() const {
  std::vector<std::string> arguments = experiment.Arguments();
  arguments.insert(arguments.end(),
                   {"--coordinators", absl::StrCat(coordinators), "--shards", absl::StrCat(shards),
                    "--sparsecores", absl::StrCat(sparsecores), "--checkpoint-every",
                    absl::StrCat(checkpoint_every)});
  return arguments;
}

absl::StatusOr<DemoOptions> ResumedOptions(const DemoOptions& defaults,
                                           const std::vector<std::string>& saved,
                                           const std::vector<std::string>& command_line) {
  DemoOptions before = defaults;
  RETURN_IF_ERROR(Override(saved, &before));
  DemoOptions resumed = before;
  RETURN_IF_ERROR(Override(command_line, &resumed));
  if (resumed.experiment.Arguments() != before.experiment.Arguments()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--resume continues a run that had other options (", absl::StrJoin(saved, " "),
                     "); omit yours, or start a new run with another --out"));
  }
  if (resumed.shards * resumed.sparsecores != before.shards * before.sparsecores) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shards times --sparsecores is ", resumed.shards * resumed.sparsecores,
                     "; the run to continue had ", before.shards * before.sparsecores,
                     ", and its tables depend on it"));
  }
  return resumed;
}

absl::Status CheckCheckpointOptions(const DemoOptions& options) {
  const ExperimentOptions& experiment = options.experiment;
  if (options.checkpoint_every == 0 ||
      (experiment.consistency == "sync" && !experiment.pipelined)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--checkpoint-every needs --consistency sync without --pipelined: only there "
                   "has every trainer seen exactly the tables of a checkpoint"));
}

}  // namespace emberd::demo
