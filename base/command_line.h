// Errors for wrong command lines, of programs whose options CLI11 reads.
#pragma once

#include <map>
#include <string>
#include <type_traits>

#include <CLI/CLI.hpp>

#include "base/suggest.h"

namespace emberd {

// `error` in words: unknown commands and options list the known ones and the nearest. Two lines:
// what is wrong, and where to read on.
std::string CommandLineError(const CLI::App& app, const CLI::ParseError& error);

// Lets all options of `command` and of the commands in it refuse an empty text: a shell makes one
// of a variable that is not set. Addresses (HOST:PORT) may be empty, for none.
void RefuseEmpty(CLI::App* command);

// As CLI::App::parse, except that "--slot=", as a shell makes it of --slot="$SLOT", is an empty
// text for --slot; CLI11 takes the next argument for its value.
void ParseArguments(CLI::App* app, int argc, const char* const* argv);

// "soon" is not a number from 0.1 to 60.
std::string NotWithin(const std::string& text, double least, double most);

// For an option that takes one of the names of an enum, whatever their case. An error lists them.
template <typename Enum>
CLI::Validator OneOf(const std::string& plural, const std::map<std::string, Enum>& values) {
  return CLI::Validator(
      [plural, values](std::string& text) {
        std::vector<std::string> names;
        for (const auto& [name, value] : values) {
          if (CLI::detail::to_lower(text) == name) {
            text = std::to_string(static_cast<int>(value));
            return std::string();
          }
          names.push_back(name);
        }
        return "\"" + text + "\" is not known; " + KnownNames(plural, text, names);
      },
      "");
}

// For an option that takes a number from `least` to `most`.
template <typename Number>
CLI::Validator Within(Number least, Number most) {
  return CLI::Validator(
      [least, most](std::string& text) {
        Number value{};
        // CLI11 reads a whole number that begins with 0 as octal.
        if (std::is_integral_v<Number> && text.size() > 1 && text[0] == '0' && text[1] >= '0' &&
            text[1] <= '9') {
          return "\"" + text + "\" begins with 0; write it without";
        }
        if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) {
          return std::string();
        }
        return NotWithin(text, static_cast<double>(least), static_cast<double>(most));
      },
      "");
}

}  // namespace emberd
