// A call with a stream of encoded messages in each direction. Internal to the client.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/transport.h"

namespace emberd::client {

// What a RawStream tells, on gRPC's threads, one call at a time.
class RawStreamListener {
 public:
  virtual ~RawStreamListener() = default;
  // A message has come. An error cancels the call and becomes its status.
  virtual absl::Status OnMessage(grpc::ByteBuffer* message) = 0;
  // The call is over: the last that is told.
  virtual void OnEnd(const absl::Status& status) = 0;
};

// Thread-safe.
class RawStream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Opens a call of `method` ("/package.Service/Method"), which Transport::CancelCalls ends too.
  // `transport` and `listener` must outlive the stream.
  RawStream(Transport* transport, int coordinator, const std::string& method,
            RawStreamListener* listener);
  // Cancels the call if it is not over, and waits for its end.
  ~RawStream() override;

  // Queues messages. Does not wait.
  void Send(std::deque<grpc::ByteBuffer> messages);
  // No message follows those sent.
  void HalfClose();

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopWriting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Transport* const transport_;
  RawStreamListener* const listener_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;
  absl::Status local_error_;  // what the listener found; touched by reactions alone

  absl::Mutex mutex_;
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = true;  // false: nothing can be written any more
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace emberd::client
