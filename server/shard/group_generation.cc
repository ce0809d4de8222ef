#include "server/shard/group_generation.h"

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"

namespace emberd::server {

uint64_t GroupGeneration::Newest() const {
  if (number_ > 0 && Mistake("generation.reused")) return number_ - 1;
  return number_;
}

bool GroupGeneration::Is(uint64_t number, uint64_t opener) const {
  return number == number_ && (opener == opener_ || Mistake("generation.reused"));
}

absl::Status GroupGeneration::Open(uint64_t number, uint64_t opener) {
  if (number < number_) {
    return absl::AbortedError(
        absl::StrCat("generation ", number, " is over; the group is in generation ", number_));
  }
  if (number == number_ && !Is(number, opener)) {
    return absl::AbortedError(
        absl::StrCat("generation ", number, " was opened by another member; join again"));
  }
  number_ = number;
  opener_ = opener;
  return absl::OkStatus();
}

}  // namespace emberd::server
