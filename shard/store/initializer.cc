#include "shard/store/initializer.h"

#include <algorithm>
#include <cmath>

#include "shard/store/portable_numbers.h"

namespace emberd::shard {
namespace {

// P(Z <= -2) of a standard normal Z.
constexpr double kBelowMinusTwo = 0.022750131948179207;

// In (0, 1): never an end, so that quantiles are finite.
double UnitInterval(uint64_t word) { return (static_cast<double>(word >> 12) + 0.5) * 0x1p-52; }

}  // namespace

Initializer::Initializer(uint64_t seed, absl::string_view table,
                         const v1::InitializerConfig& config)
    : key_(NamedKey(seed, table)) {
  switch (config.kind_case()) {
    case v1::InitializerConfig::kConstant:
      a_ = config.constant().value();
      break;
    case v1::InitializerConfig::kUniform:
      kind_ = Kind::kUniform;
      a_ = config.uniform().lower();
      b_ = config.uniform().upper();
      break;
    case v1::InitializerConfig::kNormal:
      kind_ = Kind::kNormal;
      a_ = config.normal().mean();
      b_ = config.normal().stddev();
      break;
    case v1::InitializerConfig::kTruncatedNormal:
      kind_ = Kind::kTruncatedNormal;
      a_ = config.truncated_normal().mean();
      b_ = config.truncated_normal().stddev();
      break;
    case v1::InitializerConfig::kRowId:
      kind_ = Kind::kRowId;
      break;
    case v1::InitializerConfig::kZeros:
    case v1::InitializerConfig::kAssigned:
    case v1::InitializerConfig::KIND_NOT_SET:
      break;
  }
}

bool Initializer::AllZero() const {
  return kind_ == Kind::kConstant && a_ == 0 && !std::signbit(a_);
}

float Initializer::Value(uint64_t word) const {
  const double u = UnitInterval(word);
  switch (kind_) {
    case Kind::kUniform: {
      const float lower = static_cast<float>(a_);
      const float upper = static_cast<float>(b_);
      const float value = static_cast<float>(a_ + (b_ - a_) * u);
      // Rounding to float32 may reach the open end.
      return value < upper ? std::max(value, lower) : std::max(lower, std::nextafter(upper, lower));
    }
    case Kind::kNormal:
      return static_cast<float>(a_ + b_ * InverseNormal(u));
    default:
      // The quantile of a uniform over [P(-2), P(2)] is the normal given that it lies within 2
      // deviations.
      return static_cast<float>(
          a_ +
          b_ * std::clamp(InverseNormal(kBelowMinusTwo + u * (1 - 2 * kBelowMinusTwo)), -2.0, 2.0));
  }
}

void Initializer::Fill(int64_t row, absl::Span<float> values) const {
  if (kind_ == Kind::kConstant || kind_ == Kind::kRowId) {
    const float value = static_cast<float>(kind_ == Kind::kRowId ? static_cast<double>(row) : a_);
    std::fill(values.begin(), values.end(), value);
    return;
  }
  uint64_t word = SubKey(key_, static_cast<uint64_t>(row));
  for (float& value : values) value = Value(Mix(word += kGamma));
}

}  // namespace emberd::shard
