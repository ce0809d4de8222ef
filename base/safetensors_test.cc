#include "base/safetensors.h"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/testing/sanitized.h"
#include "base/testing/seed.h"

namespace emberd {
namespace safetensors_test {

using testing::HasSubstr;

constexpr char kGood[] =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I32","shape":[2],"data_offsets":[12,20]},)"
    R"("a":{"dtype":"F16","shape":[3,2],"data_offsets":[0,12]}}  )";

std::string Fault(absl::string_view text, int64_t data_bytes = 20) {
  return std::string(ParseSafetensorsHeader(text, data_bytes).status().message());
}

// kGood with one change.
std::string Fault(absl::string_view from, absl::string_view to) {
  return Fault(absl::StrReplaceAll(kGood, {{from, to}}));
}

TEST(SafetensorsTest, ReadsTensorsInTheOrderOfTheirBytes) {
  const auto header = ParseSafetensorsHeader(kGood, 20);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[0].dtype, "F16");
  EXPECT_THAT(header->tensors[0].shape, testing::ElementsAre(3, 2));
  EXPECT_EQ(header->tensors[1].begin, 12);
  EXPECT_EQ(header->tensors[1].end, 20);
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsTest, ReadsWhatItWrites) {
  const SafetensorsHeader header = {
      .metadata = {{"k", "v \"quoted\""}},
      .tensors = {{"x", "F32", {0, 8}, 0, 0}, {"y", "BF16", {2, 3}, 0, 12}}};
  for (const int64_t size : {0, 4096}) {
    const std::string encoded = EncodeSafetensorsHeader(header, size);
    EXPECT_EQ(encoded.size() % 8, 0u);
    EXPECT_GE(static_cast<int64_t>(encoded.size()), size);
    const int64_t file_bytes = static_cast<int64_t>(encoded.size()) + 12;
    EXPECT_EQ(*SafetensorsHeaderSize(encoded.substr(0, 8), file_bytes), file_bytes - 12);
    const auto read = ParseSafetensorsHeader(encoded.substr(8), 12);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->metadata, header.metadata);
    ASSERT_EQ(read->tensors.size(), 2u);
    EXPECT_EQ(read->tensors[0].name, "x");
    EXPECT_EQ(read->tensors[1].shape, header.tensors[1].shape);
  }
}

TEST(SafetensorsTest, RefusesLengthsThatCannotBe) {
  const std::string prefix("\x10\0\0\0\0\0\0\0", 8);
  EXPECT_EQ(*SafetensorsHeaderSize(prefix, 24), 24);
  EXPECT_FALSE(SafetensorsHeaderSize(prefix, 23).ok());
  EXPECT_FALSE(SafetensorsHeaderSize(prefix, 0).ok());
  EXPECT_FALSE(SafetensorsHeaderSize("", 24).ok());
  EXPECT_FALSE(SafetensorsHeaderSize(std::string(8, '\xff'), int64_t{1} << 62).ok());
  EXPECT_FALSE(SafetensorsHeaderSize(std::string(8, '\0'), 24).ok());
}

TEST(SafetensorsTest, RefusesWhatIsNoHeader) {
  EXPECT_THAT(Fault("", int64_t{0}), HasSubstr("does not begin with {"));
  EXPECT_THAT(Fault(" {}", int64_t{0}), HasSubstr("does not begin with {"));
  EXPECT_THAT(Fault("{]", int64_t{0}), HasSubstr("not a JSON object"));
  EXPECT_THAT(Fault("{\"\xff\":1}", int64_t{0}), HasSubstr("not a JSON object"));
  EXPECT_THAT(Fault("\"b\":{", "\"a\":{"), HasSubstr("\"a\" occurs twice"));
  EXPECT_THAT(Fault(R"("shape":[2])", R"("shape":[2],"dtype":"I32")"), HasSubstr("twice"));
  EXPECT_THAT(Fault("\"pt\"", "1"), HasSubstr("__metadata__"));
  EXPECT_THAT(Fault("I32", "I33"), HasSubstr("tensor \"b\": dtype \"I33\" is not known"));
  EXPECT_THAT(Fault("[2]", "[-2]"), HasSubstr("shape holds a value that is not a size"));
  EXPECT_THAT(Fault("[2]", "[2.0]"), HasSubstr("shape holds a value that is not a size"));
  EXPECT_THAT(Fault("[2]", "[18446744073709551615]"),
              HasSubstr("shape holds a value that is not a size"));
  EXPECT_THAT(Fault("[2]", "[4294967296,4294967296]"), HasSubstr("too large for any file"));
  EXPECT_THAT(Fault("[2]", "[3]"), HasSubstr("give it 8 bytes, but its shape needs 12"));
  EXPECT_THAT(Fault("[12,20]", "[20,12]"), HasSubstr("data_offsets is not [begin, end]"));
  EXPECT_THAT(Fault("[12,20]", "[8,16]"), HasSubstr("begins at byte 8, not at 12"));
  EXPECT_THAT(Fault("[12,20]", "[16,24]"), HasSubstr("begins at byte 16, not at 12"));
  EXPECT_THAT(Fault(kGood, int64_t{24}), HasSubstr("need 20 bytes, but 24 follow the header"));
  EXPECT_THAT(Fault(kGood, int64_t{16}), HasSubstr("need 20 bytes, but 16 follow the header"));
}

// Whatever bytes come, the answer is an error or a header that is true of the data.
TEST(SafetensorsTest, SurvivesAnyBytes) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < Rounds(20000); ++i) {
    std::string text = kGood;
    for (uint64_t n = random() % 4 + 1; n > 0; --n) {
      text[random() % text.size()] =
          static_cast<char>(random() % 3 == 0 ? random() : '0' + random() % 10);
    }
    const auto header = ParseSafetensorsHeader(text, 20);
    if (!header.ok()) continue;
    int64_t end = 0;
    for (const SafetensorsTensor& tensor : header->tensors) {
      EXPECT_EQ(tensor.begin, end);
      end = tensor.end;
    }
    EXPECT_EQ(end, 20);
  }
}

}  // namespace safetensors_test
}  // namespace emberd
