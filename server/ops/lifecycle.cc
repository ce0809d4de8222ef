#include "server/ops/lifecycle.h"

#include <cerrno>
#include <utility>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "server/ops/logging.h"

namespace emberd::ops {
namespace {

// SIGHUP is not among them if nothing is to be done on it and it is ignored, as under nohup.
sigset_t Signals(bool on_hangup) {
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  if (on_hangup || hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShutdownSignal>> ShutdownSignal::Create(
    bool stop_on_eof, std::function<void()> on_hangup) {
  const sigset_t signals = Signals(on_hangup != nullptr);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
  const int stop_fd = eventfd(0, EFD_CLOEXEC);
  if (signal_fd < 0 || stop_fd < 0) {
    const int error = errno;
    if (signal_fd >= 0) close(signal_fd);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    return absl::ErrnoToStatus(error, "cannot receive signals");
  }
  return std::unique_ptr<ShutdownSignal>(
      new ShutdownSignal(signal_fd, stop_fd, stop_on_eof, std::move(on_hangup)));
}

ShutdownSignal::ShutdownSignal(int signal_fd, int stop_fd, bool stop_on_eof,
                               std::function<void()> on_hangup)
    : signal_fd_(signal_fd),
      stop_fd_(stop_fd),
      stop_on_eof_(stop_on_eof),
      on_hangup_(std::move(on_hangup)),
      thread_([this] { Run(); }) {}

ShutdownSignal::~ShutdownSignal() {
  eventfd_write(stop_fd_, 1);
  thread_.join();
  close(signal_fd_);
  close(stop_fd_);
  const sigset_t signals = Signals(on_hangup_ != nullptr);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

void ShutdownSignal::Run() {
  // A negative descriptor is not looked at.
  pollfd ready[] = {{signal_fd_, POLLIN, 0},
                    {stop_fd_, POLLIN, 0},
                    {stop_on_eof_ ? STDIN_FILENO : -1, POLLIN, 0}};
  while (true) {
    if (poll(ready, 3, -1) < 0 && errno != EINTR) return;
    if ((ready[0].revents & POLLIN) != 0) OnSignal();
    if ((ready[1].revents & POLLIN) != 0) return;
    if (ready[2].revents != 0 && !ReadInput()) {
      ready[2].fd = -1;
      if (requested_.HasBeenNotified()) continue;
      Log(LogLevel::kInfo, "stopping", {{"reason", "standard input has ended"}});
      requested_.Notify();
    }
  }
}

void ShutdownSignal::OnSignal() {
  signalfd_siginfo info{};
  if (read(signal_fd_, &info, sizeof(info)) < 0) return;
  const bool hangup = info.ssi_signo == SIGHUP;
  if (hangup && on_hangup_ != nullptr) return on_hangup_();
  const char* const name = hangup ? "SIGHUP" : info.ssi_signo == SIGINT ? "SIGINT" : "SIGTERM";
  if (requested_.HasBeenNotified()) {
    if (hangup) return;  // a terminal that closes sends it twice: the shell does, and the kernel
    Log(LogLevel::kWarning, "second signal: exiting at once", {{"signal", name}});
    _exit(1);
  }
  Log(LogLevel::kInfo, "stopping", {{"signal", name}});
  requested_.Notify();
}

bool ShutdownSignal::ReadInput() {
  char ignored[4096];
  const ssize_t size = read(STDIN_FILENO, ignored, sizeof(ignored));
  return size > 0 || (size < 0 && (errno == EINTR || errno == EAGAIN));
}

ExitDeadline::ExitDeadline(absl::Duration limit)
    : thread_([this, limit] {
        if (AwaitSteadily(done_, limit)) return;
        Log(LogLevel::kError, "did not stop in time: exiting at once",
            {{"seconds", absl::ToDoubleSeconds(limit)}});
        _exit(1);
      }) {}

ExitDeadline::~ExitDeadline() {
  done_.Notify();
  thread_.join();
}

void EnableStandardServices(grpc::ServerBuilder* builder) {
  // Both are process-wide switches that the builder reads when it builds the server.
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
}

void SetServing(grpc::Server* server, const std::vector<std::string>& services, bool serving) {
  grpc::HealthCheckServiceInterface* const health = server->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);  // every service that is known, and the server as a whole
  for (const std::string& service : services) health->SetServingStatus(service, serving);
}

}  // namespace emberd::ops
