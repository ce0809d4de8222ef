// What a disk can do at best: the files of a folder, written and read by plain system calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emberd::bench {

// Sizes of the files of a folder, by name.
std::vector<int64_t> FileSizes(const std::string& folder);

// Seconds to write files of these sizes to a new folder, which goes away again, around the system's
// cache and with fsync at the end of each; by `threads` threads, each a file at a time.
double WriteRawFiles(const std::string& folder, const std::vector<int64_t>& sizes, int threads);

// Lets the system forget what it holds of the files: the next one who reads them waits for the
// disk. They must have reached it.
void DropFromCache(const std::string& folder);
// Seconds to read all files of a folder.
double ReadRawFiles(const std::string& folder, int threads);

}  // namespace emberd::bench
