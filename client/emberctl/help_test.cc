// Every command explains itself with an example, and every error can be read by a program.
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/emberctl/output.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace help_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The commands that the help of `command` lists.
std::vector<std::string> CommandsOf(const std::string& help) {
  std::vector<std::string> commands;
  bool listed = false;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(help, '\n'))) {
    if (line == "Subcommands:") {
      listed = true;
    } else if (listed && line.rfind("  ", 0) == 0 && line.size() > 2 && line[2] != ' ') {
      commands.push_back(line.substr(2, line.find(' ', 2) - 2));
    } else if (listed && line.empty()) {
      break;
    }
  }
  return commands;
}

void CheckHelp(const std::vector<std::string>& command) {
  SCOPED_TRACE(::testing::PrintToString(command));
  std::vector<std::string> arguments = command;
  arguments.push_back("--help");
  const Outcome help = Emberctl(arguments);
  EXPECT_EQ(help.code, kOk);
  EXPECT_THAT(help.err, IsEmpty());
  EXPECT_THAT(help.out, AllOf(HasSubstr("Example"), HasSubstr("\n  emberctl ")));
  for (const std::string& word : command) EXPECT_THAT(help.out, HasSubstr(word));
  for (const std::string& more : CommandsOf(help.out)) {
    std::vector<std::string> deeper = command;
    deeper.push_back(more);
    CheckHelp(deeper);
  }
}

TEST(HelpTest, EveryCommandHasAnExample) {
  const Outcome help = Emberctl({"--help"});
  const std::vector<std::string> commands = CommandsOf(help.out);
  for (const char* command : {"status", "tables", "plan", "program", "rows", "stats", "limits",
                              "explain", "top", "memory", "model", "group", "checkpoint", "log",
                              "drain", "describe", "declare", "validate"}) {
    EXPECT_THAT(commands, Contains(command));
  }
  EXPECT_EQ(CommandsOf(Emberctl({"rows", "--help"}).out), (std::vector<std::string>{"get", "set"}));
  EXPECT_EQ(CommandsOf(Emberctl({"model", "--help"}).out),
            (std::vector<std::string>{"drop", "reset"}));
  EXPECT_EQ(CommandsOf(Emberctl({"memory", "--help"}).out),
            (std::vector<std::string>{"pin", "unpin", "compact", "release"}));
  EXPECT_EQ(CommandsOf(Emberctl({"group", "--help"}).out), (std::vector<std::string>{"drop"}));
  EXPECT_EQ(CommandsOf(Emberctl({"checkpoint", "--help"}).out),
            (std::vector<std::string>{"save", "list", "show", "diff", "delete", "prune", "verify",
                                      "restore", "merge", "export", "import"}));
  EXPECT_EQ(CommandsOf(Emberctl({"log", "--help"}).out),
            (std::vector<std::string>{"show", "verify"}));
  for (const char* code : {"  0  ", "  1  ", "  2  ", "  3  ", "  4  "}) {
    EXPECT_THAT(help.out, HasSubstr(code));
  }
  CheckHelp({});
}

TEST(HelpTest, WrongCommandLinesAreJsonToo) {
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{
           {"--json"}, {"fly", "--json"}, {"--json", "stats", "--interval", "soon"}}) {
    const Outcome outcome = Emberctl(wrong);
    EXPECT_EQ(outcome.code, kUsage);
    EXPECT_THAT(outcome.out, IsEmpty());
    const Json json = Json::parse(outcome.err);
    EXPECT_EQ(json["error"]["code"], "INVALID_ARGUMENT");
    EXPECT_FALSE(json["error"]["message"].get<std::string>().empty());
  }
}

TEST(HelpTest, WrongCommandLines) {
  const std::vector<std::vector<std::string>> wrong = {
      {"plan"},
      {"plan", "m", "--model", "f"},
      {"plan", "m", "--shards", "2", "--cluster", "c"},
      {"plan", "--model", "f", "--shards", "0"},
      {"program", "m", "--samples", "0"},
      {"stats", "--hot-rows", "101"},
      {"stats", "--interval", "0"},
      {"top", "--count", "0"},
      {"top", "--interval", "-1"},
      {"model"},
      {"model", "drop"},
      {"memory", "pin"},
      {"memory", "unpin"},
      {"memory", "compact", "m"},
      {"memory", "pin", "m", "release"},
      {"memory", "drop"},
      {"group"},
      {"group", "drop", "m"},
      {"checkpoint"},
      {"checkpoint", "save"},
      {"checkpoint", "delete", "m"},
      {"checkpoint", "diff", "m", "a"},
      {"checkpoint", "export", "m", "a"},
      {"checkpoint", "export", "m", "a", "d", "--file-bytes", "0"},
      {"checkpoint", "import", "m"},
      {"checkpoint", "import", "m", "p", "--slot", "accumulator"},
      {"serve"},
      {"serve", "m", "--storage", "int8"},
      {"drain", "--wait", "-1"},
  };
  for (const std::vector<std::string>& arguments : wrong) {
    const Outcome outcome = Emberctl(arguments);
    EXPECT_EQ(outcome.code, kUsage) << ::testing::PrintToString(arguments);
    EXPECT_FALSE(outcome.err.empty());
  }
}

TEST(OutputTest, QuantitiesAndShares) {
  EXPECT_EQ(Quantity(0), "0");
  EXPECT_EQ(Quantity(0.01), "<0.1");  // an error in 100 s is not none
  EXPECT_EQ(Quantity(0.05), "0.1");
  EXPECT_EQ(Quantity(1.25), "1.2");
  EXPECT_EQ(Quantity(99.97), "100");
  EXPECT_EQ(Quantity(999.4), "999");
  EXPECT_EQ(Quantity(999.6), "1.0k");
  EXPECT_EQ(Quantity(123'456), "123k");
  EXPECT_EQ(Quantity(1.5e9), "1.5G");
  EXPECT_EQ(Seconds(0), "0 us");
  EXPECT_EQ(Seconds(0.00015), "150 us");
  EXPECT_EQ(Seconds(0.0025), "2.5 ms");
  EXPECT_EQ(Seconds(1.2), "1.20 s");
  EXPECT_EQ(Percent(1, 0), "-");
  EXPECT_EQ(Percent(0, 5), "0%");
  EXPECT_EQ(Percent(1, 300), "0.3%");
  EXPECT_EQ(Percent(1, 2), "50%");
}

}  // namespace help_test
}  // namespace emberd::emberctl
