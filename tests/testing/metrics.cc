#include "tests/testing/metrics.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/testing/http_get.h"

namespace emberd::testing {

std::string FetchMetrics(const std::string& http_address, const std::string& token) {
  int port = 0;
  const size_t colon = http_address.rfind(':');
  if (colon == std::string::npos || !absl::SimpleAtoi(http_address.substr(colon + 1), &port)) {
    return "";
  }
  const std::string header =
      token.empty() ? "" : absl::StrCat("Authorization: Bearer ", token, "\r\n");
  return HttpCall(port, "GET", "/metrics", header);
}

double MetricSum(const std::string& page, const std::string& name, const std::string& labels) {
  double sum = 0;
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    if (!absl::ConsumePrefix(&line, name) || line.empty()) continue;
    if (line[0] != '{' && line[0] != ' ') continue;  // a longer name
    const size_t space = line.rfind(' ');
    double value = 0;
    if (space == absl::string_view::npos || !absl::SimpleAtod(line.substr(space + 1), &value)) {
      continue;
    }
    if (absl::StrContains(line.substr(0, space), labels)) sum += value;
  }
  return sum;
}

}  // namespace emberd::testing
