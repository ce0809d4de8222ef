#include "server/rpc/admission.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace emberd::server {

Admission::Admission(const v1::BudgetConfig& budgets)
    : max_bytes_(budgets.in_flight_bytes()),
      max_client_bytes_(budgets.client_in_flight_bytes()),
      max_client_requests_(budgets.client_requests()) {}

absl::StatusOr<Admission::Grant> Admission::Admit(const std::string& client, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto place = clients_.try_emplace(client).first;
  absl::Status status;
  if (place->second.requests >= max_client_requests_) {
    status = absl::ResourceExhaustedError(absl::StrCat(
        "client ", client, " has ", place->second.requests,
        " requests in work already; budgets.client_requests is ", max_client_requests_));
  } else {
    status = TakeBytes(place, bytes);
  }
  if (!status.ok()) {
    if (place->second.requests == 0) clients_.erase(place);
    return status;
  }
  ++place->second.requests;
  ++requests_;
  Grant grant;
  grant.admission_ = this;
  grant.client_ = place;
  grant.bytes_ = bytes;
  return grant;
}

absl::Status Admission::TakeBytes(Clients::iterator client, int64_t bytes) {
  if (bytes_ + bytes > max_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a request of ", bytes, " bytes beside the ", bytes_,
                     " in work; budgets.in_flight_bytes is ", max_bytes_));
  }
  if (client->second.bytes + bytes > max_client_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a request of ", bytes, " bytes beside the ", client->second.bytes, " in work for client ",
        client->first, "; budgets.client_in_flight_bytes is ", max_client_bytes_));
  }
  bytes_ += bytes;
  client->second.bytes += bytes;
  return absl::OkStatus();
}

int64_t Admission::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

int Admission::requests() const {
  absl::MutexLock lock(&mutex_);
  return requests_;
}

Admission::Grant& Admission::Grant::operator=(Grant&& other) noexcept {
  std::swap(admission_, other.admission_);
  std::swap(client_, other.client_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Admission::Grant::~Grant() {
  if (admission_ == nullptr) return;
  absl::MutexLock lock(&admission_->mutex_);
  admission_->bytes_ -= bytes_;
  client_->second.bytes -= bytes_;
  --admission_->requests_;
  if (--client_->second.requests == 0) admission_->clients_.erase(client_);
}

absl::Status Admission::Grant::AddBytes(int64_t bytes) {
  absl::MutexLock lock(&admission_->mutex_);
  absl::Status status = admission_->TakeBytes(client_, bytes);
  if (status.ok()) bytes_ += bytes;
  return status;
}

void Admission::Grant::ReleaseBytes(int64_t bytes) {
  absl::MutexLock lock(&admission_->mutex_);
  admission_->bytes_ -= bytes;
  client_->second.bytes -= bytes;
  bytes_ -= bytes;
}

}  // namespace emberd::server
