#include "tests/testing/request_load.h"

#include <utility>

#include <grpcpp/generic/generic_stub.h>

#include "absl/time/clock.h"

namespace emberd::testing {
namespace {

constexpr absl::Duration kSettling = absl::Seconds(1);

std::vector<std::shared_ptr<grpc::Channel>> MakeChannels(const std::string& address, int count) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < count; ++i) {
    channels.push_back(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }
  return channels;
}

grpc::ByteBuffer ToBuffer(const std::string& message) {
  const grpc::Slice slice(message);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

struct RequestLoad::Call {
  grpc::ClientContext context;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
  grpc::ByteBuffer response;
  grpc::Status status;
};

RequestLoad::RequestLoad(const std::string& address, int connections, std::string method,
                         std::string message, absl::Duration deadline)
    : channels_(MakeChannels(address, connections)),
      method_(std::move(method)),
      message_(ToBuffer(message)),
      deadline_(deadline) {}

void RequestLoad::Start(grpc::CompletionQueue* queue) {
  grpc::GenericStub stub(channels_[next_channel_++ % channels_.size()]);
  auto* call = new Call;
  call->context.set_deadline(absl::ToChronoTime(absl::Now() + deadline_));
  call->reader = stub.PrepareUnaryCall(&call->context, method_, message_, queue);
  call->reader->StartCall();
  call->reader->Finish(&call->response, &call->status, call);
  ++outstanding_;
}

bool RequestLoad::Take(grpc::CompletionQueue* queue, absl::Time until, LoadResult* result) {
  void* tag = nullptr;
  bool ok = false;
  if (queue->AsyncNext(&tag, &ok, absl::ToChronoTime(until)) != grpc::CompletionQueue::GOT_EVENT) {
    return false;
  }
  const std::unique_ptr<Call> call(static_cast<Call*>(tag));
  --outstanding_;
  switch (call->status.error_code()) {
    case grpc::OK:
      ++result->good;
      break;
    case grpc::RESOURCE_EXHAUSTED:
      ++result->refused;
      break;
    case grpc::DEADLINE_EXCEEDED:
    case grpc::CANCELLED:
      ++result->late;
      break;
    default:
      ++result->other;
      result->other_error = call->status.error_message();
  }
  return true;
}

LoadResult RequestLoad::RunClosed(int outstanding, absl::Duration duration) {
  LoadResult result;
  int64_t early = 0;
  grpc::CompletionQueue queue;
  const absl::Time start = absl::Now();
  for (; result.sent < outstanding; ++result.sent) Start(&queue);
  while (absl::Now() < start + duration) {
    if (!Take(&queue, start + duration, &result)) break;
    if (absl::Now() < start + kSettling) early = result.good;
    Start(&queue);
    ++result.sent;
  }
  result.sending_ended = absl::Now();
  result.seconds = absl::ToDoubleSeconds(result.sending_ended - start);
  result.good_settled = result.good - early;
  // What comes after the time is not counted.
  LoadResult rest;
  while (outstanding_ > 0) Take(&queue, absl::InfiniteFuture(), &rest);
  return result;
}

LoadResult RequestLoad::RunOpen(double per_second, absl::Duration duration) {
  LoadResult result;
  int64_t early = 0;
  grpc::CompletionQueue queue;
  const absl::Time start = absl::Now();
  const auto wanted = static_cast<int64_t>(per_second * absl::ToDoubleSeconds(duration));
  while (result.sent < wanted) {
    const absl::Time due = start + absl::Seconds(static_cast<double>(result.sent) / per_second);
    if (absl::Now() >= due) {
      Start(&queue);
      ++result.sent;
      // Answers are taken between two requests, or they would pile up here.
      while (Take(&queue, absl::UnixEpoch(), &result)) {
      }
    } else {
      Take(&queue, due, &result);
    }
    if (absl::Now() < start + kSettling) early = result.good;
  }
  result.sending_ended = absl::Now();
  result.seconds = absl::ToDoubleSeconds(result.sending_ended - start);
  result.good_settled = result.good - early;
  while (outstanding_ > 0) Take(&queue, absl::InfiniteFuture(), &result);
  return result;
}

grpc::Status RequestLoad::SendOne() {
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channels_.front());
  Call call;
  call.context.set_deadline(absl::ToChronoTime(absl::Now() + deadline_));
  call.reader = stub.PrepareUnaryCall(&call.context, method_, message_, &queue);
  call.reader->StartCall();
  call.reader->Finish(&call.response, &call.status, &call);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return call.status;
}

}  // namespace emberd::testing
