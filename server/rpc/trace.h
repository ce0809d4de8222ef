// Trace ids (W3C trace context): what ties together the log lines of one request on all processes
// that it passes. They travel in the metadata "traceparent".
#pragma once

#include <string>

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include "absl/strings/string_view.h"

namespace emberd::rpc {

// The caller's trace context, or a new one if it sent none or nonsense.
std::string TraceOf(const grpc::ServerContextBase& context);
// Sends the trace context along, under a span of its own. Does nothing if it is empty.
void SendTrace(absl::string_view trace, grpc::ClientContext* context);
// The id in it, 32 hex digits: what logs show.
absl::string_view TraceId(absl::string_view trace);

// "00-" 32 hex digits "-" 16 hex digits "-" 2 hex digits, ids not zero.
bool IsTrace(absl::string_view trace);

}  // namespace emberd::rpc
