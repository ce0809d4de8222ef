// The main function of every test program. A program holds the tests of many sources; ctest starts
// it once for each of them, with --source=PATH (from the root of the tree) as the only argument.
// GTEST_FILTER chooses among the cases of the source. Status 77: every case was skipped.
#include <cstdio>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd {
namespace {

// Leaves the cases of other sources out. Returns how many cases the source has.
int KeepSource(absl::string_view path) {
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  std::string filter = GTEST_FLAG_GET(filter);
  absl::StrAppend(&filter, absl::StrContains(filter, '-') ? ":" : "-");
  int kept = 0;
  for (int s = 0; s < program.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *program.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (absl::EndsWith(test.file(), absl::StrCat("/", path))) {
        ++kept;
      } else {
        absl::StrAppend(&filter, suite.name(), ".", test.name(), ":");
      }
    }
  }
  GTEST_FLAG_SET(filter, filter);
  return kept;
}

int Main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  absl::string_view path = argc > 1 ? argv[1] : "";
  if (argc > 1 && (!absl::ConsumePrefix(&path, "--source=") || KeepSource(path) == 0)) {
    std::fprintf(stderr, "%s: no case stands in a source of this name\n", argv[1]);
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
