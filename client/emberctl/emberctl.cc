#include "client/emberctl/emberctl.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "absl/status/status.h"
#include "client/emberctl/cluster_shape.h"
#include "client/emberctl/command.h"
#include "client/emberctl/commands.h"
#include "client/emberctl/explain.h"
#include "client/emberctl/limits.h"
#include "client/emberctl/output.h"
#include "client/emberctl/session.h"

namespace emberd::emberctl {
namespace {

constexpr char kFooter[] = R"(
Example, against `emberd up --shards 2`:
  emberctl plan --model model.textproto --shards 2
  emberctl declare model.textproto
  emberctl status
  emberctl rows get my_model users 7 8
  emberctl bench --model my_model --seconds 10
  emberctl top

With --json, results go to standard output as JSON, and errors to standard error as
{"error": {"code": ..., "message": ...}}.

Exit codes:
  0  done
  1  refused, by the server or by the check of a file
  2  the command line makes no sense
  3  no coordinator, or a shard, answers in time
  4  what the command waited for has not happened in time (drain --wait))";

// A command line on its way: the options that CLI11 fills in, and the command that was chosen.
struct CommandLine {
  CommandLine(Session& session) : session(session) {}

  Session& session;
  std::string model, path, kind = "auto";
  RowsTarget target;
  std::string test_case;
  bool zero_gains = false;
  ExplainOptions explain;
  LimitsOptions limits;
  std::vector<int64_t> ids;
  std::vector<std::string> row_texts;
  Command command;
};

void AddSecurityOptions(CLI::App& app, Session& session) {
  app.add_option("--ca", session.ca_file,
                 "Connect by TLS and trust certificates that the authorities in FILE (PEM) signed")
      ->type_name("FILE")
      ->envname("EMBERD_CA");
  CLI::Option* certificate =
      app.add_option("--cert", session.certificate_file,
                     "Certificate (PEM) to show where coordinators ask for one")
          ->type_name("FILE")
          ->envname("EMBERD_CERT");
  CLI::Option* key = app.add_option("--key", session.key_file, "Its key (PEM)")
                         ->type_name("FILE")
                         ->envname("EMBERD_KEY");
  certificate->needs(key);
  key->needs(certificate);
  app.add_option("--token-file", session.token_file, "Holds the token to send, in one line")
      ->type_name("FILE")
      ->envname("EMBERD_TOKEN_FILE");
}

void AddCommonOptions(CLI::App& app, CommandLine& line) {
  line.session.addresses = {"127.0.0.1:7400"};
  app.add_option(
         "-a,--address", line.session.addresses,
         "host:port of a coordinator; may be given several times, then they are tried in turn")
      ->allow_extra_args(false)  // what follows the address is not another one
      ->envname("EMBERD_ADDRESS")
      ->capture_default_str();
  app.add_flag("--json", line.session.json, "Write JSON, errors too");
  app.add_option("--timeout", line.session.timeout_seconds, "Seconds to wait for each answer")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  AddSecurityOptions(app, line.session);
}

void AddModelCommands(CLI::App& app, CommandLine& line) {
  CLI::App* status =
      app.add_subcommand("status",
                         "State of the coordinator (DRAINING while it is out of service), the "
                         "shards and the models; 3 if a shard is down");
  status->callback([&line] { line.command = [&line] { return ShowStatus(line.session); }; });
  SetExample(status, "emberctl status --json");
  CLI::App* tables = app.add_subcommand("tables", "List the tables of a model, or of all");
  tables->add_option("MODEL", line.model, "Name of the model");
  tables->callback(
      [&line] { line.command = [&line] { return ListTables(line.session, line.model); }; });
  SetExample(tables, "emberctl tables my_model");
  CLI::App* describe = app.add_subcommand(
      "describe", "A declared model: its tables, stacks and features; for its memory see plan");
  describe->add_option("MODEL", line.model, "Name of the model")->required();
  describe->callback(
      [&line] { line.command = [&line] { return Describe(line.session, line.model); }; });
  SetExample(describe, "emberctl describe my_model");
  CLI::App* declare = app.add_subcommand(
      "declare", "Make the tables of a model; nothing happens if they are there");
  declare->add_option("FILE", line.path, "ModelConfig as text proto or JSON")->required();
  declare->callback(
      [&line] { line.command = [&line] { return Declare(line.session, line.path); }; });
  SetExample(declare, "emberctl declare model.textproto");
  CLI::App* validate =
      app.add_subcommand("validate", "Check a model or cluster config; needs no server");
  validate->add_option("FILE", line.path, "ModelConfig or ClusterConfig as text proto or JSON")
      ->required();
  validate->add_option("--kind", line.kind, "What FILE is")
      ->check(CLI::IsMember({"auto", "model", "cluster"}))
      ->capture_default_str();
  validate->callback(
      [&line] { line.command = [&line] { return Validate(line.session, line.path, line.kind); }; });
  SetExample(validate, "emberctl validate cluster.textproto --kind cluster");
}

void AddLimitsCommand(CLI::App& app, CommandLine& line) {
  CLI::App* limits = app.add_subcommand(
      "limits",
      "What batches needed per partition since the coordinators started, and the limits that this "
      "suggests; each --address is asked");
  limits->add_option("MODEL", line.limits.model, "Name of the model")->required();
  limits->add_option("--headroom", line.limits.headroom, "Suggested limit over observed maximum")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  limits->add_option("--out", line.limits.out,
                     "Write the model config, with the suggested limits, as text proto");
  limits->callback(
      [&line] { line.command = [&line] { return Limits(line.session, line.limits); }; });
  SetExample(limits, "emberctl limits my_model --headroom 1.3 --out tighter.textproto");
}

absl::Status SetRowsFromTexts(CommandLine& line) {
  std::vector<RowText> rows;
  for (const std::string& text : line.row_texts) rows.push_back(*ParseRow(text));
  return SetRows(line.session, line.target, rows);
}

void AddRowCommands(CLI::App& app, CommandLine& line) {
  CLI::App* rows = app.add_subcommand("rows", "Read and write rows of a table by id");
  rows->require_subcommand(1);
  SetExample(rows, "emberctl rows get my_model users 7 8");
  const auto add_target = [&line](CLI::App* command) {
    command->add_option("MODEL", line.target.model, "Name of the model")->required();
    command->add_option("TABLE", line.target.table, "Name of the table")->required();
    command->add_option("--slot", line.target.slot,
                        "An optimizer slot instead of the weights, for example accumulator");
  };
  CLI::App* get = rows->add_subcommand("get", "Print rows, one a line: ID=VALUE,VALUE,...");
  add_target(get);
  get->add_option("ID", line.ids, "Ids of the rows")->required();
  get->callback(
      [&line] { line.command = [&line] { return GetRows(line.session, line.target, line.ids); }; });
  SetExample(get, "emberctl rows get my_model users 7 8 --slot accumulator");
  CLI::App* set = rows->add_subcommand("set", "Overwrite rows, written as `rows get` prints them");
  add_target(set);
  set->add_option("ROW", line.row_texts, "ID=VALUE,VALUE,...")
      ->required()
      ->check(
          [](const std::string& text) { return std::string(ParseRow(text).status().message()); });
  set->callback([&line] { line.command = [&line] { return SetRowsFromTexts(line); }; });
  SetExample(set, "emberctl rows set my_model users 7=0.5,1,-2,0.25");
}

constexpr char kExplainFooter[] = R"(
Example:
  emberctl explain --model model.textproto --batch batch.json --shards 4 --sparsecores 2

BATCH is one of
  a JSON file: {"FEATURE": {"ids": [[1, 2], [], 3], "weights": [[0.5, 1], [], 2]}, ...}, one element
    per sample, a list of ids or a single id; weights may be absent
  a directory of .npy files (little-endian int32, int64 and float32, C order), or single ones:
    FEATURE.ids.npy [samples] or [samples, ids per sample], or FEATURE.values.npy with
    FEATURE.row_splits.npy [samples + 1]; and FEATURE.weights.npy where there are weights

CASE is a recorded case of jax-tpu-embedding's behaviour, of kind preprocess, stacking, hash, keys or
split. What its `expected` holds is printed as JSON, with or without --json. Where that system
aborts, {"error": {"code": ..., "message": ...}} is printed and the exit code is 1. Samples whose
weights sum to zero (their squares, with sqrtn) have NaN or infinite gains there and in the cases;
emberd's servers give them a gain of 0, and so does --zero-gains here.)";

void AddExplainCommand(CLI::App& app, CommandLine& line) {
  CLI::App* explain = app.add_subcommand("explain",
                                         "How a batch is stacked, placed and cut into "
                                         "mini-batches, and what it costs; --json adds all "
                                         "buffers. Needs no server");
  explain->footer(kExplainFooter);
  CLI::Option_group* subject = explain->add_option_group("subject");
  CLI::Option* test_case = subject->add_option("--case", line.test_case, "CASE file");
  CLI::Option* model =
      subject->add_option("--model", line.explain.model, "ModelConfig as text proto or JSON");
  subject->require_option(1);
  explain->add_flag("--zero-gains", line.zero_gains, "Do not divide by zero in a CASE: gain 0")
      ->needs(test_case);
  CLI::Option* batch =
      explain->add_option("--batch", line.explain.batches, "BATCH; may be given several times")
          ->needs(model);
  model->needs(batch);
  AddClusterShapeOptions(explain, model, &line.explain.cluster);
  explain->callback([&line] {
    line.command = [&line] {
      if (line.explain.model.empty()) {
        return ExplainCase(line.session, line.test_case, line.zero_gains);
      }
      return ExplainBatch(line.session, line.explain);
    };
  });
}

int Report(const absl::Status& status, bool json, std::ostream& err) {
  if (status.ok()) return kOk;
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string message(status.message());
  if (json) {
    err << Json{{"error", {{"code", code}, {"message", message}}}}.dump(1) << "\n";
  } else {
    err << "emberctl: " << code << ": " << message << "\n";
  }
  if (IsUnfinished(status)) return kUnfinished;
  const bool unreachable = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  return unreachable ? kUnreachable : kRefused;
}

}  // namespace

int Run(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  Session session(out);
  session.terminal = &out == &std::cout && isatty(STDOUT_FILENO) == 1;
  CommandLine line(session);
  CLI::App app("emberctl: looks into an emberd cluster and changes its tables", "emberctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();
  AddCommonOptions(app, line);
  AddModelCommands(app, line);
  AddRowCommands(app, line);
  AddExplainCommand(app, line);
  AddLimitsCommand(app, line);
  AddPlanCommand(app, session, line.command);
  AddStatsCommand(app, session, line.command);
  AddTopCommand(app, session, line.command);
  AddDrainCommand(app, session, line.command);
  AddBenchCommand(app, session, line.command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help, out, err);
  } catch (const CLI::ParseError& error) {
    // Parsing may have ended before the flag.
    if (std::find(argv, argv + argc, std::string("--json")) == argv + argc) {
      app.exit(error, out, err);
    } else {
      Report(absl::InvalidArgumentError(error.what()), /*json=*/true, err);
    }
    return kUsage;
  }
  return Report(line.command(), session.json, err);
}

}  // namespace emberd::emberctl
