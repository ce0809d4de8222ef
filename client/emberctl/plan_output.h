// Plans for people.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "emberd/v1/plan.pb.h"

namespace emberd::emberctl {

// "none" for 0.
std::string Limit(int32_t limit);
// One line per stack: its size, its limits and its tables with row offset and rotation.
void PrintStacks(const v1::ModelPlan& plan, std::ostream& out);
// One line per feature, in stack order.
void PrintFeatures(const v1::ModelPlan& plan, std::ostream& out);

}  // namespace emberd::emberctl
