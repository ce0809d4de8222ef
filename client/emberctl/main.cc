#include <csignal>
#include <iostream>

#include <fcntl.h>
#include <unistd.h>

#include "client/emberctl/emberctl.h"

namespace {

// A standard stream that the caller closed would become the first socket or file opened, and the
// output would go there. This one takes its place: writing to it fails as writing to a closed one
// does.
void HoldClosedStreams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (fcntl(stream, F_GETFD) == -1 && open("/dev/null", O_RDONLY) == -1) return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  HoldClosedStreams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` is an error like a full disk
  return emberd::emberctl::Run(argc, argv, std::cout, std::cerr);
}
