// A CallContext for one piece of work of a longer call: its own deadline, the longer call's
// trace and cancellation.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

// `parent` must outlive it.
class LinkedContext {
 public:
  LinkedContext(rpc::CallContext* parent, absl::Duration limit)
      : context_(absl::Now() + limit, parent->trace()),
        watch_(parent, [this] { context_.Cancel(); }) {}

  rpc::CallContext* get() { return &context_; }

 private:
  rpc::CallContext context_;
  rpc::CancelWatch watch_;
};

}  // namespace emberd::server
