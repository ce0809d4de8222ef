// What a test does less of under a sanitizer.
#pragma once

namespace emberd {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// `all`, or a fifth of them under a sanitizer: it shows in few rounds what there is for it, and
// each takes long.
constexpr int Rounds(int all) { return kSanitized ? all / 5 : all; }

}  // namespace emberd
