#include "shard/store/portable_numbers.h"

#include <cmath>
#include <limits>

namespace emberd::shard {
namespace {

// ln 2 in two parts: the first has 32 significant bits, so that its product with an exponent is
// exact.
constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;
constexpr double kSqrt2 = 1.41421356237309504880;

template <int N>
double Polynomial(const double (&coefficients)[N], double x) {
  double sum = coefficients[0];
  for (int i = 1; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

}  // namespace

double PortableLog(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent) * 2;  // [1, 2)
  --exponent;
  if (mantissa > kSqrt2) {
    mantissa *= 0.5;
    ++exponent;
  }
  // log m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
  const double s = (mantissa - 1) / (mantissa + 1);
  const double s2 = s * s;
  double series = 0;
  for (int k = 23; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
  return exponent * kLn2High + (2 * s * series + exponent * kLn2Low);
}

double PortableExp(double x) {
  if (std::isnan(x)) return x;
  if (x > 710) return std::numeric_limits<double>::infinity();
  if (x < -760) return 0;
  const double n = std::floor(x * 1.44269504088896340736 + 0.5);
  const double r = (x - n * kLn2High) - n * kLn2Low;  // |r| < 0.35
  double sum = 1;
  for (int k = 15; k >= 1; --k) sum = 1 + sum * r / k;
  return std::ldexp(sum, static_cast<int>(n));
}

double PortablePow(double x, double y) {
  // Special values are exact in every library.
  if (!(x > 0) || !std::isfinite(x) || !std::isfinite(y)) return std::pow(x, y);
  return PortableExp(y * PortableLog(x));
}

// Rational approximations by P. J. Acklam.
double InverseNormal(double p) {
  static constexpr double kCentreTop[] = {-3.969683028665376e+01, 2.209460984245205e+02,
                                          -2.759285104469687e+02, 1.383577518672690e+02,
                                          -3.066479806614716e+01, 2.506628277459239e+00};
  static constexpr double kCentreBottom[] = {-5.447609879822406e+01, 1.615858368580409e+02,
                                             -1.556989798598866e+02, 6.680131188771972e+01,
                                             -1.328068155288572e+01, 1};
  static constexpr double kTailTop[] = {-7.784894002430293e-03, -3.223964580411365e-01,
                                        -2.400758277161838e+00, -2.549732539343734e+00,
                                        4.374664141464968e+00,  2.938163982698783e+00};
  static constexpr double kTailBottom[] = {7.784695709041462e-03, 3.224671290700398e-01,
                                           2.445134137142996e+00, 3.754408661907416e+00, 1};
  constexpr double kTail = 0.02425;
  if (p < kTail || p > 1 - kTail) {
    const double q = std::sqrt(-2 * PortableLog(p < kTail ? p : 1 - p));
    const double z = Polynomial(kTailTop, q) / Polynomial(kTailBottom, q);
    return p < kTail ? z : -z;
  }
  const double q = p - 0.5;
  const double r = q * q;
  return q * Polynomial(kCentreTop, r) / Polynomial(kCentreBottom, r);
}

}  // namespace emberd::shard
