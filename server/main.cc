// The emberd binary: flags to options, then build, start and wait.
//
// Exit status: 0 stopped as asked, 1 could not start or save, or died, 2 wrong flags or
// configuration.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <limits>
#include <map>
#include <string>

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <google/protobuf/generated_enum_reflection.h>
#include <sys/resource.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "base/command_line.h"
#include "base/status.h"
#include "config/config.h"
#include "server/launcher/cluster_options.h"
#include "server/launcher/serve.h"
#include "server/launcher/up.h"
#include "server/launcher/verbs.h"
#include "server/ops/catalogue.h"
#include "server/ops/logging.h"

namespace emberd {
namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;
// Of a cluster, as config/ has it: a description of many more shards would not fit into memory.
constexpr int kMaxPartitions = 1024;

// Everything that flags can say.
struct Flags {
  std::string config;
  int index = 0;
  std::string ready_file;
  bool insecure = false;
  bool processes = false;
  bool no_restart = false;
  bool stop_on_eof = false;
  launcher::LocalCluster local;
  launcher::Overrides overrides;
  launcher::HealthOptions health;
  double health_timeout = absl::ToDoubleSeconds(launcher::HealthOptions().timeout);
  launcher::NewToken token;
};

// A stream, a region of shared memory, a file of a log or checkpoint: each takes a descriptor. The
// lower limit, which a process may raise, is there for programs that use select().
void RaiseLimitOfFiles() {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

// `type`: what stands for the value in the help.
template <typename T>
CLI::Option* AddOption(CLI::App* command, const char* name, const char* type, T& value,
                       const char* help) {
  return command->add_option(name, value, help)->type_name(type);
}

// By name in lower case, all values of a protobuf enum but 0.
template <typename Enum>
std::map<std::string, Enum> ValuesOf() {
  std::map<std::string, Enum> values;
  const auto& type = *google::protobuf::GetEnumDescriptor<Enum>();
  for (int i = 0; i < type.value_count(); ++i) {
    if (type.value(i)->number() == 0) continue;
    values[absl::AsciiStrToLower(type.value(i)->name())] =
        static_cast<Enum>(type.value(i)->number());
  }
  return values;
}

// Flags that every process has. Their values replace those of the configuration.
void AddCommonFlags(CLI::App* command, Flags* flags) {
  launcher::Overrides& overrides = flags->overrides;
  command
      ->add_option("--threads", overrides.threads, "Worker threads of each shard and coordinator")
      ->check(Within(1, 1024));
  AddOption(command, "--log-level", "LEVEL", overrides.log_level, "debug, info, warning or error")
      ->transform(OneOf("levels", ValuesOf<v1::LoggingConfig::Level>()));
  AddOption(command, "--log-format", "FORMAT", overrides.log_format,
            "text, or json: one object per line")
      ->transform(OneOf("formats", ValuesOf<v1::LoggingConfig::Format>()));
  AddOption(command, "--log-file", "FILE", overrides.log_file,
            "Append the log to FILE, not to stderr; SIGHUP opens FILE anew");
  AddOption(command, "--span-file", "FILE", overrides.span_file,
            "Append spans of calls to FILE, for OpenTelemetry: lines of OTLP in JSON; "
            "SIGHUP opens FILE anew");
  command->add_flag(
      "--insecure", flags->insecure,
      "Allow addresses beyond the loopback interface without protection: anybody on the network "
      "can call");
}

void AddStorageFlags(CLI::App* up, launcher::Overrides* overrides) {
  AddOption(up, "--data", "DIR", overrides->data,
            "Folder for checkpoints and logs, created if it does not exist; default: rows are "
            "in memory only");
  AddOption(
      up, "--durability", "LEVEL", overrides->durability,
      "memory: save checkpoints on request only; checkpoint: also every 10 minutes, and restore "
      "the newest one after rows were lost; log: write every change to a log before it is "
      "answered, so that a killed process loses nothing [checkpoint with --data]")
      ->transform(OneOf("levels", ValuesOf<v1::StorageConfig::Durability>()));
}

void AddUp(CLI::App* app, Flags* flags) {
  CLI::App* const up = app->add_subcommand("up", "Run a complete cluster on this machine");
  CLI::Option* const shards =
      up->add_option("--shards", flags->local.shards, "Number of shards, a power of two")
          ->check(Within(1, kMaxPartitions))
          ->capture_default_str();
  CLI::Option* const sparsecores =
      up->add_option("--sparsecores", flags->local.sparsecores_per_shard,
                     "SparseCores of each shard, a power of two")
          ->check(Within(1, kMaxPartitions))
          ->capture_default_str();
  CLI::Option* const coordinators =
      up->add_option("--coordinators", flags->local.coordinators,
                     "Number of coordinators; any of them serves any trainer; more than one needs "
                     "--processes")
          ->check(Within(1, 64))
          ->capture_default_str();
  AddOption(up, "--config", "FILE", flags->config,
            "Cluster description, text proto or JSON, instead of the numbers above")
      ->excludes(shards)
      ->excludes(sparsecores)
      ->excludes(coordinators);
  AddOption(up, "--listen", "HOST:PORT", flags->overrides.address,
            "Address of the public API of the first coordinator; port 0: the system picks one "
            "[127.0.0.1:7400]");
  AddOption(up, "--http", "HOST:PORT", flags->overrides.http_address,
            "Address of the status page and /metrics of the first coordinator; '' for none "
            "[127.0.0.1:7401]");
  AddStorageFlags(up, &flags->overrides);
  up->add_flag("--processes", flags->processes,
               "Run each shard and coordinator in its own process; default: all in this process");
  up->add_flag(
      "--stop-on-eof", flags->stop_on_eof,
      "Also stop when standard input ends: for a program that starts its own cluster and may "
      "be killed");
  up->add_flag("--no-restart", flags->no_restart,
               "With --processes: do not restart a process that dies")
      ->needs("--processes");
  AddCommonFlags(up, flags);
  up->footer(
      "Prints 'emberd: ready coordinator=HOST:PORT http=HOST:PORT shards=N pids=...' when "
      "everything listens.\nThe first SIGTERM or Ctrl-C stops it cleanly, the second at once.\n"
      "A closed terminal (SIGHUP) stops it cleanly, too, without log or span files and nohup.\n\n"
      "Examples:\n"
      "  emberd up --shards 4\n"
      "  emberd up --shards 4 --coordinators 2 --processes\n"
      "  emberd up --shards 4 --processes --data /var/lib/emberd --durability checkpoint\n"
      "  emberd up --shards 4 --processes --listen 127.0.0.1:0 --http 127.0.0.1:0\n"
      "  emberd up --config cluster.textproto --processes --log-format json");
}

// `kind` is "shard" or "coordinator".
void AddServer(CLI::App* app, const std::string& kind, const std::string& what, Flags* flags) {
  CLI::App* const command = app->add_subcommand(kind, what);
  AddOption(command, "--config", "FILE", flags->config,
            "Cluster description, text proto or JSON; the same for every process")
      ->required();
  command
      ->add_option("--index", flags->index,
                   "Number of this " + kind + " in the cluster description, from 0")
      ->check(Within(0, std::numeric_limits<int>::max()))
      ->capture_default_str();
  AddOption(command, "--address", "HOST:PORT", flags->overrides.address,
            "Listen here instead of where the configuration says; port 0: the system picks one");
  AddOption(command, "--http-address", "HOST:PORT", flags->overrides.http_address,
            "Serve web pages here instead of where the configuration says; '' for none");
  AddOption(command, "--ready-file", "FILE", flags->ready_file,
            "Write grpc=, http= and pid= lines to FILE when it listens; "
            "default: one line to standard output");
  AddCommonFlags(command, flags);
  command->footer(
      "The first SIGTERM or Ctrl-C drains and stops it, the second stops it at once.\n\n"
      "Examples:\n  emberd " +
      kind + " --config cluster.textproto --index 0\n  emberd " + kind +
      " --config cluster.textproto --index 0 --address 127.0.0.1:0 --ready-file ready");
}

void AddHealth(CLI::App* app, Flags* flags) {
  CLI::App* const command = app->add_subcommand("health", "Ask a process whether it serves");
  AddOption(command, "--address", "HOST:PORT", flags->health.address, "Its gRPC address")
      ->capture_default_str();
  command->add_option("--timeout", flags->health_timeout, "Seconds to wait for the answer")
      ->check(Within(0.001, 3600.0))
      ->capture_default_str();
  AddOption(command, "--config", "FILE", flags->config,
            "Cluster description; needed if its `security` requires TLS")
      ->needs("--address");
  command->footer(
      "Exit status: 0 it serves, 1 it does not serve or cannot be reached, 2 wrong flags.\n\n"
      "Example:\n  emberd health --address 127.0.0.1:7400");
}

void AddToken(CLI::App* app, Flags* flags) {
  CLI::App* const command = app->add_subcommand(
      "token", "Create a token, add its digest to a token file, and print the token");
  command->add_option("NAME", flags->token.name, "Name of the holder, for logs and quotas")
      ->required();
  AddOption(command, "ROLE", "ROLE", flags->token.role, "reader, trainer, loader, admin or cluster")
      ->required()
      ->transform(OneOf("roles", ValuesOf<v1::Token::Role>()));
  AddOption(command, "--file", "FILE", flags->token.file,
            "TokenFile as text proto, security.tokens_file of the cluster; created if it "
            "does not exist")
      ->required();
  command->footer(
      "Keep the printed token: it is stored nowhere. Running processes accept it a few seconds "
      "later.\n\n"
      "Examples:\n"
      "  emberd token cluster cluster --file tokens.textproto > cluster.token\n"
      "  emberd token alice trainer --file tokens.textproto > alice.token");
}

// The path of this binary, so that children show up under its name.
std::string OwnPath() {
  std::string path(4096, '\0');
  const ssize_t size = readlink("/proc/self/exe", path.data(), path.size());
  if (size <= 0) return "/proc/self/exe";
  return path.substr(0, size);
}

absl::Status RunUp(const Flags& flags) {
  ASSIGN_OR_RETURN(v1::ClusterConfig cluster,
                   flags.config.empty()
                       ? launcher::MakeLocalCluster(flags.local, flags.overrides)
                       : launcher::LoadClusterFor(flags.config, launcher::Role::kCoordinator, 0,
                                                  flags.overrides));
  const launcher::UpOptions options = {.cluster = std::move(cluster),
                                       .insecure = flags.insecure,
                                       .restart = !flags.no_restart,
                                       .stop_on_eof = flags.stop_on_eof,
                                       .program = OwnPath()};
  return flags.processes ? launcher::UpProcesses(options) : launcher::UpEmbedded(options);
}

absl::Status RunServer(const Flags& flags, launcher::Role role) {
  ASSIGN_OR_RETURN(v1::ClusterConfig cluster,
                   launcher::LoadClusterFor(flags.config, role, flags.index, flags.overrides));
  const launcher::ServeOptions options = {.cluster = std::move(cluster),
                                          .index = flags.index,
                                          .insecure = flags.insecure,
                                          .ready_file = flags.ready_file};
  return role == launcher::Role::kShard ? launcher::ServeShard(options)
                                        : launcher::ServeCoordinator(options);
}

absl::Status RunToken(const Flags& flags) {
  constexpr char kLost[] = "the token cannot be printed, so that none is added";
  // A file that is opened would take its place, and the token.
  if (fcntl(STDOUT_FILENO, F_GETFD) == -1) return absl::ErrnoToStatus(errno, kLost);
  return launcher::MakeToken(flags.token, [&](const std::string& secret) {
    errno = 0;
    if (std::printf("%s\n", secret.c_str()) > 0 && std::fflush(stdout) == 0) {
      return absl::OkStatus();
    }
    return absl::ErrnoToStatus(errno == 0 ? EIO : errno, kLost);
  });
}

absl::Status RunHealth(Flags* flags) {
  flags->health.timeout = absl::Seconds(flags->health_timeout);
  if (!flags->config.empty()) {
    ASSIGN_OR_RETURN(v1::ClusterConfig cluster, config::ReadCluster(flags->config));
    cluster.clear_storage();  // it may be valid only with flags of the process that is asked
    RETURN_IF_ERROR(Annotate(config::CompleteCluster(&cluster), flags->config));
    ASSIGN_OR_RETURN(flags->health.security, security::Security::Create(cluster.security()));
  }
  absl::Status status = launcher::CheckHealth(flags->health);
  if (status.ok()) std::printf("emberd: %s serves\n", flags->health.address.c_str());
  return status;
}

int ExitStatus(const absl::Status& status) {
  if (status.ok()) return 0;
  const std::string message(status.message());
  if (absl::IsInvalidArgument(status) || absl::IsNotFound(status)) {
    std::fprintf(stderr, "emberd: %s\n", message.c_str());
    return kUsage;
  }
  ops::Log(ops::LogLevel::kError, message);
  if (ops::LogsToFile()) std::fprintf(stderr, "emberd: %s\n", message.c_str());
  return kFailure;
}

int Main(int argc, char** argv) {
  RaiseLimitOfFiles();
  // A file that reaches the limit of its size (ulimit -f) is an error like a full disk, and a log
  // that nobody reads any more (`emberd up 2>&1 | head`) is none: neither ends the process.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  Flags flags;
  CLI::App app("emberd, a sparse embedding parameter server", "emberd");
  app.set_version_flag("--version", "emberd " EMBERD_VERSION);
  app.require_subcommand(1);
  AddUp(&app, &flags);
  AddServer(&app, "coordinator", "Serve the public API in front of the shards of a cluster",
            &flags);
  AddServer(&app, "shard", "Hold the rows of one shard of a cluster", &flags);
  AddHealth(&app, &flags);
  AddToken(&app, &flags);
  app.add_subcommand("metrics", "Print the reference of all metrics, in Markdown");
  RefuseEmpty(&app);
  app.footer(
      "'emberd COMMAND --help' explains a command.\n"
      "Exit status: 0 stopped as asked, 1 could not start or save, or died, 2 wrong flags or "
      "configuration.");
  try {
    ParseArguments(&app, argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // help, or the version
    std::fprintf(stderr, "emberd: %s\n", CommandLineError(app, error).c_str());
    return kUsage;
  }
  if (app.got_subcommand("up")) return ExitStatus(RunUp(flags));
  if (app.got_subcommand("shard")) return ExitStatus(RunServer(flags, launcher::Role::kShard));
  if (app.got_subcommand("coordinator")) {
    return ExitStatus(RunServer(flags, launcher::Role::kCoordinator));
  }
  if (app.got_subcommand("token")) return ExitStatus(RunToken(flags));
  if (app.got_subcommand("health")) return ExitStatus(RunHealth(&flags));
  if (std::fputs(ops::MetricReference().c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return 0;
  return ExitStatus(absl::ErrnoToStatus(errno, "the metrics cannot be printed"));
}

}  // namespace
}  // namespace emberd

int main(int argc, char** argv) { return emberd::Main(argc, argv); }
