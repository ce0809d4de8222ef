#include <sstream>

#include "client/emberctl/terminal.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {
namespace progress_test {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(ProgressTest, TellsWhatIsKnown) {
  EXPECT_EQ(ProgressText(0, 0, 0, absl::ZeroDuration()), "0 B");
  EXPECT_EQ(ProgressText(0, 4 * kMiB, 0, absl::Seconds(1)), "0%  0 B of 4.0 MiB");
  EXPECT_EQ(ProgressText(kMiB, 4 * kMiB, kMiB, absl::Seconds(2)),
            "25%  1.0 MiB of 4.0 MiB  512.0 KiB/s  about 6s left");
  // A phase that goes on where another one ended has a rate of its own.
  EXPECT_EQ(ProgressText(3 * kMiB, 4 * kMiB, kMiB, absl::Seconds(1)),
            "75%  3.0 MiB of 4.0 MiB  1.0 MiB/s  about 1s left");
  EXPECT_EQ(ProgressText(4 * kMiB, 4 * kMiB, 4 * kMiB, absl::Seconds(2)),
            "100%  4.0 MiB of 4.0 MiB  2.0 MiB/s");
}

TEST(ProgressTest, BarsFitTheirTerminal) {
  EXPECT_EQ(ProgressBar("saving", kMiB, 4 * kMiB, kMiB, absl::Seconds(2), 100),
            "saving    [######------------------]  25%  1.0 MiB of 4.0 MiB  512.0 KiB/s  about 6s "
            "left");
  EXPECT_EQ(ProgressBar("pausing", 0, 0, 0, absl::ZeroDuration(), 100),
            "pausing   [------------------------]  0 B");
  // What has grown beyond its total fills the bar and no more.
  EXPECT_EQ(ProgressBar("saving", 9, 4, 0, absl::ZeroDuration(), 41),
            "saving    [##########]  100%  9 B of 4 B");
  EXPECT_EQ(ProgressBar("saving", 9, 4, 0, absl::ZeroDuration(), 20), "saving    [####]  1");
  EXPECT_EQ(ProgressBar("saving", 9, 4, 0, absl::ZeroDuration(), 0), "");
}

TEST(ProgressTest, WithoutATerminalThereIsALineNowAndThen) {
  std::ostringstream out;
  Session session(out);
  {
    Progress progress(session);
    progress.Show("pausing", 0, 0, absl::ZeroDuration());
    progress.Show("saving", 0, 40, absl::Seconds(1));
    for (int second = 2; second <= 21; ++second) {
      progress.Show("saving", second - 1, 40, absl::Seconds(second));
    }
  }
  EXPECT_EQ(out.str(),
            "saving: 0%  0 B of 40 B\n"
            "saving: 25%  10 B of 40 B  1 B/s  about 30s left\n"
            "saving: 50%  20 B of 40 B  1 B/s  about 20s left\n");
}

TEST(ProgressTest, JsonHasNoProgress) {
  std::ostringstream out;
  Session session(out);
  session.json = true;
  Progress(session).Show("saving", 1, 2, absl::Seconds(1));
  EXPECT_EQ(out.str(), "");
}

}  // namespace progress_test
}  // namespace emberd::emberctl
