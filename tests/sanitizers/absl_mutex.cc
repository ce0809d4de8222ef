// Tells ThreadSanitizer what absl::Mutex orders. Debian's Abseil is built without instrumentation:
// to ThreadSanitizer its locks are nothing, and everything that they guard is a race. These
// definitions stand in front of the package's, for this program and for gRPC beneath it, and call
// it between annotations. Part of every program of the preset `tsan`.
#include <dlfcn.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {
// Of ThreadSanitizer's run-time library.
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace {

// What the package calls by this name.
template <class Function>
Function Package(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// While the package runs. It calls conditions of waiting threads, under the mutex, from whichever
// thread lets it go; what they read was ordered by the mutex, but after it was released as far as
// the annotations go.
class InPackage {
 public:
  InPackage() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~InPackage() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

}  // namespace

// Calls NAME of the package as RESULT (this, PARAMETERS...).
#define CALL_PACKAGE(RESULT, NAME, PARAMETERS, ...)                \
  static const auto package = Package<RESULT(*) PARAMETERS>(NAME); \
  const InPackage in_package;                                      \
  return package(__VA_ARGS__)

namespace absl {
ABSL_NAMESPACE_BEGIN

namespace {
struct Acquire {
  const void* address;
  ~Acquire() { __tsan_acquire(const_cast<void*>(address)); }
};
}  // namespace

void Mutex::Lock() {
  const Acquire acquire{this};
  CALL_PACKAGE(void, "_ZN4absl7debian35Mutex4LockEv", (Mutex*), this);
}

void Mutex::ReaderLock() {
  const Acquire acquire{this};
  CALL_PACKAGE(void, "_ZN4absl7debian35Mutex10ReaderLockEv", (Mutex*), this);
}

bool Mutex::TryLock() {
  const Acquire acquire{this};
  CALL_PACKAGE(bool, "_ZN4absl7debian35Mutex7TryLockEv", (Mutex*), this);
}

void Mutex::LockWhen(const Condition& condition) {
  const Acquire acquire{this};
  CALL_PACKAGE(void, "_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE",
               (Mutex*, const Condition&), this, condition);
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  const Acquire acquire{this};
  CALL_PACKAGE(bool, "_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE",
               (Mutex*, const Condition&, Time), this, condition, deadline);
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  const Acquire acquire{this};
  CALL_PACKAGE(bool, "_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE",
               (Mutex*, const Condition&, Duration), this, condition, timeout);
}

void Mutex::Unlock() {
  __tsan_release(this);
  CALL_PACKAGE(void, "_ZN4absl7debian35Mutex6UnlockEv", (Mutex*), this);
}

void Mutex::ReaderUnlock() {
  __tsan_release(this);
  CALL_PACKAGE(void, "_ZN4absl7debian35Mutex12ReaderUnlockEv", (Mutex*), this);
}

void Mutex::Await(const Condition& condition) {
  __tsan_release(this);
  const Acquire acquire{this};
  CALL_PACKAGE(void, "_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE", (Mutex*, const Condition&),
               this, condition);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  __tsan_release(this);
  const Acquire acquire{this};
  CALL_PACKAGE(bool, "_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE",
               (Mutex*, const Condition&, Duration), this, condition, timeout);
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  __tsan_release(this);
  const Acquire acquire{this};
  CALL_PACKAGE(bool, "_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE",
               (Mutex*, const Condition&, Time), this, condition, deadline);
}

void CondVar::Wait(Mutex* mutex) {
  __tsan_release(mutex);
  const Acquire acquire{mutex};
  CALL_PACKAGE(void, "_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE", (CondVar*, Mutex*), this, mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  __tsan_release(mutex);
  const Acquire acquire{mutex};
  CALL_PACKAGE(bool, "_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE",
               (CondVar*, Mutex*, Duration), this, mutex, timeout);
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  __tsan_release(mutex);
  const Acquire acquire{mutex};
  CALL_PACKAGE(bool, "_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE",
               (CondVar*, Mutex*, Time), this, mutex, deadline);
}

// Written out, for HasBeenNotified is a header's, and reads what must be written under the same
// eyes.
void Notification::Notify() {
  __tsan_release(this);
  const MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}

void Notification::WaitForNotification() const {
  const Acquire acquire{this};
  CALL_PACKAGE(void, "_ZNK4absl7debian312Notification19WaitForNotificationEv",
               (const Notification*), this);
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  const Acquire acquire{this};
  CALL_PACKAGE(bool,
               "_ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE",
               (const Notification*, Duration), this, timeout);
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  const Acquire acquire{this};
  CALL_PACKAGE(bool, "_ZNK4absl7debian312Notification31WaitForNotificationWithDeadlineENS0_4TimeE",
               (const Notification*, Time), this, deadline);
}

ABSL_NAMESPACE_END
}  // namespace absl
