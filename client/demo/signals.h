// Ctrl-C and SIGTERM as something to look at, instead of an interruption.
#pragma once

#include <signal.h>
#include <sys/signalfd.h>

#include "client/demo/descriptor.h"

namespace emberd::demo {

// Make one in main, before any thread starts: threads inherit what is blocked. Not thread-safe.
class StopSignals {
 public:
  StopSignals() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    descriptor_ = Descriptor(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  int descriptor() const { return descriptor_.get(); }  // readable when a signal has come
  // True once a signal has come.
  bool Requested() {
    signalfd_siginfo info;
    requested_ = requested_ || read(descriptor_.get(), &info, sizeof(info)) == sizeof(info);
    return requested_;
  }

 private:
  Descriptor descriptor_;
  bool requested_ = false;
};

}  // namespace emberd::demo
