#include "client/emberctl/emberctl.h"

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "absl/status/status.h"
#include "base/command_line.h"
#include "client/emberctl/output.h"
#include "client/emberctl/session.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

constexpr char kFooter[] = R"(
Example, against `emberd up --shards 2`:
  emberctl plan --model model.textproto --shards 2
  emberctl declare model.textproto
  emberctl status
  emberctl rows get my_model users 7 8
  emberctl top

With --json, results go to standard output as JSON, and errors to standard error as
{"error": {"code": ..., "message": ...}}.

Exit status:
  0  done
  1  refused by the server, or by the check of a file; or the output could not be written
  2  wrong command line
  3  no coordinator has answered in time, or a shard has not
  4  what the command waits for has not happened in time (drain --wait))";

void AddSecurityOptions(CLI::App& app, Session& session) {
  app.add_option("--ca", session.ca_file,
                 "Connect with TLS and trust certificates signed by the authorities in FILE (PEM)")
      ->type_name("FILE")
      ->envname("EMBERD_CA");
  CLI::Option* certificate =
      app.add_option("--cert", session.certificate_file,
                     "Client certificate (PEM), for coordinators that require one")
          ->type_name("FILE")
          ->envname("EMBERD_CERT");
  CLI::Option* key =
      app.add_option("--key", session.key_file, "Key of the client certificate (PEM)")
          ->type_name("FILE")
          ->envname("EMBERD_KEY");
  certificate->needs(key);
  key->needs(certificate);
  app.add_option("--token-file", session.token_file, "File with the token to send, on one line")
      ->type_name("FILE")
      ->envname("EMBERD_TOKEN_FILE");
}

int Report(const absl::Status& status, bool json, std::ostream& err) {
  if (status.ok()) return kOk;
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string message(status.message());
  if (json) {
    err << Dump(Json{{"error", {{"code", code}, {"message", message}}}}, 1) << "\n";
  } else {
    err << "emberctl: " << code << ": " << message << "\n";
  }
  if (IsUnfinished(status)) return kUnfinished;
  if (IsWrongUsage(status)) return kUsage;
  const bool unreachable = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  return unreachable ? kUnreachable : kRefused;
}

// For what happens before and after the flags are known.
bool WantsJson(int argc, const char* const* argv) {
  return std::find(argv, argv + argc, std::string("--json")) != argv + argc;
}

int Execute(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  SilenceLibraries();
  Session session(out);
  session.terminal = &out == &std::cout && isatty(STDOUT_FILENO) == 1;
  CLI::App app("emberctl: inspects and operates an emberd cluster", "emberctl");
  app.footer(kFooter);
  app.set_version_flag("--version", "emberctl " EMBERD_VERSION, "Print the version and exit");
  app.require_subcommand(1);
  app.fallthrough();
  AddCommonOptions(app, session);
  // In the order in which the help lists them.
  for (const auto add :
       {AddStatus,  AddTables, AddDescribe,   AddDeclare, AddValidate, AddRows,  AddExport,
        AddExplain, AddLimits, AddPlan,       AddProgram, AddStats,    AddTop,   AddMemory,
        AddModel,   AddGroup,  AddCheckpoint, AddServe,   AddLog,      AddDrain, AddCompletion}) {
    add(app, session);
  }
  RefuseEmpty(&app);
  try {
    ParseArguments(&app, argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help, out, err);
  } catch (const CLI::ParseError& error) {
    // Parsing may have ended before the flag.
    const std::string message = CommandLineError(app, error);
    if (WantsJson(argc, argv)) {
      Report(absl::InvalidArgumentError(message), /*json=*/true, err);
    } else {
      err << "emberctl: " << message << "\n";
    }
    return kUsage;
  }
  return Report(session.command(), session.json, err);
}

}  // namespace

void AddCommonOptions(CLI::App& app, Session& session) {
  session.addresses = {"127.0.0.1:7400"};
  app.add_option(
         "-a,--address", session.addresses,
         "host:port of a coordinator; may be given several times: they are tried in this order")
      ->allow_extra_args(false)  // what follows the address is not another one
      ->envname("EMBERD_ADDRESS")
      ->capture_default_str();
  app.add_flag("--json", session.json, "Write results and errors as JSON");
  app.add_option("--timeout", session.timeout_seconds, "Seconds to wait for each answer")
      ->check(Within(0.001, 86400.0))
      ->capture_default_str();
  AddSecurityOptions(app, session);
}

int Run(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  const int code = Execute(argc, argv, out, err);
  errno = 0;
  if (out.flush()) return code;
  constexpr char kLost[] = "the output could not be written: it is lost or ends early";
  // A stream that had failed before does not tell why.
  const absl::Status failed =
      errno == 0 ? absl::DataLossError(kLost) : absl::ErrnoToStatus(errno, kLost);
  Report(failed, WantsJson(argc, argv), err);
  return code == kOk ? kRefused : code;
}

}  // namespace emberd::emberctl
