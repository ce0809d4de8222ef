// How a command hangs itself into the command line.
#pragma once

#include <functional>
#include <string>

#include <CLI/CLI.hpp>

#include "absl/status/status.h"
#include "client/emberctl/session.h"

namespace emberd::emberctl {

// What the command line asked for; set while it is parsed, run afterwards.
using Command = std::function<absl::Status()>;

// Every command's help ends with an example.
inline void SetExample(CLI::App* command, const std::string& example) {
  command->footer("\nExample:\n  " + example);
}

// Each adds one command to `app`. `session` and `command` must outlive it.
void AddPlanCommand(CLI::App& app, Session& session, Command& command);
void AddStatsCommand(CLI::App& app, Session& session, Command& command);
void AddTopCommand(CLI::App& app, Session& session, Command& command);
void AddDrainCommand(CLI::App& app, Session& session, Command& command);
void AddBenchCommand(CLI::App& app, Session& session, Command& command);

}  // namespace emberd::emberctl
