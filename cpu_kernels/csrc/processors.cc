#include "processors.h"

namespace kvq {
namespace {

#if defined(KVQ_AVX512)
const Multiplier* avx512_multiplier() {
#if defined(KVQ_VNNI)
  if (__builtin_cpu_supports("avx512vnni")) return &multiplier_vnni;
#endif
  return &multiplier_avx512;
}
#endif

// F16C is not asked for, because GCC 10 and Clang 17 do not know it by name. Every processor that
// has AVX2 has it.
Kernels choose_kernels() {
#if defined(KVQ_AVX512) && defined(KVQ_AVX2)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("fma"))
    return {attend_tokens_avx512, attend_rows_avx512, avx512_multiplier(), "avx512"};
#endif
#if defined(KVQ_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {attend_tokens_avx2, attend_rows_avx2, &multiplier_avx2, "avx2"};
#endif
#if defined(__aarch64__)
  return {attend_tokens_baseline, attend_rows_baseline, &multiplier_baseline, "neon"};
#else
  return {attend_tokens_baseline, attend_rows_baseline, &multiplier_baseline, "baseline"};
#endif
}

}  // namespace

const Kernels& best_kernels() {
  static const Kernels kernels = choose_kernels();
  return kernels;
}

}  // namespace kvq
