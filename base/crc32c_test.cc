#include "base/crc32c.h"

#include <string>

#include <gtest/gtest.h>

#include "absl/strings/string_view.h"

namespace emberd {
namespace crc32c_test {

uint32_t Crc32c(absl::string_view text) {
  return ExtendCrc32c(0, absl::MakeConstSpan(text.data(), text.size()));
}

// The check value of the catalogue of CRCs, and those of RFC 3720, appendix B.4.
TEST(Crc32cTest, GivesPublishedChecksums) {
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(Crc32cTest, PiecesGiveTheChecksumOfTheWhole) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text.push_back(static_cast<char>(i * i));
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    const uint32_t first = ExtendCrc32c(0, absl::MakeConstSpan(text.data(), cut));
    EXPECT_EQ(ExtendCrc32c(first, absl::MakeConstSpan(text.data() + cut, text.size() - cut)),
              Crc32c(text));
  }
}

}  // namespace crc32c_test
}  // namespace emberd
