#include "tests/testing/prometheus.h"

#include <filesystem>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/testing/http_get.h"

namespace emberd::testing {
namespace {

using nlohmann::json;

constexpr char kPrometheus[] = "/usr/bin/prometheus";
constexpr absl::Duration kReadyTimeout = absl::Seconds(60);

std::string Config(const std::vector<Prometheus::Target>& targets, const std::string& rule_file) {
  std::string config = "global: {scrape_interval: 1s, evaluation_interval: 1s}\n";
  if (!rule_file.empty()) absl::StrAppend(&config, "rule_files: [\"", rule_file, "\"]\n");
  absl::StrAppend(&config, "scrape_configs:\n  - job_name: emberd\n    static_configs:\n");
  for (const Prometheus::Target& target : targets) {
    absl::StrAppend(&config, "      - targets: [\"", target.address, "\"]\n",
                    "        labels: {process: ", target.process, "}\n");
  }
  return config;
}

// The port that it logs once it listens; 0 before.
int ListeningPort(const std::string& log) {
  constexpr char kAddress[] = "msg=\"Listening on\" address=127.0.0.1:";
  const size_t found = log.find(kAddress);
  const size_t begin = found + sizeof(kAddress) - 1;
  const size_t end = log.find_first_not_of("0123456789", begin);
  int port = 0;
  if (found == std::string::npos || end == std::string::npos) return 0;
  return absl::SimpleAtoi(log.substr(begin, end - begin), &port) ? port : 0;
}

std::string UrlEncoded(const std::string& text) {
  std::string encoded;
  for (const char c : text) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
      encoded += c;
    } else {
      absl::StrAppendFormat(&encoded, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

// A body that was sent in chunks: "SIZE\r\n" and as many bytes and "\r\n", until one of size 0.
std::string Unchunked(const std::string& body) {
  std::string whole;
  for (size_t at = 0; at < body.size();) {
    const size_t line = body.find("\r\n", at);
    if (line == std::string::npos) break;
    const size_t size = std::strtoul(body.c_str() + at, nullptr, 16);
    if (size == 0) break;
    whole += body.substr(line + 2, size);
    at = line + 2 + size + 2;
  }
  return whole;
}

}  // namespace

bool Prometheus::Installed() { return std::filesystem::exists(kPrometheus); }

absl::StatusOr<std::unique_ptr<Prometheus>> Prometheus::Start(const std::vector<Target>& targets,
                                                              const std::string& rule_file) {
  ASSIGN_OR_RETURN(TempDir directory, TempDir::Create());
  std::unique_ptr<Prometheus> prometheus(new Prometheus(std::move(directory)));
  const TempDir& folder = prometheus->directory_;
  const std::string config = folder.Path("prometheus.yml");
  WriteFile(config, Config(targets, rule_file));
  ASSIGN_OR_RETURN(prometheus->process_,
                   StartProcess({kPrometheus, absl::StrCat("--config.file=", config),
                                 absl::StrCat("--storage.tsdb.path=", folder.Path("data")),
                                 "--web.listen-address=127.0.0.1:0"},
                                folder.Path("log")));
  const absl::Time deadline = absl::Now() + kReadyTimeout;
  while (absl::Now() < deadline && prometheus->process_->Running()) {
    prometheus->port_ = ListeningPort(ReadFile(folder.Path("log")));
    if (prometheus->port_ != 0 && prometheus->Query("vector(1)").ok()) return prometheus;
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::UnavailableError(
      absl::StrCat("Prometheus did not get ready:\n", ReadFile(folder.Path("log"))));
}

absl::StatusOr<std::string> Prometheus::Get(const std::string& path) const {
  const std::string answer = HttpGet(port_, path);
  const size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos) return absl::UnavailableError("Prometheus does not answer");
  const std::string headers = absl::AsciiStrToLower(answer.substr(0, body));
  const bool chunked = headers.find("transfer-encoding: chunked") != std::string::npos;
  return chunked ? Unchunked(answer.substr(body + 4)) : answer.substr(body + 4);
}

absl::StatusOr<std::vector<Prometheus::Sample>> Prometheus::Query(
    const std::string& expression) const {
  auto text = Get(absl::StrCat("/api/v1/query?query=", UrlEncoded(expression)));
  if (!text.ok()) return text.status();
  const json answer = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object() || answer.value("status", "") != "success") {
    return absl::InvalidArgumentError(absl::StrCat(expression, ": ", *text));
  }
  std::vector<Sample> samples;
  const json& data = answer["data"];
  if (data["resultType"] != "vector") {
    return absl::InvalidArgumentError(absl::StrCat(expression, ": not an instant vector"));
  }
  for (const json& result : data["result"]) {
    Sample& sample = samples.emplace_back();
    sample.labels = result["metric"].get<std::map<std::string, std::string>>();
    if (!absl::SimpleAtod(result["value"][1].get<std::string>(), &sample.value)) {
      return absl::InternalError(absl::StrCat("not a number: ", result.dump()));
    }
  }
  return samples;
}

absl::StatusOr<std::vector<Prometheus::Rule>> Prometheus::Rules() const {
  auto text = Get("/api/v1/rules");
  if (!text.ok()) return text.status();
  const json answer = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object() || answer.value("status", "") != "success") {
    return absl::InternalError(*text);
  }
  std::vector<Rule> rules;
  for (const json& group : answer["data"]["groups"]) {
    for (const json& rule : group["rules"]) {
      rules.push_back({rule.value("name", ""), rule.value("query", ""), rule.value("state", ""),
                       rule.value("health", ""), rule.value("lastError", "")});
    }
  }
  return rules;
}

}  // namespace emberd::testing
