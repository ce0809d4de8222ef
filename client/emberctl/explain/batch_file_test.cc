#include "client/emberctl/explain/batch_file.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {

namespace batch_file_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Npy(const std::string& dictionary, const std::string& data, char version = 1) {
  const auto length = static_cast<uint32_t>(dictionary.size());
  std::string size(reinterpret_cast<const char*>(&length), version == 1 ? 2 : 4);
  return absl::StrCat("\x93NUMPY", std::string{version, '\0'}, size, dictionary, data);
}

std::string Dictionary(const std::string& type, const std::string& shape) {
  return absl::StrCat("{'descr': '", type, "', 'fortran_order': False, 'shape': ", shape,
                      ", }  \n");
}

template <typename T>
std::string Data(std::vector<T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

TEST(NpyTest, ReadsEveryTypeVersionAndShape) {
  absl::StatusOr<Array> array =
      ParseNpy(Npy(Dictionary("<i4", "(2, 3)"), Data<int32_t>({1, 2, 3, 4, 5, -6})));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(array->shape, ElementsAre(2, 3));
  EXPECT_THAT(std::get<std::vector<int32_t>>(array->values), ElementsAre(1, 2, 3, 4, 5, -6));
  array = ParseNpy(Npy(Dictionary("<i8", "(2,)"), Data<int64_t>({1, int64_t{1} << 40}), 2));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(array->shape, ElementsAre(2));
  EXPECT_THAT(std::get<std::vector<int64_t>>(array->values), ElementsAre(1, int64_t{1} << 40));
  array = ParseNpy(Npy(Dictionary("<f4", "()"), Data<float>({0.5f}), 3));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(array->shape, IsEmpty());
  EXPECT_THAT(std::get<std::vector<float>>(array->values), ElementsAre(0.5f));
  array = ParseNpy(Npy(Dictionary("<i4", "(0, 7)"), ""));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(std::get<std::vector<int32_t>>(array->values), IsEmpty());
}

// Would catch a read beyond the file, or an array allocated for a size that the file does not have.
TEST(NpyTest, RefusesWhatItCannotRead) {
  const std::string good = Npy(Dictionary("<i4", "(2,)"), Data<int32_t>({1, 2}));
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(ParseNpy(good.substr(0, length)).ok()) << length;
  }
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {good + "x", "9 bytes of data instead of 8"},
      {Npy(Dictionary("<i4", "(2,)"), "", 4), "version is 4"},
      {Npy(Dictionary("<f8", "(1,)"), Data<double>({1})), "its type is '<f8'"},
      {Npy(Dictionary(">i4", "(1,)"), Data<int32_t>({1})), "its type is '>i4'"},
      {Npy(Dictionary("<i4", "(-1,)"), ""), "its shape is (-1,)"},
      {Npy(Dictionary("<i4", "(1,1,1,1,1,1,1,1,1)"), Data<int32_t>({1})), "its shape is"},
      {Npy(Dictionary("<i4", "(4294967296, 4294967296)"), ""), "shorter than its shape"},
      {Npy(Dictionary("<i4", "(3, 0)"), Data<int32_t>({1, 2})), "8 bytes of data instead of 0"},
      {Npy(Dictionary("<i4", "1"), Data<int32_t>({1})), "no shape"},
      {Npy("{'descr': '<i4', 'fortran_order': True, 'shape': (1,)}", Data<int32_t>({1})),
       "Fortran order"},
      {Npy("", ""), "no shape"}};
  for (const auto& [content, message] : wrong) {
    const absl::Status status = ParseNpy(content).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace batch_file_test

}  // namespace emberd::emberctl
