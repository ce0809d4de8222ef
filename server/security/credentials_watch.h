// Certificates and tokens that are renewed while a process serves.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/security/security.h"

namespace emberd::security {

// Reloads `security` when its files change, and when it is told to, and says in the log what came
// of it. A file is read when it has been the same for one look: who renews a certificate writes two
// files, and not at once.
class CredentialsWatch {
 public:
  static constexpr absl::Duration kEvery = absl::Seconds(1);

  // `changed` is called, by a thread of the watch, after something new was read. What the arguments
  // point to must outlive it.
  CredentialsWatch(Security* security, std::function<void()> changed,
                   absl::Duration every = kEvery);
  ~CredentialsWatch();

  // Now, although no file may have changed. Does not wait.
  void ReloadSoon();

 private:
  void Run();
  // Whether to reload now; `asked`: somebody wants it.
  bool IsTime(bool asked);
  void Reload(bool asked);
  // What says, without reading them, that files have changed.
  std::string Marks() const;

  Security* const security_;
  const std::function<void()> changed_;
  const absl::Duration every_;
  const std::vector<std::string> files_;
  std::string read_;     // the marks when they were read; none: read them soon
  std::string seen_;     // at the last look
  bool broken_ = false;  // what was read last could not be used

  absl::Mutex mutex_;
  absl::CondVar wake_;
  bool asked_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace emberd::security
