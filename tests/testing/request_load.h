// More requests than a server can answer: one unary request, sent over and over.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/time/time.h"

namespace emberd::testing {

struct LoadResult {
  int64_t sent = 0;
  int64_t good = 0;     // answered OK within the deadline
  int64_t refused = 0;  // RESOURCE_EXHAUSTED
  int64_t late = 0;     // DEADLINE_EXCEEDED, or CANCELLED by the server for that reason
  int64_t other = 0;
  std::string other_error;  // one of them
  absl::Time sending_ended;
  double seconds = 0;        // of sending
  int64_t good_settled = 0;  // of `good`, answered while sending, but not in its first second
};

// Not thread-safe; each call blocks until every answer is there.
class RequestLoad {
 public:
  // Over `connections` connections of their own. `method`: "/package.Service/Method".
  RequestLoad(const std::string& address, int connections, std::string method, std::string message,
              absl::Duration deadline);

  // Sends the next request when one of `outstanding` is answered.
  LoadResult RunClosed(int outstanding, absl::Duration duration);
  // Sends `per_second` requests a second, whatever becomes of them.
  LoadResult RunOpen(double per_second, absl::Duration duration);
  // One request, alone.
  grpc::Status SendOne();

 private:
  struct Call;
  void Start(grpc::CompletionQueue* queue);
  // Takes one answer, if there is one by `until`; false if there is none.
  bool Take(grpc::CompletionQueue* queue, absl::Time until, LoadResult* result);

  const std::vector<std::shared_ptr<grpc::Channel>> channels_;
  const std::string method_;
  const grpc::ByteBuffer message_;
  const absl::Duration deadline_;
  size_t next_channel_ = 0;
  int64_t outstanding_ = 0;
};

}  // namespace emberd::testing
