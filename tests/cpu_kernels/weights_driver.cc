// Runs products with packed weights without XLA, for sanitizers: every array is a heap block of
// exactly its size. Every kernel must agree with a plain loop, and neither the number of threads nor
// the other rows may change a bit.
#include <algorithm>
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

// Numbers of 16 bits from 1 to 2 and from -2 to -1, and their values.
static uint16_t random_half(bool bfloat16 = false) {
  const uint32_t bits = random_bits();
  return uint16_t(bfloat16 ? (bits & 0x807F) | 0x3F80 : (bits & 0x83FF) | 0x3C00);
}
static double value_of(uint16_t half, bool bfloat16 = false) {
  const double fraction = bfloat16 ? double(half & 0x7F) / 128 : double(half & 0x3FF) / 1024;
  return (half & 0x8000 ? -1 : 1) * (1 + fraction);
}

struct MatrixShape {
  int64_t bits, group, inputs, outputs, tokens, digits;
  ScaleKind kind;
  bool mins;
  bool of_scale = false;  // minima are factors of scales
  bool e4m3 = false;
  bool levels = false;
  bool exponents() const { return kind == ScaleKind::kExponents; }
};

constexpr float kLevels[16] = {-1,  -.7f, -.5f, -.4f, -.3f, -.2f, -.1f, 0,
                               .1f, .2f,  .25f, .3f,  .4f,  .6f,  .7f,  1};
constexpr double kE2M1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};

struct RandomScales {
  const ScaleKind kind;
  std::vector<uint16_t> halves, coarse;
  std::vector<int8_t> bytes;
  std::vector<uint8_t> powers;
  std::vector<float> floats;

  RandomScales(ScaleKind kind, const MatrixShape& s, int64_t panels) : kind(kind) {
    const int64_t entries = panels * s.inputs / s.group * 32;
    if (kind == ScaleKind::kExponents) powers.resize(entries);
    else if (kind == ScaleKind::kOfCoarse || kind == ScaleKind::kOfScale) bytes.resize(entries);
    else if (kind == ScaleKind::kFloat32) floats.resize(entries);
    else halves.resize(entries);
    if (kind == ScaleKind::kOfCoarse) coarse.resize(panels * s.inputs / kCoarse * 32);
    for (auto& x : floats) x = random_float();
    for (auto& x : powers) x = uint8_t(124 + random_bits() % 8);
    for (auto& x : halves) x = random_half(kind == ScaleKind::kBfloat16);
    for (auto& x : coarse) x = random_half();
    for (auto& x : bytes) x = int8_t(random_bits() % 128 - 64);
  }
  Scales scales() const {
    const void* const fine = !powers.empty()   ? (const void*)powers.data()
                             : !floats.empty() ? (const void*)floats.data()
                             : !bytes.empty()  ? (const void*)bytes.data()
                                               : (const void*)halves.data();
    return {fine, coarse.empty() ? nullptr : coarse.data(), kind};
  }
  double at(const MatrixShape& s, int64_t i, int64_t o, double scale = 1) const {
    const int64_t groups = s.inputs / s.group;
    const int64_t fine = (o / 32 * groups + i / s.group) * 32 + o % 32;
    if (!powers.empty()) return std::ldexp(1, powers[fine] - 127);
    if (!floats.empty()) return floats[fine];
    if (!halves.empty()) return value_of(halves[fine], kind == ScaleKind::kBfloat16);
    if (coarse.empty()) return bytes[fine] * scale;
    return bytes[fine] *
           value_of(coarse[(o / 32 * (s.inputs / kCoarse) + i / kCoarse) * 32 + o % 32]);
  }
};

static std::vector<float> run(PackedCall call, const Multiplier& kernel, int64_t helpers,
                              const std::vector<int32_t>& chosen = {}, int64_t experts = 1) {
  std::vector<float> y(call.tokens * call.products[0].weights.outputs, NAN);
  call.products[0].y = y.data();
  std::vector<std::thread> threads;
  const auto schedule = [&](std::function<void()> work) { threads.emplace_back(std::move(work)); };
  if (chosen.empty()) multiply(call, kernel, helpers, schedule);
  else multiply_chosen(call, chosen.data(), experts, kernel, helpers, schedule);
  for (auto& thread : threads) thread.join();
  return y;
}

static bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), 4 * a.size());
}

static double e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return code & 128 ? -size : size;
}

static double code_of(const MatrixShape& s, const std::vector<uint8_t>& codes, int64_t i,
                      int64_t o) {
  const int64_t panel = o / 32 * s.inputs, lane = o % 32;
  if (s.bits == 16) {
    uint16_t half;
    std::memcpy(&half, codes.data() + ((panel + i) * 32 + lane) * 2, 2);
    return value_of(half);
  }
  if (s.bits == 8) {
    const uint8_t code = codes[((panel + i) / 4 * 32 + lane) * 4 + i % 4];
    return s.e4m3 ? e4m3(code) : int8_t(code);
  }
  const int64_t half = i % 32 / 16, word = i / 32 * 4 + i % 16 / 4;
  const uint8_t byte = codes[((panel / 8 + word) * 32 + lane) * 4 + i % 4];
  const int code = half ? byte >> 4 : byte & 15;
  return s.exponents() ? kE2M1[code] : s.levels ? kLevels[code] : code;
}

// Entry i of row t, as a product reads it.
static double read_as(const MatrixShape& s, const std::vector<float>& x, int64_t t, int64_t i) {
  const float* const row = x.data() + t * s.inputs;
  if (s.digits == 3 || s.bits == 16 || s.e4m3 || s.levels) return row[i];
  float most = 0;
  for (int64_t j = i / s.group * s.group; j < (i / s.group + 1) * s.group; j++)
    most = std::max(most, std::fabs(row[j]));
  if (most == 0) return 0;
  return std::nearbyint(row[i] * (127 / most)) * double(most / 127);
}

static int check(const MatrixShape& s) {
  const int64_t panels = (s.outputs + 31) / 32;
  std::vector<uint8_t> codes(panels * 32 * s.inputs * s.bits / 8);
  for (auto& code : codes) {
    code = uint8_t(random_bits());
    if (s.e4m3 && (code & 127) == 127) code = 0;  // a NaN
  }
  for (size_t i = 0; s.bits == 16 && i < codes.size(); i += 2) {
    const uint16_t half = random_half();
    std::memcpy(codes.data() + i, &half, 2);
  }
  const RandomScales scales(s.kind, s, panels);
  const RandomScales mins(s.of_scale ? ScaleKind::kOfScale : s.kind, s, panels);
  std::vector<float> x(s.tokens * s.inputs);
  for (float& value : x) value = random_float();
  // a row of zeros, which is skipped, among others
  if (s.tokens > 2) std::fill_n(x.begin() + s.inputs, s.inputs, 0.0f);
  const float centre =
      s.bits == 4 && (!s.mins || s.of_scale) && !s.exponents() && !s.levels ? 8.0f : 0.0f;
  const PackedMatrix weights{s.bits,
                             s.group,
                             s.inputs,
                             s.outputs,
                             centre,
                             codes.data(),
                             s.bits == 16 ? Scales{} : scales.scales(),
                             s.mins ? mins.scales() : Scales{},
                             false,
                             s.e4m3,
                             s.levels ? kLevels : nullptr};
  const PackedCall call{x.data(), s.tokens, s.inputs, s.digits, {{weights, nullptr}}};
  const Multiplier& kernel = *best_kernels().multiplier;
  const auto one = run(call, multiplier_baseline, 0);
  const auto best = run(call, kernel, 0);
  bool equal = same(one, run(call, multiplier_baseline, 3)) && same(best, run(call, kernel, 2));
  if (s.outputs % (2 * kPanelOutputs) == 0) {  // two experts, of half of the outputs each
    std::vector<int32_t> chosen(s.tokens);
    for (auto& expert : chosen) expert = int32_t(random_bits() % 2);
    PackedCall halved = call;
    const int64_t half = halved.products[0].weights.outputs = s.outputs / 2;
    const auto y = run(halved, kernel, 2, chosen, 2);
    for (int64_t t = 0; t < s.tokens; t++)
      equal &= !std::memcmp(&y[t * half], &best[t * s.outputs + chosen[t] * half], 4 * half);
  }
  for (int64_t t = 0; t < s.tokens; t++) {
    PackedCall alone = call;
    alone.x += t * s.inputs, alone.tokens = 1;
    const auto y = run(alone, kernel, 0);
    equal &= !std::memcmp(y.data(), best.data() + t * s.outputs, 4 * y.size());
  }
  double difference = 0, between = 0, size = 0;
  for (int64_t t = 0; t < s.tokens; t++)
    for (int64_t o = 0; o < s.outputs; o++) {
      double want = 0;
      for (int64_t i = 0; i < s.inputs; i++) {
        const double scale = s.bits == 16 ? 1 : scales.at(s, i, o);
        const double w =
            (code_of(s, codes, i, o) - centre) * scale + (s.mins ? mins.at(s, i, o, scale) : 0);
        want += read_as(s, x, t, i) * w;
      }
      difference += std::pow(one[t * s.outputs + o] - want, 2);
      between += std::pow(best[t * s.outputs + o] - want, 2);
      size += want * want;
    }
  if (equal && size > 0 && difference <= 1e-11 * size && between <= 1e-11 * size) return 0;
  std::printf("%d bits, %d x %d, %d tokens: %s, differences %g and %g of %g\n", int(s.bits),
              int(s.inputs), int(s.outputs), int(s.tokens), equal ? "bits agree" : "bits differ",
              difference, between, size);
  return 1;
}

int main() {
  int failures = 0, checked = 0;
  for (int64_t bits : {4, 8})
    for (int64_t group : {16, 32})
      for (ScaleKind kind : {ScaleKind::kFloat16, ScaleKind::kBfloat16, ScaleKind::kOfCoarse})
        for (bool mins : {false, true})
          for (int64_t outputs : {5, 40})
            for (int64_t tokens : {1, 2, 3, 13})
              for (int64_t digits : {1, 3}) {
                if (bits == 4 && group == 16) continue;
                if (digits == 1 && tokens > 2) continue;
                const int64_t inputs = kind == ScaleKind::kOfCoarse ? 512 : 160;
                failures += check({bits, group, inputs, outputs, tokens, digits, kind, mins});
                checked++;
              }
  for (int64_t outputs : {5, 64})
    for (int64_t tokens : {1, 3, 13})
      for (int64_t digits : {1, 3}) {
        const ScaleKind half = ScaleKind::kFloat16, coarse = ScaleKind::kOfCoarse;
        failures += check({16, 32, 160, outputs, tokens, digits, half, false});
        failures += check({4, 32, 160, outputs, tokens, digits, ScaleKind::kExponents, false});
        failures += check({8, 16, 512, outputs, tokens, digits, coarse, true});
        for (int64_t bits : {4, 8})
          failures += check({bits, 32, 160, outputs, tokens, digits, half, true, true});
        for (bool e4m3 : {false, true})
          failures +=
              check({8, 32, 160, outputs, tokens, digits, ScaleKind::kFloat32, false, false, e4m3});
        failures += check(
            {4, 32, 160, outputs, tokens, digits, ScaleKind::kFloat32, false, false, false, true});
        checked += 8;
      }
  // more blocks of rows than meet a group of codes together
  for (int64_t bits : {4, 8, 16}) {
    failures += check({bits, 32, 96, 40, 300, 3, ScaleKind::kFloat16, bits < 16});
    checked++;
  }
  std::printf("%d products, kernel %s, %d failures\n", checked, best_kernels().name, failures);
  return failures != 0;
}
