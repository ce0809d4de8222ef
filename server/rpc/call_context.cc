#include "server/rpc/call_context.h"

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include "absl/random/random.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

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

}  // namespace emberd::rpc
