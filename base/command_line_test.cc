#include "base/command_line.h"

#include <gtest/gtest.h>

namespace emberd {
namespace command_line_test {

enum class Bird { kOwl = 3, kWren = 5 };

class CommandLineErrorTest : public ::testing::Test {
 protected:
  CommandLineErrorTest() : app_("a program", "prog") {
    app_.require_subcommand(1);
    app_.fallthrough();
    app_.add_flag("--json");
    CLI::App* rows = app_.add_subcommand("rows");
    rows->require_subcommand(1);
    CLI::App* get = rows->add_subcommand("get");
    get->add_option("NAME", name_)->required();
    get->add_option("--slot", slot_);
    get->add_option("--bird", bird_)
        ->transform(OneOf<Bird>(
            "birds", std::map<std::string, Bird>{{"owl", Bird::kOwl}, {"wren", Bird::kWren}}));
    rows->add_subcommand("set");
    app_.add_subcommand("status");
  }
  std::string Parse(std::vector<std::string> arguments) {
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    try {
      app_.parse(arguments);
    } catch (const CLI::ParseError& error) {
      return CommandLineError(app_, error);
    }
    return "";
  }

  CLI::App app_;
  std::string name_, slot_;
  Bird bird_ = Bird::kOwl;
};

TEST_F(CommandLineErrorTest, ListsCommands) {
  EXPECT_EQ(Parse({}), "`prog` needs a command: rows, status\nSee `prog --help`");
  EXPECT_EQ(Parse({"statsu"}),
            "there is no command \"statsu\"; did you mean \"status\"? Known commands: rows, "
            "status\nSee `prog --help`");
  EXPECT_EQ(Parse({"rows"}), "`prog rows` needs a command: get, set\nSee `prog rows --help`");
  EXPECT_EQ(Parse({"rows", "take", "n"}),
            "there is no command \"take\"; known commands: get, set\nSee `prog rows --help`");
}

TEST_F(CommandLineErrorTest, ListsOptions) {
  EXPECT_EQ(Parse({"rows", "get", "n", "--slto", "x"}),
            "there is no option --slto; did you mean \"--slot\"? Known options: --bird, --help, "
            "--json, --slot\nSee `prog rows get --help`");
  EXPECT_EQ(Parse({"status", "now"}),
            "\"now\" is one argument too many for `prog status`\nSee `prog status --help`");
  EXPECT_EQ(Parse({"rows", "get"}), "NAME is required\nSee `prog rows get --help`");
}

// The fault that this would catch: `restore ads "$NAME"` that restores another checkpoint, for the
// variable is not set.
TEST_F(CommandLineErrorTest, AnEmptyTextIsRefusedExceptAsAnAddress) {
  app_.add_option("--at", slot_)->type_name("HOST:PORT");
  RefuseEmpty(&app_);
  const std::string why =
      ": \"\" is not allowed; give a value (is a variable of your shell not set?)";
  EXPECT_EQ(Parse({"rows", "get", "n", "--slot", ""}),
            "--slot" + why + "\nSee `prog rows get --help`");
  EXPECT_EQ(Parse({"--json", "rows", "get", ""}), "NAME" + why + "\nSee `prog rows get --help`");
  EXPECT_EQ(Parse({"--json", "rows", "get", "n", "--slot", "s"}), "");
  EXPECT_EQ(Parse({"--at", "", "status"}), "");
}

// The fault that this would catch: --slot="$SLOT" whose value is the argument behind it.
TEST_F(CommandLineErrorTest, AnOptionThatEndsWithItsEqualsSignHasAnEmptyText) {
  slot_ = "of before";
  const char* const arguments[] = {"prog", "rows", "get", "--slot=", "n"};
  ParseArguments(&app_, 5, arguments);
  EXPECT_EQ(slot_, "");
  EXPECT_EQ(name_, "n");
}

// Would catch: `--index 010` that starts shard 8.
TEST(WithinTest, TakesNoNumberThatWouldBeReadAsOctal) {
  for (const char* text : {"0", "8", "1024"}) EXPECT_EQ(Within(0, 1024)(text), "") << text;
  EXPECT_EQ(Within(0, 1024)("010"), "\"010\" begins with 0; write it without");
  EXPECT_EQ(Within(0.0, 1.0)("0.5"), "");
}

TEST(NotWithinTest, WritesBoundsAsPeopleDo) {
  EXPECT_EQ(NotWithin("x", 0.1, 86400), "\"x\" is not a number from 0.1 to 86400");
  EXPECT_EQ(NotWithin("0", 0.001, int64_t{1} << 40),
            "\"0\" is not a number from 0.001 to 1099511627776");
}

TEST_F(CommandLineErrorTest, ListsNamesOfAnEnum) {
  EXPECT_EQ(Parse({"rows", "get", "n", "--bird", "Wren"}), "");
  EXPECT_EQ(bird_, Bird::kWren);
  EXPECT_EQ(Parse({"rows", "get", "n", "--bird", "wern"}),
            "--bird: \"wern\" is not known; did you mean \"wren\"? Known birds: owl, wren\nSee "
            "`prog rows get --help`");
}

}  // namespace command_line_test
}  // namespace emberd
