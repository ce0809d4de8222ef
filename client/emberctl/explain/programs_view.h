// What `emberctl explain` says about programs: the buffers that a lookup of a batch would set
// aside, and what a chain of update and next lookup would do.
#pragma once

#include <ostream>

#include "client/emberctl/explain/explanation.h"
#include "client/emberctl/output.h"

namespace emberd::emberctl {

// For people.
void PrintPrograms(const Explanation& explanation, std::ostream& out);
// {"stacks": [{stack, samples, id_capacity, cells_needed, fits, row_pointers,
// activation_rows_per_sparsecore, bytes_per_sparsecore}], "bytes_per_sparsecore",
// "chain": [{op, is, inputs, makes, bytes, released_after}]}
Json ProgramsJson(const Explanation& explanation);

}  // namespace emberd::emberctl
