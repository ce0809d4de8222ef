// A training stream without the client library: requests that it would not send, cut as it would
// not cut them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "emberd/v1/train.pb.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"

namespace emberd::testing {

// A call, and what must live as long.
struct TrainCall {
  std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream;
  int64_t next_step = 0;
};

// Sends the start. The answer comes when all ranks have sent theirs: see AwaitStart.
inline TrainCall BeginTrain(const Api& api, uint64_t model_id, const std::string& group,
                            int rank = 0, const v1::GroupOptions& options = {}) {
  TrainCall call;
  call.context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(120)));
  call.stream = api.embedding->Train(call.context.get());
  v1::TrainRequest request;
  request.mutable_start()->set_model_id(model_id);
  request.mutable_start()->set_group(group);
  request.mutable_start()->set_rank(rank);
  *request.mutable_start()->mutable_options() = options;
  EXPECT_TRUE(call.stream->Write(request));
  return call;
}

inline void AwaitStart(TrainCall* call) {
  v1::TrainResponse started;
  EXPECT_TRUE(call->stream->Read(&started)) << call->stream->Finish().error_message();
  call->next_step = started.started().next_step();
}

// Sends no more, and expects that all was well.
inline void EndTrain(TrainCall* call) {
  call->stream->WritesDone();
  const grpc::Status status = call->stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

}  // namespace emberd::testing
