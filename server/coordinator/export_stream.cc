#include "server/coordinator/export_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/call_context.h"
#include "server/rpc/wire.h"
#include "server/security/callers.h"

namespace emberd::server {

ExportStream::ExportStream(Coordinator* coordinator, const CallEnvironment& environment,
                           const grpc::CallbackServerContext& server_context,
                           const grpc::ByteBuffer& request)
    : coordinator_(coordinator),
      environment_(environment),
      request_(request),
      context_(DeadlineOf(server_context, environment.default_deadline),
               rpc::TraceOf(server_context)),
      timer_(environment.metrics, ops::Rpc::kExportTable) {}

ExportStream* ExportStream::Start(Coordinator* coordinator, const CallEnvironment& environment,
                                  const grpc::CallbackServerContext& server_context,
                                  const grpc::ByteBuffer& request) {
  auto* stream = new ExportStream(coordinator, environment, server_context, request);
  absl::Status status = stream->Admit(security::ClientName(server_context));
  if (status.ok()) {
    stream->SubmitNext();
  } else {
    stream->End(status);
  }
  return stream;
}

absl::Status ExportStream::Admit(const std::string& client) {
  auto grant = environment_.admission->Admit(client, 0);
  if (!grant.ok()) return grant.status();
  grant_ = *std::move(grant);
  return environment_.drain->draining() ? DrainingError() : absl::OkStatus();
}

void ExportStream::SubmitNext() {
  if (environment_.pool->Submit([this] { MakeNext(); })) return;
  End(absl::ResourceExhaustedError(
      absl::StrCat(environment_.pool->max_queued(),
                   " requests wait already, and budgets.max_waiting_requests is no more; retry "
                   "later")));
}

void ExportStream::MakeNext() {
  if (export_ == nullptr) {
    v1::ExportTableRequest request;
    if (absl::Status status = rpc::DecodeMessage(request_, &request); !status.ok()) {
      End(status);
      return;
    }
    auto started = coordinator_->StartExport(request, &context_);
    if (!started.ok()) {
      End(started.status());
      return;
    }
    export_ = *std::move(started);
  }
  auto part = export_->Next();
  if (!part.ok() || !part->has_values()) {
    End(part.status());
    return;
  }
  part_ = rpc::EncodeMessage(*part);
  timer_.AddResponseBytes(static_cast<int64_t>(part_.Length()));
  StartWrite(&part_);
}

void ExportStream::OnWriteDone(bool ok) {
  if (ok) {
    SubmitNext();
  } else {
    End(absl::CancelledError("the caller is gone"));
  }
}

void ExportStream::End(const absl::Status& status) {
  timer_.Finish(status.code());
  grant_ = Admission::Grant();
  Finish(rpc::ToGrpcStatus(status));
}

}  // namespace emberd::server
