// The part of an update as bytes, and back: what the log keeps of it (LogPartHeader in log.proto).
// The entries are those that the engine has arranged, so that they need not be arranged again.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "shard/engine.h"
#include "shard/update/update.h"

namespace emberd::host {

// Points into the part, which must outlive it.
class EncodedPart {
 public:
  explicit EncodedPart(const shard::CheckedPart& part);
  EncodedPart(const EncodedPart&) = delete;
  EncodedPart& operator=(const EncodedPart&) = delete;
  absl::Span<const absl::Span<const char>> pieces() const { return pieces_; }

 private:
  std::string head_;
  std::vector<absl::Span<const char>> pieces_;
};

// Checks all that it reads, but not again that gradients are finite: sums of rows may not be.
// `owner` keeps `bytes`, which begin at a multiple of 4; gradients stay there, entries go to
// buffers of `pool`. INVALID_ARGUMENT: these are not the bytes of a part of this model. NOT_FOUND:
// the engine does not know the model.
absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> DecodePart(
    uint64_t model_id, absl::Span<const char> bytes, std::shared_ptr<const void> owner,
    shard::Engine* engine, BufferPool& pool);

}  // namespace emberd::host
