#include "client/emberctl/stats_view.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/emberctl/plan_view.h"
#include "config/fold_numbers.h"

namespace emberd::emberctl {
namespace {

// Counts only grow, except where their process has restarted.
template <typename Count>
Count Growth(Count before, Count now) {
  return now >= before ? now - before : now;
}

void Subtract(const v1::ShardStatus& before, v1::ShardStatus* now) {
  // Of one that did not answer then, nobody knows what is new.
  const bool listed = !before.address().empty();
  const bool known = now->reachable() && (!listed || before.reachable());
  const bool same = before.incarnation() == now->incarnation();
  const auto growth = [&](int64_t rows_before, int64_t rows) {
    return known ? Growth(same ? rows_before : 0, rows) : 0;
  };
  now->set_rows_gathered(growth(before.rows_gathered(), now->rows_gathered()));
  now->set_rows_updated(growth(before.rows_updated(), now->rows_updated()));
}

Rates Between(const v1::GetStatsResponse& before, v1::GetStatsResponse now, double seconds) {
  v1::GetStatsResponse counts;  // of those that all fields count
  *counts.mutable_methods() = before.methods();
  *counts.mutable_stages() = before.stages();
  *counts.mutable_models() = before.models();
  *counts.mutable_stacks() = before.stacks();
  *counts.mutable_groups() = before.groups();
  config::FoldNumbers(counts, &now, config::Fold::kSubtract);
  for (v1::ShardStatus& shard : *now.mutable_shards()) {
    const auto then = std::find_if(
        before.shards().begin(), before.shards().end(), [&](const v1::ShardStatus& one) {
          return one.index() == shard.index() && one.address() == shard.address();
        });
    Subtract(then == before.shards().end() ? v1::ShardStatus() : *then, &shard);
  }
  return {std::move(now), std::max(seconds, 1e-3)};
}

}  // namespace

double Rates::SecondsOf(const v1::ShardStatus& shard) const {
  return since_start ? std::max(shard.uptime_ms() / 1000.0, 1e-3) : seconds;
}

int64_t Errors(const v1::MethodStats& method) {
  int64_t errors = 0;
  for (const auto& [code, count] : method.codes()) {
    if (code != "OK") errors += count;
  }
  return errors;
}

std::pair<std::string, double> LastRank(const v1::GroupStats& group) {
  std::string last;
  int64_t all = 0, most = 0;
  for (const auto& [rank, count] : group.last_arrivals()) {
    all += count;
    if (count == 0 || count < most || (count == most && rank > last)) continue;
    most = count;
    last = rank;
  }
  return {last, all > 0 ? static_cast<double>(most) / all : 0};
}

double Quantile(const v1::Distribution& distribution, double fraction) {
  const double wanted = fraction * distribution.count();
  double lower = 0;
  int64_t below = 0;
  for (const v1::Distribution::Bucket& bucket : distribution.buckets()) {
    const int64_t inside = bucket.count() - below;
    if (inside > 0 && bucket.count() >= wanted) {
      if (std::isinf(bucket.upper())) return lower;
      const double part = (wanted - below) / inside;
      return lower + (bucket.upper() - lower) * part;
    }
    below = bucket.count();
    lower = bucket.upper();
  }
  return 0;
}

Rates TotalsOf(const v1::GetStatsResponse& now) {
  Rates totals = Between(v1::GetStatsResponse(), now, now.uptime_ms() / 1000.0);
  totals.since_start = true;
  return totals;
}

Rates RatesBetween(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now) {
  return Between(before, now, (now.time_ms() - before.time_ms()) / 1000.0);
}

bool SameLife(const v1::GetStatsResponse& before, const v1::GetStatsResponse& now) {
  constexpr int64_t kToleranceMs = 500;
  const int64_t started_before = before.time_ms() - before.uptime_ms();
  const int64_t started_now = now.time_ms() - now.uptime_ms();
  return now.time_ms() > before.time_ms() && std::abs(started_now - started_before) < kToleranceMs;
}

Watch::Watch(const Session& session, int hot_rows) : session_(session), hot_rows_(hot_rows) {
  for (const std::string& address : session.addresses) {
    coordinators_.push_back(std::make_unique<Session>(session.At(address)));
  }
}

absl::StatusOr<v1::GetStatsResponse> Watch::Fetch() {
  v1::GetStatsRequest request;
  request.set_hot_rows(hot_rows_);
  absl::Status status =
      absl::InvalidArgumentError("--address: empty; give the address of a coordinator");
  for (size_t tried = 0; tried < coordinators_.size(); ++tried) {
    const auto response = coordinators_[current_]->Call<v1::GetStatsResponse>(request);
    if (response.ok()) return response;
    status = response.status();
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) break;
    current_ = (current_ + 1) % coordinators_.size();
  }
  return status;
}

absl::StatusOr<Rates> Watch::Next() {
  ASSIGN_OR_RETURN(v1::GetStatsResponse stats, Fetch());
  const std::string& address = session_.addresses[current_];
  since_start_ = !last_.has_value() || last_address_ != address || !SameLife(*last_, stats);
  const Rates rates = since_start_ ? TotalsOf(stats) : RatesBetween(*last_, stats);
  last_ = std::move(stats);
  last_address_ = address;
  return rates;
}

// ---- What is shown

namespace {

// How much of its checkpoints and its log has been read; empty: it is not known.
std::string ShareRead(const v1::LogStatus& log) {
  if (log.recovery_bytes() == 0) return "";
  return absl::StrCat(" ", 100 * log.recovered_bytes() / log.recovery_bytes(), "%");
}

// A line of a table and what it is sorted by.
struct Row {
  double busy = 0;
  double slow = 0;
  CellLine cells;
};

class View {
 public:
  View(const Rates& rates, const StatsViewOptions& options)
      : rates_(rates), stats_(rates.stats), options_(options) {}

  Table Methods() const;
  Table Shards() const;
  Table Stacks() const;
  Table Stages() const;
  Table Groups() const;
  Table HotRows() const;

 private:
  // A count, or how many of it there are in a second.
  std::string Count(int64_t count) const { return Count(count, rates_.seconds); }
  std::string Count(int64_t count, double seconds) const {
    return options_.per_second ? Quantity(count / seconds) : absl::StrCat(count);
  }
  // The same of what should not happen.
  Cell Faults(int64_t count) const {
    return Cell(Count(count), count > 0 ? Style::kAlarm : Style::kPlain);
  }
  std::string Volume(int64_t bytes) const {
    return Bytes(options_.per_second ? static_cast<int64_t>(bytes / rates_.seconds) : bytes);
  }
  std::string Heading(const char* what) const {
    return options_.per_second ? absl::StrCat(what, "/S") : what;
  }
  Table Sorted(CellLine headings, std::vector<Row> rows) const {
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

  const Rates& rates_;
  const v1::GetStatsResponse& stats_;
  const StatsViewOptions options_;
};

Table View::Methods() const {
  std::vector<Row> rows;
  for (const v1::MethodStats& method : stats_.methods()) {
    const v1::Distribution& times = method.seconds();
    const bool called = times.count() > 0;
    const int64_t errors = Errors(method);
    if (options_.hide_idle && !called && errors == 0) continue;
    rows.push_back({static_cast<double>(times.count()),
                    Quantile(times, 0.99),
                    {method.method(), Count(times.count()), Faults(errors),
                     called ? Seconds(Quantile(times, 0.5)) : "-",
                     called ? Seconds(Quantile(times, 0.99)) : "-", Volume(method.request_bytes()),
                     Volume(method.response_bytes())}});
  }
  return Sorted(
      {"METHOD", Heading("CALLS"), Heading("ERRORS"), "P50", "P99", Heading("IN"), Heading("OUT")},
      std::move(rows));
}

Table View::Shards() const {
  constexpr double kNearlyFull = 0.9;
  std::vector<Row> rows;
  for (const v1::ShardStatus& shard : stats_.shards()) {
    if (!shard.reachable()) {
      // First, however they are sorted.
      constexpr double kFirst = 1e300;
      rows.push_back({kFirst, kFirst, {shard.index(), shard.address(), StateOf(shard)}});
      continue;
    }
    const double seconds = rates_.SecondsOf(shard);
    const auto used = static_cast<double>(shard.table_bytes());
    const auto budget = static_cast<double>(shard.table_budget_bytes());
    rows.push_back(
        {static_cast<double>(shard.rows_gathered() + shard.rows_updated()),
         static_cast<double>(shard.queued()),
         {shard.index(), shard.address(), StateOf(shard), Count(shard.rows_gathered(), seconds),
          Count(shard.rows_updated(), seconds), Bytes(shard.table_bytes()),
          Cell(Percent(used, budget),
               budget > 0 && used > kNearlyFull * budget ? Style::kWarning : Style::kPlain),
          Bytes(shard.resident_bytes()), Percent(shard.huge_page_bytes(), shard.resident_bytes()),
          shard.queued(), shard.batches()}});
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
  // unique_ids counts one source slot of each batch; a coordinator has as many as a shard has
  // SparseCores.
  int64_t slots = 1;
  for (const v1::ShardStatus& shard : stats_.shards()) {
    slots = std::max<int64_t>(slots, shard.partitions_size());
  }
  std::vector<Row> rows;
  for (const v1::StackStats& stack : stats_.stacks()) {
    rows.push_back(
        {static_cast<double>(stack.ids()),
         static_cast<double>(stack.largest_ids_per_partition()),
         {stack.model(), stack.stack(), Count(stack.batches()), Count(stack.ids()),
          Percent(std::min(slots * stack.unique_ids(), stack.ids()), stack.ids()),
          Need(stack.largest_ids_per_partition(), stack.max_ids_per_partition()),
          Need(stack.largest_unique_ids_per_partition(), stack.max_unique_ids_per_partition()),
          Faults(stack.dropped_ids())}});
  }
  return Sorted({"MODEL", "STACK", Heading("BATCHES"), Heading("IDS"), "UNIQUE", "MAX IDS / LIMIT",
                 "MAX UNIQUE / LIMIT", Heading("DROPPED")},
                std::move(rows));
}

Table View::Stages() const {
  std::vector<Row> rows;
  for (const v1::StageStats& stage : stats_.stages()) {
    const v1::Distribution& times = stage.seconds();
    if (times.count() == 0) continue;
    const double p99 = Quantile(times, 0.99);
    rows.push_back({times.sum(),
                    p99,
                    {stage.stage(), Count(times.count()), Seconds(Quantile(times, 0.5)),
                     Seconds(p99), Percent(times.sum(), rates_.seconds)}});
  }
  return Sorted({"STAGE", Heading("TIMES"), "P50", "P99", "OF THE TIME"}, std::move(rows));
}

Table View::Groups() const {
  std::vector<Row> rows;
  for (const v1::GroupStats& group : stats_.groups()) {
    const auto [last, share] = LastRank(group);
    rows.push_back(
        {static_cast<double>(group.updates()),
         group.wait_seconds(),
         {group.model(), group.group(), Count(group.updates()),
          Percent(group.wait_seconds(), rates_.seconds),
          last.empty() ? std::string("-") : absl::StrCat(last, " (", Percent(share, 1), ")"),
          Faults(group.failures())}});
  }
  return Sorted({"MODEL", "GROUP", Heading("UPDATES"), "WAITING", "LAST RANK", Heading("FAILURES")},
                std::move(rows));
}

Table View::HotRows() const {
  std::vector<const v1::HotRow*> hot;
  for (const v1::ShardStatus& shard : stats_.shards()) {
    for (const v1::HotRow& row : shard.hot_rows()) hot.push_back(&row);
  }
  const auto place = [](const v1::HotRow* row) {
    return std::make_pair(absl::string_view(row->model()), absl::string_view(row->table()));
  };
  std::stable_sort(hot.begin(), hot.end(), [&](const v1::HotRow* a, const v1::HotRow* b) {
    return place(a) != place(b) ? place(a) < place(b) : a->lookups() > b->lookups();
  });
  Table table;
  if (hot.empty()) return table;
  table.push_back(
      {"MODEL", "TABLE", "HOT ROW", "LOOKUPS SO FAR", "TOO HIGH UP TO", "OF ITS SHARD"});
  for (const v1::HotRow* row : hot) {
    table.push_back({row->model(), row->table(), row->id(), absl::StrCat("~", row->lookups()),
                     row->error(), Percent(row->lookups(), row->table_lookups())});
  }
  return table;
}

float PerSecond(const Rates& rates, int64_t count) {
  return static_cast<float>(count / rates.seconds);
}

Json LatencyJson(const Rates& rates, const v1::Distribution& times) {
  return {{"count", times.count()},
          {"per_second", PerSecond(rates, times.count())},
          {"seconds", static_cast<float>(times.sum())},
          {"p50_seconds", static_cast<float>(Quantile(times, 0.5))},
          {"p99_seconds", static_cast<float>(Quantile(times, 0.99))}};
}

// A list of what `json_of` makes of each element.
template <typename Elements, typename JsonOf>
Json JsonOfEach(const Elements& elements, const JsonOf& json_of) {
  Json list = Json::array();
  for (const auto& element : elements) list.push_back(json_of(element));
  return list;
}

Json MethodJson(const Rates& rates, const v1::MethodStats& method) {
  Json json = LatencyJson(rates, method.seconds());
  json["method"] = method.method();
  json["errors"] = Errors(method);
  json["request_bytes"] = method.request_bytes();
  json["response_bytes"] = method.response_bytes();
  return json;
}

Json StageJson(const Rates& rates, const v1::StageStats& stage) {
  Json json = LatencyJson(rates, stage.seconds());
  json["stage"] = stage.stage();
  return json;
}

Json StackStatsJson(const Rates& rates, const v1::StackStats& stack) {
  return {{"model", stack.model()},
          {"stack", stack.stack()},
          {"batches", stack.batches()},
          {"ids", stack.ids()},
          {"ids_per_second", PerSecond(rates, stack.ids())},
          {"unique_ids", stack.unique_ids()},
          {"dropped_ids", stack.dropped_ids()},
          {"max_ids_per_partition", stack.max_ids_per_partition()},
          {"largest_ids_per_partition", stack.largest_ids_per_partition()},
          {"max_unique_ids_per_partition", stack.max_unique_ids_per_partition()},
          {"largest_unique_ids_per_partition", stack.largest_unique_ids_per_partition()}};
}

Json HotRowJson(const v1::HotRow& row) {
  return {{"model", row.model()}, {"table", row.table()},
          {"id", row.id()},       {"lookups", row.lookups()},
          {"error", row.error()}, {"table_lookups", row.table_lookups()}};
}

Json ShardJson(const Rates& rates, const v1::ShardStatus& shard) {
  Json json = {
      {"index", shard.index()}, {"address", shard.address()}, {"reachable", shard.reachable()}};
  if (!shard.reachable()) {
    json["error"] = shard.error();
    return json;
  }
  const auto per_second = [seconds = rates.SecondsOf(shard)](int64_t count) {
    return static_cast<float>(count / seconds);
  };
  json.update(Json{{"uptime_ms", shard.uptime_ms()},
                   {"rows_gathered", shard.rows_gathered()},
                   {"rows_gathered_per_second", per_second(shard.rows_gathered())},
                   {"rows_updated", shard.rows_updated()},
                   {"rows_updated_per_second", per_second(shard.rows_updated())},
                   {"recovering", shard.log().recovering()},
                   {"log_bytes", shard.log().bytes()},
                   {"log_failure", shard.log().failure()},
                   {"table_bytes", shard.table_bytes()},
                   {"table_budget_bytes", shard.table_budget_bytes()},
                   {"resident_bytes", shard.resident_bytes()},
                   {"huge_page_bytes", shard.huge_page_bytes()},
                   {"queued", shard.queued()},
                   {"batches", shard.batches()},
                   {"hot_rows", JsonOfEach(shard.hot_rows(), HotRowJson)}});
  return json;
}

Json ModelJson(const Rates& rates, const v1::ModelStats& model) {
  return {{"model", model.model()},
          {"examples", model.examples()},
          {"examples_per_second", PerSecond(rates, model.examples())}};
}

Json GroupJson(const Rates& rates, const v1::GroupStats& group) {
  const auto [last, share] = LastRank(group);
  return {{"model", group.model()},
          {"group", group.group()},
          {"updates", group.updates()},
          {"updates_per_second", PerSecond(rates, group.updates())},
          {"failures", group.failures()},
          {"wait_seconds", static_cast<float>(group.wait_seconds())},
          {"last_rank", last},
          {"last_share", static_cast<float>(share)}};
}

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

std::vector<CellLine> SummaryLines(const Rates& rates, const std::string& address) {
  const v1::GetStatsResponse& now = rates.stats;
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
  for (const v1::ModelStats& model : now.models()) {
    if (model.examples() == 0) continue;
    lines.push_back({absl::StrCat("model ", model.model(), ": "),
                     Cell(absl::StrCat(Quantity(model.examples() / rates.seconds), " examples/s"),
                          Style::kBold)});
  }
  for (const v1::ShardStatus& shard : now.shards()) {
    if (shard.reachable()) continue;
    lines.push_back(
        {Cell(absl::StrCat("shard ", shard.index(), " does not answer: "), Style::kAlarm),
         shard.error()});
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

Json StatsJson(const Rates& rates) {
  const v1::GetStatsResponse& now = rates.stats;
  const auto each = [&rates](const auto& elements, const auto& json_of) {
    return JsonOfEach(elements, [&](const auto& element) { return json_of(rates, element); });
  };
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
          {"methods", each(now.methods(), MethodJson)},
          {"shards", each(now.shards(), ShardJson)},
          {"stacks", each(now.stacks(), StackStatsJson)},
          {"models", each(now.models(), ModelJson)},
          {"stages", each(now.stages(), StageJson)},
          {"groups", each(now.groups(), GroupJson)}};
}

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
