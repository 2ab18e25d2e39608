// The same products with rows of fp32, fp16 or bf16 numbers, which may lie anywhere.
#pragma once

#include "products.h"

namespace {

// Rows of numbers of one type, whole vectors each.
template <int64_t kType>
struct Exact {
  static KVQ_INLINE Floats load_at(const void* row, int64_t at) {
    if (kType == kvq::kFloat32) return load(static_cast<const float*>(row) + at);
    return load_halves(static_cast<const uint16_t*>(row) + at, kType == kvq::kBfloat16);
  }
};

template <class Function>
inline void with_type(int64_t type, Function function) {
  if (type == kvq::kFloat32) function(Exact<kvq::kFloat32>{});
  else if (type == kvq::kFloat16) function(Exact<kvq::kFloat16>{});
  else function(Exact<kvq::kBfloat16>{});
}

template <int R, int T, class Type>
KVQ_INLINE void score_exact_tokens(Type, const void* const* x, int64_t vectors, const float* q,
                                   int64_t stride, float* scores) {
  Floats sums[R * T] = {};
  for (int64_t v = 0; v < vectors; v++) {
    Floats y[T];
    for (int i = 0; i < T; i++) y[i] = Type::load_at(x[i], v * kLanes);
    for (int r = 0; r < R; r++) {
      const Floats query = load(q + r * stride + v * kLanes);
      for (int i = 0; i < T; i++) sums[r * T + i] += y[i] * query;
    }
  }
  put_sums<R, T>(sums, scores);
}

// scores[r, t] = q[r] . x[t]. Rows of q are `stride` apart.
inline void score_exact(int64_t rows, const void* const* x, int64_t type, int64_t count,
                        int64_t vectors, const float* q, int64_t stride, float* scores) {
  with_type(type, [&](auto kind) {
    for_rows(rows, [&](auto number) {
      constexpr int R = decltype(number)::value;
      int64_t t = 0;
      for (; t + kTogether <= count; t += kTogether)
        score_exact_tokens<R, kTogether>(kind, x + t, vectors, q, stride, scores + t);
      for (; t < count; t++) score_exact_tokens<R, 1>(kind, x + t, vectors, q, stride, scores + t);
    });
  });
}

template <int R, int V, class Type>
KVQ_INLINE void weigh_exact_vectors(Type, const void* const* x, int64_t count, int64_t first,
                                    const float* weights, int64_t stride, float* sums) {
  Floats acc[R][V] = {};
  for (int64_t t = 0; t < count; t++)
    for (int v = 0; v < V; v++) {
      const Floats y = Type::load_at(x[t], (first + v) * kLanes);
      for (int r = 0; r < R; r++) acc[r][v] += y * weights[r * kPadded + t];
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      float* sum = sums + r * stride + (first + v) * kLanes;
      store(sum, load(sum) + acc[r][v]);
    }
}

// sums[r] += sum_t weights[r, t] x[t]. Rows of sums are `stride` apart.
inline void weigh_exact(int64_t rows, const void* const* x, int64_t type, int64_t count,
                        int64_t vectors, const float* weights, int64_t stride, float* sums) {
  with_type(type, [&](auto kind) {
    for_rows(rows, [&](auto number) {
      constexpr int R = decltype(number)::value;
      int64_t v = 0;
      for (; kLanes == 16 && v + 4 <= vectors; v += 4)
        weigh_exact_vectors<R, 4>(kind, x, count, v, weights, stride, sums);
      for (; v + 2 <= vectors; v += 2)
        weigh_exact_vectors<R, 2>(kind, x, count, v, weights, stride, sums);
      for (; v < vectors; v++) weigh_exact_vectors<R, 1>(kind, x, count, v, weights, stride, sums);
    });
  });
}

}  // namespace
