#include "client/cpp/transport.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <google/protobuf/descriptor.h>
#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/cleanup/cleanup.h"
#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/cpp/coordinator.h"
#include "config/address.h"
#include "config/credentials.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::client {
namespace {

// How long a channel that cannot connect may take to say why.
constexpr absl::Duration kReasonPatience = absl::Milliseconds(500);

// How long a coordinator may leave a connection unanswered before the next one is tried: while a
// client connects, for one that is only busy is to keep its trainers; and later, by a call.
constexpr absl::Duration kFirstSilence = absl::Seconds(5);
constexpr absl::Duration kSilence = absl::Seconds(1);

// How often files of certificates and tokens are looked at, at most.
constexpr absl::Duration kLookEvery = absl::Seconds(1);

// Of one client, to one coordinator.
constexpr int kMaxLanes = 32;
// A small lookup takes about as long as it takes to wake who waits for it.
constexpr absl::Duration kWatch = absl::Microseconds(200);

// Whether a connection is there by `until`; false as soon as it is refused.
bool Connects(grpc::Channel& channel, absl::Time until) {
  grpc_connectivity_state state;
  do {
    state = channel.GetState(/*try_to_connect=*/true);
  } while (state != GRPC_CHANNEL_READY && state != GRPC_CHANNEL_TRANSIENT_FAILURE &&
           channel.WaitForStateChange(state, ToSystemTime(until)));
  return state == GRPC_CHANNEL_READY;
}

grpc::ChannelArguments MakeArguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments = rpc::ConnectionArguments();
  // gRPC pauses by itself between attempts to connect, and fails calls meanwhile. These pauses stay
  // short, so that ours decide how soon a server that is back gets to be used.
  const int pause = static_cast<int>(absl::ToInt64Milliseconds(options.initial_backoff));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, pause);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, pause);
  if (options.tls.has_value() && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  return arguments;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& tls) {
  ASSIGN_OR_RETURN(const config::PemFiles files,
                   config::LoadPemFiles({.certificate_field = "ClientOptions.tls.certificate_file",
                                         .certificate_file = tls.certificate_file,
                                         .key_field = "ClientOptions.tls.key_file",
                                         .key_file = tls.key_file,
                                         .ca_field = "ClientOptions.tls.ca_file",
                                         .ca_file = tls.ca_file}));
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = files.ca;
  options.pem_private_key = files.key;
  options.pem_cert_chain = files.certificate;
  return grpc::SslCredentials(options);
}

// Whoever listens on the way reads a token that travels in plain text.
absl::Status CheckPrivate(const ClientOptions& options) {
  if (options.tls.has_value()) return absl::OkStatus();
  for (const std::string& text : options.addresses) {
    const absl::StatusOr<config::Address> address = config::ParseAddress(text);
    if (address.ok() && address->is_loopback()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("ClientOptions.token: \"", text,
                     "\" is not on the loopback interface, where the token would travel in plain "
                     "text; ClientOptions.tls is needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Token(const ClientOptions& options) {
  if (!options.token_file.empty()) {
    return config::LoadToken("ClientOptions.token_file", options.token_file);
  }
  if (!options.token.empty()) {
    RETURN_IF_ERROR(config::CheckToken("ClientOptions.token", options.token));
  }
  return options.token;
}

}  // namespace

absl::StatusOr<Credentials> LoadCredentials(const ClientOptions& options) {
  Credentials credentials{.channel = grpc::InsecureChannelCredentials(), .authorization = ""};
  if (options.tls.has_value()) {
    ASSIGN_OR_RETURN(credentials.channel, ChannelCredentials(*options.tls));
  }
  ASSIGN_OR_RETURN(const std::string token, Token(options));
  if (token.empty()) return credentials;
  RETURN_IF_ERROR(CheckPrivate(options));
  credentials.authorization = absl::StrCat("Bearer ", token);
  return credentials;
}

void LimitGrpcLog() {
  static const bool limited = [] {
    if (std::getenv("GRPC_VERBOSITY") != nullptr) return false;
    gpr_set_log_function([](gpr_log_func_args* args) {
      static std::atomic<int64_t> next_second = 0;
      const int64_t now = absl::ToUnixSeconds(SteadyNow());
      int64_t due = next_second;
      if (now < due || !next_second.compare_exchange_strong(due, now + 60)) return;
      std::fprintf(stderr, "emberd: %s\n", args->message);
    });
    return true;
  }();
  static_cast<void>(limited);
}

Transport::FileMarks::FileMarks(const ClientOptions& options)
    : token(config::FileMarks({options.token_file})) {
  if (!options.tls.has_value()) return;
  tls = config::FileMarks(
      {options.tls->ca_file, options.tls->certificate_file, options.tls->key_file});
}

grpc::Status Coordinator::Call(const char* method, const google::protobuf::MessageLite& request,
                               grpc::ClientContext* context,
                               google::protobuf::MessageLite* response) const {
  using google::protobuf::MessageLite;
  return grpc::internal::BlockingUnaryCall<MessageLite, MessageLite>(
      channel.get(), {method, grpc::internal::RpcMethod::NORMAL_RPC}, context, request, response);
}

std::string MethodOf(const google::protobuf::Message& request) {
  const google::protobuf::Descriptor* const type = request.GetDescriptor();
  for (int s = 0; s < type->file()->service_count(); ++s) {
    const google::protobuf::ServiceDescriptor* const service = type->file()->service(s);
    for (int m = 0; m < service->method_count(); ++m) {
      if (service->method(m)->input_type() != type) continue;
      return absl::StrCat("/", service->full_name(), "/", service->method(m)->name());
    }
  }
  return "";
}

absl::StatusOr<v1::CheckpointProgress> RunWithProgress(
    Transport* transport, const google::protobuf::Message& request, absl::Duration deadline,
    absl::FunctionRef<void(const v1::CheckpointProgress&)> progress) {
  v1::CheckpointProgress last;
  grpc::Status end;  // of a call that had begun to answer
  RETURN_IF_ERROR(transport->Call(
      {deadline}, [&](const Coordinator& coordinator, grpc::ClientContext* context) {
        const auto reader = coordinator.Read<v1::CheckpointProgress>(request, context);
        bool begun = false;
        while (reader->Read(&last)) {
          begun = true;
          if (!last.done()) progress(last);
        }
        const grpc::Status status = reader->Finish();
        if (!begun) return status;
        end = status;
        return grpc::Status::OK;
      }));
  if (!end.ok()) return rpc::FromGrpcStatus(end);
  if (!last.done()) return absl::InternalError("the server ended the call without a result");
  return last;
}

absl::Duration BackoffPause(const ClientOptions& options, int attempt, double random) {
  const absl::Duration pause =
      std::min(options.initial_backoff * std::pow(2.0, attempt - 1), options.max_backoff);
  return pause * (1 + options.jitter * (2 * random - 1));
}

absl::StatusOr<std::unique_ptr<Transport>> Transport::Connect(const ClientOptions& options) {
  FileMarks marks(options);
  ASSIGN_OR_RETURN(const Credentials credentials, LoadCredentials(options));
  std::unique_ptr<Transport> transport(new Transport(options, credentials, std::move(marks)));
  RETURN_IF_ERROR(transport->WaitForConnection());
  return transport;
}

Transport::Transport(const ClientOptions& options, const Credentials& credentials, FileMarks marks)
    : options_(options), marks_(std::move(marks)), authorization_(credentials.authorization) {
  for (size_t i = 0; i < options_.addresses.size(); ++i) {
    coordinators_.push_back(MakeCoordinator(static_cast<int>(i), credentials, /*before=*/nullptr));
  }
}

std::shared_ptr<const Coordinator> Transport::MakeCoordinator(int index,
                                                              const Credentials& credentials,
                                                              const Coordinator* before) {
  const std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
      options_.addresses[index], credentials.channel, MakeArguments(options_));
  auto made = std::make_shared<Coordinator>();
  made->channel = channel;
  if (before != nullptr) {
    made->memory = before->memory;
    made->lanes = before->lanes;
    return made;
  }
  const TransportKind kind = options_.ChosenTransport().value_or(TransportKind::kAuto);
  if (kind == TransportKind::kTcp) return made;
  made->memory = std::make_shared<SharedMemory>(
      kind, [this, index](absl::Time deadline) { return AskForInvitation(index, deadline); });
  made->lanes = std::make_shared<LanePool>(
      kMaxLanes, [this, index](absl::Time deadline) { return AskForInvitation(index, deadline); },
      kWatch);
  return made;
}

std::shared_ptr<const Coordinator> Transport::At(int coordinator) {
  if (files_mutex_.TryLock()) {  // else somebody looks already
    RenewCredentials();
    files_mutex_.Unlock();
  }
  absl::MutexLock lock(&mutex_);
  return coordinators_[coordinator];
}

void Transport::RenewCredentials() {
  const absl::Time now = SteadyNow();
  if (now < next_look_) return;
  next_look_ = now + kLookEvery;
  FileMarks marks(options_);
  if (marks == marks_) return;
  const absl::StatusOr<Credentials> read = LoadCredentials(options_);
  if (!read.ok()) {  // they are read again at the next look
    if (now < next_complaint_) return;
    next_complaint_ = now + absl::Minutes(1);
    return gpr_log(GPR_ERROR,
                   "emberd: certificates or tokens cannot be read: the old ones stay in use: %s",
                   std::string(read.status().message()).c_str());
  }
  const bool other_channels = marks.tls != marks_.tls;
  marks_ = std::move(marks);
  absl::MutexLock lock(&mutex_);
  authorization_ = read->authorization;
  for (size_t i = 0; other_channels && i < coordinators_.size(); ++i) {
    coordinators_[i] = MakeCoordinator(static_cast<int>(i), *read, coordinators_[i].get());
  }
}

std::string Transport::authorization() const {
  absl::MutexLock lock(&mutex_);
  return authorization_;
}

absl::StatusOr<LocalInvitation> Transport::AskForInvitation(int coordinator, absl::Time deadline) {
  const std::shared_ptr<const Coordinator> to = At(coordinator);
  grpc::ClientContext context;
  context.set_deadline(ToSystemTime(deadline));
  Authorize(&context);
  v1::ShareMemoryResponse response;
  const grpc::Status status = to->Call("/emberd.v1.EmbeddingService/ShareMemory",
                                       v1::ShareMemoryRequest(), &context, &response);
  if (!status.ok()) return rpc::FromGrpcStatus(status);
  return LocalInvitation{response.socket(), response.ticket()};
}

absl::Status Transport::WaitForConnection() {
  const absl::Time deadline = SteadyNow() + options_.connect_timeout;
  // At first a coordinator is left for the next one when it refuses, or is silent for a while. Then
  // each gets as long as a pause would be; all of them go on connecting meanwhile.
  const absl::Duration silence =
      std::min(kFirstSilence,
               options_.connect_timeout / static_cast<int64_t>(options_.addresses.size() + 1));
  for (int round = 0; SteadyNow() < deadline; ++round) {
    const absl::Duration patience = round == 0 ? silence : BackoffPause(options_, round, 0.5);
    for (size_t i = 0; i < options_.addresses.size(); ++i) {
      const absl::Time until = std::min(SteadyNow() + patience, deadline);
      grpc::Channel& to = *channel(static_cast<int>(i));
      if (round == 0 ? Connects(to, until) : to.WaitForConnected(ToSystemTime(until))) {
        current_ = static_cast<int>(i);
        return absl::OkStatus();
      }
    }
  }
  return ConnectionError();
}

absl::Status Transport::ConnectionError() {
  std::string reasons;
  for (size_t i = 0; i < options_.addresses.size(); ++i) {
    const std::shared_ptr<const Coordinator> to = At(static_cast<int>(i));
    // A call on a broken connection ends with the reason, where a certificate may be the matter.
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(SteadyNow() + kReasonPatience));
    Authorize(&context);
    v1::GetStatusResponse response;
    const grpc::Status status =
        to->Call("/emberd.v1.AdminService/GetStatus", v1::GetStatusRequest(), &context, &response);
    absl::StrAppend(&reasons, i == 0 ? "" : "; ", options_.addresses[i]);
    if (status.error_code() == grpc::UNAVAILABLE) {
      absl::StrAppend(&reasons, " (", status.error_message(), ")");
    }
  }
  return absl::UnavailableError(absl::StrCat("no coordinator accepted a connection within ",
                                             absl::FormatDuration(options_.connect_timeout),
                                             "; tried: ", reasons));
}

void Transport::Authorize(grpc::ClientContext* context) const {
  const std::string value = authorization();
  if (!value.empty()) context->AddMetadata("authorization", value);
}

absl::Status Transport::Call(const CallSettings& settings, Attempt attempt, int* answered) {
  if (settings.coordinator >= static_cast<int>(options_.addresses.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "of coordinator ", settings.coordinator, ", but this client has ",
        options_.addresses.size(), " addresses: it must come from a call of this client"));
  }
  const absl::Duration allowed =
      settings.deadline != absl::ZeroDuration() ? settings.deadline : options_.deadline;
  const absl::Time deadline = SteadyNow() + allowed;
  const uint64_t begun = this->begun();
  for (int tries = 1;; ++tries) {
    const bool any = settings.coordinator < 0;
    int index = any ? current_.load() : settings.coordinator;
    if (answered != nullptr) *answered = index;
    const std::shared_ptr<const Coordinator> coordinator = At(index);
    grpc::ClientContext context;
    context.set_deadline(ToSystemTime(deadline));
    Authorize(&context);
    if (!Register(&context, begun)) return absl::CancelledError("CancelCalls was called");
    // Also where `attempt` throws, as a sink may, and what has no memory for an answer.
    const absl::Cleanup forget = [&] { RemoveCall(&context); };
    // Where there is no connection, nothing has been sent.
    const bool may_try = !settings.once || Connects(*coordinator->channel,
                                                    std::min(SteadyNow() + kSilence, deadline));
    const absl::Status status =
        may_try
            ? rpc::FromGrpcStatus(attempt(*coordinator, &context))
            : absl::UnavailableError(absl::StrCat("no connection to ", options_.addresses[index]));
    if (!absl::IsUnavailable(status)) return status;
    if (settings.once && may_try) {
      return absl::UnavailableError(
          absl::StrCat(status.message(), "; it may have been done: look before you repeat it"));
    }
    if (tries == options_.max_attempts) return status;
    // Whoever saw this coordinator fail moves on; others may have done so already.
    if (any) {
      MoveOn(index);
      index = current_.load();
    }
    const absl::Duration pause =
        BackoffPause(options_, tries, absl::Uniform(absl::BitGen(), 0.0, 1.0));
    // What the server said helps more than DEADLINE_EXCEEDED a little later.
    if (SteadyNow() + pause >= deadline) return status;
    if (!Pause(*channel(index), pause, begun)) {
      return absl::CancelledError("CancelCalls was called");
    }
  }
}

absl::Status Transport::CallUnary(const google::protobuf::Message& request,
                                  const CallSettings& settings, google::protobuf::Message* response,
                                  int* answered) {
  const std::string method = MethodOf(request);
  // A second one could drop what somebody has declared, trained or saved meanwhile.
  CallSettings checked = settings;
  for (const char* harmful : {"/DropModel", "/ResetModel", "/DropGroup", "/DeleteCheckpoint"}) {
    checked.once = checked.once || absl::EndsWith(method, harmful);
  }
  return Call(
      checked,
      [&](const Coordinator& coordinator, grpc::ClientContext* context) {
        return coordinator.Call(method.c_str(), request, context, response);
      },
      answered);
}

std::optional<grpc::Status> Transport::CallOnLane(const Coordinator& coordinator,
                                                  v1::LaneMethod method,
                                                  const google::protobuf::MessageLite& request,
                                                  grpc::ClientContext* context,
                                                  google::protobuf::MessageLite* response) {
  if (coordinator.lanes == nullptr) return std::nullopt;
  const absl::Time deadline = FromSystemTime(context->deadline());
  const std::string authorization = this->authorization();
  const std::string body = request.SerializeAsString();
  const auto call = coordinator.lanes->Send({.method = static_cast<uint32_t>(method),
                                             .patience = deadline - SteadyNow(),
                                             .authorization = authorization,
                                             .body = body});
  if (call == nullptr) return std::nullopt;
  {
    absl::MutexLock lock(&mutex_);
    Progress& progress = in_progress_[context];
    progress.on_lane = call.get();
    if (progress.cancelled) call->Cancel();
  }
  const absl::Cleanup leave = [&] {
    absl::MutexLock lock(&mutex_);
    in_progress_[context].on_lane = nullptr;
  };
  const std::optional<lanes::Answer> answer = call->Receive(deadline);
  if (!answer.has_value()) return std::nullopt;
  if (!answer->status.ok()) return rpc::ToGrpcStatus(answer->status);
  if (!response->ParseFromArray(answer->body.data(), static_cast<int>(answer->body.size()))) {
    return grpc::Status(grpc::INTERNAL, "the answer of the coordinator cannot be read");
  }
  return grpc::Status::OK;
}

void Transport::CancelCalls() {
  absl::MutexLock lock(&mutex_);
  ++cancellations_;
  for (auto& [context, progress] : in_progress_) {
    context->TryCancel();
    progress.cancelled = true;
    if (progress.on_lane != nullptr) progress.on_lane->Cancel();
  }
}

bool Transport::Register(grpc::ClientContext* context, uint64_t begun) {
  absl::MutexLock lock(&mutex_);
  if (cancellations_ != begun) return false;
  in_progress_[context] = {};
  return true;
}

void Transport::AddCall(grpc::ClientContext* context, uint64_t begun) {
  if (!Register(context, begun)) context->TryCancel();
}

void Transport::RemoveCall(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  in_progress_.erase(context);
}

std::shared_ptr<grpc::Channel> Transport::channel(int coordinator) {
  return At(coordinator)->channel;
}

SharedMemory* Transport::memory(int coordinator) const {
  absl::MutexLock lock(&mutex_);
  return coordinators_[coordinator]->memory.get();
}

void Transport::MoveOn(int index) {
  current_.compare_exchange_strong(index,
                                   (index + 1) % static_cast<int>(options_.addresses.size()));
}

bool Transport::Pause(grpc::Channel& channel, absl::Duration pause, uint64_t begun) {
  constexpr absl::Duration kTurn = absl::Milliseconds(20);  // to hear of a cancellation
  const bool connected = channel.GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY;
  const absl::Time end = SteadyNow() + pause;
  for (absl::Time now = SteadyNow(); now < end; now = SteadyNow()) {
    const absl::Time until = std::min(now + kTurn, end);
    if (connected) absl::SleepFor(until - now);
    // gRPC works on a connection only while somebody waits for it.
    if (!connected && channel.WaitForConnected(ToSystemTime(until))) break;
    if (cancellations_ != begun) return false;
  }
  return true;
}

}  // namespace emberd::client
