#include "processors.h"

namespace kvq {
namespace {

Kernels choose_kernels() {
#if defined(KVQ_AVX512) && defined(KVQ_AVX2)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("fma"))
    return {attend_span_avx512, attend_rows_avx512, multiply_panels_avx512, "avx512"};
#endif
#if defined(KVQ_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return {attend_span_avx2, attend_rows_avx2, multiply_panels_avx2, "avx2"};
#endif
#if defined(__aarch64__)
  return {attend_span_baseline, attend_rows_baseline, multiply_panels_baseline, "neon"};
#else
  return {attend_span_baseline, attend_rows_baseline, multiply_panels_baseline, "baseline"};
#endif
}

}  // namespace

const Kernels& best_kernels() {
  static const Kernels kernels = choose_kernels();
  return kernels;
}

}  // namespace kvq
