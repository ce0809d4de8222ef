// A large piece of memory that is zero, and backed by the system only where it is touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emberd::preprocess {

// Huge pages where the system grants them. Not copyable.
class ZeroPages {
 public:
  explicit ZeroPages(size_t bytes);
  ~ZeroPages();
  ZeroPages(const ZeroPages&) = delete;
  ZeroPages& operator=(const ZeroPages&) = delete;

  // Null if there is no memory to be had, or if none was asked for.
  uint8_t* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

}  // namespace emberd::preprocess
