// Stands in front of protobuf's header of this name, for the preset `tsan` alone. Under
// ThreadSanitizer that header gives each map two more members, which Debian's library, built
// without it, does not know: reflection and text of a message with a map would read beside them.
// What the header includes is included first, so that nothing but its own text is read so.
#pragma once

#include <atomic>
#include <functional>

#include <google/protobuf/map_entry.h>
#include <google/protobuf/map_field_lite.h>
#include <google/protobuf/map_type_handler.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#pragma push_macro("__SANITIZE_THREAD__")
#undef __SANITIZE_THREAD__
#include_next <google/protobuf/map_field.h>
#pragma pop_macro("__SANITIZE_THREAD__")
