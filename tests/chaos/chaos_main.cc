// Trains three groups (synchronous, pipelined, bounded) and two trainers without a group on a
// cluster of processes while coordinators and trainers are killed, coordinators, trainers and
// shards are stopped, and the links between them are cut and held up, up to five at a time, at
// moments that a seed decides. After each round all must go on by themselves. At the end no update
// may be lost, doubled or torn: the synchronous group's tables must equal, to the bit, those of one
// trainer on a cluster that nobody disturbed; every row of the others has counted its own updates.
//
//   emberd_chaos --minutes 10 --seed 7       exit status 0: all of that held
//
//   emberd_chaos --minutes 30 --log --fsync ALWAYS --power
//
// Shards are stopped but not killed, for their rows live in memory; with --log they are, also as
// they come back, and all processes at once, which are also stopped by SIGTERM; their logs get torn
// tails, their disk is full at times, and with --power they lose what nobody had synced. With
// --checkpoint all processes are stopped by SIGTERM now and then: they save first, and go on from
// it.
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <string>

#include <CLI/CLI.hpp>

#include "base/temp_dir.h"
#include "tests/chaos/chaos.h"

namespace emberd::chaos {
namespace {

int RunChaos(const Options& options, const std::string& program) {
  const absl::StatusOr<TempDir> folder = TempDir::Create();
  if (!folder.ok()) {
    std::fprintf(stderr, "chaos: %s\n", folder.status().ToString().c_str());
    return 1;
  }
  Chaos chaos(options, program, folder->path());
  const absl::Status status = chaos.Run();
  if (!status.ok()) std::fprintf(stderr, "chaos: %s\n", status.ToString().c_str());
  chaos.PrintSummary();
  return status.ok() ? 0 : 1;
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Kills, stops and cuts off parts of a cluster under training, and checks that no update is "
      "lost, doubled or torn.");
  Options options;
  options.seed = std::random_device()();
  app.add_option("--minutes", options.minutes, "how long to disturb, in minutes")
      ->check(CLI::Range(0.0, 10000.0))
      ->capture_default_str();
  app.add_option("--faults", options.max_faults, "stop after this many faults, if that comes first")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}));
  app.add_option("--seed", options.seed, "decides faults and moments; default: a random one");
  app.add_option("--plant", options.plant,
                 "make a mistake on purpose, which the run must find: lose or double an update")
      ->check(CLI::IsMember({"lost", "doubled"}));
  app.add_flag("--log", options.log,
               "let shards keep logs (storage.durability: LOG), and kill them too");
  app.add_option("--fsync", options.fsync, "with --log: ALWAYS, INTERVAL or NEVER")
      ->check(CLI::IsMember({"ALWAYS", "INTERVAL", "NEVER"}))
      ->capture_default_str();
  app.add_flag("--checkpoint", options.checkpoint,
               "save checkpoints (storage.durability: CHECKPOINT), and stop all coordinators and "
               "shards by SIGTERM now and then: a clean stop saves first, so that nothing is lost")
      ->excludes("--log");
  app.add_flag("--power", options.power,
               "with --log and --fsync ALWAYS: when all processes are killed, lose what they had "
               "not synced");
  app.add_flag(
      "--one-machine", options.one_machine,
      "let coordinators and shards share memory and lanes, which are not cut with the links");
  TrainerOptions trainer;
  std::string mode;
  app.add_option("--trainer", mode, "be a trainer of this group; chaos starts these itself")
      ->group("");
  app.add_option("--rank", trainer.rank)->group("");
  app.add_option("--control", trainer.control_folder)->group("");
  app.add_option("--address", trainer.addresses)->group("");
  CLI11_PARSE(app, argc, argv);
  if (options.power && (!options.log || options.fsync != "ALWAYS")) {
    std::fprintf(stderr,
                 "chaos: --power needs --log and --fsync ALWAYS: else a loss is no fault\n");
    return 2;
  }
  if (mode.empty()) {
    return RunChaos(options, std::filesystem::canonical("/proc/self/exe").string());
  }
  const std::optional<Mode> found = ModeOf(mode);
  if (!found.has_value()) {
    std::fprintf(stderr, "chaos: there is no group '%s'\n", mode.c_str());
    return 2;
  }
  trainer.mode = *found;
  trainer.size = kRanks;
  if (!options.plant.empty()) {
    trainer.plant = options.plant == "lost" ? Plant::kLost : Plant::kDoubled;
  }
  const absl::Status status = Train(trainer);
  if (!status.ok()) std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace emberd::chaos

int main(int argc, char** argv) { return emberd::chaos::Main(argc, argv); }
