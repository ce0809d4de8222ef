// Commits the fault that its argument names. Built with sanitizers only, whose report is what the
// test waits for.
#include <climits>
#include <cstdio>
#include <string_view>
#include <thread>

namespace {

volatile int sink;

void UseAfterFree() {
  int* volatile number = new int(7);
  delete number;
  sink = *number;
}

void Leak() {
  int* volatile number = new int(7);
  sink = *number;
  number = nullptr;
}

void Overflow() {
  volatile int largest = INT_MAX;
  sink = largest + 1;
}

void Race() {
  int number = 0;
  std::thread other([&] { ++number; });
  ++number;
  other.join();
  sink = number;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view fault = argc > 1 ? argv[1] : "";
  if (fault == "use_after_free") UseAfterFree();
  if (fault == "leak") Leak();
  if (fault == "overflow") Overflow();
  if (fault == "race") Race();
  std::puts("nobody stopped this program");
}
