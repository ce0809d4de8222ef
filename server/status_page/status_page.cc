#include "server/status_page/status_page.h"

#include <set>
#include <utility>

#include <google/protobuf/util/json_util.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/channel_arguments.h>
#include <nlohmann/json.hpp>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/suggest.h"
#include "config/address.h"
#include "config/fold_numbers.h"

namespace emberd::status_page {
namespace {

// So that a coordinator that comes back is found soon.
constexpr int kFirstReconnectMs = 200;
constexpr int kMaxReconnectMs = 2000;

bool CanBeAsked(const std::string& text) {
  const auto address = config::ParseAddress(text);
  if (!address.ok() || address->port == 0) return false;
  return !address->is_wildcard();
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                       const security::Security& security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  // Several clusters may live in one process: connections are not shared.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return security.Connect(address, arguments);
}

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

// Keeps what `make` gives, and calls it again only when that is older than kMaxAge. Thread-safe;
// all who ask meanwhile wait.
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

// The models whose stacks `stats` lists. One that cannot be described, such as one that has just
// been dropped, is left out, and the page shows the others. While a shard is silent, it takes
// seconds to describe a model that only other coordinators know, so after one second no more are
// asked for. This coordinator's own models come first in `stats`, and are described at once.
std::vector<v1::DescribeModelResponse> Models(const Source& source,
                                              const v1::GetStatsResponse& stats) {
  std::set<std::string> asked;
  std::vector<v1::DescribeModelResponse> models;
  const absl::Time end = SteadyNow() + Peers::kPatience;
  for (const v1::StackStats& stack : stats.stacks()) {
    if (SteadyNow() >= end) break;
    if (!asked.insert(stack.model()).second) continue;
    v1::DescribeModelRequest request;
    request.set_name(stack.model());
    absl::StatusOr<v1::DescribeModelResponse> model = source.model(request);
    if (model.ok()) models.push_back(*std::move(model));
  }
  absl::c_sort(models,
               [](const auto& a, const auto& b) { return a.config().name() < b.config().name(); });
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
  ASSIGN_OR_RETURN(const v1::GetStatsResponse stats, source.stats({}));
  std::vector<std::string> parts;
  for (const v1::DescribeModelResponse& model : Models(source, stats)) {
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

// Asks the cluster, and remembers what it said. Not thread-safe.
class Board {
 public:
  explicit Board(const Source& source) : source_(source) {}

  // Figures of the whole cluster, and the page's text about them.
  absl::StatusOr<std::string> Ask() {
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
                        absl::StrJoin(Models(source_, sum), ",", model_json), "],\"stats\":", stats,
                        ",\"coordinators\":[", absl::StrJoin(coordinators, ","), "]}\n");
  }

 private:
  // Whether what is summed over `now` may be less than it was: a coordinator is gone, is back, or
  // counts anew.
  bool MayBeLess(const ClusterFigures& now) const {
    for (size_t i = 0; i < now.size() && i < latest_.size(); ++i) {
      if (now[i].status.ok() != latest_[i].status.ok()) return true;
      if (now[i].stats.uptime_ms() < latest_[i].stats.uptime_ms()) return true;
    }
    return false;
  }

  const Source source_;
  ClusterFigures latest_;
  int epoch_ = 0;
};

}  // namespace

v1::GetStatsResponse Merge(const ClusterFigures& figures) {
  v1::GetStatsResponse sum = figures.empty() ? v1::GetStatsResponse() : figures.front().stats;
  for (size_t i = 1; i < figures.size(); ++i) {
    if (!figures[i].status.ok()) continue;
    v1::GetStatsResponse more = figures[i].stats;
    more.clear_time_ms();
    more.clear_uptime_ms();
    more.clear_shards();  // all know the same ones
    config::FoldNumbers(more, &sum, config::Fold::kAdd);
  }
  return sum;
}

Peers::Peers(const v1::ClusterConfig& cluster, int self, const security::Security& security) {
  for (int i = 0; i < cluster.coordinators_size(); ++i) {
    const v1::CoordinatorConfig& coordinator = cluster.coordinators(i);
    if (i == self || !CanBeAsked(coordinator.address())) continue;
    peers_.push_back({.figures = {.name = absl::StrCat("coordinator-", i),
                                  .address = coordinator.address(),
                                  .http_address = coordinator.http_address()},
                      .stub = v1::AdminService::NewStub(Connect(coordinator.address(), security))});
  }
}

ClusterFigures Peers::Ask() const {
  ClusterFigures figures(peers_.size());
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  v1::GetStatsRequest request;
  request.set_without_shards(true);
  absl::BlockingCounter waiting(static_cast<int>(peers_.size()));
  const auto deadline = ToSystemTime(SteadyNow() + kPatience);
  for (size_t i = 0; i < peers_.size(); ++i) {
    figures[i] = peers_[i].figures;
    grpc::ClientContext* const context =
        contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get();
    context->set_deadline(deadline);
    CoordinatorFigures* const answer = &figures[i];
    peers_[i].stub->async()->GetStats(
        context, &request, &answer->stats, [answer, &waiting](const grpc::Status& status) {
          answer->status = absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                                        status.error_message());
          waiting.DecrementCount();
        });
  }
  waiting.Wait();
  return figures;
}

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
