// Runs products with tables and sparse entries without XLA, for sanitizers: every array is a heap
// block of exactly its size. Every kernel must agree with a plain loop, and neither the number of
// threads nor the other rows may change a bit.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "processors.h"
#include "unwritten_memory.h"
#include "weights_call.h"

using namespace kvq;

static uint32_t state = 1;
static uint32_t random_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }
static float random_float() { return float(random_bits()) / (1 << 23) - 1; }

// Numbers of a kind, and their values.
struct Numbers {
  std::vector<uint16_t> halves;
  std::vector<float> floats;
  std::vector<double> values;

  Numbers(ScaleKind kind, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      if (kind == ScaleKind::kFloat32) {
        floats.push_back(random_float());
        values.push_back(floats.back());
        continue;
      }
      const bool bfloat16 = kind == ScaleKind::kBfloat16;  // from 1 to 2, and from -2 to -1
      const uint32_t bits = random_bits(), fraction = bits & (bfloat16 ? 0x7F : 0x3FF);
      halves.push_back(uint16_t((bits & 0x8000) | fraction | (bfloat16 ? 0x3F80 : 0x3C00)));
      values.push_back((bits & 0x8000 ? -1 : 1) * (1 + double(fraction) / (bfloat16 ? 128 : 1024)));
    }
  }
  const void* data() const {
    return floats.empty() ? (const void*)halves.data() : (const void*)floats.data();
  }
};

static std::vector<float> run(PackedCall call, const Multiplier& kernel, int64_t helpers) {
  std::vector<float> y(call.tokens * call.products[0].weights.outputs, NAN);
  call.products[0].y = y.data();
  std::vector<std::thread> threads;
  multiply(call, kernel, helpers,
           [&](std::function<void()> work) { threads.emplace_back(std::move(work)); });
  for (auto& thread : threads) thread.join();
  return y;
}

static bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), 4 * a.size());
}

static int check(int64_t inputs, int64_t outputs, int64_t tokens, ScaleKind kind, int64_t one_in) {
  std::vector<uint32_t> codes(outputs * inputs / 8);
  for (auto& word : codes) word = random_bits() ^ random_bits() << 12;
  std::vector<int32_t> starts{0};
  std::vector<uint16_t> at;
  for (int64_t o = 0; o < outputs; o++) {
    for (int64_t i = 0; i < inputs && o % 3; i++) {  // every third output has none
      if (!one_in || random_bits() % one_in) continue;
      codes[(o * inputs + i) / 8] &= ~(15u << 4 * (i % 8));
      at.push_back(uint16_t(i));
    }
    starts.push_back(int32_t(at.size()));
  }
  at.shrink_to_fit(), starts.shrink_to_fit();
  const Numbers levels(kind, outputs * 16), values(kind, int64_t(at.size()));
  std::vector<float> x(tokens * inputs);
  for (float& value : x) value = random_float();
  // a row of zeros, which is skipped, among others
  if (tokens > 2) std::fill_n(x.begin() + inputs, inputs, 0.0f);
  PackedMatrix weights{4, 32, inputs, outputs, 0, codes.data(), {}, {}};
  weights.tables = {levels.data(), starts.data(), at.data(), values.data(), kind};
  const PackedCall call{x.data(), tokens, inputs, 3, {{weights, nullptr}}};
  const Multiplier& kernel = *best_kernels().multiplier;
  const auto one = run(call, multiplier_baseline, 0), best = run(call, kernel, 0);
  bool equal = same(one, run(call, multiplier_baseline, 3)) && same(best, run(call, kernel, 2));
  for (int64_t t = 0; t < tokens; t++) {
    PackedCall alone = call;
    alone.x += t * inputs, alone.tokens = 1;
    const auto y = run(alone, kernel, 0);
    equal &= !std::memcmp(y.data(), best.data() + t * outputs, 4 * y.size());
  }
  double difference = 0, between = 0, size = 0;
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t o = 0; o < outputs; o++) {
      double want = 0;
      int64_t e = starts[o];
      for (int64_t i = 0; i < inputs; i++) {
        const bool sparse = e < starts[o + 1] && at[e] == i;
        const int64_t code = codes[(o * inputs + i) / 8] >> 4 * (i % 8) & 15;
        want += x[t * inputs + i] * (sparse ? values.values[e++] : levels.values[o * 16 + code]);
      }
      difference += std::pow(one[t * outputs + o] - want, 2);
      between += std::pow(best[t * outputs + o] - want, 2);
      size += want * want;
    }
  if (equal && size > 0 && difference <= 1e-11 * size && between <= 1e-11 * size) return 0;
  std::printf("%d x %d, %d tokens: %s, differences %g and %g of %g\n", int(inputs), int(outputs),
              int(tokens), equal ? "bits agree" : "bits differ", difference, between, size);
  return 1;
}

int main() {
  int failures = 0, checked = 0;
  for (ScaleKind kind : {ScaleKind::kFloat16, ScaleKind::kBfloat16, ScaleKind::kFloat32})
    for (int64_t inputs : {8, 136, 256})
      for (int64_t outputs : {5, 40})
        for (int64_t tokens : {1, 2, 3, 13})
          for (int64_t one_in : {0, 2, 50}) {
            failures += check(inputs, outputs, tokens, kind, one_in);
            checked++;
          }
  std::printf("%d products, kernel %s, %d failures\n", checked, best_kernels().name, failures);
  return failures != 0;
}
