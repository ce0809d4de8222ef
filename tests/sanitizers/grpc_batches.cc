// Tells ThreadSanitizer what gRPC orders. Debian's gRPC is built without instrumentation, but much
// of its C++ part stands in headers: to ThreadSanitizer, the thread that starts a batch of
// operations and the one that learns of its end share them without order. These definitions stand
// in front of the package's, and call it between annotations. Part of every program of the preset
// `tsan`.
#include <dlfcn.h>
#include <grpc/grpc.h>

extern "C" {
// Of ThreadSanitizer's run-time library.
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

namespace {

template <class Function>
Function* Package(const char* name, Function*) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// A batch and its end have one tag.
grpc_event Ended(const grpc_event& event) {
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

}  // namespace

extern "C" {

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t nops, void* tag,
                                      void* reserved) {
  static const auto package = Package("grpc_call_start_batch", &grpc_call_start_batch);
  __tsan_release(tag);
  return package(call, ops, nops, tag, reserved);
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                      void* reserved) {
  static const auto package = Package("grpc_completion_queue_next", &grpc_completion_queue_next);
  return Ended(package(queue, deadline, reserved));
}

grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                       gpr_timespec deadline, void* reserved) {
  static const auto package = Package("grpc_completion_queue_pluck", &grpc_completion_queue_pluck);
  return Ended(package(queue, tag, deadline, reserved));
}

}  // extern "C"
