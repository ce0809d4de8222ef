// Packets of lanes: the whole input as a request and as an answer. Catches: a packet that is read
// beyond its end, and one that is taken for a call although it is none, so that what comes back is
// not what was sent.
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "base/lanes.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace lane_fuzz {

using fuzz::Require;

bool IsInside(absl::string_view piece, absl::string_view packet) {
  return piece.empty() || (piece.data() >= packet.data() &&
                           piece.data() + piece.size() <= packet.data() + packet.size());
}

template <typename Message>
std::string Encode(const Message& message) {
  std::string head;
  Require(lanes::EncodeHead(message, &head), "what came in a packet fits in one");
  return head.append(message.body.data(), message.body.size());
}

void TryRequest(absl::string_view packet) {
  const std::optional<lanes::Request> request = lanes::DecodeRequest(packet);
  if (!request.has_value()) return;
  fuzz::accepted = true;
  for (const absl::string_view piece : {request->authorization, request->trace, request->body}) {
    Require(IsInside(piece, packet), "a request lies in its packet");
  }
  Require(Encode(*request) == packet, "a request is encoded as it came");
}

void TryAnswer(absl::string_view packet) {
  const std::optional<lanes::Answer> answer = lanes::DecodeAnswer(packet);
  if (!answer.has_value()) return;
  fuzz::accepted = true;
  Require(IsInside(answer->body, packet), "an answer lies in its packet");
  Require(answer->status.ok() || answer->body.empty(), "an error has no answer");
  // Of a longer message the rest is cut off.
  if (answer->status.message().size() > lanes::kMaxPacketBytes / 2) return;
  Require(Encode(*answer) == packet, "an answer is encoded as it came");
}

EMBERD_FUZZ_TARGET(lane, data, size) {
  const absl::string_view packet(reinterpret_cast<const char*>(data), size);
  TryRequest(packet);
  TryAnswer(packet);
  return 0;
}

}  // namespace lane_fuzz
}  // namespace emberd
