// Logarithm, exponential, power and the normal quantile from +, -, *, / and sqrt alone.
//
// A C library may answer differently on two machines (it picks fused or unfused code by CPU). These
// functions do not: every IEEE 754 machine gives the same bits, which is what initial values and
// fractional powers need. Relative error below 1e-14, except InverseNormal (below 2e-9).
#pragma once

namespace emberd::shard {

// Natural logarithm; x finite and > 0.
double PortableLog(double x);
// e^x; underflows to 0 and overflows to infinity.
double PortableExp(double x);
// x^y with the special values of std::pow.
double PortablePow(double x, double y);
// z with P(Z <= z) = p for a standard normal Z; 0 < p < 1.
double InverseNormal(double p);

}  // namespace emberd::shard
