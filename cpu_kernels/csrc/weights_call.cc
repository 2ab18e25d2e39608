#include "weights_call.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

namespace kvq {
namespace {

constexpr int64_t kMinWork = 1 << 18;  // codes times tokens of a task: some 10 microseconds
constexpr int64_t kTasksOfThread = 4;
constexpr size_t kAlignment = 64;       // bytes of a cache line, which no vector then crosses
constexpr int64_t kRowBytes = 1 << 19;  // of the rows of x that a task reads again for each panel

using Chosen = std::vector<int64_t>;  // rows of x

int64_t blocks_of(int64_t tokens) { return (tokens + kTokenBlock - 1) / kTokenBlock; }

int64_t width_of(int64_t tokens) {
  int64_t width = 1;
  while (width < tokens && width < kTokenBlock) width *= 2;
  return width;
}

// What is added to codes to count them from 0.
int32_t offset_of(const PackedMatrix& weights) {
  return weights.bits == 8 ? 128 : weights.e2m1() ? 12 : int32_t(weights.centre);
}

struct FreeAligned {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{kAlignment}); }
};

// The chosen rows of x as the kernel reads them, for the matrices that take them alike.
struct Rows {
  int64_t group;
  int32_t offset;
  bool to_digits, summed, rounded, by_word;
  int64_t floats = 0, sums = 0, lanes = 0, integers = 0, starts = 0;  // of a block
  std::unique_ptr<float[]> scratch{};
  std::unique_ptr<int32_t[]> words{};
  std::unique_ptr<float[], FreeAligned> by_word_of{};
  std::vector<TokenBlock> blocks{};

  Rows(const PackedCall& call, const PackedMatrix& weights, const Multiplier& kernel)
      : group(weights.group), offset(offset_of(weights)),
        to_digits(kernel.reads_digits && kernel.reads_digits(weights, call.digits)),
        summed(weights.mins.fine || (weights.centre != 0 && !to_digits)),
        rounded(call.digits == 1 && weights.integers()), by_word(weights.has_tables()) {}

  bool serves(const Rows& other) const {
    return group == other.group && summed == other.summed && to_digits == other.to_digits &&
           rounded == other.rounded && by_word == other.by_word &&
           (!to_digits || offset == other.offset);
  }
};

void allocate(const PackedCall& call, int64_t tokens, Rows& rows) {
  const int64_t width = width_of(tokens), groups = call.inputs / rows.group;
  const int64_t count = blocks_of(tokens);
  // One row in full precision needs no interleaving.
  const bool as_it_is = !rows.to_digits && tokens == 1 && !rows.rounded;
  rows.floats = rows.to_digits ? groups * width : as_it_is ? 0 : call.inputs * width;
  rows.sums = rows.summed ? groups * width : 0;
  rows.lanes = rows.by_word ? (call.inputs + kLaneRun - 1) / kLaneRun * kLaneRun * width : 0;
  rows.integers = rows.to_digits ? call.inputs / 4 * width * call.digits : 0;
  rows.starts = rows.to_digits ? groups * width * 2 : 0;
  rows.scratch.reset(new float[count * (rows.floats + rows.sums)]);
  rows.by_word_of.reset(new (std::align_val_t{kAlignment}) float[count * rows.lanes]);
  rows.words.reset(new int32_t[count * (rows.integers + rows.starts)]);
  rows.blocks.resize(count);
}

// Round a group of a row to the numbers that one digit can hold.
void round_group(float* x, int64_t stride, int64_t group) {
  constexpr float kWhole = 12582912;  // added and subtracted, it leaves the nearest integer
  float largest = 0;
  for (int64_t i = 0; i < group; i++) largest = std::max(largest, std::fabs(x[i * stride]));
  const float scale = largest > 1e-30f ? largest / 127 : 0, factor = scale > 0 ? 127 / largest : 0;
  for (int64_t i = 0; i < group; i++) {
    float& entry = x[i * stride];
    entry = std::isfinite(entry) ? scale * ((entry * factor + kWhole) - kWhole) : NAN;
  }
}

// Interleave the rows of a block, and add up each group of inputs.
void interleave(const PackedCall& call, const Rows& rows, const TokenBlock& block, float* x,
                float* sums) {
  const int64_t inputs = call.inputs, group = rows.group, width = block.width;
  if (rows.floats) {
    std::fill_n(x, inputs * width, 0.0f);
    for (int64_t t = 0; t < block.count; t++) {
      const float* from = call.x + block.rows[t] * inputs;
      for (int64_t i = 0; i < inputs; i++) x[i * width + t] = from[i];
      for (int64_t g = 0; rows.rounded && g < inputs / group; g++)
        round_group(x + g * group * width + t, width, group);
    }
  }
  if (!sums) return;
  const float* const all = block.x;
  for (int64_t t = 0; t < width; t++)
    for (int64_t g = 0; g < inputs / group; g++) {
      const float* from = all + g * group * width + t;
      float parts[8] = {};  // in an order that vectors can follow
      for (int64_t i = 0; i < group; i += 8)
        for (int64_t j = 0; j < 8; j++) parts[j] += from[(i + j) * width];
      sums[g * width + t] = ((parts[0] + parts[4]) + (parts[1] + parts[5])) +
                            ((parts[2] + parts[6]) + (parts[3] + parts[7]));
    }
}

// Put entry j of each word of a run of inputs beside each other.
void lay_by_word(const PackedCall& call, const TokenBlock& block, float* by_word) {
  const int64_t inputs = call.inputs, width = block.width;
  for (int64_t run = 0; run * kLaneRun < inputs; run++)
    for (int64_t j = 0; j < 8; j++)
      for (int64_t t = 0; t < width; t++, by_word += kLaneWords) {
        std::fill_n(by_word, kLaneWords, 0.0f);
        if (t >= block.count) continue;
        const float* from = call.x + block.rows[t] * inputs + run * kLaneRun + j;
        const int64_t words = std::min(kLaneWords, (inputs - run * kLaneRun) / 8);
        for (int64_t w = 0; w < words; w++) by_word[w] = from[8 * w];
      }
}

void arrange(const PackedCall& call, const Chosen& chosen, const Multiplier& kernel, Rows& rows,
             int64_t b) {
  TokenBlock& block = rows.blocks[b];
  float* const floats = rows.scratch.get() + b * (rows.floats + rows.sums);
  float* const sums = rows.sums ? floats + rows.floats : nullptr;
  int32_t* const words = rows.words.get() + b * (rows.integers + rows.starts);
  const int64_t tokens = int64_t(chosen.size()), first = b * kTokenBlock;
  block.rows = chosen.data() + first;
  block.count = std::min(kTokenBlock, tokens - first);
  block.width = width_of(tokens);
  block.sums = sums;
  if (!rows.to_digits) {
    block.x = rows.floats ? floats : call.x + block.rows[0] * call.inputs;
    interleave(call, rows, block, floats, sums);
    if (rows.by_word) {
      float* const lanes = rows.by_word_of.get() + b * rows.lanes;
      lay_by_word(call, block, lanes);
      block.by_word = lanes;
    }
    return;
  }
  block.digits = words, block.scales = floats, block.starts = words + rows.integers;
  kernel.to_digits({call.x, block.rows, call.inputs, rows.group, block.width, block.count,
                    rows.offset, words, floats, words + rows.integers, sums},
                   call.digits);
}

// Expert e of stacked matrices.
PackedMatrix expert_of(PackedMatrix weights, int64_t e) {
  const int64_t panels = e * weights.panels(), inputs = weights.inputs;
  const auto moved = [](const void* p, int64_t bytes) {
    return p ? static_cast<const char*>(p) + bytes : nullptr;
  };
  weights.codes = moved(weights.codes, panels * kPanelOutputs * inputs * weights.bits / 8);
  for (Scales* scales : {&weights.scales, &weights.mins}) {
    const int64_t entries = panels * inputs / weights.group * kPanelOutputs;
    scales->fine = moved(scales->fine, entries * scales->bytes());
    if (scales->coarse) scales->coarse += panels * (inputs / kCoarse) * kPanelOutputs;
  }
  return weights;
}

// True if all entries of row t of x are 0. NaN is not.
bool is_zero(const PackedCall& call, int64_t t) {
  const float* const x = call.x + t * call.inputs;
  return std::all_of(x, x + call.inputs, [](float entry) { return entry == 0; });
}

// Fill row t of each y with 0.
void clear_results(const PackedCall& call, int64_t t) {
  for (const PackedProduct& product : call.products) {
    const int64_t outputs = product.weights.outputs;
    std::fill_n(product.y + t * outputs, outputs, 0.0f);
  }
}

// Fill the chosen rows of each y.
void multiply_rows(const PackedCall& call, const Chosen& chosen, const Multiplier& kernel,
                   int64_t helpers, const Schedule& schedule) {
  const int64_t tokens = int64_t(chosen.size()), count = blocks_of(tokens), inputs = call.inputs;
  if (!count) return;
  // The caller's thread allocates all memory, because a helper that ran out of it could not report
  // it.
  std::vector<Rows> kinds;
  std::vector<size_t> kind_of;
  std::vector<int64_t> ends;  // of the panels of each matrix, among all
  int64_t panels = 0, work = 0;
  for (const PackedProduct& product : call.products) {
    const PackedMatrix& weights = product.weights;
    Rows rows(call, weights, kernel);
    size_t kind = 0;
    while (kind < kinds.size() && !kinds[kind].serves(rows)) kind++;
    if (kind == kinds.size()) {
      allocate(call, tokens, rows);
      kinds.push_back(std::move(rows));
    }
    kind_of.push_back(kind);
    ends.push_back(panels += weights.panels());
    work += inputs * weights.outputs * tokens;
  }
  if (!panels) return;
  const int64_t max_tasks = std::max<int64_t>(1, work / kMinWork), blocks = count * kinds.size();
  helpers = std::min(helpers, max_tasks - 1);
  run_tasks(blocks, std::min(helpers, count - 1), schedule, [&](int64_t b, int64_t) {
    arrange(call, chosen, kernel, kinds[b / count], b % count);
  });
  // Blocks of a task.
  const int64_t together = std::clamp<int64_t>(kRowBytes / (inputs * kTokenBlock * 4), 1, count);
  const int64_t chunks = (count + together - 1) / together;
  const int64_t parts =
      std::clamp<int64_t>(kTasksOfThread * (helpers + 1) / chunks, 1,
                          std::min(panels, std::max<int64_t>(1, max_tasks / chunks)));
  run_tasks(chunks * parts, helpers, schedule, [&](int64_t task, int64_t) {
    const int64_t chunk = task / parts, part = task % parts;
    const int64_t begin = panels * part / parts, end = panels * (part + 1) / parts;
    for (size_t m = 0; m < call.products.size(); m++) {
      const int64_t start = m ? ends[m - 1] : 0;
      if (begin >= ends[m] || end <= start) continue;
      kernel.panels({&call.products[m].weights, kinds[kind_of[m]].blocks.data(), call.products[m].y,
                     std::max(begin, start) - start, std::min(end, ends[m]) - start,
                     chunk * together, std::min(count, (chunk + 1) * together), call.digits});
    }
  });
}

}  // namespace

void multiply(const PackedCall& call, const Multiplier& kernel, int64_t helpers,
              const Schedule& schedule) {
  Chosen rows;
  for (int64_t t = 0; t < call.tokens; t++)
    if (is_zero(call, t)) clear_results(call, t);
    else rows.push_back(t);
  multiply_rows(call, rows, kernel, helpers, schedule);
}

void multiply_chosen(const PackedCall& call, const int32_t* chosen, int64_t experts,
                     const Multiplier& kernel, int64_t helpers, const Schedule& schedule) {
  std::vector<Chosen> rows_of(experts);
  for (int64_t t = 0; t < call.tokens; t++)
    if (is_zero(call, t)) clear_results(call, t);
    else rows_of[chosen[t]].push_back(t);
  for (int64_t e = 0; e < experts; e++) {
    if (rows_of[e].empty()) continue;
    PackedCall of_expert = call;
    for (PackedProduct& product : of_expert.products)
      product.weights = expert_of(product.weights, e);
    multiply_rows(of_expert, rows_of[e], kernel, helpers, schedule);
  }
}

}  // namespace kvq
