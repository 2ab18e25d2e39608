// Times the attention kernel alone, on this thread: no XLA, no windows, no other thread.
//
//   roofline limits
//       prints vectors multiplied and added per nanosecond, and bytes read per nanosecond
//   roofline attend ROUNDS ROWS TOKENS KEYS VALUES
//       prints the seconds of the fastest round for one KV head, and the bytes that it read
//
// KEYS and VALUES are the fields of a Body (csrc/body.h), separated by commas. Numbers are random,
// which does not change the time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "processors.h"
#include "split.h"
#include "vectors.h"

using namespace kvq;

// Time of this thread alone, not counting other programs that take the processor meanwhile.
static double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

static uint32_t random_bits() {
  static uint32_t state = 1;
  return (state = state * 1664525u + 1013904223u) >> 8;
}

struct Memory {
  std::vector<std::vector<uint16_t>> blocks;
  double bytes = 0;

  // An array of 16-bit words, which are small numbers if they are floats.
  Strided take(int64_t words, uint32_t mask, bool counts = true) {
    blocks.emplace_back(words);
    for (auto& word : blocks.back()) word = uint16_t(random_bits() & mask);
    if (counts) bytes += 2.0 * double(words);
    return {reinterpret_cast<const char*>(blocks.back().data()), 0, 0};
  }
};

static Side fill(const Body& body, int64_t tokens, Memory& memory) {
  Side side{};
  side.body = body;
  static float table[16], turns[1 << 20];
  const int64_t runs = (tokens + kDecoded - 1) / kDecoded;
  side.table = table,
  side.turns = {turns, turns, turns, std::min(runs, kNear), (runs + kNear - 1) / kNear};
  const int64_t float_words = body.scale_type == kFloat32 ? 2 : 1,
                mask = body.scale_type == kFloat32 ? 0 : 0x2FFF;
  if (body.form == kRows) {
    side.scale = memory.take(tokens * body.channels * float_words, mask);
    return side;
  }
  for (int64_t set = 0; set < body.sets(); set++)
    side.words[set] = memory.take(tokens / body.slots * body.row_words(set), 0xFFFF);
  const int64_t numbers = body.affine == kChannels        ? body.channels
                          : body.affine == kChannelGroups ? body.channels / body.group * tokens
                                                          : tokens / body.group * body.channels;
  for (Strided* array : {&side.scale, &side.zero, &side.angle_scale, &side.angle_zero}) {
    if (array == &side.zero ? !body.stores_zero() : array != &side.scale && body.form != kPolar)
      continue;
    *array = memory.take(numbers * float_words, mask);
  }
  if (body.pool) {  // none is used
    side.outliers.index = side.outliers.residual = memory.take(tokens, 0, false);
    side.outliers.ends = memory.take(tokens / body.pool, 0, false), side.outliers.heads = 1;
  }
  return side;
}

static Body parse(const char* text) {
  Body body{};
  int64_t* field = reinterpret_cast<int64_t*>(&body);
  for (int64_t i = 0; i < kBodyFields; i++, text += strcspn(text, ",") + 1)
    field[i] = std::atoll(text);
  return body;
}

static void limits() {
  double best = 1e9;
  const int64_t count = 1 << 22;
  for (int round = 0; round < 9; round++) {
    Floats sums[8], x = splat(float(round) * 1e-9f), y = splat(0.5f);
    for (int j = 0; j < 8; j++)
      sums[j] = splat(float(j + round));  // equal sums would be computed once
    const double start = now();
    for (int64_t i = 0; i < count; i++) {
      for (auto& sum : sums) sum = sum * y + x;
    }
    best = std::min(best, now() - start);
    volatile float kept = 0;
    for (auto& sum : sums) kept = kept + sum[0];
  }
  std::vector<float> array(1 << 26, 1.0f);
  double read = 1e9;
  for (int round = 0; round < 5; round++) {
    Floats sums[8] = {};
    const double start = now();
    for (size_t i = 0; i < array.size(); i += 8 * kLanes)
      for (int j = 0; j < 8; j++) sums[j] += load(&array[i + size_t(j) * kLanes]);
    read = std::min(read, now() - start);
    volatile float kept = 0;
    for (auto& sum : sums) kept = kept + sum[0];
  }
  std::printf("%d %.4f %.4f\n", kLanes, 8e-9 * double(count) / best,
              4e-9 * double(array.size()) / read);
}

int main(int count, char** arguments) {
  if (count == 2 && !std::strcmp(arguments[1], "limits")) return limits(), 0;
  if (count != 7) return 2;
  const int64_t rounds = std::atoll(arguments[2]), rows = std::atoll(arguments[3]),
                tokens = std::atoll(arguments[4]);
  const Body k = parse(arguments[5]), v = parse(arguments[6]);
  Memory memory;
  Call call{};
  call.keys = fill(k, tokens, memory), call.values = fill(v, tokens, memory);
  std::vector<float> q(rows * k.head_dim(), 0.25f), m(rows), l(rows), o(rows * k.head_dim());
  const int32_t limit = int32_t(tokens);
  call.q = q.data(), call.limits = &limit, call.m = m.data(), call.l = l.data(), call.o = o.data();
  call.batch = call.heads = call.queries = 1, call.rows = rows, call.capacity = tokens;
  double best = 1e9;
  for (int64_t round = 0; round < rounds; round++) {
    const double start = now();
    attend(call, best_kernels().attend_tokens, 0, [](std::function<void()>) {});
    best = std::min(best, now() - start);
  }
  std::printf("%.9f %.0f\n", best, memory.bytes);
}
