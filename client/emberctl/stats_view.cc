#include "client/emberctl/stats_view.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/emberctl/plan_view.h"

namespace emberd::emberctl {
namespace {

// How much of its checkpoints and its log has been read; empty: it is not known.
std::string ShareRead(const v1::LogStatus& log) {
  if (log.recovery_bytes() == 0) return "";
  return absl::StrCat(" ", 100 * log.recovered_bytes() / log.recovery_bytes(), "%");
}

}  // namespace

Cell StateOf(const v1::ShardStatus& shard) {
  if (!shard.reachable()) return Cell("DOWN", Style::kAlarm);
  const v1::LogStatus& log = shard.log();
  if (log.recovering()) return Cell(absl::StrCat("RECOVERING", ShareRead(log)), Style::kWarning);
  return log.failure().empty() ? Cell("ok") : Cell("NO CHANGES", Style::kAlarm);
}

absl::Status CheckShard(const v1::ShardStatus& shard) {
  const std::string name = absl::StrCat("shard ", shard.index(), " (", shard.address(), ")");
  if (!shard.reachable()) {
    return absl::UnavailableError(absl::StrCat(name, " does not answer: ", shard.error()));
  }
  const v1::LogStatus& log = shard.log();
  if (log.recovering()) {
    const std::string share = ShareRead(log);
    return absl::UnavailableError(
        absl::StrCat(name, " reads its log", share.empty() ? "" : ":", share));
  }
  if (log.failure().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(name, " refuses changes: ", log.failure()));
}

namespace {

using Table = std::vector<CellLine>;

// A line of a table and what it is sorted by.
struct Row {
  double busy = 0;
  double slow = 0;
  CellLine cells;
};

class View {
 public:
  View(const Rates& rates, const StatsViewOptions& options) : rates_(rates), options_(options) {}

  Table Methods() const;
  Table Shards() const;
  Table Stacks() const;
  Table Stages() const;
  Table Groups() const;
  Table HotRows() const;

 private:
  // A count, or how many of it there are in a second.
  std::string Count(int64_t count) const {
    return options_.per_second ? Quantity(static_cast<double>(count) / rates_.seconds)
                               : absl::StrCat(count);
  }
  std::string Volume(int64_t bytes) const {
    return options_.per_second
               ? Bytes(static_cast<int64_t>(static_cast<double>(bytes) / rates_.seconds))
               : Bytes(bytes);
  }
  std::string Heading(const char* what) const {
    return options_.per_second ? absl::StrCat(what, "/S") : what;
  }
  Table Sorted(CellLine headings, std::vector<Row> rows) const;

  const Rates& rates_;
  const StatsViewOptions options_;
};

Table View::Sorted(CellLine headings, std::vector<Row> rows) const {
  if (options_.order != Order::kName) {
    const auto key = [this](const Row& row) {
      return options_.order == Order::kBusy ? row.busy : row.slow;
    };
    std::stable_sort(rows.begin(), rows.end(),
                     [&](const Row& a, const Row& b) { return key(a) > key(b); });
  }
  Table table;
  if (rows.empty()) return table;
  table.push_back(std::move(headings));
  for (Row& row : rows) table.push_back(std::move(row.cells));
  return table;
}

Table View::Methods() const {
  std::vector<Row> rows;
  for (const MethodRates& method : rates_.methods) {
    const Latency& latency = method.latency;
    if (options_.hide_idle && latency.count == 0 && method.errors == 0) continue;
    rows.push_back({static_cast<double>(latency.count),
                    latency.p99,
                    {method.method, Count(latency.count),
                     Cell(Count(method.errors), method.errors > 0 ? Style::kAlarm : Style::kPlain),
                     latency.count > 0 ? Seconds(latency.p50) : "-",
                     latency.count > 0 ? Seconds(latency.p99) : "-", Volume(method.request_bytes),
                     Volume(method.response_bytes)}});
  }
  return Sorted(
      {"METHOD", Heading("CALLS"), Heading("ERRORS"), "P50", "P99", Heading("IN"), Heading("OUT")},
      std::move(rows));
}

Table View::Shards() const {
  constexpr double kNearlyFull = 0.9;
  std::vector<Row> rows;
  for (const ShardRates& shard : rates_.shards) {
    const v1::ShardStatus& now = shard.now;
    if (!now.reachable()) {
      // First, however they are sorted.
      constexpr double kFirst = 1e300;
      rows.push_back({kFirst, kFirst, {absl::StrCat(now.index()), now.address(), StateOf(now)}});
      continue;
    }
    const auto used = static_cast<double>(now.table_bytes());
    const auto budget = static_cast<double>(now.table_budget_bytes());
    rows.push_back(
        {static_cast<double>(shard.rows_gathered + shard.rows_updated),
         static_cast<double>(now.queued()),
         {absl::StrCat(now.index()), now.address(), StateOf(now), Count(shard.rows_gathered),
          Count(shard.rows_updated), Bytes(now.table_bytes()),
          Cell(Percent(used, budget),
               budget > 0 && used > kNearlyFull * budget ? Style::kWarning : Style::kPlain),
          Bytes(now.resident_bytes()),
          Percent(static_cast<double>(now.huge_page_bytes()),
                  static_cast<double>(now.resident_bytes())),
          absl::StrCat(now.queued()), absl::StrCat(now.batches())}});
  }
  return Sorted({"SHARD", "ADDRESS", "STATE", Heading("GATHERED"), Heading("UPDATED"), "TABLES",
                 "BUDGET", "RESIDENT", "HUGE", "QUEUE", "BATCHES"},
                std::move(rows));
}

// The largest need, and the limit it stands against.
Cell Need(int64_t largest, int32_t limit) {
  return Cell(absl::StrCat(largest, " / ", Limit(limit)),
              limit > 0 && largest > limit ? Style::kWarning : Style::kPlain);
}

Table View::Stacks() const {
  std::vector<Row> rows;
  for (const StackRates& stack : rates_.stacks) {
    const v1::StackStats& now = stack.now;
    rows.push_back(
        {static_cast<double>(stack.ids),
         static_cast<double>(now.largest_ids_per_partition()),
         {now.model(), now.stack(), Count(stack.batches), Count(stack.ids),
          Percent(static_cast<double>(stack.unique_ids), static_cast<double>(stack.ids)),
          Need(now.largest_ids_per_partition(), now.max_ids_per_partition()),
          Need(now.largest_unique_ids_per_partition(), now.max_unique_ids_per_partition()),
          Cell(Count(stack.dropped_ids), stack.dropped_ids > 0 ? Style::kAlarm : Style::kPlain)}});
  }
  return Sorted({"MODEL", "STACK", Heading("BATCHES"), Heading("IDS"), "UNIQUE", "MAX IDS / LIMIT",
                 "MAX UNIQUE / LIMIT", Heading("DROPPED")},
                std::move(rows));
}

Table View::Stages() const {
  std::vector<Row> rows;
  for (const StageRates& stage : rates_.stages) {
    const Latency& latency = stage.latency;
    if (latency.count == 0) continue;
    rows.push_back({latency.sum,
                    latency.p99,
                    {stage.stage, Count(latency.count), Seconds(latency.p50), Seconds(latency.p99),
                     Percent(latency.sum, rates_.seconds)}});
  }
  return Sorted({"STAGE", Heading("TIMES"), "P50", "P99", "OF THE TIME"}, std::move(rows));
}

Table View::Groups() const {
  std::vector<Row> rows;
  for (const GroupRates& group : rates_.groups) {
    rows.push_back(
        {static_cast<double>(group.updates),
         group.wait_seconds,
         {group.model, group.group, Count(group.updates),
          Percent(group.wait_seconds, rates_.seconds),
          group.last_rank.empty()
              ? std::string("-")
              : absl::StrCat(group.last_rank, " (", Percent(group.last_share, 1), ")"),
          Cell(Count(group.failures), group.failures > 0 ? Style::kAlarm : Style::kPlain)}});
  }
  return Sorted({"MODEL", "GROUP", Heading("UPDATES"), "WAITING", "LAST RANK", Heading("FAILURES")},
                std::move(rows));
}

Table View::HotRows() const {
  std::vector<const v1::HotRow*> hot;
  for (const ShardRates& shard : rates_.shards) {
    for (const v1::HotRow& row : shard.now.hot_rows()) hot.push_back(&row);
  }
  const auto place = [](const v1::HotRow* row) {
    return std::make_pair(absl::string_view(row->model()), absl::string_view(row->table()));
  };
  std::stable_sort(hot.begin(), hot.end(), [&](const v1::HotRow* a, const v1::HotRow* b) {
    return place(a) != place(b) ? place(a) < place(b) : a->lookups() > b->lookups();
  });
  Table table;
  if (hot.empty()) return table;
  table.push_back({"MODEL", "TABLE", "HOT ROW", "LOOKUPS", "ERROR UP TO", "OF ITS SHARD"});
  for (const v1::HotRow* row : hot) {
    table.push_back(
        {row->model(), row->table(), absl::StrCat(row->id()), absl::StrCat(row->lookups()),
         absl::StrCat(row->error()),
         Percent(static_cast<double>(row->lookups()), static_cast<double>(row->table_lookups()))});
  }
  return table;
}

}  // namespace

std::vector<CellLine> SummaryLines(const Rates& rates, const std::string& address) {
  const v1::GetStatsResponse& now = rates.now;
  CellLine first = {Cell(absl::StrCat("coordinator ", address), Style::kBold),
                    absl::StrCat(", up ", Uptime(now.uptime_ms()), ", ")};
  first.push_back(now.draining() ? Cell("DRAINING", Style::kAlarm) : Cell("in service"));
  const CellLine second = {
      absl::StrCat(Counted(now.in_flight_requests(), "request"), " in progress (",
                   Bytes(now.in_flight_bytes()), " of ", Bytes(now.in_flight_budget_bytes()),
                   "), "),
      Cell(absl::StrCat(now.queued_requests(), " waiting"),
           now.queued_requests() > 0 ? Style::kWarning : Style::kPlain),
      absl::StrCat("; ", Counted(now.train_streams(), "training stream"), "; ",
                   Counted(now.batches(), "batch", "batches"), " (", Bytes(now.batch_bytes()),
                   " of ", Bytes(now.batch_budget_bytes()), ")")};
  std::vector<CellLine> lines = {first, second};
  for (const ModelRates& model : rates.models) {
    if (model.examples == 0) continue;
    lines.push_back(
        {absl::StrCat("model ", model.model, ": "),
         Cell(absl::StrCat(Quantity(static_cast<double>(model.examples) / rates.seconds),
                           " examples/s"),
              Style::kBold)});
  }
  for (const ShardRates& shard : rates.shards) {
    if (shard.now.reachable()) continue;
    lines.push_back(
        {Cell(absl::StrCat("shard ", shard.now.index(), " does not answer: "), Style::kAlarm),
         shard.now.error()});
  }
  return lines;
}

std::vector<Table> StatsTables(const Rates& rates, const StatsViewOptions& options) {
  const View view(rates, options);
  std::vector<Table> tables;
  for (Table& table : std::vector<Table>{view.Methods(), view.Shards(), view.Stacks(),
                                         view.Stages(), view.Groups(), view.HotRows()}) {
    if (!table.empty()) tables.push_back(std::move(table));
  }
  return tables;
}

namespace {

float PerSecond(const Rates& rates, int64_t count) {
  return static_cast<float>(static_cast<double>(count) / rates.seconds);
}

Json LatencyJson(const Rates& rates, const Latency& latency) {
  return {{"count", latency.count},
          {"per_second", PerSecond(rates, latency.count)},
          {"seconds", static_cast<float>(latency.sum)},
          {"p50_seconds", static_cast<float>(latency.p50)},
          {"p99_seconds", static_cast<float>(latency.p99)}};
}

Json MethodsJson(const Rates& rates) {
  Json methods = Json::array();
  for (const MethodRates& method : rates.methods) {
    Json json = LatencyJson(rates, method.latency);
    json["method"] = method.method;
    json["errors"] = method.errors;
    json["request_bytes"] = method.request_bytes;
    json["response_bytes"] = method.response_bytes;
    methods.push_back(std::move(json));
  }
  return methods;
}

Json StagesJson(const Rates& rates) {
  Json stages = Json::array();
  for (const StageRates& stage : rates.stages) {
    Json json = LatencyJson(rates, stage.latency);
    json["stage"] = stage.stage;
    stages.push_back(std::move(json));
  }
  return stages;
}

Json StacksJson(const Rates& rates) {
  Json stacks = Json::array();
  for (const StackRates& stack : rates.stacks) {
    const v1::StackStats& now = stack.now;
    stacks.push_back(
        {{"model", now.model()},
         {"stack", now.stack()},
         {"batches", stack.batches},
         {"ids", stack.ids},
         {"ids_per_second", PerSecond(rates, stack.ids)},
         {"unique_ids", stack.unique_ids},
         {"dropped_ids", stack.dropped_ids},
         {"max_ids_per_partition", now.max_ids_per_partition()},
         {"largest_ids_per_partition", now.largest_ids_per_partition()},
         {"max_unique_ids_per_partition", now.max_unique_ids_per_partition()},
         {"largest_unique_ids_per_partition", now.largest_unique_ids_per_partition()}});
  }
  return stacks;
}

Json HotRowsJson(const v1::ShardStatus& shard) {
  Json rows = Json::array();
  for (const v1::HotRow& row : shard.hot_rows()) {
    rows.push_back({{"model", row.model()},
                    {"table", row.table()},
                    {"id", row.id()},
                    {"lookups", row.lookups()},
                    {"error", row.error()},
                    {"table_lookups", row.table_lookups()}});
  }
  return rows;
}

Json ShardsJson(const Rates& rates) {
  Json shards = Json::array();
  for (const ShardRates& shard : rates.shards) {
    const v1::ShardStatus& now = shard.now;
    Json json = {
        {"index", now.index()}, {"address", now.address()}, {"reachable", now.reachable()}};
    if (!now.reachable()) {
      json["error"] = now.error();
      shards.push_back(std::move(json));
      continue;
    }
    json.update(Json{{"uptime_ms", now.uptime_ms()},
                     {"rows_gathered", shard.rows_gathered},
                     {"rows_gathered_per_second", PerSecond(rates, shard.rows_gathered)},
                     {"rows_updated", shard.rows_updated},
                     {"rows_updated_per_second", PerSecond(rates, shard.rows_updated)},
                     {"recovering", now.log().recovering()},
                     {"log_bytes", now.log().bytes()},
                     {"log_failure", now.log().failure()},
                     {"table_bytes", now.table_bytes()},
                     {"table_budget_bytes", now.table_budget_bytes()},
                     {"resident_bytes", now.resident_bytes()},
                     {"huge_page_bytes", now.huge_page_bytes()},
                     {"queued", now.queued()},
                     {"batches", now.batches()},
                     {"hot_rows", HotRowsJson(now)}});
    shards.push_back(std::move(json));
  }
  return shards;
}

Json ModelsJson(const Rates& rates) {
  Json models = Json::array();
  for (const ModelRates& model : rates.models) {
    models.push_back({{"model", model.model},
                      {"examples", model.examples},
                      {"examples_per_second", PerSecond(rates, model.examples)}});
  }
  return models;
}

Json GroupsJson(const Rates& rates) {
  Json groups = Json::array();
  for (const GroupRates& group : rates.groups) {
    groups.push_back({{"model", group.model},
                      {"group", group.group},
                      {"updates", group.updates},
                      {"updates_per_second", PerSecond(rates, group.updates)},
                      {"failures", group.failures},
                      {"wait_seconds", static_cast<float>(group.wait_seconds)},
                      {"last_rank", group.last_rank},
                      {"last_share", static_cast<float>(group.last_share)}});
  }
  return groups;
}

}  // namespace

Json StatsJson(const Rates& rates) {
  const v1::GetStatsResponse& now = rates.now;
  return {{"time_ms", now.time_ms()},
          {"uptime_ms", now.uptime_ms()},
          {"seconds", static_cast<float>(rates.seconds)},
          {"draining", now.draining()},
          {"in_flight_requests", now.in_flight_requests()},
          {"in_flight_bytes", now.in_flight_bytes()},
          {"queued_requests", now.queued_requests()},
          {"train_streams", now.train_streams()},
          {"batches", now.batches()},
          {"batch_bytes", now.batch_bytes()},
          {"methods", MethodsJson(rates)},
          {"shards", ShardsJson(rates)},
          {"stacks", StacksJson(rates)},
          {"models", ModelsJson(rates)},
          {"stages", StagesJson(rates)},
          {"groups", GroupsJson(rates)}};
}

namespace {

// Everything, however low the window is.
std::vector<std::string> AllLines(const Rates& rates, const std::string& address,
                                  const FrameOptions& options) {
  std::vector<std::string> lines;
  for (const CellLine& line : SummaryLines(rates, address)) {
    lines.push_back(LayOutLine(line, options.colors, options.columns));
  }
  const StatsViewOptions view = {.per_second = true, .order = options.order, .hide_idle = true};
  for (const auto& table : StatsTables(rates, view)) {
    lines.emplace_back();
    for (std::string& line : LayOut(table, options.colors, options.columns)) {
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

// Lines of the window that the hint leaves.
int RoomOf(const FrameOptions& options) {
  return std::max(options.rows - (options.hint.empty() ? 0 : 1), 1);
}

}  // namespace

int LastScroll(const Rates& rates, const std::string& address, const FrameOptions& options) {
  if (options.rows == 0) return 0;
  const auto lines = static_cast<int>(AllLines(rates, address, options).size());
  return std::max(0, lines - RoomOf(options));
}

std::vector<std::string> TopFrame(const Rates& rates, const std::string& address,
                                  const FrameOptions& options) {
  std::vector<std::string> lines = AllLines(rates, address, options);
  const size_t first = std::min(lines.size(), static_cast<size_t>(options.first));
  lines.erase(lines.begin(), lines.begin() + static_cast<ptrdiff_t>(first));
  const auto room = static_cast<size_t>(RoomOf(options));
  if (options.rows > 0 && lines.size() > room) {
    const size_t missing = lines.size() - room + 1;
    lines.resize(room - 1);
    lines.push_back(LayOutLine(
        {Cell(absl::StrCat("... ", missing, " more lines: arrow down, or j"), Style::kBold)},
        options.colors, options.columns));
  }
  if (!options.hint.empty() && (options.rows == 0 || options.rows > 1)) {
    lines.push_back(
        LayOutLine({Cell(options.hint, Style::kBold)}, options.colors, options.columns));
  }
  return lines;
}

}  // namespace emberd::emberctl
