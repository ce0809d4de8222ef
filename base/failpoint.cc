#include "base/failpoint.h"

#include "absl/base/attributes.h"

namespace emberd {

// Weak: the tests' build has others.
ABSL_ATTRIBUTE_WEAK void ReachFailpoint(const char*) {}
ABSL_ATTRIBUTE_WEAK bool Mistake(const char*) { return false; }

}  // namespace emberd
