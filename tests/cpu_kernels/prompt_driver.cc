// Runs exact attention of prompts without XLA, for sanitizers: every array is a heap block of
// exactly its size. Every kernel must agree with a plain loop, and the number of threads must not
// change a bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "processors.h"
#include "prompt_call.h"
#include "unwritten_memory.h"

using namespace kvq;

static uint32_t state = 1;
static float random_float() {
  return float((state = state * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1;
}

struct Shape {
  int64_t batch, heads, group, queries, old, channels, type, window;
};

struct Output {
  std::vector<float> m, l, o;
};

static Output run(PromptCall call, AttendRows kernel, int64_t helpers) {
  const int64_t rows = call.batch * call.heads * call.group * call.queries;
  Output out{std::vector<float>(rows), std::vector<float>(rows),
             std::vector<float>(rows * call.channels)};
  call.m = out.m.data(), call.l = out.l.data(), call.o = out.o.data();
  std::vector<std::thread> threads;
  attend_prompt(call, kernel, helpers,
                [&](std::function<void()> work) { threads.emplace_back(std::move(work)); });
  for (auto& thread : threads) thread.join();
  return out;
}

// The kernels beside the baseline: the best one, and AVX2's too if that is AVX-512's.
static std::vector<AttendRows> kernels() {
  std::vector<AttendRows> chosen{best_kernels().attend_rows};
#if defined(__x86_64__)
  if (!std::strcmp(best_kernels().name, "avx512")) chosen.push_back(attend_rows_avx2);
#endif
  return chosen;
}

static int check(const Shape& s) {
  const int64_t tokens = s.old + s.queries, rows = s.batch * s.heads * s.group * s.queries;
  const int64_t elements = s.batch * s.heads * tokens * s.channels;
  std::vector<float> q(rows * s.channels), keys(elements), values(elements);
  std::vector<uint16_t> short_keys(elements), short_values(elements);
  for (float& x : q) x = 3 * random_float();
  const auto fill = [](std::vector<float>& rows, std::vector<uint16_t>& shorts) {
    for (size_t i = 0; i < rows.size(); i++) {
      rows[i] = random_float();
      uint32_t bits;
      std::memcpy(&bits, &rows[i], 4);
      shorts[i] = uint16_t(bits >> 16), bits &= 0xFFFF0000u;  // a bfloat16
      std::memcpy(&rows[i], &bits, 4);
    }
  };
  fill(keys, short_keys), fill(values, short_values);
  std::vector<int32_t> reach(s.batch * s.old);
  for (size_t i = 0; i < reach.size(); i++)
    reach[i] = i % 3 == 1 ? 0 : int32_t(s.window ? i * 7 % (s.queries + 2) : s.queries);
  std::vector<int32_t> counts(s.batch * s.queries);
  for (int64_t i = 0; i < int64_t(counts.size()); i++)
    counts[i] = int32_t(i % s.queries) + (i < s.queries ? 1 : 0);
  std::vector<int32_t> real(s.batch);  // some query tokens of other rows than the first are padding
  for (int64_t b = 0; b < s.batch; b++) real[b] = int32_t(b ? s.queries * 3 / 4 : s.queries);
  PromptCall call{};
  const bool whole = s.type == kFloat32;
  call.q = q.data(), call.reach = reach.data(), call.counts = counts.data(), call.type = s.type;
  call.real = real.data();
  call.keys =
      whole ? reinterpret_cast<char*>(keys.data()) : reinterpret_cast<char*>(short_keys.data());
  call.values =
      whole ? reinterpret_cast<char*>(values.data()) : reinterpret_cast<char*>(short_values.data());
  call.batch = s.batch, call.heads = s.heads, call.group = s.group, call.queries = s.queries;
  call.channels = s.channels, call.old = s.old, call.fresh = s.queries;
  call.scale = 1 / std::sqrt(float(s.channels));
  call.window = s.window, call.soft_cap = s.window ? 1.5f : 0;
  const Output one = run(call, attend_rows_baseline, 0), many = run(call, attend_rows_baseline, 3);
  std::vector<Output> outputs{one};
  for (AttendRows kernel : kernels()) outputs.push_back(run(call, kernel, 2));
  std::vector<double> differences(outputs.size());
  double size = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t pair = row / (s.group * s.queries), b = pair / s.heads, t = row % s.queries;
    std::vector<double> o(s.channels), scores(tokens);
    double most = -1e30, total = 0;
    for (int64_t i = 0; i < tokens; i++) {
      const bool visible = t >= real[b] ? false
                           : i < s.old  ? reach[b * s.old + i] > t
                                        : i - s.old < counts[b * s.queries + t] &&
                                              (!s.window || i - s.old > t - s.window);
      double score = 0;
      for (int64_t c = 0; c < s.channels; c++)
        score += double(q[row * s.channels + c]) * keys[(pair * tokens + i) * s.channels + c];
      score *= call.scale;
      if (call.soft_cap > 0) score = call.soft_cap * std::tanh(score / call.soft_cap);
      scores[i] = visible ? score : -1e30;
      most = std::fmax(most, scores[i]);
    }
    for (int64_t i = 0; i < tokens; i++) {
      const double weight = scores[i] == -1e30 ? 0 : std::exp(scores[i] - most);
      total += weight;
      for (int64_t c = 0; c < s.channels; c++)
        o[c] += weight * values[(pair * tokens + i) * s.channels + c];
    }
    for (int64_t c = 0; c < s.channels; c++) {
      const double want = total ? o[c] / total : 0;
      const int64_t i = row * s.channels + c;
      double* difference = differences.data();
      for (const Output& output : outputs)
        *difference++ += std::pow((output.l[row] ? output.o[i] / output.l[row] : 0) - want, 2);
      size += want * want;
    }
  }
  const bool same = !std::memcmp(one.o.data(), many.o.data(), 4 * one.o.size()) &&
                    !std::memcmp(one.l.data(), many.l.data(), 4 * one.l.size());
  bool close = size > 0;
  for (double difference : differences) close &= difference <= 1e-11 * size;
  if (same && close) return 0;
  std::printf("%d queries, %d old, %d channels: %s, differences", int(s.queries), int(s.old),
              int(s.channels), same ? "threads agree" : "threads differ");
  for (double difference : differences) std::printf(" %g", difference);
  std::printf(" of %g\n", size);
  return 1;
}

int main() {
  int failures = 0, checked = 0;
  for (int64_t type : {int64_t(kFloat32), int64_t(kBfloat16)})
    for (int64_t channels : {8, 20, 64, 80, 128})
      for (int64_t queries : {1, 5, 70, 131})
        for (int64_t old : {0, 3, 300}) {
          const int64_t window = (checked % 3 + checked / 3) % 2 ? 20 : 0;  // every other one
          failures += check({2, 2, queries % 2 ? 3 : 1, queries, old, channels, type, window});
          checked++;
        }
  std::printf("%d prompts, kernel %s, %d failures\n", checked, best_kernels().name, failures);
  return failures != 0;
}
