#include "server/rpc/call_context.h"

#include <atomic>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "absl/random/random.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/ops/logging.h"

namespace emberd::rpc {
namespace {

constexpr char kMetadataKey[] = "traceparent";
constexpr size_t kIdBegin = 3;
constexpr size_t kIdSize = 32;
constexpr size_t kSpanBegin = 36;
constexpr size_t kSpanSize = 16;
constexpr size_t kSize = 55;

// 16 hex digits, not all zero.
std::string RandomDigits() { return absl::StrCat(absl::Hex(RandomId(), absl::kZeroPad16)); }

bool AreDigits(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); });
}

bool AreIdDigits(absl::string_view text) {
  return AreDigits(text) && text.find_first_not_of('0') != absl::string_view::npos;
}

using Json = nlohmann::json;

struct Exporter {
  int file = -1;
  std::string path;
  std::string process;
};

int OpenToAppend(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
}

// Made once, and never deleted: calls may end when the process does.
std::atomic<const Exporter*> the_exporter = nullptr;

Json Attribute(const std::string& key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}

// Spans are measured by the steady clock, and shown with dates.
std::string Nanoseconds(absl::Time time) {
  return absl::StrCat(absl::ToUnixNanos(absl::FromChrono(ToSystemTime(time))));
}

void Write(const Exporter& exporter, Json span) {
  const Json resource = {
      {"attributes",
       {Attribute("service.name", "emberd"), Attribute("service.instance.id", exporter.process)}}};
  const Json scope = {{"scope", {{"name", "emberd"}}}, {"spans", {std::move(span)}}};
  const Json request = {
      {"resourceSpans", {{{"resource", resource}, {"scopeSpans", Json::array({scope})}}}}};
  // In one piece, so that processes may share the file. A message may be any bytes.
  const std::string line =
      absl::StrCat(request.dump(-1, ' ', false, Json::error_handler_t::replace), "\n");
  static auto* const log = new ops::RateLimitedLog(absl::Minutes(1));
  const ssize_t written = write(exporter.file, line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return;
  // A disk that is full loses spans, and nothing else.
  log->Log(ops::LogLevel::kWarning, "a span was not written",
           {{"file", exporter.path},
            {"reason", written < 0 ? std::strerror(errno) : "the disk took only a part of it"}});
}

}  // namespace

uint64_t RandomId() {
  thread_local absl::BitGen generator;
  return absl::Uniform<uint64_t>(generator, 1, ~uint64_t{0});
}

bool IsTrace(absl::string_view trace) {
  return trace.size() == kSize && trace.substr(0, kIdBegin) == "00-" && trace[35] == '-' &&
         trace[52] == '-' && AreIdDigits(trace.substr(kIdBegin, kIdSize)) &&
         AreIdDigits(trace.substr(kSpanBegin, kSpanSize)) && AreDigits(trace.substr(53));
}

absl::string_view TraceId(absl::string_view trace) {
  return trace.size() == kSize ? trace.substr(kIdBegin, kIdSize) : absl::string_view();
}

absl::string_view SpanId(absl::string_view trace) {
  return trace.size() == kSize ? trace.substr(kSpanBegin, kSpanSize) : absl::string_view();
}

std::string NewSpanOf(absl::string_view trace) {
  return absl::StrCat(trace.substr(0, kSpanBegin), RandomDigits(),
                      trace.substr(kSpanBegin + kSpanSize));
}

absl::string_view SentTrace(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find(kMetadataKey);
  if (found == context.client_metadata().end()) return {};
  return {found->second.data(), found->second.size()};
}

std::string TraceOf(const grpc::ServerContextBase& context) { return TraceOf(SentTrace(context)); }

std::string TraceOf(absl::string_view sent) {
  if (IsTrace(sent)) return std::string(sent);
  return absl::StrCat("00-", RandomDigits(), RandomDigits(), "-", RandomDigits(), "-00");
}

void SendTrace(absl::string_view trace, grpc::ClientContext* context) {
  if (trace.empty()) return;
  context->AddMetadata(kMetadataKey, std::string(trace));
}

absl::Status SetUpSpans(const std::string& path, const std::string& process) {
  if (path.empty()) return absl::OkStatus();
  const int file = OpenToAppend(path);
  if (file < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "logging.span_file: '", path, "' cannot be opened for appending: ", std::strerror(errno)));
  }
  the_exporter.store(new Exporter{file, path, process});
  return absl::OkStatus();
}

void ReopenSpans() {
  const Exporter* const exporter = the_exporter.load();
  if (exporter == nullptr) return;
  const int file = OpenToAppend(exporter->path);
  // In place: each span is written to the old file or to the new one.
  if (file < 0 || dup3(file, exporter->file, O_CLOEXEC) < 0) {
    ops::Log(ops::LogLevel::kError, "spans go on in their old file",
             {{"file", exporter->path}, {"reason", std::strerror(errno)}});
  }
  if (file >= 0) close(file);
}

bool SpansAreOn() { return the_exporter.load(std::memory_order_relaxed) != nullptr; }

Span::Span(CallContext* context, std::string_view name, Kind kind, bool has_parent,
           absl::Time began)
    : context_(SpansAreOn() ? context : nullptr),
      name_(name),
      kind_(kind),
      has_parent_(has_parent),
      began_(began) {
  if (context_ == nullptr) return;
  parent_ = context_->trace();
  if (!IsTrace(parent_)) {
    context_ = nullptr;
    return;
  }
  context_->SetTrace(NewSpanOf(parent_));
}

void Span::Set(std::string_view key, std::string_view value) {
  if (context_ != nullptr) attributes_.emplace_back(key, value);
}

void Span::End(const absl::Status& status) {
  const Exporter* const exporter = the_exporter.load();
  if (context_ == nullptr || exporter == nullptr) return;
  const std::string trace = context_->trace();
  Json span = {{"traceId", std::string(TraceId(trace))},
               {"spanId", std::string(SpanId(trace))},
               {"name", std::string(name_)},
               {"kind", static_cast<int>(kind_)},
               {"startTimeUnixNano", Nanoseconds(began_)},
               {"endTimeUnixNano", Nanoseconds(SteadyNow())}};
  if (has_parent_) span["parentSpanId"] = std::string(SpanId(parent_));
  for (const auto& [key, value] : attributes_) span["attributes"].push_back(Attribute(key, value));
  if (!status.ok()) span["status"] = {{"code", 2}, {"message", std::string(status.message())}};
  Write(*exporter, std::move(span));
  context_->SetTrace(parent_);
  context_ = nullptr;
}

void TimedWork::End() const {
  if (SpansAreOn()) {
    CallContext context(absl::InfiniteFuture(), trace_);
    const Span span(&context, ops::RpcName(rpc_), Span::Kind::kInternal, /*has_parent=*/true,
                    began_);
  }
  const absl::Duration took = SteadyNow() - began_;
  if (took <= slow_) return;
  ops::Log(ops::LogLevel::kWarning, "slow call",
           {{"rpc", ops::RpcName(rpc_)},
            {"ms", absl::ToInt64Milliseconds(took)},
            {"trace", TraceId(trace_)}});
}

}  // namespace emberd::rpc
