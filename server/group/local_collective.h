// A Collective over a Rendezvous of this process.
#pragma once

#include <memory>

#include "server/group/collective.h"
#include "server/group/rendezvous.h"

namespace emberd::server {

// `rendezvous` must outlive it.
std::unique_ptr<Collective> MakeLocalCollective(Rendezvous* rendezvous);

}  // namespace emberd::server
