#include "client/demo/curve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::demo {
namespace {

using testing::HasSubstr;

const std::vector<CurvePoint> kPoints = {{1000, 0.5, 0.69, 0.51, 0.52},
                                         {2000, 1.0, 0.6, 0.7, 0.72}};

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(CurveTest, Csv) {
  EXPECT_EQ(CurveCsv(kPoints),
            "examples,seconds,loss,auc,held_out_auc\n"
            "1000,0.500,0.690000,0.510000,0.520000\n"
            "2000,1.000,0.600000,0.700000,0.720000\n");
}

TEST(CurveTest, SvgIsWellFormedAndEscaped) {
  const std::string svg = CurveSvg("a < b & c", kPoints, 0.8, "best");
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("best: 0.8000"));
  EXPECT_EQ(Count(svg, "<text"), Count(svg, "</text>"));
  EXPECT_EQ(Count(svg, "<polyline"), 2u);
}

TEST(CurveTest, SvgWithoutPoints) {
  EXPECT_THAT(CurveSvg("t", {}, 0.8, "best"), HasSubstr("</svg>"));
}

// The higher AUC must be higher up, that is at a smaller y, and the later point further to the
// right.
TEST(CurveTest, SvgHasTheRightWayUp) {
  const std::string svg = CurveSvg("t", kPoints, 0.8, "best");
  double x1, y1, x2, y2;
  const size_t at = svg.find("points=\"");
  ASSERT_EQ(std::sscanf(svg.c_str() + at, "points=\"%lf,%lf %lf,%lf", &x1, &y1, &x2, &y2), 4);
  EXPECT_LT(x1, x2);
  EXPECT_GT(y1, y2);
}

TEST(WriteFileTest, NamesThePathThatCannotBeWritten) {
  const absl::Status status = WriteFile("/no/such/directory/file", "x");
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such/directory/file"));
}

}  // namespace
}  // namespace emberd::demo
