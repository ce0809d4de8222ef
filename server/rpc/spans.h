// What a request spends its time on, for OpenTelemetry: spans, each under the one that it is a part
// of, as lines of a file, each an ExportTraceServiceRequest in JSON. Without a file, nothing costs
// anything.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "server/ops/rpc_names.h"
#include "server/rpc/call_context.h"

namespace emberd::rpc {

// Call once at the start of a process, which is called `process` in the spans. Empty: no spans.
// INVALID_ARGUMENT if the file cannot be opened for appending.
absl::Status SetUpSpans(const std::string& path, const std::string& process);
bool SpansAreOn();
// Makes a new file under the name of the file of spans, if there is one, and goes on in it, as
// after logrotate has moved the old one. If that fails, the old one stays. Thread-safe.
void ReopenSpans();

// From its creation to its end, on one thread: what is done meanwhile for the context is a part of
// it, here and in the processes that are called. Spans of one context end in reverse order.
class Span {
 public:
  enum class Kind { kInternal = 1, kServer = 2 };

  // `context` must outlive it; null: there is no span. `has_parent`: its trace names a span of the
  // caller. `name` must outlive the span.
  Span(CallContext* context, std::string_view name, Kind kind = Kind::kInternal,
       bool has_parent = true, absl::Time began = SteadyNow());
  ~Span() { End(absl::OkStatus()); }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void Set(std::string_view key, std::string_view value);
  void Set(std::string_view key, int64_t value) { Set(key, std::to_string(value)); }
  // Ends it; once.
  void End(const absl::Status& status);

 private:
  CallContext* context_;  // null: there is no span, or it has ended
  std::string_view name_;
  Kind kind_;
  bool has_parent_;
  absl::Time began_;
  std::string parent_;  // the context's trace of before
  std::vector<std::pair<std::string, std::string>> attributes_;
};

// Pieces of a shard's own work for a call of a step. Each is a span without parts, under the span
// that `trace` names, and a line in the log if it took longer than `slow`.
class TimedWork {
 public:
  TimedWork(absl::Duration slow, ops::Rpc rpc, std::string trace)
      : slow_(slow), rpc_(rpc), trace_(std::move(trace)) {}

  void Begin() { began_ = SteadyNow(); }
  void End() const;

 private:
  const absl::Duration slow_;
  const ops::Rpc rpc_;
  const std::string trace_;
  absl::Time began_ = SteadyNow();
};

}  // namespace emberd::rpc
