#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/command_line.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/emberctl/output.h"
#include "client/emberctl/stats_view.h"
#include "client/emberctl/terminal.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

void PrintShards(const v1::GetStatusResponse& status, std::ostream& out) {
  Table lines = {{"SHARD", "ADDRESS", "STATE", "UP", "MODELS", "TABLES", "BATCHES", "ROWS GATHERED",
                  "ROWS UPDATED"}};
  for (const v1::ShardStatus& shard : status.shards()) {
    CellLine& line = lines.emplace_back();
    line = {shard.index(), shard.address(), StateOf(shard)};
    if (!shard.reachable()) continue;  // why stands in the error at the end
    line.insert(line.end(), {Uptime(shard.uptime_ms()), shard.models(), Bytes(shard.table_bytes()),
                             absl::StrCat(shard.batches(), " (", Bytes(shard.batch_bytes()), ")"),
                             shard.rows_gathered(), shard.rows_updated()});
  }
  PrintColumns(lines, out);
}

void PrintModels(const v1::GetStatusResponse& status, std::ostream& out) {
  Table lines = {{"MODEL", "ID", "TABLES", "STACKS", "SIZE"}};
  for (const v1::ModelStatus& model : status.models()) {
    lines.push_back({model.name(), HexId(model.model_id()), model.tables(), model.stacks(),
                     Bytes(model.table_bytes())});
  }
  PrintColumns(lines, out);
  for (const v1::ModelStatus& model : status.models()) {
    if (!model.recovery().empty()) {
      out << "RECOVERING: model '" << model.name() << "': " << model.recovery() << "\n";
    } else if (!model.lost().empty()) {
      out << "LOST: " << model.lost() << "\n";
    } else if (!model.serves().empty()) {
      out << "SERVES: model '" << model.name() << "': checkpoint " << model.serves() << "\n";
    }
  }
}

absl::Status ShowStatus(Session& session) {
  ASSIGN_OR_RETURN(const v1::GetStatusResponse response, session.GetStatus());
  if (session.json) {
    RETURN_IF_ERROR(PrintJson(response, session.out));
  } else {
    session.out << "emberd " << response.version() << ", up " << Uptime(response.uptime_ms())
                << (response.draining() ? ", DRAINING, " : ", ")
                << Counted(response.batches(), "batch", "batches") << " ("
                << Bytes(response.batch_bytes()) << ") between lookup and update\n\n";
    PrintShards(response, session.out);
    session.out << "\n";
    PrintModels(response, session.out);
  }
  for (const v1::ShardStatus& shard : response.shards()) {
    RETURN_IF_ERROR(CheckShard(shard));
  }
  for (const v1::ModelStatus& model : response.models()) {
    if (!model.recovery().empty()) {
      return absl::UnavailableError(
          absl::StrCat("model '", model.name(), "' is recovering: ", model.recovery()));
    }
    if (!model.lost().empty()) return absl::DataLossError(model.lost());
  }
  return absl::OkStatus();
}

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
    PrintColumns(table, session.out);
  }
}

void AddHotRows(CLI::App* verb, int* hot_rows) {
  verb->add_option("--hot-rows", *hot_rows,
                   "Rows to list of each table and shard, estimated from a sample")
      ->check(Within(0, 100))
      ->capture_default_str();
}

absl::Status ShowStats(Session& session, const StatsOptions& options) {
  Watch watch(session, options.hot_rows);
  ASSIGN_OR_RETURN(Rates rates, watch.Next());
  const bool per_second = options.interval_seconds > 0;
  if (per_second) {
    absl::SleepFor(absl::Seconds(options.interval_seconds));
    ASSIGN_OR_RETURN(rates, watch.Next());
    if (watch.since_start()) {
      return absl::UnavailableError(
          "in the meantime the coordinator was restarted, its clock set, or another one answered; "
          "try again");
    }
  }
  if (session.json) return PrintJson(StatsJson(rates), session.out);
  Print(rates, watch.address(), per_second, session);
  return absl::OkStatus();
}

struct TopOptions {
  double interval_seconds = 2;
  int64_t count = 0;  // 0: without end
  int hot_rows = 3;
};

struct OrderName {
  Order order;
  const char* name;
};
// In the turn in which a key changes them.
constexpr OrderName kOrders[] = {
    {Order::kBusy, "busy first"}, {Order::kSlow, "slow first"}, {Order::kName, "as listed"}};

// For files and pipes: one frame after another.
absl::Status PrintFrames(Session& session, const TopOptions& options, Watch& watch) {
  const absl::Duration interval = absl::Seconds(options.interval_seconds);
  RETURN_IF_ERROR(watch.Next().status());
  for (int64_t frame = 0; options.count == 0 || frame < options.count;) {
    absl::SleepFor(interval);
    ASSIGN_OR_RETURN(const auto rates, watch.Next());
    if (watch.since_start()) continue;  // a new coordinator: rates come with its next answer
    if (session.json) {
      session.out << Dump(StatsJson(rates)) << std::endl;
    } else {
      if (frame > 0) session.out << "\n";
      for (const std::string& line : TopFrame(rates, watch.address(), {})) {
        session.out << line << "\n";
      }
      session.out << std::flush;
    }
    if (!session.out) return absl::OkStatus();  // nobody reads any more
    ++frame;
  }
  return absl::OkStatus();
}

// The live view.
class Screen {
 public:
  Screen(Terminal& terminal, Watch& watch, const TopOptions& options)
      : terminal_(terminal), watch_(watch), interval_(absl::Seconds(options.interval_seconds)) {}

  // Until somebody wants to leave.
  void Run(absl::StatusOr<Rates> rates) {
    while (true) {
      if (rates.ok()) shown_ = std::move(*rates);
      error_ = rates.status();
      const absl::Time next = SteadyNow() + interval_;
      Draw();
      for (auto event = terminal_.WaitUntil(next); event.kind != Terminal::Event::kTimeout;
           event = terminal_.WaitUntil(next)) {
        if (event.kind == Terminal::Event::kStop || event.key == 'q') return;
        OnKey(event.key);
        Draw();
      }
      rates = watch_.Next();
    }
  }

 private:
  // Arrow keys come as ESC [ A and ESC [ B, the keys that turn pages as ESC [ 5 ~ and ESC [ 6 ~.
  void OnKey(char key) {
    const int page = std::max(1, Terminal::CurrentSize().rows - 2);
    if (key == '\x1b' || (escape_ == "\x1b" && key == '[')) {
      escape_ = key == '[' ? "\x1b[" : "\x1b";
      return;
    }
    const bool arrow = escape_ == "\x1b[";
    escape_.clear();
    if (key == 's' && !arrow) order_ = (order_ + 1) % std::size(kOrders);
    if (arrow ? key == 'B' : key == 'j') ++first_;
    if (arrow ? key == 'A' : key == 'k') --first_;
    if (arrow ? key == '6' : key == ' ') first_ += page;
    if (arrow ? key == '5' : key == 'b') first_ -= page;
  }

  void Draw() {
    const Terminal::Size size = Terminal::CurrentSize();
    FrameOptions options;
    options.order = kOrders[order_].order;
    options.colors = WantsColors();
    options.columns = size.columns;
    options.rows = size.rows;
    if (error_.ok()) {
      const std::string period = watch_.since_start()
                                     ? "means since the start"
                                     : absl::StrFormat("of the last %.1f s", shown_.seconds);
      options.hint =
          absl::StrCat("q: quit  j, k: scroll  s: sort (", kOrders[order_].name, ")  ", period);
    } else {
      options.hint = absl::StrCat("q: quit  NO ANSWER: ", std::string(error_.message()));
    }
    first_ = std::clamp(first_, 0, LastScroll(shown_, watch_.address(), options));
    options.first = first_;
    terminal_.Draw(TopFrame(shown_, watch_.address(), options));
  }

  Terminal& terminal_;
  Watch& watch_;
  const absl::Duration interval_;
  size_t order_ = 0;    // in kOrders
  int first_ = 0;       // line at the top
  std::string escape_;  // the bytes so far of a key that sends several
  Rates shown_;
  absl::Status error_;
};

absl::Status Top(Session& session, const TopOptions& options) {
  Session impatient = session.At("");
  impatient.addresses = session.addresses;
  const bool live = session.terminal && CanDraw() && !session.json && options.count == 0;
  // The keys wait as long as an answer does.
  constexpr double kPatience = 2;
  if (live) impatient.timeout_seconds = std::min(session.timeout_seconds, kPatience);
  Watch watch(impatient, options.hot_rows);
  if (!live) return PrintFrames(session, options, watch);
  ASSIGN_OR_RETURN(Rates first, watch.Next());  // an error here belongs on an ordinary screen
  ASSIGN_OR_RETURN(auto terminal, Terminal::Open());
  Screen(*terminal, watch, options).Run(std::move(first));
  return absl::OkStatus();
}

}  // namespace

void AddStatus(CLI::App& app, Session& session) {
  CLI::App* status = app.add_subcommand(
      "status",
      "Show the state of the coordinator (DRAINING while it is out of service), the shards and the "
      "models. Exit status 3 if a shard is down, or a shard or a model is recovering, 1 if a "
      "model has lost rows or a shard refuses changes");
  SetExample(status, "emberctl status --json");
  status->callback([&session] { session.command = [&session] { return ShowStatus(session); }; });
}

void AddStats(CLI::App& app, Session& session) {
  auto [stats, options] = AddVerb(
      app, session, "stats",
      "Show what a coordinator and the shards have done since they started, or do now: methods, "
      "stages, stacks against their limits, shards, training groups, hot rows. Of several "
      "addresses, the first that answers is asked",
      "emberctl stats --interval 5 --hot-rows 3", ShowStats);
  AddHotRows(stats, &options->hot_rows);
  stats
      ->add_option("--interval", options->interval_seconds,
                   "Watch for this many seconds and show rates per second")
      ->check(Within(0.1, 86400.0));
}

void AddTop(CLI::App& app, Session& session) {
  auto [top, options] = AddVerb(
      app, session, "top",
      "Watch a coordinator and the shards live; q quits, s changes the order, j, k and the arrow "
      "keys scroll. Methods that nobody calls are left out. Where standard output is not a "
      "terminal, and with --count or --json, frames follow one another",
      "emberctl top --interval 1", Top);
  top->add_option("--interval", options->interval_seconds, "Seconds between frames")
      ->check(Within(0.1, 86400.0))
      ->capture_default_str();
  top->add_option("--count", options->count, "Print this many frames, then exit")
      ->check(Within(int64_t{1}, int64_t{1} << 40));
  AddHotRows(top, &options->hot_rows);
}

}  // namespace emberd::emberctl
