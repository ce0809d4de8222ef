#include "server/ops/http_routes.h"

#include <iterator>
#include <utility>

#include <prometheus/text_serializer.h>

#include "absl/strings/str_cat.h"

namespace emberd::ops {

HttpRoute MetricsRoute(const Metrics& metrics) {
  const auto answer = [collectables = metrics.collectables()]() -> HttpAnswer {
    std::vector<prometheus::MetricFamily> families;
    for (const auto& weak : collectables) {
      const auto collectable = weak.lock();
      if (collectable == nullptr) continue;
      std::vector<prometheus::MetricFamily> some = collectable->Collect();
      families.insert(families.end(), std::make_move_iterator(some.begin()),
                      std::make_move_iterator(some.end()));
    }
    return {200, prometheus::TextSerializer().Serialize(families)};
  };
  return {"/metrics", "text/plain; version=0.0.4; charset=utf-8", answer};
}

HttpRoute HealthRoute(std::function<bool()> serving) {
  const auto answer = [serving = std::move(serving)]() -> HttpAnswer {
    if (serving()) return {200, "serving\n"};
    return {503, "not serving\n"};
  };
  return {"/healthz", "text/plain; charset=utf-8", answer, /*open=*/true};
}

HttpRoute IndexRoute(const std::string& name, const std::vector<std::string>& paths) {
  std::string page =
      absl::StrCat("<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>emberd ",
                   name, "</title>\n<h1>emberd ", EMBERD_VERSION, ": ", name, "</h1>\n<ul>\n");
  for (const std::string& path : paths) {
    absl::StrAppend(&page, "<li><a href=\"", path, "\">", path, "</a></li>\n");
  }
  absl::StrAppend(&page, "</ul>\n</html>\n");
  const auto answer = [page]() -> HttpAnswer { return {200, page}; };
  return {"/", "text/html; charset=utf-8", answer, /*open=*/true};
}

}  // namespace emberd::ops
