#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/rates.h"
#include "client/emberctl/stats_view.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

struct StatsOptions {
  int hot_rows = 0;
  double interval_seconds = 0;  // 0: since the start
};

void Print(const Rates& rates, const std::string& address, bool per_second, Session& session) {
  for (const CellLine& line : SummaryLines(rates, address)) {
    session.out << LayOutLine(line, /*colors=*/false) << "\n";
  }
  for (const auto& table : StatsTables(rates, {.per_second = per_second})) {
    session.out << "\n";
    for (const std::string& line : LayOut(table, /*colors=*/false)) session.out << line << "\n";
  }
}

absl::Status ShowStats(Session& session, const StatsOptions& options) {
  StatsSource source(session, options.hot_rows);
  ASSIGN_OR_RETURN(auto stats, source.Fetch());
  const bool per_second = options.interval_seconds > 0;
  Rates rates;
  if (per_second) {
    absl::SleepFor(absl::Seconds(options.interval_seconds));
    const std::string address = source.address();
    ASSIGN_OR_RETURN(const auto later, source.Fetch());
    if (source.address() != address || !SameLife(stats, later)) {
      return absl::UnavailableError("the coordinator was restarted in the meantime; try again");
    }
    rates = RatesBetween(stats, later);
  } else {
    rates = TotalsOf(stats);
  }
  if (session.json) {
    session.out << StatsJson(rates).dump(1) << "\n";
  } else {
    Print(rates, source.address(), per_second, session);
  }
  return absl::OkStatus();
}

}  // namespace

void AddStats(CLI::App& app, Session& session, Command& command) {
  auto options = std::make_shared<StatsOptions>();
  CLI::App* stats =
      app.add_subcommand("stats",
                         "Show what a coordinator and the shards have done since they started, or "
                         "do now: methods, stages, stacks against their limits, shards, training "
                         "groups, hot rows. Of several addresses, the first that answers is asked");
  stats->add_option("--hot-rows", options->hot_rows, "Rows to list of each table and shard")
      ->check(Within(0, 100))
      ->capture_default_str();
  stats
      ->add_option("--interval", options->interval_seconds,
                   "Watch for this many seconds and show rates per second")
      ->check(Within(0.1, 86400.0));
  SetExample(stats, "emberctl stats --interval 5 --hot-rows 3");
  stats->callback([options, &session, &command] {
    command = [options, &session] { return ShowStats(session, *options); };
  });
}

}  // namespace emberd::emberctl
