#include "server/status_page/history.h"

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace emberd::status_page {
namespace {

int64_t TimeOf(const ClusterFigures& figures) { return figures.front().stats.time_ms(); }

// Four digits are more than a chart can show.
void AppendNumber(double value, std::string* json) {
  if (std::isfinite(value)) {
    absl::StrAppendFormat(json, ",%.4g", value);
  } else {
    json->append(",null");
  }
}

}  // namespace

void History::Add(ClusterFigures figures) {
  const int64_t now = TimeOf(figures);
  if (!recent_.empty() && now - TimeOf(recent_.back()) < kLeastMs) {
    if (now >= TimeOf(recent_.back())) return;
    recent_.clear();  // the clock was set back
    coarse_.clear();
    fine_.clear();
  }
  if (recent_.empty()) Push(Gap(now));
  recent_.push_back(std::move(figures));
  while (recent_.size() > 2 && TimeOf(recent_[1]) <= now - kLatencyMs) recent_.pop_front();
  if (recent_.size() > 1) Push(Latest(recent_, kRatesMs, kLatencyMs));
}

void History::Push(Point point) {
  const int64_t now = point.time_ms;
  fine_.push_back(std::move(point));
  while (fine_.front().time_ms < now - kFineMs) {
    if (coarse_.empty() || fine_.front().time_ms >= coarse_.back().time_ms + kCoarseMs) {
      coarse_.push_back(std::move(fine_.front()));
    }
    fine_.pop_front();
  }
  while (!coarse_.empty() && coarse_.front().time_ms < now - kKeepMs) coarse_.pop_front();
}

std::string History::ToJson(int64_t since_ms) const {
  std::vector<const Point*> points;
  for (const std::deque<Point>* part : {&coarse_, &fine_}) {
    for (const Point& point : *part) {
      if (point.time_ms > since_ms) points.push_back(&point);
    }
  }
  std::map<std::string, size_t> codes;
  for (const Point* point : points) {
    for (const auto& [code, rate] : point->errors) codes.emplace(code, 0);
  }
  std::string json = "{\"keys\":[";
  for (int i = 0; i < kValues; ++i) {
    absl::StrAppend(&json, i == 0 ? "" : ",", "\"", NameOf(static_cast<Value>(i)), "\"");
  }
  size_t columns = 0;
  for (auto& [code, column] : codes) {
    column = columns++;
    absl::StrAppend(&json, ",\"error ", code, "\"");  // names of status codes
  }
  json += "],\"points\":[";
  for (size_t i = 0; i < points.size(); ++i) {
    absl::StrAppend(&json, i == 0 ? "[" : ",[", points[i]->time_ms);
    for (const double value : points[i]->values) AppendNumber(value, &json);
    std::vector<double> errors(columns, points[i]->at(Value::kErrors) * 0);  // unknown in a gap
    for (const auto& [code, rate] : points[i]->errors) errors[codes.at(code)] = rate;
    for (const double rate : errors) AppendNumber(rate, &json);
    json += "]";
  }
  json += "]}";
  return json;
}

}  // namespace emberd::status_page
