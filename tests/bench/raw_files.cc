#include "tests/bench/raw_files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/buffers.h"
#include "base/file_descriptor.h"
#include "tests/bench/step_trainer.h"

namespace emberd::bench {
namespace {

constexpr int64_t kBlock = int64_t{1} << 20, kPage = 4096;

void DieUnlessTrue(bool ok, const std::string& path) {
  if (!ok) DieUnless(absl::ErrnoToStatus(errno, path));
}

std::vector<std::string> Files(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Seconds until `threads` threads have done `work` for each of 0 .. count - 1.
double Each(int threads, size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  const absl::Time start = absl::Now();
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&] {
      for (size_t k = next++; k < count; k = next++) work(k);
    });
  }
  for (std::thread& thread : running) thread.join();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

}  // namespace

std::vector<int64_t> FileSizes(const std::string& folder) {
  std::vector<int64_t> sizes;
  for (const std::string& path : Files(folder)) {
    sizes.push_back(static_cast<int64_t>(std::filesystem::file_size(path)));
  }
  return sizes;
}

double WriteRawFiles(const std::string& folder, const std::vector<int64_t>& sizes, int threads) {
  std::filesystem::create_directory(folder);
  auto block = MappedMemory::Map(kBlock, /*huge_pages=*/false);
  DieUnless(block.status());
  std::fill_n(block->data(), kBlock, 'e');
  const double seconds = Each(threads, sizes.size(), [&](size_t k) {
    const std::string path = absl::StrCat(folder, "/", k);
    const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    fcntl(file.get(), F_SETFL, O_DIRECT);
    for (int64_t left = (sizes[k] + kPage - 1) / kPage * kPage; left > 0;) {
      const ssize_t written = write(file.get(), block->data(), std::min(left, kBlock));
      DieUnlessTrue(written > 0, path);
      left -= written;
    }
    DieUnlessTrue(fsync(file.get()) == 0, path);
  });
  std::filesystem::remove_all(folder);
  return seconds;
}

void DropFromCache(const std::string& folder) {
  for (const std::string& path : Files(folder)) {
    const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    DieUnlessTrue(file.get() >= 0, path);
    posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

double ReadRawFiles(const std::string& folder, int threads) {
  const std::vector<std::string> paths = Files(folder);
  return Each(threads, paths.size(), [&](size_t k) {
    const FileDescriptor file(open(paths[k].c_str(), O_RDONLY | O_CLOEXEC));
    std::vector<char> block(kBlock);
    ssize_t size = 1;
    while (size > 0) size = read(file.get(), block.data(), block.size());
    DieUnlessTrue(size == 0, paths[k]);
  });
}

}  // namespace emberd::bench
