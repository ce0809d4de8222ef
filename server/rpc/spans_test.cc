#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/temp_dir.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"

namespace emberd::rpc {
namespace spans_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kCaller[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

std::vector<json> SpansIn(const std::string& path) {
  std::vector<json> spans;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const json request = json::parse(line);
    const json& resource = request.at("resourceSpans").at(0);
    EXPECT_EQ(resource.at("resource").at("attributes").at(1).at("value").at("stringValue"), "me");
    spans.push_back(resource.at("scopeSpans").at(0).at("spans").at(0));
  }
  return spans;
}

// One after the other: what is set up stays so for the process.
TEST(SpansTest, AreATreeInAFile) {
  CallContext off(absl::InfiniteFuture(), kCaller);
  {
    Span span(&off, "nothing");
    EXPECT_EQ(off.trace(), kCaller);
  }
  EXPECT_FALSE(SpansAreOn());
  const absl::Status bad = SetUpSpans("/dev/null/spans", "me");
  EXPECT_EQ(bad.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.message()), HasSubstr("'/dev/null/spans' cannot be opened"));
  EXPECT_TRUE(SetUpSpans("", "me").ok());
  EXPECT_FALSE(SpansAreOn());

  const TempDir directory = *TempDir::Create();
  const std::string path = directory.path() + "/spans";
  ASSERT_TRUE(SetUpSpans(path, "me").ok());
  CallContext context(absl::InfiniteFuture(), kCaller);
  {
    Span call(&context, "call", Span::Kind::kServer);
    EXPECT_NE(context.trace(), kCaller);
    EXPECT_EQ(TraceId(context.trace()), TraceId(kCaller));
    {
      Span part(&context, "part");
      part.Set("emberd.op_index", 3);
      TimedWork(absl::InfiniteDuration(), ops::Rpc::kShardGather, context.trace()).End();
      part.End(absl::AbortedError("bad \xff byte"));
      part.Set("late", "is not kept");
      part.End(absl::OkStatus());
    }
    Span next(&context, "next");
    Span none(nullptr, "none");
  }
  EXPECT_EQ(context.trace(), kCaller);
  { const Span alone(&context, "alone", Span::Kind::kServer, /*has_parent=*/false); }

  const std::vector<json> spans = SpansIn(path);
  ASSERT_EQ(spans.size(), 5u);
  const json &elsewhere = spans[0], &part = spans[1], &next = spans[2], &call = spans[3];
  EXPECT_EQ(call.at("name"), "call");
  EXPECT_EQ(call.at("parentSpanId"), "00f067aa0ba902b7");
  EXPECT_EQ(call.at("kind"), 2);
  EXPECT_EQ(part.at("parentSpanId"), call.at("spanId"));
  EXPECT_EQ(next.at("parentSpanId"), call.at("spanId"));
  EXPECT_EQ(elsewhere.at("parentSpanId"), part.at("spanId"));
  EXPECT_EQ(part.at("attributes").size(), 1u);
  EXPECT_EQ(part.at("attributes").at(0).at("value").at("stringValue"), "3");
  EXPECT_EQ(part.at("status").at("code"), 2);
  EXPECT_THAT(part.at("status").at("message").get<std::string>(), HasSubstr("bad"));
  EXPECT_FALSE(call.contains("status"));
  EXPECT_FALSE(spans[4].contains("parentSpanId"));
  for (const json& span : spans) {
    EXPECT_EQ(span.at("traceId"), "4bf92f3577b34da6a3ce929d0e0e4736");
    EXPECT_LE(std::stoll(span.at("startTimeUnixNano").get<std::string>()),
              std::stoll(span.at("endTimeUnixNano").get<std::string>()));
  }

  // After the file was moved, spans go on in a new one; where none can be made, in the old one.
  const std::string moved = directory.path() + "/moved";
  std::filesystem::rename(path, moved);
  ReopenSpans();
  Span{&context, "new"}.End(absl::OkStatus());
  EXPECT_EQ(SpansIn(moved).size(), 5u);
  ASSERT_EQ(SpansIn(path).size(), 1u);
  EXPECT_EQ(SpansIn(path)[0].at("name"), "new");
  const std::string gone = directory.path() + "/gone";
  std::filesystem::rename(path, gone);
  std::filesystem::create_directory(path);
  v1::LoggingConfig logging;
  logging.set_file(directory.path() + "/log");
  ASSERT_TRUE(ops::SetUpLogging(logging, "test").ok());
  ReopenSpans();
  Span{&context, "kept"}.End(absl::OkStatus());
  EXPECT_EQ(SpansIn(gone).back().at("name"), "kept");
  // Where the disk is full, the log says so.
  std::filesystem::remove(path);
  std::filesystem::create_symlink("/dev/full", path);
  ReopenSpans();
  Span{&context, "lost"}.End(absl::OkStatus());
  ASSERT_TRUE(ops::SetUpLogging({}, "emberd").ok());
  std::ifstream log(logging.file());
  EXPECT_THAT(
      std::string(std::istreambuf_iterator<char>(log), {}),
      AllOf(HasSubstr("spans go on in their old file"), HasSubstr("a span was not written")));
}

}  // namespace spans_test
}  // namespace emberd::rpc
