// The files of page/, as they were when this was built.
#pragma once

#include <string_view>
#include <vector>

namespace emberd::status_page {

struct PageFile {
  std::string_view name;  // "index.html"
  std::string_view content;
};

std::vector<PageFile> PageFiles();

}  // namespace emberd::status_page
