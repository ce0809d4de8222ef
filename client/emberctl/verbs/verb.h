// The verbs of emberctl: each file here has one. Its Add function puts the verb with its options
// into the command line; when it is chosen, `command` becomes what carries it out.
#pragma once

#include <functional>
#include <string>

#include <CLI/CLI.hpp>

#include "absl/status/status.h"
#include "client/emberctl/session.h"

namespace emberd::emberctl {

// Set while the command line is parsed, run afterwards. Prints its result and returns why it could
// not.
using Command = std::function<absl::Status()>;

// Every verb's help ends with an example.
inline void SetExample(CLI::App* verb, const std::string& example) {
  verb->footer("\nExample:\n  " + example);
}

// `session` and `command` must outlive `app`.
void AddStatus(CLI::App& app, Session& session, Command& command);
void AddTables(CLI::App& app, Session& session, Command& command);
void AddDescribe(CLI::App& app, Session& session, Command& command);
void AddDeclare(CLI::App& app, Session& session, Command& command);
void AddValidate(CLI::App& app, Session& session, Command& command);
void AddRows(CLI::App& app, Session& session, Command& command);
void AddExplain(CLI::App& app, Session& session, Command& command);
void AddLimits(CLI::App& app, Session& session, Command& command);
void AddPlan(CLI::App& app, Session& session, Command& command);
void AddStats(CLI::App& app, Session& session, Command& command);
void AddTop(CLI::App& app, Session& session, Command& command);
void AddGroup(CLI::App& app, Session& session, Command& command);
void AddMemory(CLI::App& app, Session& session, Command& command);
void AddModel(CLI::App& app, Session& session, Command& command);
void AddCheckpoint(CLI::App& app, Session& session, Command& command);
void AddServe(CLI::App& app, Session& session, Command& command);
void AddLog(CLI::App& app, Session& session, Command& command);
void AddDrain(CLI::App& app, Session& session, Command& command);
void AddExport(CLI::App& app, Session& session, Command& command);
void AddCompletion(CLI::App& app, Session& session, Command& command);
void AddBench(CLI::App& app, Session& session, Command& command);

}  // namespace emberd::emberctl
