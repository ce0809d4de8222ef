// Files of rows against a plain map of rows; and the ways in which a file can be another one than
// the manifest means.
#include "server/checkpoint/partition_file.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/safetensors.h"
#include "base/temp_dir.h"
#include "base/testing/seed.h"
#include "server/files/files.h"

namespace emberd::checkpoint {
namespace partition_file_test {

using testing::HasSubstr;

using Rows = std::map<int64_t, std::string>;  // bytes by local row

PartitionArray Array(int columns, int64_t rows, v1::DataType dtype) {
  return {.model = "m",
          .stack = "users/items",
          .array = "weights",
          .partition = 3,
          .partitions = 4,
          .dtype = dtype,
          .columns = columns,
          .rows_per_partition = rows};
}

std::string RandomRow(const PartitionArray& array, std::mt19937_64& random) {
  std::string row(array.row_bytes(), '\0');
  for (char& c : row) c = static_cast<char>(random());
  return row;
}

// Writes about half of all rows, in pieces that come in any order. Adds them to `rows`.
v1::CheckpointFile WriteSome(const std::string& folder, const PartitionArray& array,
                             std::mt19937_64& random, Rows* rows) {
  auto writer = PartitionFileWriter::Create(folder, array);
  EXPECT_TRUE(writer.ok()) << writer.status();
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (int64_t row = 0; row < array.rows_per_partition;) {
    const int64_t end =
        std::min<int64_t>(array.rows_per_partition, row + 1 + static_cast<int64_t>(random() % 50));
    if (random() % 2 == 0) pieces.emplace_back(row, end);
    row = end;
  }
  if (random() % 2 == 0) std::shuffle(pieces.begin(), pieces.end(), random);
  for (const auto& [begin, end] : pieces) {
    std::string bytes;
    for (int64_t row = begin; row < end; ++row) {
      const std::string value = RandomRow(array, random);
      (*rows)[row] = value;
      bytes += value;
    }
    EXPECT_TRUE((*writer)->Append(begin, absl::MakeConstSpan(bytes.data(), bytes.size())).ok());
  }
  auto file = (*writer)->Finish();
  EXPECT_TRUE(file.ok()) << file.status();
  return *file;
}

Rows ReadAll(PartitionFileReader& reader, const PartitionArray& array) {
  Rows rows;
  const absl::Status status = reader.Stream([&](int64_t first, absl::Span<const char> bytes) {
    EXPECT_LE(bytes.size(), size_t{1} << 20);
    for (int64_t i = 0; i * array.row_bytes() < static_cast<int64_t>(bytes.size()); ++i) {
      const bool is_new = rows.emplace(first + i, std::string(bytes.data() + i * array.row_bytes(),
                                                              array.row_bytes()))
                              .second;
      EXPECT_TRUE(is_new) << first + i;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return rows;
}

// Whichever order the pieces came in, a reader finds the rows that were written: by streaming, and
// one by one upwards or in any order.
TEST(PartitionFileTest, ReadsWhatWasWritten) {
  const TempDir dir = *TempDir::Create();
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 40; ++i) {
    const v1::DataType dtype = i % 3 == 0 ? v1::BFLOAT16 : i % 3 == 1 ? v1::FLOAT16 : v1::FLOAT32;
    const PartitionArray array =
        Array(i % 4 == 0 ? 1 : 8 << random() % 4, 1 + random() % 5000, dtype);
    Rows expected;
    std::filesystem::create_directory(dir.Path(absl::StrCat(i)));
    const std::string folder = dir.Path(absl::StrCat(i));
    const v1::CheckpointFile file = WriteSome(folder, array, random, &expected);
    EXPECT_EQ(file.path(), "users%2Fitems.weights.p0003.safetensors");
    EXPECT_EQ(file.rows(), static_cast<int64_t>(expected.size()));
    EXPECT_EQ(file.bytes(),
              static_cast<int64_t>(std::filesystem::file_size(files::PathIn(folder, file.path()))));

    auto reader = PartitionFileReader::Open(folder, file, array);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(ReadAll(**reader, array), expected);
    std::string row(array.row_bytes(), '\0');
    for (int64_t r = 0; r < array.rows_per_partition; ++r) {
      const int64_t wanted =
          i % 2 == 0 ? r : static_cast<int64_t>(random() % array.rows_per_partition);
      const auto found = (*reader)->ReadRow(wanted, absl::MakeSpan(row.data(), row.size()));
      ASSERT_TRUE(found.ok()) << found.status();
      ASSERT_EQ(*found, expected.count(wanted) == 1);
      if (*found) {
        ASSERT_EQ(row, expected[wanted]);
      }
    }
  }
}

// A stack has any name, and a slot one of up to 128 characters; a merge adds ".merged".
TEST(PartitionFileTest, TheLongestNamesMakeFilesOfTheirOwn) {
  const TempDir dir = *TempDir::Create();
  const auto name_of = [&](const std::string& stack, const std::string& slot) {
    PartitionArray array = Array(8, 10, v1::FLOAT32);
    array.stack = stack;
    array.array = slot;
    auto writer = PartitionFileWriter::Create(dir.path(), array);
    EXPECT_TRUE(writer.ok()) << writer.status();
    const auto file = writer.ok() ? (*writer)->Finish() : writer.status();
    if (!file.ok()) return std::string();
    EXPECT_TRUE(PartitionFileReader::Open(dir.path(), *file, array).ok());
    EXPECT_LE(file->path().size() + std::string(".merged").size(), 255u);
    return file->path();
  };
  const std::string stack(128, 'a'), slot(128, 's');
  std::set<std::string> names;
  for (const std::string& s : {stack, stack + "a", std::string(300, 'a'), stack + ".s"}) {
    for (const std::string& a : {slot, slot.substr(1), slot.substr(2)}) {
      EXPECT_TRUE(names.insert(name_of(s, a)).second) << s << " " << a;
    }
  }
}

TEST(PartitionFileTest, RowsThatFollowOneAnotherAreOneRange) {
  const TempDir dir = *TempDir::Create();
  const PartitionArray array = Array(8, 100, v1::FLOAT32);
  auto writer = *PartitionFileWriter::Create(dir.path(), array);
  const std::string rows(array.row_bytes() * 5, 'x');
  for (const int64_t first : {10, 15, 30, 20, 25}) {
    ASSERT_TRUE(writer->Append(first, absl::MakeConstSpan(rows.data(), rows.size())).ok());
  }
  const auto file = writer->Finish();
  ASSERT_TRUE(file.ok()) << file.status();
  const auto reader = *PartitionFileReader::Open(dir.path(), *file, array);
  ASSERT_EQ(reader->ranges().size(), 3u);
  EXPECT_EQ(reader->ranges()[0].end, 20);
  EXPECT_EQ(reader->ranges()[2].begin, 20);
  EXPECT_EQ(reader->ranges()[2].end, 30);
}

TEST(PartitionFileTest, TheHeaderSaysWhichSliceItIs) {
  const TempDir dir = *TempDir::Create();
  PartitionArray array = Array(8, 14, v1::FLOAT32);
  array.array = "accumulator";
  std::mt19937_64 random(TestSeed(1));
  Rows rows;
  const v1::CheckpointFile file = WriteSome(dir.path(), array, random, &rows);
  std::ifstream stream(dir.Path(file.path()), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(stream)), {});
  const int64_t size = *SafetensorsHeaderSize(bytes.substr(0, 8), file.bytes());
  EXPECT_EQ(size % 4096, 0);
  const auto header = *ParseSafetensorsHeader(bytes.substr(8, size - 8), file.bytes() - size);
  EXPECT_EQ(header.metadata.at("format"), "emberd.checkpoint.1");
  EXPECT_EQ(header.metadata.at("variable"), "users/items/accumulator");
  EXPECT_EQ(header.metadata.at("full_shape"), "[56, 8]");
  EXPECT_EQ(header.metadata.at("slice_spec"), "56 8 42,14:0,8");
}

TEST(PartitionFileTest, RefusesRowsThatDoNotFit) {
  const TempDir dir = *TempDir::Create();
  const PartitionArray array = Array(8, 10, v1::FLOAT32);
  auto writer = *PartitionFileWriter::Create(dir.path(), array);
  const std::string rows(array.row_bytes() * 2, 'x');
  const auto append = [&](int64_t first, size_t bytes) {
    return writer->Append(first, absl::MakeConstSpan(rows.data(), bytes)).ok();
  };
  EXPECT_FALSE(append(-1, rows.size()));
  EXPECT_FALSE(append(9, rows.size()));
  EXPECT_FALSE(append(0, rows.size() - 1));
  EXPECT_TRUE(append(8, rows.size()));
  EXPECT_TRUE(append(7, rows.size()));  // row 8 for the second time
  EXPECT_THAT(std::string(writer->Finish().status().message()), HasSubstr("rows [8, 10)"));
  // Files are never written over.
  EXPECT_EQ(PartitionFileWriter::Create(dir.path(), array).status().code(),
            absl::StatusCode::kAlreadyExists);
}

class DamagedFileTest : public testing::Test {
 protected:
  DamagedFileTest() {
    std::mt19937_64 random(TestSeed(2));
    file_ = WriteSome(dir_.path(), array_, random, &rows_);
  }

  // What Open or Verify says; always of the file by name.
  std::string Fault() {
    auto reader = PartitionFileReader::Open(dir_.path(), file_, array_);
    const absl::Status status =
        reader.ok() ? (*reader)->Verify([](int64_t) { return absl::OkStatus(); }) : reader.status();
    if (status.ok()) return "";
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(dir_.Path(file_.path())));
    return std::string(status.message());
  }

  const TempDir dir_ = *TempDir::Create();
  const PartitionArray array_ = Array(8, 1000, v1::FLOAT32);
  Rows rows_;
  v1::CheckpointFile file_;
};

TEST_F(DamagedFileTest, FindsFlippedBytes) {
  EXPECT_EQ(Fault(), "");
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 300; ++i) {
    const auto at = static_cast<std::streamoff>(random() % file_.bytes());
    std::fstream stream(dir_.Path(file_.path()), std::ios::binary | std::ios::in | std::ios::out);
    stream.seekg(at);
    const auto byte = static_cast<char>(stream.get());
    const auto put = [&](char value) {
      stream.seekp(at);
      stream.put(value);
      stream.flush();
    };
    put(static_cast<char>(byte ^ 1 << random() % 8));
    EXPECT_NE(Fault(), "") << "byte " << at;
    put(byte);
  }
  EXPECT_EQ(Fault(), "");
}

TEST_F(DamagedFileTest, FindsAFileThatIsCutOffOrMissing) {
  std::filesystem::resize_file(dir_.Path(file_.path()), file_.bytes() - 1);
  EXPECT_THAT(Fault(), HasSubstr("cut off"));
  std::filesystem::resize_file(dir_.Path(file_.path()), 0);
  EXPECT_THAT(Fault(), HasSubstr("cut off"));
  std::filesystem::remove(dir_.Path(file_.path()));
  EXPECT_THAT(Fault(), HasSubstr("is missing"));
}

TEST_F(DamagedFileTest, FindsAFileThatIsCutOffWhileItIsRead) {
  auto reader = *PartitionFileReader::Open(dir_.path(), file_, array_);
  std::filesystem::resize_file(dir_.Path(file_.path()), 4096);
  std::string row(array_.row_bytes(), '\0');
  const auto read = reader->ReadRow(rows_.begin()->first, absl::MakeSpan(row.data(), row.size()));
  EXPECT_THAT(std::string(read.status().message()), HasSubstr("ends at byte"));
}

// Such a file may have the right size, and be whole.
TEST_F(DamagedFileTest, FindsTheFileOfAnotherPartition) {
  const TempDir other = *TempDir::Create();
  PartitionArray array = array_;
  array.partition = 2;
  std::mt19937_64 random(TestSeed(2));
  Rows rows;
  const v1::CheckpointFile file = WriteSome(other.path(), array, random, &rows);
  ASSERT_EQ(file.bytes(), file_.bytes());
  std::filesystem::copy_file(other.Path(file.path()), dir_.Path(file_.path()),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(Fault(), HasSubstr("checksum"));
  file_.set_header_crc32c(file.header_crc32c());
  EXPECT_THAT(Fault(), HasSubstr("its partition is \"2\", not \"3\": it is the wrong file"));
}

TEST_F(DamagedFileTest, DoesNotFollowPathsOutOfTheFolder) {
  for (const char* path : {"../x", "/etc/passwd", ".x", "", "a/b"}) {
    v1::CheckpointFile file = file_;
    file.set_path(path);
    EXPECT_EQ(PartitionFileReader::Open(dir_.path(), file, array_).status().code(),
              absl::StatusCode::kDataLoss)
        << path;
  }
}

}  // namespace partition_file_test
}  // namespace emberd::checkpoint
