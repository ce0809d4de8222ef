#include "client/demo/cluster.h"

#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/demo/descriptor.h"
#include "client/demo/text_lines.h"

namespace emberd::demo {

namespace {

constexpr absl::Duration kReadyTimeout = absl::Minutes(2);
constexpr absl::Duration kStopTimeout = absl::Seconds(30);  // emberd drains within half of it
constexpr char kReady[] = "emberd: ready ";

// Reads lines from `pipe` until one says that the cluster is ready.
absl::StatusOr<std::string> AwaitReady(int pipe, Child* child,
                                       const std::function<bool()>& cancelled) {
  std::string output;
  const absl::Time deadline = absl::Now() + kReadyTimeout;
  while (absl::Now() < deadline) {
    if (cancelled()) return absl::CancelledError("stopped while the cluster was starting");
    pollfd waiting{pipe, POLLIN, 0};
    if (poll(&waiting, 1, 100) > 0) {
      char buffer[4096];
      const ssize_t size = read(pipe, buffer, sizeof(buffer));
      if (size > 0) output.append(buffer, size);
    }
    const size_t begin = output.find(kReady), end = output.find('\n', begin);
    if (begin != std::string::npos && end != std::string::npos) {
      return output.substr(begin, end - begin);
    }
    if (!child->Running()) return absl::UnavailableError(absl::StrCat("emberd ", child->End()));
  }
  return absl::DeadlineExceededError("emberd does not get ready");
}

std::string LastLineOf(const std::string& path) {
  const auto lines = TextLines::Open(path);
  if (!lines.ok() || (*lines)->size() == 0) return "no message";
  return std::string((*lines)->Read((*lines)->size() - 1, 1)[0]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(const ClusterOptions& options,
                                                        const std::function<bool()>& cancelled) {
  if (access(options.program.c_str(), X_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat(options.program, ": no such program; build it or give --emberd"));
  }
  int pipe[2];
  if (pipe2(pipe, O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no pipe");
  const Descriptor reader(pipe[0]), writer(pipe[1]);
  const Descriptor log(
      open(options.log_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (log.get() < 0) {
    return absl::FailedPreconditionError(absl::StrCat(options.log_file, ": cannot be written"));
  }
  absl::StatusOr<std::unique_ptr<Child>> child = Child::Start(
      {options.program, "up", "--processes", "--shards", absl::StrCat(options.shards),
       "--sparsecores", absl::StrCat(options.sparsecores), "--coordinators",
       absl::StrCat(options.coordinators), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"},
      {.output = writer.get(), .error = log.get()});
  if (!child.ok()) return child.status();
  std::unique_ptr<Cluster> cluster(new Cluster);
  cluster->child_ = *std::move(child);
  absl::StatusOr<std::string> ready = AwaitReady(reader.get(), cluster->child_.get(), cancelled);
  if (!ready.ok()) {
    cluster->Stop();
    return absl::Status(ready.status().code(),
                        absl::StrCat(ready.status().message(), ": ", LastLineOf(options.log_file),
                                     " (", options.log_file, ")"));
  }
  cluster->ready_line_ = *ready;
  return cluster;
}

void Cluster::Stop() { child_->Stop(kStopTimeout); }

std::string Cluster::Field(const std::string& name) const { return FieldOf(ready_line_, name); }

std::vector<std::string> Cluster::Coordinators() const {
  return absl::StrSplit(Field("coordinator"), ',');
}

std::string FieldOf(const std::string& line, const std::string& name) {
  const std::string key = absl::StrCat(" ", name, "=");
  const size_t begin = line.find(key);
  if (begin == std::string::npos) return "";
  const size_t value = begin + key.size();
  return line.substr(value, line.find(' ', value) - value);
}

}  // namespace emberd::demo
