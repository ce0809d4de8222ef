// The verbs of emberctl. Each Add function puts a verb with its options into the command line; when
// it is chosen, session.command becomes what carries it out.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "absl/status/status.h"
#include "client/emberctl/session.h"

namespace emberd::emberctl {

// Every verb's help ends with an example.
inline void SetExample(CLI::App* verb, const std::string& example) {
  verb->footer("\nExample:\n  " + example);
}

// Adds a verb. When it is chosen, the command is to `run` it with its options, which the caller
// gives to the command line, and which live as long as `parent`.
template <typename Options>
std::pair<CLI::App*, Options*> AddVerb(CLI::App& parent, Session& session, const std::string& name,
                                       const std::string& help, const std::string& example,
                                       absl::Status (*run)(Session&, const Options&)) {
  CLI::App* const verb = parent.add_subcommand(name, help);
  SetExample(verb, example);
  const auto options = std::make_shared<Options>();
  verb->callback([options, run, &session] {
    session.command = [options, run, &session] { return run(session, *options); };
  });
  return {verb, options.get()};
}

// Adds a verb that has verbs of its own, one of which has to be given.
inline CLI::App& AddGroupOfVerbs(CLI::App& parent, const std::string& name, const std::string& help,
                                 const std::string& example) {
  CLI::App* const group = parent.add_subcommand(name, help);
  group->require_subcommand(1);
  SetExample(group, example);
  return *group;
}

// `session` must outlive `app`.

// --address and whatever else a session needs, for every verb.
void AddCommonOptions(CLI::App& app, Session& session);

void AddStatus(CLI::App& app, Session& session);
void AddTables(CLI::App& app, Session& session);
void AddDescribe(CLI::App& app, Session& session);
void AddDeclare(CLI::App& app, Session& session);
void AddValidate(CLI::App& app, Session& session);
void AddRows(CLI::App& app, Session& session);
void AddExplain(CLI::App& app, Session& session);
void AddLimits(CLI::App& app, Session& session);
void AddPlan(CLI::App& app, Session& session);
void AddProgram(CLI::App& app, Session& session);
void AddStats(CLI::App& app, Session& session);
void AddTop(CLI::App& app, Session& session);
void AddGroup(CLI::App& app, Session& session);
void AddMemory(CLI::App& app, Session& session);
void AddModel(CLI::App& app, Session& session);
void AddCheckpoint(CLI::App& app, Session& session);
void AddServe(CLI::App& app, Session& session);
void AddLog(CLI::App& app, Session& session);
void AddDrain(CLI::App& app, Session& session);
void AddExport(CLI::App& app, Session& session);
void AddCompletion(CLI::App& app, Session& session);

}  // namespace emberd::emberctl
