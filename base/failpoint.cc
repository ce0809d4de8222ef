#include "base/failpoint.h"

#include "absl/base/attributes.h"

namespace emberd {

// Weak: the tests' build has another one.
ABSL_ATTRIBUTE_WEAK void ReachFailpoint(const char*) {}

}  // namespace emberd
