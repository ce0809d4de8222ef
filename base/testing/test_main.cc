// The main function of every test program. A program holds the tests of many sources; ctest starts
// it once for each of them, with --source=PATH (from the root of the tree) as the only argument.
// GTEST_FILTER chooses among the cases of the source. Status 77: every case was skipped.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <fnmatch.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd {
namespace {

// Whether one of the patterns of GTEST_FILTER, "A.*:B.*-B.x", fits.
bool Wanted(const std::string& filter, const std::string& name) {
  const std::pair<std::string, std::string> patterns =
      absl::StrSplit(filter, absl::MaxSplits('-', 1));
  const auto any_fits = [&](const std::string& all) {
    for (const std::string& pattern : std::vector<std::string>(absl::StrSplit(all, ':'))) {
      if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0) return true;
    }
    return false;
  };
  return any_fits(patterns.first) && !any_fits(patterns.second);
}

// Runs the cases of one source alone. Returns how many it has that GTEST_FILTER wants.
int KeepSource(absl::string_view path) {
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  std::vector<std::string> kept;
  for (int s = 0; s < program.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *program.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string name = absl::StrCat(suite.name(), ".", test.name());
      if (absl::EndsWith(test.file(), absl::StrCat("/", path)) &&
          Wanted(GTEST_FLAG_GET(filter), name)) {
        kept.push_back(name);
      }
    }
  }
  GTEST_FLAG_SET(filter, absl::StrJoin(kept, ":"));
  return static_cast<int>(kept.size());
}

int Main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
#ifdef NDEBUG
  // Where Abseil is packaged as for debugging, it looks for cycles among mutexes that were built
  // not to say when they go: another one at the same place then makes a cycle that is none.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
  absl::string_view path = argc > 1 ? argv[1] : "";
  if (argc > 1 && (!absl::ConsumePrefix(&path, "--source=") || KeepSource(path) == 0)) {
    std::fprintf(stderr, "%s: no source of this name has a case that GTEST_FILTER wants\n",
                 argv[1]);
    return 2;
  }
  const int status = RUN_ALL_TESTS();
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  const bool all_skipped = program.skipped_test_count() > 0 && program.successful_test_count() == 0;
  return status == 0 && all_skipped ? 77 : status;
}

}  // namespace
}  // namespace emberd

int main(int argc, char** argv) { return emberd::Main(argc, argv); }
