#include "tests/testing/file_faults.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <tuple>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/file_descriptor.h"

namespace emberd::testing {
namespace {

FileFaultTable* Map(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  void* const place = file.get() < 0 || ftruncate(file.get(), sizeof(FileFaultTable)) != 0
                          ? MAP_FAILED
                          : mmap(nullptr, sizeof(FileFaultTable), PROT_READ | PROT_WRITE,
                                 MAP_SHARED, file.get(), 0);
  if (place == MAP_FAILED) throw std::runtime_error(path + " cannot be made");
  return new (place) FileFaultTable;
}

}  // namespace

FileFaults::FileFaults(const std::string& control, const std::string& root)
    : environment_(absl::StrCat(control, ":", root)), table_(Map(control)) {}

FileFaults::~FileFaults() { munmap(table_, sizeof(*table_)); }

std::vector<FileCall> FileFaults::Recorded() const {
  std::vector<FileCall> calls;
  for (const FileFaultTable::Call& call : table_->calls) {
    const std::string text = call.text;
    const size_t space = text.find(' ');
    if (call.count == 0 || space == std::string::npos) continue;
    calls.push_back({text.substr(0, space), text.substr(space + 1), call.count});
  }
  std::sort(calls.begin(), calls.end(), [](const FileCall& a, const FileCall& b) {
    return std::tie(a.path, a.call) < std::tie(b.path, b.call);
  });
  return calls;
}

void FileFaults::Forget() {
  for (FileFaultTable::Call& call : table_->calls) call.count = 0;
}

void FileFaults::Fail(const FileCall& call, int error, int ordinal, bool lasting) {
  table_->reached = 0;
  table_->error = error;
  table_->first = ordinal;
  table_->last = lasting ? std::numeric_limits<int>::max() : ordinal;
  table_->failing = FileCallHash(absl::StrCat(call.call, " ", call.path));
}

}  // namespace emberd::testing
