#pragma once

// Before a function: it is compiled for several generations of CPUs, and the loader takes the one
// that fits. Its bits are the same in each, for nothing is contracted. What it calls must be
// inlined, and its library needs emberd_optimise. Not by clang: its sanitizers are not ready when
// the loader asks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EMBERD_SIMD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EMBERD_SIMD_CLONES
#endif
