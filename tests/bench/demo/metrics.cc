#include "tests/bench/demo/metrics.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "tests/bench/demo/dense_model.h"

namespace emberd::demo {

double Auc(absl::Span<const float> scores, absl::Span<const float> labels) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return scores[a] < scores[b]; });
  double positives = 0, negatives = 0;
  double below = 0;  // pairs (positive, negative) in the right order, ties as one half
  for (size_t i = 0; i < order.size();) {
    double tied_positives = 0, tied_negatives = 0;
    const float score = scores[order[i]];
    for (; i < order.size() && scores[order[i]] == score; ++i) {
      (labels[order[i]] > 0.5f ? tied_positives : tied_negatives) += 1;
    }
    below += tied_positives * (negatives + 0.5 * tied_negatives);
    positives += tied_positives;
    negatives += tied_negatives;
  }
  return positives == 0 || negatives == 0 ? 0.5 : below / (positives * negatives);
}

void RollingMetrics::Add(absl::Span<const float> logits, absl::Span<const float> labels) {
  logits_.insert(logits_.end(), logits.begin(), logits.end());
  labels_.insert(labels_.end(), labels.begin(), labels.end());
  const int64_t excess = std::max<int64_t>(0, size() - window_);
  logits_.erase(logits_.begin(), logits_.begin() + excess);
  labels_.erase(labels_.begin(), labels_.begin() + excess);
}

double RollingMetrics::auc() const {
  return Auc(std::vector<float>(logits_.begin(), logits_.end()),
             std::vector<float>(labels_.begin(), labels_.end()));
}

double RollingMetrics::log_loss() const {
  Vector logits(size());
  std::copy(logits_.begin(), logits_.end(), logits.data());
  return LogLoss(logits, std::vector<float>(labels_.begin(), labels_.end()));
}

namespace {

constexpr double kWidth = 760, kHeight = 420;
constexpr double kLeft = 64, kRight = 24, kTop = 72, kBottom = 52;

// From data to the picture.
struct Axes {
  double max_examples, low, high;  // of AUC

  double X(double examples) const {
    return kLeft + (kWidth - kLeft - kRight) * examples / max_examples;
  }
  double Y(double auc) const {
    return kHeight - kBottom - (kHeight - kTop - kBottom) * (auc - low) / (high - low);
  }
};

// The step of about `ticks` round marks over a length: 1, 2 or 5 times a power of ten.
double RoundStep(double length, int ticks) {
  const double raw = std::max(length, 1e-9) / ticks;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

constexpr int kAucTicks = 8;
constexpr int kExampleTicks = 6;

// The first tenth of a run climbs from an AUC of 0.5 and would leave no room for the rest; what is
// below the axis is cut off.
Axes Fit(const std::vector<CurvePoint>& points, double best_auc) {
  Axes axes{1, best_auc, best_auc};
  for (const CurvePoint& point : points) {
    axes.max_examples = std::max(axes.max_examples, static_cast<double>(point.examples));
  }
  for (const CurvePoint& point : points) {
    axes.high = std::max({axes.high, point.auc, point.held_out_auc});
    if (static_cast<double>(point.examples) < 0.1 * axes.max_examples) continue;
    axes.low = std::min({axes.low, point.auc, point.held_out_auc});
  }
  // Round marks with room on both sides.
  const double step = RoundStep(axes.high - axes.low + 0.002, kAucTicks);
  axes.low = std::floor(axes.low / step - 0.25) * step;
  axes.high = std::ceil(axes.high / step + 0.25) * step;
  return axes;
}

std::string Text(double x, double y, const char* anchor, const std::string& text,
                 const char* style = "") {
  const std::string escaped =
      absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y,
                         anchor, style, escaped);
}

std::string Line(double x1, double y1, double x2, double y2, const char* stroke) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2,
                         y2, stroke);
}

std::string Grid(const Axes& axes) {
  std::string svg;
  const double auc_step = RoundStep(axes.high - axes.low, kAucTicks);
  const int decimals = auc_step < 0.0095 ? 3 : 2;
  for (double auc = axes.low; auc < axes.high + auc_step / 2; auc += auc_step) {
    svg += Line(kLeft, axes.Y(auc), kWidth - kRight, axes.Y(auc), "stroke=\"#e4e4e4\"");
    svg += Text(kLeft - 8, axes.Y(auc) + 4, "end", absl::StrFormat("%.*f", decimals, auc));
  }
  const double step = RoundStep(axes.max_examples, kExampleTicks);
  for (double examples = 0; examples <= axes.max_examples; examples += step) {
    svg += Text(axes.X(examples), kHeight - kBottom + 20, "middle",
                axes.max_examples >= 1e6 ? absl::StrFormat("%.4g M", examples / 1e6)
                                         : absl::StrFormat("%.4g k", examples / 1e3));
  }
  return svg + Text(kWidth / 2, kHeight - 10, "middle", "training examples");
}

std::string Series(const Axes& axes, const std::vector<CurvePoint>& points,
                   double CurvePoint::*value, const char* color) {
  std::string path;
  for (const CurvePoint& point : points) {
    absl::StrAppendFormat(&path, "%.1f,%.1f ", axes.X(static_cast<double>(point.examples)),
                          axes.Y(point.*value));
  }
  return absl::StrFormat(
      "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" clip-path=\"url(#plot)\" "
      "points=\"%s\"/>\n",
      color, path);
}

}  // namespace

std::string CurveCsv(const std::vector<CurvePoint>& points) {
  std::string csv = "examples,seconds,loss,auc,held_out_auc\n";
  for (const CurvePoint& point : points) {
    absl::StrAppendFormat(&csv, "%d,%.3f,%.6f,%.6f,%.6f\n", point.examples, point.seconds,
                          point.loss, point.auc, point.held_out_auc);
  }
  return csv;
}

std::string CurveSvg(const std::string& title, const std::vector<CurvePoint>& points,
                     double best_auc, const std::string& best_label) {
  const Axes axes = Fit(points, best_auc);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  absl::StrAppendFormat(&svg,
                        "<clipPath id=\"plot\"><rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" "
                        "height=\"%.0f\"/></clipPath>\n",
                        kLeft, kTop, kWidth - kLeft - kRight, kHeight - kTop - kBottom);
  svg += Text(kLeft, 24, "start", title, " font-size=\"15\" font-weight=\"bold\"");
  svg += Grid(axes);
  svg += Line(kLeft, axes.Y(best_auc), kWidth - kRight, axes.Y(best_auc),
              "stroke=\"#2c8a4b\" stroke-dasharray=\"6 4\" stroke-width=\"2\"");
  svg += Series(axes, points, &CurvePoint::auc, "#9db7d8");
  svg += Series(axes, points, &CurvePoint::held_out_auc, "#1f4e9c");
  const struct {
    std::string text;
    const char* style;
  } legend[] = {{absl::StrFormat("%s: %.4f", best_label, best_auc), " fill=\"#2c8a4b\""},
                {"held-out AUC", " fill=\"#1f4e9c\""},
                {"training AUC, of the latest examples", " fill=\"#6f92c0\""}};
  // Between the title and the plot.
  double x = kLeft;
  for (const auto& entry : legend) {
    svg += Text(x, 48, "start", entry.text, entry.style);
    constexpr double kLetter = 6.5, kGap = 24;
    x += kLetter * static_cast<double>(entry.text.size()) + kGap;
  }
  return svg + "</svg>\n";
}

absl::Status WriteFile(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << content;
  file.close();
  if (file) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(path, ": cannot be written"));
}

}  // namespace emberd::demo
