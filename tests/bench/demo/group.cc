#include "tests/bench/demo/group.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"

namespace emberd::demo {
namespace {

constexpr int64_t kPrintedExamples = 32'768;  // that a printed line is about
constexpr absl::Duration kPrintEvery = absl::Seconds(5);

void Put(const std::vector<float>& values, std::string* bytes) {
  const int64_t count = static_cast<int64_t>(values.size());
  bytes->append(reinterpret_cast<const char*>(&count), sizeof(count));
  bytes->append(reinterpret_cast<const char*>(values.data()), count * sizeof(float));
}

template <typename Number>
void Put(Number value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Each takes a value off the front of *bytes; false if there are too few of them.
template <typename Number>
bool Take(std::string_view* bytes, Number* value) {
  if (bytes->size() < sizeof(Number)) return false;
  std::memcpy(value, bytes->data(), sizeof(Number));
  bytes->remove_prefix(sizeof(Number));
  return true;
}

bool Take(std::string_view* bytes, std::vector<float>* values) {
  int64_t count = 0;
  if (!Take(bytes, &count)) return false;
  if (count < 0 || static_cast<uint64_t>(count) > bytes->size() / sizeof(float)) return false;
  values->resize(count);
  if (count > 0) std::memcpy(values->data(), bytes->data(), count * sizeof(float));
  bytes->remove_prefix(count * sizeof(float));
  return true;
}

struct FrameHead {
  uint32_t kind;
  uint32_t size;
};

absl::Status SendAll(int socket, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, data, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return absl::UnavailableError(absl::StrCat("send: ", std::strerror(errno)));
    data += sent;
    size -= sent;
  }
  return absl::OkStatus();
}

}  // namespace

SoloGroup::SoloGroup() : metrics_(kPrintedExamples), start_(absl::Now()), last_print_(start_) {}

absl::StatusOr<GradientSum> SoloGroup::Reduce(const Contribution& contribution) {
  metrics_.Add(contribution.logits, contribution.labels);
  examples_ += contribution.examples;
  return GradientSum{contribution.examples, contribution.gradient};
}

absl::Status SoloGroup::Finish(const RoundReport&) {
  if (absl::Now() - last_print_ < kPrintEvery) return absl::OkStatus();
  last_print_ = absl::Now();
  Print();
  return absl::OkStatus();
}

void SoloGroup::Report(const std::string& message) {
  std::fprintf(stderr, "trainer %s\n", message.c_str());
}

void SoloGroup::Print() const {
  std::printf(
      "%lld examples, %.0f examples/s, loss %.4f, AUC %.4f (of the latest, before learning from "
      "them)\n",
      static_cast<long long>(examples_),
      static_cast<double>(examples_) / absl::ToDoubleSeconds(absl::Now() - start_),
      metrics_.log_loss(), metrics_.auc());
  std::fflush(stdout);
}

absl::Status SendFrame(int socket, uint32_t kind, std::string_view payload) {
  const FrameHead head{kind, static_cast<uint32_t>(payload.size())};
  RETURN_IF_ERROR(SendAll(socket, reinterpret_cast<const char*>(&head), sizeof(head)));
  return SendAll(socket, payload.data(), payload.size());
}

absl::Status FrameReader::Read(int flags) {
  char buffer[1 << 16];
  while (true) {
    const ssize_t received = recv(socket_, buffer, sizeof(buffer), flags);
    if (received > 0) {
      bytes_.append(buffer, received);
      return absl::OkStatus();
    }
    if (received == 0) return absl::UnavailableError("the other end is gone");
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("recv: ", std::strerror(errno)));
  }
}

absl::StatusOr<Frame> FrameReader::Receive() {
  while (true) {
    if (std::optional<Frame> frame = Next()) return *std::move(frame);
    RETURN_IF_ERROR(Read(0));
  }
}

absl::Status FrameReader::Poll() { return Read(MSG_DONTWAIT); }

std::optional<Frame> FrameReader::Next() {
  FrameHead head;
  if (bytes_.size() < sizeof(head)) return std::nullopt;
  std::memcpy(&head, bytes_.data(), sizeof(head));
  if (bytes_.size() - sizeof(head) < head.size) return std::nullopt;
  Frame frame{head.kind, bytes_.substr(sizeof(head), head.size)};
  bytes_.erase(0, sizeof(head) + head.size);
  return frame;
}

template <typename Message>
std::string Encode(const Message& message) {
  std::string bytes;
  std::apply([&bytes](const auto&... field) { (Put(field, &bytes), ...); },
             Message::Fields(message));
  return bytes;
}

template <typename Message>
bool Decode(std::string_view bytes, Message* message) {
  const bool complete =
      std::apply([&bytes](auto&... field) { return (Take(&bytes, &field) && ...); },
                 Message::Fields(*message));
  return complete && bytes.empty();
}

template std::string Encode(const Contribution&);
template std::string Encode(const GradientSum&);
template std::string Encode(const RoundReport&);
template std::string Encode(const Position&);
template std::string Encode(const Departure&);
template bool Decode(std::string_view, Contribution*);
template bool Decode(std::string_view, GradientSum*);
template bool Decode(std::string_view, RoundReport*);
template bool Decode(std::string_view, Position*);
template bool Decode(std::string_view, Departure*);

absl::StatusOr<std::string> SocketGroup::Expect(uint32_t kind) {
  ASSIGN_OR_RETURN(Frame frame, reader_.Receive());
  if (frame.kind == kind) return std::move(frame.payload);
  if (frame.kind == Frame::kJoinAnew) return absl::AbortedError("another trainer joins anew");
  return absl::InternalError(absl::StrCat("frame of kind ", frame.kind, " instead of ", kind));
}

absl::StatusOr<Position> SocketGroup::Begin() {
  ASSIGN_OR_RETURN(const std::string answer, Expect(Frame::kPosition));
  Position position;
  if (!Decode(answer, &position)) return absl::InternalError("malformed position");
  return position;
}

absl::StatusOr<GradientSum> SocketGroup::Reduce(const Contribution& contribution) {
  RETURN_IF_ERROR(SendFrame(socket_, Frame::kContribution, Encode(contribution)));
  ASSIGN_OR_RETURN(const std::string answer, Expect(Frame::kSum));
  GradientSum sum;
  if (!Decode(answer, &sum)) return absl::InternalError("malformed sum of gradients");
  return sum;
}

absl::Status SocketGroup::Finish(const RoundReport& report) {
  RETURN_IF_ERROR(SendFrame(socket_, Frame::kApplied, Encode(report)));
  return Expect(Frame::kNextRound).status();
}

// If nobody listens any more, the next call of the round says so.
void SocketGroup::Leave(const Departure& departure) {
  SendFrame(socket_, Frame::kLeave, Encode(departure)).IgnoreError();
}

void SocketGroup::Report(const std::string& message) {
  SendFrame(socket_, Frame::kReport, message).IgnoreError();
}

}  // namespace emberd::demo
