# What takes most of a build is reading headers. So those that most sources include are read once for each set of flags:
#   product   programs and their libraries
#   tests     programs of tests
# A source includes what it uses all the same: ./run lint and the preset `fuzz` read each one without these.
set(EMBERD_COMMON_HEADERS
  <algorithm> <atomic> <filesystem> <fstream> <functional> <map> <memory> <optional> <random> <set> <sstream> <string> <thread>
  <utility> <vector>
  <absl/container/flat_hash_map.h> <absl/functional/function_ref.h> <absl/status/status.h> <absl/status/statusor.h>
  <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/strings/str_join.h> <absl/strings/str_split.h>
  <absl/synchronization/mutex.h> <absl/time/clock.h> <absl/time/time.h> <absl/types/span.h>
  <emberd/internal/v1/shard_service.pb.h> <emberd/v1/admin_service.pb.h> <emberd/v1/cluster.pb.h>
  <emberd/v1/embedding_service.pb.h>)

function(emberd_precompile_headers KIND)
  set(owner emberd_headers_${KIND})
  file(WRITE ${CMAKE_BINARY_DIR}/${owner}.cc "")
  add_library(${owner} OBJECT ${CMAKE_BINARY_DIR}/${owner}.cc)
  target_precompile_headers(${owner} PRIVATE ${EMBERD_COMMON_HEADERS} ${ARGN})
  target_link_libraries(${owner} PRIVATE emberd_options emberd_proto)
  # Clang would refuse those from the compiler's cache once a file that they read was written anew, though with the same text.
  target_compile_options(${owner} PRIVATE "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endfunction()

# emberd_use_precompiled_headers(): for all targets of emberd_unity, once all are known.
function(emberd_use_precompiled_headers)
  emberd_precompile_headers(product)
  emberd_precompile_headers(tests <gmock/gmock.h> <gtest/gtest.h>)
  target_link_libraries(emberd_headers_tests PRIVATE GTest::gmock GTest::gtest)
  emberd_optimise_not(emberd_headers_tests)
  get_property(targets GLOBAL PROPERTY EMBERD_UNITY_TARGETS)
  foreach(target ${targets})
    get_target_property(test ${target} EMBERD_TEST)
    set(kind product)
    if(test)
      set(kind tests)
    endif()
    target_precompile_headers(${target} REUSE_FROM emberd_headers_${kind})
  endforeach()
endfunction()
