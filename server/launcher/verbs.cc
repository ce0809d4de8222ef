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

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/file_descriptor.h"
#include "base/local_server.h"
#include "base/rpc/wire.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "config/config.h"
#include "server/launcher/files.h"

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

// The right to change files of a folder, which one process has at a time. Leaves no file there,
// which another user's call could not open.
absl::StatusOr<FileDescriptor> LockFolderOf(const std::filesystem::path& file,
                                            absl::Duration patience) {
  const std::string folder = file.parent_path();
  const absl::Time give_up = SteadyNow() + patience;
  FileDescriptor lock(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock.get() < 0) return absl::ErrnoToStatus(errno, "folder '" + folder + "' cannot be opened");
  while (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK ? SteadyNow() >= give_up : errno != EINTR) {
      return absl::ErrnoToStatus(
          errno, absl::StrCat(folder,
                              ": cannot be locked; if another process keeps it locked, as "
                              "emberd does with its temporary folders, name a file elsewhere"));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  return lock;
}

// What stands in the file; empty if there is none.
absl::StatusOr<std::string> OldText(const std::string& path) {
  const absl::StatusOr<std::string> text = config::ReadFile(path);
  if (absl::IsNotFound(text.status()) || (text.ok() && text->empty())) return "";
  RETURN_IF_ERROR(Annotate(text.status(), path));
  RETURN_IF_ERROR(Annotate(config::ParseTokenFile(*text).status(), path));
  if (config::IsJson(*text)) {
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
  std::error_code error;  // opening what is there says what is wrong
  const auto target =
      std::filesystem::weakly_canonical(std::filesystem::absolute(token.file, error), error);
  ASSIGN_OR_RETURN(const FileDescriptor lock, LockFolderOf(target, token.patience));
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
