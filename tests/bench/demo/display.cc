#include "tests/bench/demo/display.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <sys/ioctl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace emberd::demo {
namespace {

constexpr absl::Duration kTerminalEvery = absl::Milliseconds(500), kLineEvery = absl::Seconds(5);
constexpr int kBarWidth = 20;

size_t TerminalWidth(int descriptor) {
  winsize size{};
  return ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string Short(double number) {
  if (std::abs(number) >= 999.5e3) return absl::StrFormat("%.2f M", number / 1e6);
  if (std::abs(number) >= 999.5) return absl::StrFormat("%.1f k", number / 1e3);
  return absl::StrFormat("%.0f", number);
}

std::string ProgressLine(const Progress& progress) {
  const double done = progress.total == 0 ? 1.0
                                          : static_cast<double>(progress.examples) /
                                                static_cast<double>(progress.total);
  const int filled = static_cast<int>(std::clamp(done, 0.0, 1.0) * kBarWidth);
  std::string line =
      absl::StrFormat("[%s%s] %.0f%%  %s examples  %s/s  training loss %.4f  training AUC %.4f",
                      std::string(filled, '#'), std::string(kBarWidth - filled, '.'), 100 * done,
                      Short(static_cast<double>(progress.examples)),
                      Short(progress.examples_per_second), progress.loss, progress.auc);
  if (progress.held_out_auc >= 0) {
    absl::StrAppendFormat(&line, "  held-out AUC %.4f", progress.held_out_auc);
  }
  absl::StrAppend(&line, "  ", Short(static_cast<double>(progress.rows_touched)), " rows touched");
  if (progress.shards.empty()) return line;
  absl::StrAppend(&line, "  shards");
  for (const ShardTraffic& shard : progress.shards) {
    absl::StrAppend(
        &line, " ",
        shard.reachable ? absl::StrFormat("%.2f", shard.rows_per_second / 1e6) : "down");
  }
  return absl::StrCat(line, " M rows/s");
}

std::string WrapProgress(const std::string& line, size_t width) {
  std::string wrapped;
  size_t used = 0;
  for (absl::string_view part : absl::StrSplit(line, "  ")) {
    if (used > 0 && used + 2 + part.size() <= width) {
      absl::StrAppend(&wrapped, "  ", part);
      used += 2 + part.size();
    } else {
      absl::StrAppend(&wrapped, used > 0 ? "\n" : "", part.substr(0, width));
      used = std::min(width, part.size());
    }
  }
  return wrapped;
}

Display::Display(std::FILE* stream) : stream_(stream), terminal_(isatty(fileno(stream)) == 1) {}

bool Display::Due(absl::Time now) const {
  return now - last_ >= (terminal_ ? kTerminalEvery : kLineEvery);
}

void Display::Show(const Progress& progress, absl::Time now) {
  last_ = now;
  const std::string line = ProgressLine(progress);
  if (!terminal_) return Print(line);
  Erase();
  live_ = WrapProgress(line, TerminalWidth(fileno(stream_)) - 1);
  std::fputs(live_.c_str(), stream_);
  std::fflush(stream_);
}

// Back to the beginning of the first live line, and away with all that follows.
void Display::Erase() {
  if (live_.empty()) return;
  const int64_t up = std::count(live_.begin(), live_.end(), '\n');
  std::fputs(up > 0 ? absl::StrCat("\r\x1b[", up, "A\x1b[J").c_str() : "\r\x1b[J", stream_);
}

void Display::ShowLast(const Progress& progress) {
  Show(progress, absl::Now());
  Finish();
}

void Display::Print(const std::string& line) {
  // On a terminal the line takes the place of the live ones, which are drawn again below it.
  Erase();
  std::fprintf(stream_, "%s\n%s", line.c_str(), live_.c_str());
  std::fflush(stream_);
}

void Display::Finish() {
  if (!live_.empty()) std::fputc('\n', stream_);
  live_.clear();
}

namespace {

std::string Row(const std::string& name, const std::string& value) {
  return absl::StrFormat("  %-26s %s\n", name, value);
}

double Rate(const TrainingResult& training) {
  return training.seconds > 0
             ? static_cast<double>(training.examples - training.examples_before) / training.seconds
             : 0;
}

std::string Milliseconds(const std::vector<std::pair<const char*, double>>& parts,
                         int64_t batches) {
  std::vector<std::string> texts;
  for (const auto& [name, seconds] : parts) {
    texts.push_back(absl::StrFormat(
        "%s %.1f ms", name, 1e3 * seconds / static_cast<double>(std::max<int64_t>(1, batches))));
  }
  return absl::StrJoin(texts, ", ");
}

std::string GroupText(const Experiment& experiment) {
  const client::TrainOptions& group = experiment.group;
  switch (group.consistency) {
    case client::Consistency::kSync:
      return group.pipelined ? "in one synchronous group, pipelined" : "in one synchronous group";
    case client::Consistency::kAsync:
      return "in one asynchronous group";
    case client::Consistency::kBounded:
      return absl::StrCat("in one group, at most ", group.staleness_bound, " steps apart");
  }
  return "";
}

}  // namespace

std::string SummaryTable(const Experiment& experiment, const client::Model& model, int coordinators,
                         const TrainingResult& training, const std::vector<ShardTraffic>& shards,
                         const Outcome& outcome) {
  int64_t rows = 0;
  for (const client::TableInfo& table : model.tables) rows += table.vocabulary_size;
  std::string text = "\n";
  text += Row("data", experiment.dataset->info().description);
  text += Row("tables", absl::StrFormat("%d with %s rows of %d, %.1f MB with optimizer state",
                                        model.tables.size(), Short(static_cast<double>(rows)),
                                        experiment.parameters.embedding_dim,
                                        static_cast<double>(model.table_bytes) / 1e6));
  text += Row("cluster", absl::StrFormat("%d coordinator%s, %d shards with %d SparseCores each",
                                         coordinators, coordinators == 1 ? "" : "s", model.shards,
                                         model.sparsecores_per_shard));
  text += Row("trainers", absl::StrFormat("%d %s, batches of %d", experiment.schedule.trainers,
                                          GroupText(experiment), experiment.schedule.batch_size));
  text +=
      Row("trained on",
          absl::StrFormat("%s examples in %.1f s: %.0f examples/s",
                          Short(static_cast<double>(training.examples - training.examples_before)),
                          training.seconds, Rate(training)));
  if (training.examples_before > 0) {
    text +=
        Row("went on after", absl::StrFormat("%s examples that a checkpoint held",
                                             Short(static_cast<double>(training.examples_before))));
  }
  text += Row("mini-batches of a step",
              absl::StrFormat("%.2f", training.batches == 0
                                          ? 0.0
                                          : static_cast<double>(training.total.minibatches) /
                                                static_cast<double>(training.batches)));
  const RoundReport& total = training.total;
  text += Row("a trainer's batch takes", Milliseconds({{"dense part", total.dense_seconds},
                                                       {"waiting for emberd", total.wait_seconds}},
                                                      training.batches));
  text += Row("and on its coordinator", Milliseconds({{"preprocess", total.preprocess_seconds},
                                                      {"shards", total.shard_seconds},
                                                      {"combine", total.combine_seconds},
                                                      {"waiting for ranks", total.rank_seconds}},
                                                     training.batches));
  for (size_t i = 0; i < shards.size(); ++i) {
    text += Row(
        absl::StrCat("shard ", i),
        absl::StrFormat("%s rows gathered, %s updated, %d restarts",
                        Short(static_cast<double>(shards[i].rows_gathered)),
                        Short(static_cast<double>(shards[i].rows_updated)), shards[i].restarts));
  }
  if (training.replaced_trainers > 0)
    text += Row("replaced trainers", absl::StrCat(training.replaced_trainers));
  text += Row("held-out log loss", absl::StrFormat("%.4f", outcome.held_out.log_loss));
  text += Row("held-out AUC",
              absl::StrFormat("%.4f over %d examples", outcome.held_out.auc, experiment.held_out));
  text += Row(outcome.planted ? "best reachable AUC" : "AUC of the plain run",
              absl::StrFormat("%.4f (difference %+.4f)", outcome.best_auc,
                              outcome.held_out.auc - outcome.best_auc));
  return text;
}

std::string BestAucMeaning(const Outcome& outcome) {
  return outcome.planted ? "best_auc: the held-out examples scored with the very probabilities "
                           "that drew their labels"
                         : "best_auc: the same model, trained in one process by plain loops with "
                           "no emberd, on the same held-out examples";
}

std::string LastLine(const TrainingResult& training, const Outcome& outcome) {
  return absl::StrFormat("demo: auc=%.4f best_auc=%.4f examples_per_s=%.0f table_sha256=%s",
                         outcome.held_out.auc, outcome.best_auc, Rate(training),
                         outcome.table_sha256);
}

}  // namespace emberd::demo
