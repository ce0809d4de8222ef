// Covers: client/emberctl/verbs/log.cc
// emberctl log show and verify: what they print of logs that are whole, and of such that are not.
#include <filesystem>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "client/emberctl/output.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"
#include "server/log/testing/sample.h"

namespace emberd::emberctl {
namespace log_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class LogVerbsTest : public ::testing::Test {
 protected:
  LogVerbsTest() {
    for (const int shard : {0, 1}) log::WriteSampleLog(Log(shard), shard, 2);
  }
  std::string Folder(int shard) { return dir_.Path(absl::StrCat("shard-000", shard)); }
  std::string Log(int shard) { return Folder(shard) + "/log"; }

  const TempDir dir_ = *TempDir::Create();
};

TEST_F(LogVerbsTest, ShowNamesEachRecord) {
  const Outcome one = Emberctl({"log", "show", Log(1)});
  EXPECT_EQ(one.code, kOk);
  EXPECT_THAT(one.err, IsEmpty());
  EXPECT_THAT(one.out,
              AllOf(HasSubstr("1:128"), HasSubstr("state"), HasSubstr("trainer/17"),
                    HasSubstr("00000000000012ab"), HasSubstr("commit"), HasSubstr("run/3"),
                    HasSubstr("rank 0 of 2"), HasSubstr("0000000000000008"), HasSubstr("5.0 KiB")));
  EXPECT_THAT(one.out, Not(HasSubstr("shard-0000")));
  EXPECT_EQ(Emberctl({"log", "show", Folder(1)}).out, one.out);
  const Outcome both = Emberctl({"log", "show", dir_.path()});
  EXPECT_THAT(both.out, AllOf(HasSubstr(Log(0)), HasSubstr(one.out)));
}

TEST_F(LogVerbsTest, ShowBeginsAndEndsWhereItIsTold) {
  const Outcome some =
      Emberctl({"--json", "log", "show", dir_.path(), "--from", "3", "--limit", "2"});
  EXPECT_EQ(some.code, kOk);
  std::istringstream lines(some.out);
  std::string line;
  std::vector<std::string> shown;
  while (std::getline(lines, line)) {
    const Json json = Json::parse(line);
    shown.push_back(
        absl::StrCat(json["log"].get<std::string>(), " ", json["sequence"].get<int64_t>(), " ",
                     json["kind"].get<std::string>(), " ", json["model"].get<std::string>()));
  }
  EXPECT_THAT(shown, ::testing::ElementsAre(Log(0) + " 3 vote ads", Log(0) + " 4 decision ads",
                                            Log(1) + " 3 vote ads", Log(1) + " 4 decision ads"));
}

TEST_F(LogVerbsTest, VerifyCountsAll) {
  const Outcome whole = Emberctl({"log", "verify", dir_.path()});
  EXPECT_EQ(whole.code, kOk);
  EXPECT_THAT(whole.out, AllOf(HasSubstr(Log(0) + ": OK, shard 0 of 2: 5 records and 1 blob, "),
                               HasSubstr(Log(1) + ": OK, shard 1 of 2: "),
                               HasSubstr("in 1 segment, up to record 5\n")));
  const Json json = Json::parse(Emberctl({"log", "verify", dir_.path(), "--json"}).out);
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[1]["records"], 5);
  EXPECT_EQ(json[1]["next_sequence"], 6);
  EXPECT_EQ(json[1]["fsync"], "INTERVAL");
  EXPECT_EQ(json[1]["torn_bytes"], 0);
}

TEST_F(LogVerbsTest, VerifySaysWhereTheDamageIs) {
  const std::string blobs = Log(1) + "/0000000001.blobs";
  fs::resize_file(blobs, 4000);
  const Outcome cut = Emberctl({"log", "verify", dir_.path()});
  EXPECT_EQ(cut.code, kRefused);
  EXPECT_THAT(cut.out, HasSubstr(Log(0) + ": OK"));
  EXPECT_THAT(cut.err, AllOf(HasSubstr("DATA_LOSS"), HasSubstr(blobs + ": ends at byte 4000")));
  EXPECT_EQ(Emberctl({"log", "show", dir_.path()}).code, kOk);
  fs::remove(blobs);
  const Outcome gone = Emberctl({"log", "verify", Log(1), "--json"});
  EXPECT_EQ(gone.code, kRefused);
  EXPECT_EQ(Json::parse(gone.err)["error"]["code"], "DATA_LOSS");
}

TEST_F(LogVerbsTest, WhereThereIsNoLogTheySaySo) {
  const TempDir empty = *TempDir::Create();
  for (const std::string& folder : {empty.path(), empty.Path("none")}) {
    for (const char* verb : {"show", "verify"}) {
      const Outcome none = Emberctl({"log", verb, folder});
      EXPECT_EQ(none.code, kRefused);
      EXPECT_THAT(none.err,
                  AllOf(HasSubstr("NOT_FOUND"), HasSubstr(folder), HasSubstr("storage.directory")));
    }
  }
  EXPECT_EQ(Emberctl({"log", "show"}).code, kUsage);
  EXPECT_EQ(Emberctl({"log", "show", Log(0), "--limit", "-1"}).code, kUsage);
  const Outcome from = Emberctl({"log", "show", Log(0), "--from", "-1"});
  EXPECT_EQ(from.code, kUsage);
  EXPECT_THAT(from.err, HasSubstr("--from: \"-1\" is not a number from 0 to 1125899906842624\n"));
}

}  // namespace log_test
}  // namespace emberd::emberctl
