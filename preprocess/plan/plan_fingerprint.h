// The hash by which processes find out that they planned differently.
#pragma once

#include <cstdint>

#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// First 64 bits of a SHA-256 over the topology and every stack, table and feature of the plan,
// never 0. `plan.fingerprint` itself is ignored.
uint64_t PlanFingerprint(const Plan& plan);

}  // namespace emberd::preprocess
