#include "server/status_page/status_page.h"

#include <cstdint>
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
#include "absl/time/clock.h"
#include "server/status_page/page_files.h"

namespace emberd::status_page {
namespace {

constexpr int kHotRows = 5;  // of each table and shard
constexpr char kJson[] = "application/json";

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

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
    if (absl::Now() - made_ >= kMaxAge) {
      const absl::StatusOr<std::string> body = make_();
      answer_ = body.ok() ? ops::HttpAnswer{200, *body}
                          : ops::HttpAnswer{503, absl::StrCat(body.status().message(), "\n")};
      made_ = absl::Now();
    }
    return answer_;
  }

 private:
  const std::function<absl::StatusOr<std::string>()> make_;
  absl::Mutex mutex_;
  absl::Time made_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  ops::HttpAnswer answer_ ABSL_GUARDED_BY(mutex_);
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

absl::StatusOr<std::string> StatusJson(const Source& source) {
  v1::GetStatsRequest request;
  request.set_hot_rows(kHotRows);
  const absl::StatusOr<v1::GetStatsResponse> stats = source.stats(request);
  if (!stats.ok()) return stats.status();
  const auto models = Models(source, *stats);
  if (!models.ok()) return models.status();
  const absl::StatusOr<std::string> figures = ToJson(*stats);
  if (!figures.ok()) return figures.status();
  const auto model_json = [](std::string* out, const v1::DescribeModelResponse& model) {
    absl::StrAppend(
        out, "{\"model_id\":\"", model.model_id(), "\",\"name\":", Quoted(model.config().name()),
        ",\"history\":\"", model.history(),
        "\",\"lost\":", Quoted(model.recovery().empty() ? model.lost() : model.recovery()), "}");
  };
  return absl::StrCat("{\"name\":", Quoted(source.name), ",\"version\":\"", EMBERD_VERSION,
                      "\",\"models\":[", absl::StrJoin(*models, ",", model_json),
                      "],\"stats\":", *figures, "}\n");
}

absl::StatusOr<std::string> ModelsJson(const Source& source) {
  const absl::StatusOr<v1::GetStatsResponse> stats = source.stats({});
  if (!stats.ok()) return stats.status();
  const auto models = Models(source, *stats);
  if (!models.ok()) return models.status();
  std::vector<std::string> parts;
  for (const v1::DescribeModelResponse& model : *models) {
    absl::StatusOr<std::string> json = ToJson(model);
    if (!json.ok()) return json.status();
    parts.push_back(*std::move(json));
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

}  // namespace

std::vector<ops::HttpRoute> Routes(const Source& source) {
  std::vector<ops::HttpRoute> routes;
  for (const PageFile& file : PageFiles()) routes.push_back(FileRoute(file));
  const auto add = [&routes](const std::string& path,
                             std::function<absl::StatusOr<std::string>()> make) {
    const auto cached = std::make_shared<Cached>(std::move(make));
    routes.push_back({path, kJson, [cached] { return cached->Get(); }});
  };
  add("/status.json", [source] { return StatusJson(source); });
  add("/models.json", [source] { return ModelsJson(source); });
  return routes;
}

}  // namespace emberd::status_page
