// The clock of the tests' own build of the server. Where the variable EMBERD_CLOCK names a file of
// 8 bytes, the system's clock is so many nanoseconds ahead as that file says at the moment: as if
// somebody set it.
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <ctime>

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

constexpr int64_t kSecond = 1'000'000'000;

// No memory is taken here: who takes memory may ask for the time.
const std::atomic<int64_t>* Place() {
  static const std::atomic<int64_t>* const place = []() -> const std::atomic<int64_t>* {
    const char* const path = std::getenv("EMBERD_CLOCK");
    const int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return nullptr;
    void* const mapped = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? nullptr : static_cast<const std::atomic<int64_t>*>(mapped);
  }();
  return place;
}

void Shift(timespec* time, int sign) {
  const std::atomic<int64_t>* const place = Place();
  if (place == nullptr) return;
  const int64_t all = time->tv_sec * kSecond + time->tv_nsec + sign * place->load();
  time->tv_sec = all / kSecond;
  time->tv_nsec = all % kSecond;
}

// Times of the steady clock are those since the machine started, and much smaller.
bool IsDate(const timespec& time) { return time.tv_sec > 1'000'000'000; }

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  using Call = int (*)(clockid_t, timespec*);
  static const auto real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = real(clock, time);
  if (clock == CLOCK_REALTIME && result == 0) Shift(time, 1);
  return result;
}

int gettimeofday(timeval* time, void*) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* to) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (to != nullptr) *to = now.tv_sec;
  return now.tv_sec;
}

// What waits until a date waits until the kernel's.
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  using Call = int (*)(pthread_cond_t*, pthread_mutex_t*, const timespec*);
  static const auto real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
  timespec kernels = *until;
  if (IsDate(kernels)) Shift(&kernels, -1);
  return real(condition, mutex, &kernels);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  using Call = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  timespec kernels = *until;
  if (IsDate(kernels)) Shift(&kernels, -1);
  return real(condition, mutex, clock, &kernels);
}

// Abseil waits by this.
long syscall(long number, ...) noexcept {
  using Call = long (*)(long, ...);
  static const auto real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "syscall"));
  va_list rest;
  va_start(rest, number);
  long given[6];
  for (long& one : given) one = va_arg(rest, long);
  va_end(rest);
  timespec kernels;
  const bool waits_for_date =
      number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME) != 0 && given[3] != 0;
  if (waits_for_date) {
    kernels = *reinterpret_cast<const timespec*>(given[3]);
    Shift(&kernels, -1);
    given[3] = reinterpret_cast<long>(&kernels);
  }
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

}  // extern "C"
