#include "base/sha256.h"

#include <gtest/gtest.h>

namespace emberd {
namespace sha256_test {

// From FIPS 180-4.
TEST(Sha256Test, GivesPublishedDigests) {
  EXPECT_EQ(Sha256Hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Sha256Test, PiecesGiveTheDigestOfTheWhole) {
  Sha256Stream stream;
  for (const char* piece : {"a", "", "bc"}) stream.Add(piece);
  EXPECT_EQ(stream.Hex(), Sha256Hex("abc"));
  EXPECT_EQ(Sha256("abc")[0], 0xba);
  EXPECT_EQ(Sha256Prefix("abc"), 0xba7816bf8f01cfeau);
}

}  // namespace sha256_test
}  // namespace emberd
