// The files of the tests' own build of the server. The variable EMBERD_FILE_FAULTS, CONTROL:FOLDER,
// names the file of a FileFaults (file_faults.h) and the folder whose files can fail. What a
// library does inside itself, as fopen does, is not seen: only calls by name from another one.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include "tests/testing/file_faults.h"

// The function of the C library behind the one here.
#define REAL(name)                                                                         \
  ([] {                                                                                    \
    static const auto real = reinterpret_cast<decltype(&::name)>(dlsym(RTLD_NEXT, #name)); \
    return real;                                                                           \
  }())

namespace {

using emberd::testing::FileCallHash;
using emberd::testing::FileFaultTable;

constexpr int kMostFiles = 1 << 16;
// By descriptor: the kind of its path, if it is one of the folder. They are few, and stay.
std::atomic<const std::string*> kinds_of_files[kMostFiles];

struct Watched {
  FileFaultTable* table = nullptr;
  std::string root;
};

const Watched& Faults() {
  static const Watched* const watched = [] {
    auto* const made = new Watched;
    const char* const value = std::getenv("EMBERD_FILE_FAULTS");
    const char* const colon = value == nullptr ? nullptr : std::strchr(value, ':');
    if (colon == nullptr) return made;
    const std::string control(value, colon - value);
    const int file = REAL(open)(control.c_str(), O_RDWR | O_CLOEXEC);
    void* const place =
        REAL(mmap)(nullptr, sizeof(FileFaultTable), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    REAL(close)(file);
    if (place == MAP_FAILED) std::abort();  // a mistake in a test
    made->table = static_cast<FileFaultTable*>(place);
    made->root = colon + 1;
    return made;
  }();
  return *watched;
}

// What is random in a name stands behind the last - of one that begins with a dot, or is a spill.
std::string KindOf(const std::string& path) {
  std::string kind;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    std::string name = path.substr(begin, end - begin);
    const size_t dash = name.rfind('-');
    if (dash != std::string::npos && (name[0] == '.' || name.compare(0, 6, "spill-") == 0)) {
      const size_t dot = name.find('.', dash);
      name = name.substr(0, dash) + "-*" + (dot == std::string::npos ? "" : name.substr(dot));
    }
    for (const char c : name) {
      if (c < '0' || c > '9') {
        kind.push_back(c);
      } else if (kind.empty() || kind.back() != '#') {
        kind.push_back('#');
      }
    }
    if (end < path.size()) kind.push_back('/');
    begin = end + 1;
  }
  return kind.empty() ? "." : kind;
}

// Empty: it is none of ours.
std::string KindAt(int folder, const char* path) {
  const Watched& faults = Faults();
  if (faults.table == nullptr || path == nullptr) return "";
  if (path[0] == '/') {
    if (std::strncmp(path, faults.root.c_str(), faults.root.size()) != 0) return "";
    const char* const rest = path + faults.root.size();
    if (*rest != '\0' && *rest != '/') return "";
    return KindOf(*rest == '\0' ? "" : rest + 1);
  }
  if (folder < 0 || folder >= kMostFiles) return "";
  const std::string* const parent = kinds_of_files[folder];
  if (parent == nullptr) return "";
  return path[0] == '\0' ? *parent : *parent + "/" + KindOf(path);
}

std::string KindOfFile(int file) { return KindAt(file, ""); }

void Count(FileFaultTable& table, uint64_t hash, const std::string& text) {
  for (uint64_t i = 0; i < FileFaultTable::kCalls; ++i) {
    FileFaultTable::Call& call = table.calls[(hash + i) % FileFaultTable::kCalls];
    uint64_t free = 0;
    if (call.hash.compare_exchange_strong(free, hash)) {
      std::snprintf(call.text, sizeof(call.text), "%s", text.c_str());
    } else if (free != hash) {
      continue;
    }
    ++call.count;
    return;
  }
  std::abort();  // more kinds than there is room for
}

// Whether this call is to fail, with errno set.
bool Fails(const char* name, const std::string& kind) {
  if (kind.empty()) return false;
  FileFaultTable& table = *Faults().table;
  const std::string text = std::string(name) + " " + kind;
  const uint64_t hash = FileCallHash(text);
  Count(table, hash, text);
  if (table.failing != hash) return false;
  const int number = ++table.reached;
  if (number < table.first || number > table.last) return false;
  errno = table.error;
  return true;
}

int Opened(int file, const std::string& kind) {
  if (file >= 0 && file < kMostFiles && !kind.empty()) {
    kinds_of_files[file] = new std::string(kind);
  }
  return file;
}

void Closed(int file) {
  if (file >= 0 && file < kMostFiles) delete kinds_of_files[file].exchange(nullptr);
}

// `real` opens it.
template <typename Real>
int Open(int folder, const char* path, int flags, const Real& real) {
  const std::string kind = KindAt(folder, path);
  const char* const name = (flags & O_CREAT) != 0 ? "create" : "open";
  return Fails(name, kind) ? -1 : Opened(real(), kind);
}

mode_t ModeOf(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  return Open(AT_FDCWD, path, flags, [&] { return REAL(open)(path, flags, mode); });
}

int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  return Open(folder, path, flags, [&] { return REAL(openat)(folder, path, flags, mode); });
}

int mkostemp(char* path, int flags) {
  return Open(AT_FDCWD, path, O_CREAT, [&] { return REAL(mkostemp)(path, flags); });
}

FILE* fopen(const char* path, const char* mode) {
  const bool writes = std::strpbrk(mode, "wa+") != nullptr;
  if (Fails(writes ? "create" : "open", KindAt(AT_FDCWD, path))) return nullptr;
  return REAL(fopen)(path, mode);
}

FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

int close(int file) {
  Closed(file);
  return REAL(close)(file);
}

// What takes a descriptor and says by -1 that it failed.
#define EMBERD_ON_FILE(result, name, parameters, arguments, kind) \
  result name parameters { return Fails(kind, KindOfFile(file)) ? -1 : REAL(name) arguments; }
EMBERD_ON_FILE(ssize_t, write, (int file, const void* bytes, size_t size), (file, bytes, size),
               "write")
EMBERD_ON_FILE(ssize_t, pwrite, (int file, const void* bytes, size_t size, off_t offset),
               (file, bytes, size, offset), "write")
EMBERD_ON_FILE(ssize_t, writev, (int file, const iovec* pieces, int count), (file, pieces, count),
               "write")
EMBERD_ON_FILE(ssize_t, pwritev, (int file, const iovec* pieces, int count, off_t offset),
               (file, pieces, count, offset), "write")
EMBERD_ON_FILE(ssize_t, read, (int file, void* bytes, size_t size), (file, bytes, size), "read")
EMBERD_ON_FILE(ssize_t, pread, (int file, void* bytes, size_t size, off_t offset),
               (file, bytes, size, offset), "read")
EMBERD_ON_FILE(int, fsync, (int file), (file), "sync")
EMBERD_ON_FILE(int, fdatasync, (int file), (file), "sync")
EMBERD_ON_FILE(int, ftruncate, (int file, off_t size) noexcept, (file, size), "truncate")
EMBERD_ON_FILE(int, fstat, (int file, struct stat* status) noexcept, (file, status), "stat")
EMBERD_ON_FILE(int, flock, (int file, int operation) noexcept, (file, operation), "lock")

int posix_fallocate(int file, off_t offset, off_t size) {
  return Fails("allocate", KindOfFile(file)) ? errno : REAL(posix_fallocate)(file, offset, size);
}

// The same with a path.
#define EMBERD_ON_PATH(name, parameters, arguments, kind)                   \
  int name parameters noexcept {                                            \
    return Fails(kind, KindAt(AT_FDCWD, path)) ? -1 : REAL(name) arguments; \
  }
EMBERD_ON_PATH(stat, (const char* path, struct stat* status), (path, status), "stat")
EMBERD_ON_PATH(lstat, (const char* path, struct stat* status), (path, status), "stat")
EMBERD_ON_PATH(statvfs, (const char* path, struct statvfs* status), (path, status), "statvfs")
EMBERD_ON_PATH(mkdir, (const char* path, mode_t mode), (path, mode), "mkdir")
EMBERD_ON_PATH(rmdir, (const char* path), (path), "rmdir")
EMBERD_ON_PATH(unlink, (const char* path), (path), "unlink")
EMBERD_ON_PATH(rename, (const char* path, const char* to), (path, to), "rename")
EMBERD_ON_PATH(link, (const char* path, const char* to), (path, to), "link")
EMBERD_ON_PATH(truncate, (const char* path, off_t size), (path, size), "truncate")

#define EMBERD_AT(name, parameters, arguments, kind)                      \
  int name parameters noexcept {                                          \
    return Fails(kind, KindAt(folder, path)) ? -1 : REAL(name) arguments; \
  }
EMBERD_AT(unlinkat, (int folder, const char* path, int flags), (folder, path, flags), "unlink")
EMBERD_AT(fstatat, (int folder, const char* path, struct stat* status, int flags),
          (folder, path, status, flags), "stat")
EMBERD_AT(utimensat, (int folder, const char* path, const timespec* times, int flags),
          (folder, path, times, flags), "touch")

DIR* opendir(const char* path) {
  const std::string kind = KindAt(AT_FDCWD, path);
  if (Fails("opendir", kind)) return nullptr;
  DIR* const folder = REAL(opendir)(path);
  if (folder != nullptr) Opened(dirfd(folder), kind);
  return folder;
}

DIR* fdopendir(int file) {
  return Fails("opendir", KindOfFile(file)) ? nullptr : REAL(fdopendir)(file);
}

dirent* readdir(DIR* folder) {
  return Fails("readdir", KindOfFile(dirfd(folder))) ? nullptr : REAL(readdir)(folder);
}

int closedir(DIR* folder) {
  Closed(dirfd(folder));
  return REAL(closedir)(folder);
}

void* mmap(void* address, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  if (file >= 0 && Fails("mmap", KindOfFile(file))) return MAP_FAILED;
  return REAL(mmap)(address, size, protection, flags, file, offset);
}

}  // extern "C"
