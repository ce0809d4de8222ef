#include "server/launcher/verbs.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <google/protobuf/empty.pb.h>
#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "base/file_descriptor.h"
#include "base/local_server.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "config/config.h"
#include "server/launcher/files.h"
#include "server/rpc/wire.h"

namespace emberd::launcher {
namespace {

// On the wire, a HealthCheckRequest about the server as a whole is empty, and a HealthCheckResponse
// is one number in field 1.
using HealthStub =
    grpc::TemplatedGenericStub<google::protobuf::Empty, google::protobuf::Int32Value>;
constexpr int kServing = 1;

std::shared_ptr<grpc::Channel> Connect(const HealthOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options.security != nullptr) return options.security->Connect(options.address, arguments);
  return grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(), arguments);
}

constexpr size_t kTokenBytes = 32;

// Where the symbolic link `path` leads, be something there or not; any other path as it is.
std::string Target(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the system has it; reading the file says what is wrong
  std::filesystem::path target = path;
  std::error_code error;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(target, error); ++i) {
    target = target.parent_path() / std::filesystem::read_symlink(target, error);
  }
  return target.string();
}

// The right to change a file, which one process has at a time: a lock of FILE.lock, which is
// removed in the end. One that a killed process has left is as good as a new one.
class ChangeLock {
 public:
  static absl::StatusOr<ChangeLock> Take(const std::string& file) {
    std::string path = file + ".lock";
    while (true) {
      FileDescriptor lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
      if (lock.get() < 0) {
        return absl::ErrnoToStatus(errno,
                                   absl::StrCat(file, ": its lock ", path, " cannot be opened"));
      }
      while (flock(lock.get(), LOCK_EX) != 0) {
        if (errno == EINTR) continue;
        return absl::ErrnoToStatus(errno,
                                   absl::StrCat(file, ": its lock ", path, " cannot be taken"));
      }
      // Whoever had it before may have removed it.
      struct stat mine, there;
      if (fstat(lock.get(), &mine) == 0 && stat(path.c_str(), &there) == 0 &&
          mine.st_dev == there.st_dev && mine.st_ino == there.st_ino) {
        return ChangeLock(std::move(path), std::move(lock));
      }
    }
  }
  ~ChangeLock() {
    if (lock_.get() >= 0) unlink(path_.c_str());
  }
  ChangeLock(ChangeLock&&) = default;

 private:
  ChangeLock(std::string path, FileDescriptor lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  FileDescriptor lock_;
};

// As config/ tells the formats apart: comments may stand before the bracket.
bool IsJson(absl::string_view text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripLeadingAsciiWhitespace(line);
    if (!line.empty() && line[0] != '#') return line[0] == '{';
  }
  return false;
}

// What stands in the file; empty if there is none.
absl::StatusOr<std::string> OldText(const std::string& path) {
  const absl::StatusOr<std::string> text = config::ReadFile(path);
  if (absl::IsNotFound(text.status()) || (text.ok() && text->empty())) return "";
  RETURN_IF_ERROR(Annotate(text.status(), path));
  RETURN_IF_ERROR(Annotate(config::ParseTokenFile(*text).status(), path));
  if (IsJson(*text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": tokens can be added to text protos, not to JSON"));
  }
  return text;
}

}  // namespace

absl::Status CheckHealth(const HealthOptions& options) {
  const auto address = config::ParseAddress(options.address);
  if (!address.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--address: \"", options.address, "\": ", address.status().message()));
  }
  HealthStub stub(Connect(options));
  grpc::ClientContext context;
  context.set_deadline(ToSystemTime(SteadyNow() + options.timeout));
  const google::protobuf::Empty request;
  google::protobuf::Int32Value response;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &response,
                 [&](grpc::Status answered) {
                   status = std::move(answered);
                   done.Notify();
                 });
  done.WaitForNotification();
  if (status.error_code() == grpc::UNAVAILABLE) {
    return absl::UnavailableError(absl::StrCat(
        options.address, ": ", status.error_message(),
        ". Is the process running, is this its gRPC address, and does its description ask for TLS "
        "(--config)?"));
  }
  if (!status.ok()) return Annotate(rpc::FromGrpcStatus(status), options.address);
  if (response.value() != kServing) {
    return absl::UnavailableError(absl::StrCat(options.address, ": it does not serve (status ",
                                               response.value(), "); is it draining?"));
  }
  return absl::OkStatus();
}

absl::Status MakeToken(const NewToken& token,
                       absl::FunctionRef<absl::Status(const std::string& secret)> keep) {
  const std::string target = Target(token.file);
  ASSIGN_OR_RETURN(const ChangeLock lock, ChangeLock::Take(target));
  ASSIGN_OR_RETURN(std::string text, OldText(token.file));
  ASSIGN_OR_RETURN(const std::string random, RandomBytes(kTokenBytes));
  const std::string secret = absl::WebSafeBase64Escape(random);
  if (!text.empty() && text.back() != '\n') text.push_back('\n');
  absl::StrAppend(&text, "tokens { name: \"", absl::CEscape(token.name),
                  "\" role: ", v1::Token::Role_Name(token.role), " sha256: \"", Sha256Hex(secret),
                  "\" }\n");
  // The whole file as processes will read it.
  RETURN_IF_ERROR(Annotate(config::ParseTokenFile(text).status(), token.file));
  RETURN_IF_ERROR(keep(secret));
  return WriteFileAtomically(target, text);
}

}  // namespace emberd::launcher
