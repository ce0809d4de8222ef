// The learning curve as files: CSV for programs, SVG for eyes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace emberd::demo {

// State of a run after some examples.
struct CurvePoint {
  int64_t examples = 0;
  double seconds = 0;  // of training
  double loss =
      0;  // mean log loss of the latest training examples, each scored before it was learned from
  double auc = 0;  // of the same
  double held_out_auc = 0;
};

// "examples,seconds,loss,auc,held_out_auc", one point a line.
std::string CurveCsv(const std::vector<CurvePoint>& points);
// A self-contained picture: both AUCs over the examples, and best_auc as a line.
std::string CurveSvg(const std::string& title, const std::vector<CurvePoint>& points,
                     double best_auc, const std::string& best_label);

absl::Status WriteFile(const std::string& path, const std::string& content);

}  // namespace emberd::demo
