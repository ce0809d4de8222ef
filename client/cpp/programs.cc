#include "client/cpp/programs.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>

#include "absl/memory/memory.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/periodic_task.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/options.h"
#include "client/cpp/transport.h"
#include "emberd/v1/program_service.pb.h"

namespace emberd::client {
namespace {

namespace pb = google::protobuf;

constexpr absl::Duration kPeriod = absl::Milliseconds(500);
constexpr absl::Duration kPatience = absl::Seconds(5);
constexpr absl::Duration kLastPatience = absl::Seconds(1);

std::unique_ptr<pb::Message> NewMessage(const pb::Descriptor* type) {
  auto* const factory = pb::MessageFactory::generated_factory();
  return absl::WrapUnique(factory->GetPrototype(type)->New());
}

absl::Status ReadMessage(const std::string& text, pb::Message* message) {
  std::string wrong = "it is no text proto of its message";
  if (text.empty() || text[0] != '{') {
    if (pb::TextFormat::ParseFromString(text, message)) return absl::OkStatus();
  } else {
    const auto read = pb::util::JsonStringToMessage(text, message);
    if (read.ok()) return absl::OkStatus();
    wrong = std::string(read.message());
  }
  return absl::InvalidArgumentError(absl::StrCat("request: ", wrong));
}

// Calls `visit` with each tensor of a message, until one is refused.
absl::Status ForEachTensor(pb::Message* message,
                           const std::function<absl::Status(v1::Tensor*)>& visit) {
  if (auto* tensor = pb::DynamicCastToGenerated<v1::Tensor>(message)) return visit(tensor);
  const pb::Reflection* const parts = message->GetReflection();
  std::vector<const pb::FieldDescriptor*> fields;
  parts->ListFields(*message, &fields);
  for (const pb::FieldDescriptor* field : fields) {
    if (field->message_type() == nullptr || field->is_map()) continue;
    const int count = field->is_repeated() ? parts->FieldSize(*message, field) : 1;
    for (int i = 0; i < count; ++i) {
      RETURN_IF_ERROR(ForEachTensor(field->is_repeated()
                                        ? parts->MutableRepeatedMessage(message, field, i)
                                        : parts->MutableMessage(message, field),
                                    visit));
    }
  }
  return absl::OkStatus();
}

// Says in a request whose it is, and which update.
void Sign(const std::string& client_id, std::atomic<uint64_t>* updates, pb::Message* message) {
  const pb::Reflection* const parts = message->GetReflection();
  const auto find = [&](const char* name) {
    return message->GetDescriptor()->FindFieldByName(name);
  };
  if (const auto* id = find("client_id")) parts->SetString(message, id, client_id);
  if (const auto* sequence = find("sequence")) parts->SetUInt64(message, sequence, ++*updates);
  if (const auto* config = find("config")) {
    Sign(client_id, updates, parts->MutableMessage(message, config));
  }
  const auto* key = find("execution_instance_key");
  if (key != nullptr && !parts->HasField(*message, key)) {
    Sign(client_id, updates, parts->MutableMessage(message, key));
  }
}

// Of an answer and, in turn, its results. 0: nothing is kept.
void AddHandles(const pb::Message& message, std::vector<uint64_t>* handles) {
  const pb::Reflection* const parts = message.GetReflection();
  for (const char* name : {"program_handle", "handle"}) {
    const auto* field = message.GetDescriptor()->FindFieldByName(name);
    if (field != nullptr) handles->push_back(parts->GetUInt64(message, field));
  }
  const auto* results = message.GetDescriptor()->FindFieldByName("results");
  for (int i = 0; results != nullptr && i < parts->FieldSize(message, results); ++i) {
    AddHandles(parts->GetRepeatedMessage(message, results, i), handles);
  }
}

}  // namespace

Programs::Programs(Transport* transport) : transport_(transport), client_id_(RandomUuid()) {}
Programs::~Programs() = default;

void Programs::End() {
  if (task_ == nullptr) return;
  task_ = nullptr;
  Tell(/*end=*/true);
}

KeptPtr Programs::Keep(uint64_t handle, int coordinator) {
  if (handle == 0) return nullptr;
  absl::MutexLock lock(&mutex_);
  ++coordinators_[coordinator].kept;
  if (task_ == nullptr) {
    task_ = std::make_unique<PeriodicTask>(kPeriod, [this] { Tell(/*end=*/false); });
  }
  const auto release = [self = shared_from_this()](const Kept* kept) {
    self->Release(*kept);
    delete kept;
  };
  return KeptPtr(new Kept{handle, coordinator}, release);
}

void Programs::Release(const Kept& kept) {
  absl::MutexLock lock(&mutex_);
  AtCoordinator& at = coordinators_[kept.coordinator];
  --at.kept;
  at.released.push_back(kept.handle);
}

void Programs::Tell(bool end) {
  std::map<int, v1::ReleaseRequest> requests;
  absl::Duration patience = kLastPatience;
  {
    absl::MutexLock lock(&mutex_);
    if (!end) patience = std::min(kPatience, lease_ / 4);
    const bool renew = end || SteadyNow() >= renewed_ + lease_ / 4;
    if (renew) renewed_ = SteadyNow();
    for (auto& [coordinator, at] : coordinators_) {
      if (at.released.empty() && (at.kept == 0 || !renew)) continue;
      v1::ReleaseRequest& request = requests[coordinator];
      request.mutable_handles()->Assign(at.released.begin(), at.released.end());
      request.set_client_id(client_id_);
      if (end) request.set_all_of_client(client_id_);
      at.released.clear();
    }
  }
  // Those that do not answer must not keep the others waiting for longer than leases last.
  const std::vector<std::pair<int, v1::ReleaseRequest>> calls(requests.begin(), requests.end());
  BlockingPool().RunEach(static_cast<int>(calls.size()), [&](int i) {
    const auto& [coordinator, request] = calls[i];
    if (transport_->Call<v1::ReleaseResponse>(request, {patience, coordinator}).ok()) return;
    absl::MutexLock lock(&mutex_);  // to be told again
    auto& released = coordinators_[coordinator].released;
    released.insert(released.end(), request.handles().begin(), request.handles().end());
  });
}

absl::StatusOr<ServiceAnswer> Programs::Call(const std::string& method, const std::string& text,
                                             absl::Span<const std::string_view> tensors,
                                             const Kept* at) {
  const auto* const pool = pb::DescriptorPool::generated_pool();
  const auto* found = pool->FindMethodByName("emberd.v1.ProgramService." + method);
  const bool programs = found != nullptr;
  if (!programs) found = pool->FindMethodByName("emberd.v1.AdminService." + method);
  if (found == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "method: '", method, "' is not allowed; it must be one of AdminService or ProgramService"));
  }
  const std::unique_ptr<pb::Message> request = NewMessage(found->input_type());
  const std::unique_ptr<pb::Message> answer = NewMessage(found->output_type());
  RETURN_IF_ERROR(ReadMessage(text, request.get()));
  RETURN_IF_ERROR(ForEachTensor(request.get(), [&](v1::Tensor* tensor) {
    size_t place = 0;
    if (!absl::SimpleAtoi(tensor->data(), &place) || place >= tensors.size()) {
      return absl::InvalidArgumentError(absl::StrCat("tensors: the data of a tensor is at place '",
                                                     tensor->data(), "'; ", tensors.size(),
                                                     " are given"));
    }
    tensor->set_data(tensors[place].data(), tensors[place].size());
    return absl::OkStatus();
  }));
  if (programs) Sign(client_id_, &updates_, request.get());
  RETURN_IF_ERROR(CheckSize(*request));
  int answered = 0;
  RETURN_IF_ERROR(transport_->CallUnary(
      *request, {.coordinator = at == nullptr ? -1 : at->coordinator}, answer.get(), &answered));

  ServiceAnswer result;
  if (const auto* compiled = pb::DynamicCastToGenerated<v1::CompileResponse>(answer.get())) {
    absl::MutexLock lock(&mutex_);
    lease_ = std::min(lease_, absl::Milliseconds(compiled->lease_ms()));
  }
  std::vector<uint64_t> handles;
  if (programs) AddHandles(*answer, &handles);
  for (const uint64_t handle : handles) result.kept.push_back(Keep(handle, answered));
  RETURN_IF_ERROR(ForEachTensor(answer.get(), [&](v1::Tensor* tensor) {
    result.tensors.push_back(std::move(*tensor->mutable_data()));
    tensor->set_data(absl::StrCat(result.tensors.size() - 1));
    return absl::OkStatus();
  }));
  pb::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = !programs;
  if (pb::util::MessageToJsonString(*answer, &result.json, options).ok()) return result;
  return absl::InternalError(absl::StrCat(method, ": the answer cannot be written as JSON"));
}

}  // namespace emberd::client
