#include "base/local_socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/time/clock.h"

namespace emberd {
namespace {

constexpr absl::Duration kAcceptPause = absl::Milliseconds(20);

}  // namespace

std::string RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  size_t filled = 0;
  while (filled < size) {
    const ssize_t got = getrandom(bytes.data() + filled, size - filled, 0);
    if (got > 0) filled += got;
  }
  return bytes;
}

bool IsOfThisUser(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

FileDescriptor AcceptLocal(int listener, bool any_user) {
  FileDescriptor socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.get() >= 0 && (any_user || IsOfThisUser(socket.get()))) return socket;
  if (socket.get() < 0) absl::SleepFor(kAcceptPause);
  return FileDescriptor();
}

}  // namespace emberd
