#include "config/slot_values.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace emberd::config {
namespace {

// Averages and sums of gradients. Every other slot is a sum of squares or a count.
constexpr absl::string_view kSigned[] = {"linear", "momentum", "mu"};

}  // namespace

absl::Status CheckSlotValues(const std::string& table, const std::string& slot,
                             absl::Span<const int64_t> ids, absl::Span<const float> values) {
  const bool any =
      slot.empty() || std::find(std::begin(kSigned), std::end(kSigned), slot) != std::end(kSigned);
  if (any) return absl::OkStatus();
  const auto bad =
      std::find_if(values.begin(), values.end(), [](float value) { return value < 0; });
  if (bad == values.end()) return absl::OkStatus();
  const size_t columns = values.size() / ids.size();
  const size_t place = bad - values.begin();
  return absl::InvalidArgumentError(absl::StrCat(
      "slot '", slot, "' of table '", table, "' would be ", *bad, " for id ", ids[place / columns],
      ", column ", place % columns, "; its values must be at least 0"));
}

}  // namespace emberd::config
