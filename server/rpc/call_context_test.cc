#include "server/rpc/call_context.h"

#include <gtest/gtest.h>

namespace emberd::rpc {
namespace call_context_test {

constexpr char kTrace[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceTest, KnowsATraceContext) {
  EXPECT_TRUE(IsTrace(kTrace));
  EXPECT_EQ(TraceId(kTrace), "4bf92f3577b34da6a3ce929d0e0e4736");
  for (const char* wrong : {
           "",
           "00",
           "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
           "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
           "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
           "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0g",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-011",
       }) {
    EXPECT_FALSE(IsTrace(wrong)) << wrong;
  }
  EXPECT_EQ(TraceId("short"), "");
  EXPECT_EQ(SpanId(kTrace), "00f067aa0ba902b7");
  EXPECT_EQ(SpanId("short"), "");
  const std::string other = NewSpanOf(kTrace);
  EXPECT_TRUE(IsTrace(other));
  EXPECT_EQ(TraceId(other), TraceId(kTrace));
  EXPECT_NE(SpanId(other), SpanId(kTrace));
}

TEST(LinkedContextTest, HasTheTraceAndAtMostTheTimeOfItsParent) {
  const absl::Time end = absl::Now() + absl::Hours(1);
  CallContext parent(end, kTrace);
  LinkedContext longer(&parent, absl::Hours(2)), shorter(&parent, absl::Minutes(1));
  EXPECT_EQ(longer.get()->deadline(), end);
  EXPECT_LT(shorter.get()->deadline(), end);
  EXPECT_EQ(shorter.get()->trace(), kTrace);
  shorter.get()->Cancel();
  EXPECT_FALSE(parent.cancelled());
  parent.Cancel();
  EXPECT_TRUE(longer.get()->cancelled());
}

}  // namespace call_context_test
}  // namespace emberd::rpc
