#include "server/security/credentials_watch.h"

#include <algorithm>
#include <utility>

#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/steady_wait.h"
#include "server/ops/logging.h"

namespace emberd::security {

CredentialsWatch::CredentialsWatch(Security* security, std::function<void()> changed,
                                   absl::Duration every)
    : security_(security),
      changed_(std::move(changed)),
      every_(every),
      files_(security->Files()),
      seen_(Marks()),
      thread_([this] { Run(); }) {}

CredentialsWatch::~CredentialsWatch() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.SignalAll();
  thread_.join();
}

void CredentialsWatch::ReloadSoon() {
  {
    absl::MutexLock lock(&mutex_);
    asked_ = true;
  }
  wake_.SignalAll();
}

void CredentialsWatch::Run() {
  while (true) {
    bool asked = false;
    {
      absl::MutexLock lock(&mutex_);
      const absl::Time next = files_.empty() ? absl::InfiniteFuture() : SteadyNow() + every_;
      while (!stopping_ && !asked_ && SteadyNow() < next) {
        wake_.WaitWithTimeout(&mutex_, std::min(next - SteadyNow(), kLongestWait));
      }
      if (stopping_) return;
      asked = std::exchange(asked_, false);
    }
    if (IsTime(asked)) Reload(asked);
  }
}

bool CredentialsWatch::IsTime(bool asked) {
  std::string marks = Marks();
  const bool calm = marks == seen_;
  seen_ = std::move(marks);
  if (!asked && (!calm || seen_ == read_)) return false;
  read_ = seen_;
  return true;
}

void CredentialsWatch::Reload(bool asked) {
  const absl::StatusOr<bool> changed = security_->Reload();
  if (!changed.ok()) {
    ops::Log(ops::LogLevel::kError,
             "certificates or tokens cannot be read: the old ones stay in use",
             {{"error", changed.status().message()}});
  } else if (*changed) {
    ops::Log(ops::LogLevel::kInfo, "certificates and tokens were read again");
  } else if (asked || broken_) {
    ops::Log(ops::LogLevel::kInfo, files_.empty()
                                       ? "the description names no certificate and no token to read"
                                       : "certificates and tokens have not changed");
  }
  broken_ = !changed.ok();
  if (changed_) changed_();
}

std::string CredentialsWatch::Marks() const {
  return absl::StrJoin(files_, "\n", [](std::string* out, const std::string& file) {
    struct stat info = {};
    // What stands behind a link, which is how certificates are often replaced.
    if (stat(file.c_str(), &info) != 0) return absl::StrAppend(out, "none");
    absl::StrAppend(out, info.st_dev, " ", info.st_ino, " ", info.st_size, " ", info.st_mtim.tv_sec,
                    ".", info.st_mtim.tv_nsec);
  });
}

}  // namespace emberd::security
