// What a test does less of under a sanitizer.
#pragma once

namespace emberd {

#if defined(__has_feature)  // clang
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

// `all`, or a fifth of them under a sanitizer: it shows in few rounds what there is for it, and
// each takes long.
constexpr int Rounds(int all) { return kSanitized ? all / 5 : all; }

}  // namespace emberd
