#include "server/status_page/status_page.h"

#include <memory>
#include <set>
#include <utility>

#include <google/protobuf/util/json_util.h>
#include <nlohmann/json.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/status_page/page_files.h"

namespace emberd::status_page {
namespace {

constexpr int kHotRows = 5;  // of each table and shard
constexpr char kJson[] = "application/json";

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string HexId(uint64_t id) { return absl::StrCat(absl::Hex(id, absl::kZeroPad16)); }

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  return json;
}

// What `make` gives, made anew only when the last one is older than kMaxAge. Thread-safe; who asks
// meanwhile waits.
class Cached {
 public:
  explicit Cached(std::function<absl::StatusOr<std::string>()> make) : make_(std::move(make)) {}

  ops::HttpAnswer Get() {
    absl::MutexLock lock(&mutex_);
    if (SteadyNow() - made_ >= kMaxAge) {
      const absl::StatusOr<std::string> body = make_();
      answer_ = body.ok() ? ops::HttpAnswer{200, *body}
                          : ops::HttpAnswer{503, absl::StrCat(body.status().message(), "\n")};
      made_ = SteadyNow();
    }
    return answer_;
  }

 private:
  const std::function<absl::StatusOr<std::string>()> make_;
  absl::Mutex mutex_;
  absl::Time made_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  ops::HttpAnswer answer_ ABSL_GUARDED_BY(mutex_);
};

// Asks the cluster, and remembers what it said. Not thread-safe.
class Board {
 public:
  explicit Board(const Source& source) : source_(source) {}

  // Figures of the whole cluster, and the page's text about them.
  absl::StatusOr<std::string> Ask();

 private:
  // Whether what is summed over `now` may be less than it was: a coordinator is gone, is back, or
  // counts anew.
  bool MayBeLess(const ClusterFigures& now) const;

  const Source source_;
  ClusterFigures latest_;
  int epoch_ = 0;
};

// The models whose stacks `stats` lists.
absl::StatusOr<std::vector<v1::DescribeModelResponse>> Models(const Source& source,
                                                              const v1::GetStatsResponse& stats) {
  std::set<std::string> names;
  for (const v1::StackStats& stack : stats.stacks()) names.insert(stack.model());
  std::vector<v1::DescribeModelResponse> models;
  for (const std::string& name : names) {
    v1::DescribeModelRequest request;
    request.set_name(name);
    absl::StatusOr<v1::DescribeModelResponse> model = source.model(request);
    if (absl::IsNotFound(model.status())) continue;  // it has just been dropped
    if (!model.ok()) return model.status();
    models.push_back(*std::move(model));
  }
  return models;
}

std::string ModelJson(const v1::DescribeModelResponse& model) {
  return absl::StrCat(
      "{\"model_id\":\"", HexId(model.model_id()), "\",\"name\":", Quoted(model.config().name()),
      ",\"history\":\"", HexId(model.history()),
      "\",\"lost\":", Quoted(model.recovery().empty() ? model.lost() : model.recovery()), "}");
}

// What is said of a coordinator beside the others: how busy it is.
absl::StatusOr<std::string> CoordinatorJson(const CoordinatorFigures& figures, bool self) {
  v1::GetStatsResponse load = figures.stats;
  load.clear_methods();
  load.clear_stages();
  load.clear_groups();
  load.clear_shards();
  load.clear_models();
  ASSIGN_OR_RETURN(const std::string stats, ToJson(load));
  return absl::StrCat(
      "{\"name\":", Quoted(figures.name), ",\"address\":", Quoted(figures.address),
      ",\"http_address\":", Quoted(figures.http_address), ",\"self\":", self ? "true" : "false",
      ",\"reachable\":", figures.status.ok() ? "true" : "false",
      ",\"error\":", Quoted(std::string(figures.status.message())), ",\"stats\":", stats, "}");
}

absl::StatusOr<std::string> ModelsJson(const Source& source) {
  const absl::StatusOr<v1::GetStatsResponse> stats = source.stats({});
  if (!stats.ok()) return stats.status();
  const auto models = Models(source, *stats);
  if (!models.ok()) return models.status();
  std::vector<std::string> parts;
  for (const v1::DescribeModelResponse& model : *models) {
    ASSIGN_OR_RETURN(const std::string text, ToJson(model));
    // Ids look the same everywhere.
    auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
    json["model_id"] = HexId(model.model_id());
    json["history"] = HexId(model.history());
    parts.push_back(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return absl::StrCat("{\"models\":[", absl::StrJoin(parts, ","), "]}\n");
}

const char* ContentType(absl::string_view name) {
  if (absl::EndsWith(name, ".html")) return "text/html; charset=utf-8";
  if (absl::EndsWith(name, ".css")) return "text/css; charset=utf-8";
  if (absl::EndsWith(name, ".js")) return "text/javascript; charset=utf-8";
  return "image/svg+xml";
}

ops::HttpRoute FileRoute(const PageFile& file) {
  const absl::string_view name(file.name.data(), file.name.size());
  const std::string path = name == "index.html" ? "/" : absl::StrCat("/", name);
  const auto answer = [content = std::string(file.content)]() -> ops::HttpAnswer {
    return {200, content};
  };
  return {path, ContentType(name), answer, /*open=*/true};
}

bool Board::MayBeLess(const ClusterFigures& now) const {
  for (size_t i = 0; i < now.size() && i < latest_.size(); ++i) {
    if (now[i].status.ok() != latest_[i].status.ok()) return true;
    if (now[i].stats.uptime_ms() < latest_[i].stats.uptime_ms()) return true;
  }
  return false;
}

absl::StatusOr<std::string> Board::Ask() {
  v1::GetStatsRequest request;
  request.set_hot_rows(kHotRows);
  ClusterFigures figures(1);
  figures[0] = {
      .name = source_.name, .address = source_.address, .http_address = source_.http_address};
  ASSIGN_OR_RETURN(figures[0].stats, source_.stats(request));
  if (source_.others) {
    for (CoordinatorFigures& other : source_.others()) figures.push_back(std::move(other));
  }
  const v1::GetStatsResponse sum = Merge(figures);
  ASSIGN_OR_RETURN(const auto models, Models(source_, sum));
  ASSIGN_OR_RETURN(const std::string stats, ToJson(sum));
  if (MayBeLess(figures)) ++epoch_;
  std::vector<std::string> coordinators;
  for (size_t i = 0; i < figures.size(); ++i) {
    ASSIGN_OR_RETURN(coordinators.emplace_back(), CoordinatorJson(figures[i], i == 0));
  }
  const auto model_json = [](std::string* out, const v1::DescribeModelResponse& model) {
    out->append(ModelJson(model));
  };
  latest_ = std::move(figures);
  return absl::StrCat("{\"name\":", Quoted(source_.name), ",\"version\":\"", EMBERD_VERSION,
                      "\",\"epoch\":", epoch_, ",\"models\":[",
                      absl::StrJoin(models, ",", model_json), "],\"stats\":", stats,
                      ",\"coordinators\":[", absl::StrJoin(coordinators, ","), "]}\n");
}

}  // namespace

std::vector<ops::HttpRoute> Routes(const Source& source) {
  std::vector<ops::HttpRoute> routes;
  for (const PageFile& file : PageFiles()) routes.push_back(FileRoute(file));
  const auto add = [&](const char* path, std::function<absl::StatusOr<std::string>()> make) {
    const auto cached = std::make_shared<Cached>(std::move(make));
    routes.push_back({path, kJson, [cached] { return cached->Get(); }});
  };
  add("/status.json", [board = std::make_shared<Board>(source)] { return board->Ask(); });
  add("/models.json", [source] { return ModelsJson(source); });
  return routes;
}

}  // namespace emberd::status_page
