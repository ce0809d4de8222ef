// What `emberd up` prints when everything serves.
#include <cstdio>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/launcher/up.h"

namespace emberd::launcher {
namespace {

// `page`: what is to be looked at first.
std::string Row(const std::string& name, const ReadyInfo& process, const std::string& scheme,
                const char* page) {
  std::string row = absl::StrFormat("  %-14s %-22s pid %-8d", name, process.grpc, process.pid);
  if (!process.http.empty()) absl::StrAppend(&row, scheme, process.http, page);
  return row + "\n";
}

// `field` of every process, separated by commas.
template <typename T>
std::string Joined(const std::vector<ReadyInfo>& processes, T ReadyInfo::*field) {
  return absl::StrJoin(processes, ",", [field](std::string* out, const ReadyInfo& process) {
    absl::StrAppend(out, process.*field);
  });
}

}  // namespace

std::string Banner(const ClusterInfo& info) {
  const std::string scheme = info.https ? "https://" : "http://";
  std::string text =
      absl::StrCat("emberd ", EMBERD_VERSION, ": ", info.shard_count,
                   info.shard_count == 1 ? " shard" : " shards", " with ",
                   info.sparsecores_per_shard, " SparseCores each, ",
                   info.shards.empty() ? "all in this process" : "one process each", "\n");
  for (size_t i = 0; i < info.coordinators.size(); ++i) {
    absl::StrAppend(&text, Row(absl::StrCat("coordinator ", i), info.coordinators[i], scheme, "/"));
  }
  for (size_t i = 0; i < info.shards.size(); ++i) {
    absl::StrAppend(&text, Row(absl::StrCat("shard ", i), info.shards[i], scheme, "/metrics"));
  }
  return absl::StrCat(text, "Stop it with Ctrl-C or: kill ", getpid(), "\n");
}

std::string ReadyLine(const ClusterInfo& info) {
  std::vector<ReadyInfo> all = info.coordinators;
  all.insert(all.end(), info.shards.begin(), info.shards.end());
  std::string line =
      absl::StrCat("emberd: ready coordinator=", Joined(info.coordinators, &ReadyInfo::grpc),
                   " http=", Joined(info.coordinators, &ReadyInfo::http),
                   " shards=", info.shard_count, " pids=", Joined(all, &ReadyInfo::pid));
  if (!info.shards.empty()) {
    absl::StrAppend(&line, " shard_grpc=", Joined(info.shards, &ReadyInfo::grpc),
                    " shard_http=", Joined(info.shards, &ReadyInfo::http));
  }
  return line;
}

void PrintReady(const ClusterInfo& info, const v1::LoggingConfig& logging) {
  const bool json_log = logging.format() == v1::LoggingConfig::JSON && logging.file().empty();
  if (!json_log) std::fputs(Banner(info).c_str(), stderr);
  std::printf("%s\n", ReadyLine(info).c_str());
  std::fflush(stdout);
}

}  // namespace emberd::launcher
