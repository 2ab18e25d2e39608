// The same products with rows of fp32 numbers, wherever each of them lies.
#pragma once

#include "products.h"

namespace {

template <int R, int T>
inline void score_exact_tokens(const float* const* x, int64_t vectors, const float* q, int64_t stride, float* scores) {
  Floats sums[R * T] = {};
  for (int64_t v = 0; v < vectors; v++) {
    for (int r = 0; r < R; r++) {
      const Floats y = load(q + r * stride + v * kLanes);
      for (int i = 0; i < T; i++) sums[r * T + i] += load(x[i] + v * kLanes) * y;
    }
  }
  put_sums<R, T>(sums, scores);
}

// scores[r, t] = q[r] . x[t]; rows of q are `stride` apart.
inline void score_exact(int64_t rows, const float* const* x, int64_t count, int64_t vectors, const float* q, int64_t stride, float* scores) {
  for_rows(rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    int64_t t = 0;
    for (; t + kTogether <= count; t += kTogether) score_exact_tokens<R, kTogether>(x + t, vectors, q, stride, scores + t);
    for (; t < count; t++) score_exact_tokens<R, 1>(x + t, vectors, q, stride, scores + t);
  });
}

template <int R, int V>
inline void weigh_exact_vectors(const float* const* x, int64_t count, int64_t first, const float* weights, int64_t stride, float* sums) {
  Floats acc[R][V] = {};
  for (int64_t t = 0; t < count; t++)
    for (int v = 0; v < V; v++) {
      const Floats y = load(x[t] + (first + v) * kLanes);
      for (int r = 0; r < R; r++) acc[r][v] += y * weights[r * kPadded + t];
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      float* sum = sums + r * stride + (first + v) * kLanes;
      store(sum, load(sum) + acc[r][v]);
    }
}

// sums[r] += sum_t weights[r, t] x[t]; rows of sums are `stride` apart.
inline void weigh_exact(int64_t rows, const float* const* x, int64_t count, int64_t vectors, const float* weights, int64_t stride, float* sums) {
  for_rows(rows, [&](auto number) {
    constexpr int R = decltype(number)::value;
    int64_t v = 0;
    for (; v + 2 <= vectors; v += 2) weigh_exact_vectors<R, 2>(x, count, v, weights, stride, sums);
    for (; v < vectors; v++) weigh_exact_vectors<R, 1>(x, count, v, weights, stride, sums);
  });
}

}  // namespace
