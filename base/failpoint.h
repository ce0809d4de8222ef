// Named places where a test may make the process die, stop or wait, so that a fault comes at every
// step and not only where chance puts it, or make a mistake, to see that some test finds it. In
// emberd they do nothing: what acts is linked into the tests' own build of the server alone
// (tests/testing/acting_failpoints.cc).
#pragma once

namespace emberd {

void ReachFailpoint(const char* name);

// Whether to make this mistake; see tests/fault/README.md.
bool Mistake(const char* name);

}  // namespace emberd
