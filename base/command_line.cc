#include "base/command_line.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace emberd {
namespace {

// The innermost command that was named.
const CLI::App& CommandNamed(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().back();
  return *command;
}

// "emberctl rows get"
std::string NameOf(const CLI::App& command) {
  return command.get_parent() == nullptr
             ? command.get_name()
             : absl::StrCat(NameOf(*command.get_parent()), " ", command.get_name());
}

std::vector<std::string> CommandsOf(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* one : command.get_subcommands([](const CLI::App*) { return true; })) {
    if (!one->get_name().empty()) names.push_back(one->get_name());  // others group options
  }
  return names;
}

// Those of the command, then those of the commands around it.
void AddOptions(const CLI::App& command, std::vector<std::string>* names) {
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_lnames().empty()) names->push_back("--" + option->get_lnames().front());
  }
  for (const CLI::App* one : command.get_subcommands([](const CLI::App*) { return true; })) {
    if (one->get_name().empty()) AddOptions(*one, names);
  }
}

std::vector<std::string> OptionsOf(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* one = &command; one != nullptr; one = one->get_parent()) {
    AddOptions(*one, &names);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

std::string Describe(const CLI::App& app, const CLI::App& command, const CLI::ParseError& error) {
  const std::string name = NameOf(command);
  const std::vector<std::string> commands = CommandsOf(command);
  const std::vector<std::string> left = app.remaining(/*recurse=*/true);
  const std::string what = error.what();
  if (!left.empty() && absl::StartsWith(left.front(), "-")) {
    return absl::StrCat("there is no option ", left.front(), "; ",
                        KnownNames("options", left.front(), OptionsOf(command)));
  }
  if (!left.empty() && !commands.empty()) {
    return absl::StrCat("there is no command \"", left.front(), "\"; ",
                        KnownNames("commands", left.front(), commands));
  }
  if (!left.empty()) {
    return absl::StrCat("\"", left.front(), "\" is one argument too many for `", name, "`");
  }
  if (!commands.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    return absl::StrCat("`", name, "` needs a command: ", absl::StrJoin(commands, ", "));
  }
  // "Exactly 1 option from [MODEL,--model] is required"
  const size_t list = what.find(" from [");
  if (absl::StartsWith(what, "Exactly 1 option") && list != std::string::npos) {
    const size_t begin = list + 7;
    return absl::StrCat("give exactly one of ", what.substr(begin, what.find(']') - begin));
  }
  return what;
}

// All digits of the bounds of options; of 0.1, no more.
std::string Number(double value) { return absl::StrFormat("%.16g", value); }

}  // namespace

std::string NotWithin(const std::string& text, double least, double most) {
  return absl::StrCat("\"", text, "\" is not a number from ", Number(least), " to ", Number(most));
}

void RefuseEmpty(CLI::App* command) {
  const auto not_empty = [](const std::string& text) -> std::string {
    return text.empty() ? "\"\" is not allowed; give a value (is a variable of your shell not set?)"
                        : "";
  };
  for (CLI::Option* option : command->get_options()) {
    if (option->get_type_name() != "HOST:PORT") option->check(not_empty);
  }
  for (CLI::App* one : command->get_subcommands([](CLI::App*) { return true; })) RefuseEmpty(one);
}

void ParseArguments(CLI::App* app, int argc, const char* const* argv) {
  std::deque<std::string> names;  // of options without a value; none moves when others come
  std::vector<const char*> arguments;
  for (int i = 0; i < argc; ++i) {
    const std::string argument = argv[i];
    if (absl::StartsWith(argument, "--") && argument.find('=') == argument.size() - 1) {
      names.push_back(argument.substr(0, argument.size() - 1));
      arguments.insert(arguments.end(), {names.back().c_str(), ""});
    } else {
      arguments.push_back(argv[i]);
    }
  }
  app->parse(static_cast<int>(arguments.size()), arguments.data());
}

std::string CommandLineError(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = CommandNamed(app);
  return absl::StrCat(Describe(app, command, error), "\nSee `", NameOf(command), " --help`");
}

}  // namespace emberd
