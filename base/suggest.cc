#include "base/suggest.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace emberd {
namespace {

constexpr size_t kMaxListed = 40;
constexpr size_t kMaxLength = 128;  // longer texts are no misspelt names

// Letters to insert, remove, replace, or swap with their neighbour, to get from one to the other.
size_t Distance(absl::string_view a, absl::string_view b) {
  std::vector<std::vector<size_t>> edits(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) edits[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) edits[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = edits[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
      }
    }
  }
  return edits[a.size()][b.size()];
}

}  // namespace

std::string NearestName(absl::string_view text, const std::vector<std::string>& names) {
  if (text.empty() || text.size() > kMaxLength) return "";
  const std::string wanted = absl::AsciiStrToLower(text);
  std::string nearest;
  size_t least = std::max<size_t>(1, text.size() / 3) + 1;
  for (const std::string& name : names) {
    if (name.size() > kMaxLength) continue;
    const std::string known = absl::AsciiStrToLower(name);
    size_t distance = Distance(wanted, known);
    // Half a name is near, too: "vocab" for "vocabulary_size".
    if (wanted.size() >= 3 && known.find(wanted) == 0) distance = std::min<size_t>(distance, 1);
    if (distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

std::string KnownNames(absl::string_view plural, absl::string_view text,
                       const std::vector<std::string>& names) {
  if (names.empty()) return absl::StrCat("there are no ", plural);
  const std::string nearest = NearestName(text, names);
  const size_t listed = std::min(names.size(), kMaxListed);
  const size_t left_out = names.size() - listed;
  return absl::StrCat(
      nearest.empty() ? "known " : absl::StrCat("did you mean \"", nearest, "\"? Known "), plural,
      ": ", absl::StrJoin(names.begin(), names.begin() + static_cast<ptrdiff_t>(listed), ", "),
      left_out > 0 ? absl::StrCat(" and ", left_out, " more") : "");
}

}  // namespace emberd
