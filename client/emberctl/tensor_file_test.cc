#include "client/emberctl/tensor_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <tuple>

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace tensor_file_test {

// By number: the files and folders that this thread has synced, if it is not null; and whether that
// fails.
thread_local std::set<ino_t>* synced = nullptr;
thread_local bool sync_fails = false;

}  // namespace tensor_file_test
}  // namespace emberd::emberctl

// Instead of the system's.
extern "C" int fsync(int descriptor) {
  using namespace emberd::emberctl::tensor_file_test;
  struct stat file = {};
  if (synced != nullptr && fstat(descriptor, &file) == 0) synced->insert(file.st_ino);
  if (!sync_fails) return static_cast<int>(syscall(SYS_fsync, descriptor));
  errno = EIO;
  return -1;
}

namespace emberd::emberctl {
namespace tensor_file_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string Values(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// The safetensors file of a header.
std::string WithLength(const std::string& header) {
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  return length + header;
}

std::string ErrorOf(const std::string& name, const std::string& text) {
  const std::string path = WriteTestFile(name, text);
  const auto tensors = ReadTensorHeaders(path);
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument) << tensors.status();
  EXPECT_THAT(std::string(tensors.status().message()), HasSubstr(path));
  return std::string(tensors.status().message());
}

const std::string kSix = Values({1, 2, 3, 4, 5, 6});

TEST(TensorFileTest, ReadsWhatItWrites) {
  const std::map<std::string, std::string> metadata = {{"table", "users"}};
  const std::string files[] = {
      WriteTestFile("six.npy", NpyHeader(3, 2) + kSix),
      WriteTestFile("six.safetensors", SafetensorsStart("six", metadata, 3, 2) + kSix)};
  for (const std::string& path : files) {
    const auto tensors = ReadTensorHeaders(path);
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    ASSERT_THAT(*tensors, SizeIs(1));
    const TensorInFile& tensor = tensors->front();
    EXPECT_EQ(tensor.name, "six");
    EXPECT_EQ(tensor.rows, 3);
    EXPECT_EQ(tensor.columns, 2);
    EXPECT_EQ(tensor.metadata.count("table"), path == files[1]);
    const auto rows = ReadRowsOf(tensor, 1, 2);
    ASSERT_TRUE(rows.ok()) << rows.status();
    EXPECT_THAT(*rows, ElementsAre(3, 4, 5, 6));
  }
}

TEST(TensorFileTest, ReadsFilesOfSeveralTensors) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[16,24]},)"
                             R"("b":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})";
  const auto tensors =
      ReadTensorHeaders(WriteTestFile("two.safetensors", WithLength(header) + kSix));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_THAT(*tensors, SizeIs(2));
  EXPECT_THAT(*ReadRowsOf(tensors->at(0), 0, 2), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(tensors->at(1).columns, 1);
  EXPECT_THAT(*ReadRowsOf(tensors->at(1), 0, 2), ElementsAre(5, 6));
}

TEST(TensorFileTest, SaysWhatIsWrongWithANumpyFile) {
  const std::string good = NpyHeader(3, 2) + kSix;
  EXPECT_THAT(ErrorOf("a.npy", ""), HasSubstr("it does not begin with \\x93NUMPY"));
  EXPECT_THAT(ErrorOf("b.npy", good.substr(0, 40)), HasSubstr("it ends inside its header"));
  EXPECT_THAT(ErrorOf("c.npy", good.substr(0, good.size() - 1)),
              HasSubstr("\"c\" has 23 bytes, but its shape needs 24; is the file cut off?"));
  EXPECT_THAT(ErrorOf("d.npy", absl::StrReplaceAll(good, {{"<f4", "<f8"}})),
              HasSubstr("holds the type '<f8'; it must be '<f4': save array.astype(\"float32\")"));
  EXPECT_THAT(ErrorOf("e.npy", absl::StrReplaceAll(good, {{"False", "True "}})),
              HasSubstr("numpy.ascontiguousarray"));
  EXPECT_THAT(ErrorOf("f.npy", absl::StrReplaceAll(good, {{"(3, 2)", "(3,2,1)"}})),
              HasSubstr("has the shape [3, 2, 1]; it must be a matrix"));
  EXPECT_THAT(ErrorOf("g.npy", absl::StrReplaceAll(good, {{"(3, 2)", "(3, x)"}})),
              HasSubstr("its shape is (3, x)"));
  EXPECT_THAT(ErrorOf("h.npz", good), HasSubstr("must end with .npy or .safetensors"));
}

TEST(TensorFileTest, SaysWhatIsWrongWithASafetensorsFile) {
  const std::string good = SafetensorsStart("six", {}, 3, 2) + kSix;
  const auto entry = [](const char* dtype, const char* shape, const char* offsets) {
    return WithLength(absl::StrCat(R"({"six":{"dtype":")", dtype, R"(","shape":)", shape,
                                   R"(,"data_offsets":)", offsets, "}}")) +
           kSix;
  };
  EXPECT_THAT(ErrorOf("a.safetensors", ""), HasSubstr("too short"));
  EXPECT_THAT(ErrorOf("b.safetensors", good.substr(0, 50)), HasSubstr("length"));
  EXPECT_THAT(ErrorOf("c.safetensors", good.substr(0, good.size() - 1)), HasSubstr("24 bytes"));
  EXPECT_THAT(ErrorOf("d.safetensors", entry("I32", "[3,2]", "[0,24]")),
              HasSubstr("\"six\" has the type I32; only F32 is read"));
  EXPECT_THAT(ErrorOf("e.safetensors", entry("F32", "[3,2,1]", "[0,24]")),
              HasSubstr("has the shape [3, 2, 1]; it must be a matrix"));
}

TEST(PartialFileTest, SaysWhatTheSystemSays) {
  const std::string folder = WriteTestFile("a_file", "") + "_no_more";
  ASSERT_TRUE(std::filesystem::create_directory(folder));
  const std::tuple<std::string, absl::StatusCode, const char*> cases[] = {
      {folder + "/none/x", absl::StatusCode::kNotFound, "No such file or directory"},
      {"/dev/full", absl::StatusCode::kResourceExhausted, "No space left on device"},
      {folder, absl::StatusCode::kFailedPrecondition, "Is a directory"}};
  for (const auto& [path, code, reason] : cases) {
    PartialFile file(path);
    absl::Status status = file.Write("x");
    if (status.ok()) status = file.Close();
    if (status.ok()) status = file.Keep();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(status.message(), absl::StrCat(path, ": cannot be written: ", reason));
  }
  std::filesystem::remove_all(folder);
}

ino_t NumberOf(const std::string& path) {
  struct stat file = {};
  EXPECT_EQ(stat(path.c_str(), &file), 0) << path;
  return file.st_ino;
}

// Would catch: a file that is empty after a loss of power, in place of a good one.
TEST(PartialFileTest, IsOnTheDiskBeforeItCounts) {
  const std::string path = WriteTestFile("durable", "old");
  const auto write = [&] {
    PartialFile file(path);
    EXPECT_TRUE(file.Write("new").ok());
    const absl::Status closed = file.Close();
    return closed.ok() ? file.Keep() : closed;
  };
  sync_fails = true;
  const absl::Status failed = write();
  sync_fails = false;
  EXPECT_EQ(failed.message(), absl::StrCat(path, ": cannot be written: Input/output error"));
  EXPECT_EQ(std::filesystem::file_size(path), 3u);
  EXPECT_EQ(std::ifstream(path).get(), 'o');
  std::set<ino_t> files;
  synced = &files;
  EXPECT_TRUE(write().ok());
  synced = nullptr;
  EXPECT_EQ(std::ifstream(path).get(), 'n');
  EXPECT_TRUE(files.contains(NumberOf(path)));
  EXPECT_TRUE(files.contains(NumberOf(std::filesystem::path(path).parent_path())));
}

// Would catch: an export that takes the file of another one, and what it has not written yet.
TEST(PartialFileTest, IsWrittenByOneAtATime) {
  const std::string path = WriteTestFile("contended", "old");
  {
    PartialFile first(path);
    ASSERT_TRUE(first.Write("first").ok());
    {
      PartialFile second(path);
      EXPECT_EQ(second.Write("second"), absl::FailedPreconditionError(absl::StrCat(
                                            path, ": another process is writing it, to ", path,
                                            ".partial; try again when it has ended")));
    }
    ASSERT_TRUE(first.Close().ok());
    ASSERT_TRUE(first.Keep().ok());
    PartialFile third(path);
    EXPECT_TRUE(third.Write("third").ok());
  }
  std::string text;
  std::getline(std::ifstream(path), text);
  EXPECT_EQ(text, "first");
  std::error_code ignored;
  EXPECT_FALSE(std::filesystem::exists(path + ".partial", ignored));
}

TEST(PartialFileTest, LeavesALinkAndWritesWhereItLeads) {
  const std::string behind = WriteTestFile("behind", "old");
  const std::string link = behind + "_link";
  std::filesystem::create_symlink(behind, link);
  PartialFile file(link);
  ASSERT_TRUE(file.Write("new").ok());
  ASSERT_TRUE(file.Close().ok());
  ASSERT_TRUE(file.Keep().ok());
  std::error_code error;
  EXPECT_TRUE(std::filesystem::is_symlink(link, error));
  std::string text;
  std::getline(std::ifstream(behind), text);
  EXPECT_EQ(text, "new");
  std::filesystem::remove(link, error);
}

TEST(TensorFileTest, AFileThatIsNotThereIsNamed) {
  const auto tensors = ReadTensorHeaders("/nowhere/a.npy");
  EXPECT_THAT(std::string(tensors.status().message()),
              HasSubstr("/nowhere/a.npy: No such file or directory"));
}

}  // namespace tensor_file_test
}  // namespace emberd::emberctl
