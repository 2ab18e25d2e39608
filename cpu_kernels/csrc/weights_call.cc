#include "weights_call.h"

#include <algorithm>
#include <vector>

namespace kvq {
namespace {

constexpr int64_t kLeastWork = 1 << 18;  // codes times tokens of a task: some 10 microseconds
constexpr int64_t kTasksOfThread = 4;
constexpr int64_t kRowBytes = 1 << 19;  // of the rows of x that a task reads again for each panel

int64_t width_of(int64_t tokens) {
  int64_t width = 1;
  while (width < tokens && width < kTokenBlock) width *= 2;
  return width;
}

// Interleave the rows of a block, and add up each group of inputs.
void arrange(const PackedCall& call, int64_t first, const TokenBlock& block, float* x,
             float* sums) {
  const int64_t inputs = call.weights.inputs, group = call.weights.group, width = block.width;
  if (width > 1) {
    std::fill_n(x, inputs * width, 0.0f);
    for (int64_t t = 0; t < block.count; t++) {
      const float* from = call.x + (first + t) * inputs;
      for (int64_t i = 0; i < inputs; i++) x[i * width + t] = from[i];
    }
  }
  if (!sums) return;
  std::fill_n(sums, inputs / group * width, 0.0f);
  for (int64_t t = 0; t < block.count; t++) {
    const float* from = call.x + (first + t) * inputs;
    for (int64_t g = 0; g < inputs / group; g++) {
      float parts[8] = {};  // in an order that vectors can follow
      for (int64_t i = 0; i < group; i += 8)
        for (int64_t j = 0; j < 8; j++) parts[j] += from[g * group + i + j];
      sums[g * width + t] = ((parts[0] + parts[4]) + (parts[1] + parts[5])) +
                            ((parts[2] + parts[6]) + (parts[3] + parts[7]));
    }
  }
}

}  // namespace

void multiply(const PackedCall& call, MultiplyPanels kernel, int64_t helpers,
              const Schedule& schedule) {
  const PackedMatrix& weights = call.weights;
  const int64_t panels = weights.panels(), inputs = weights.inputs;
  const int64_t count = (call.tokens + kTokenBlock - 1) / kTokenBlock;
  if (!panels || !count) return;
  // The caller's thread allocates all memory, because a helper that ran out of it could not report
  // it.
  const bool single = call.tokens == 1;  // a row needs no interleaving
  const int64_t floats = single ? 0 : inputs * kTokenBlock;
  const int64_t sums = weights.mins.fine ? inputs / weights.group * kTokenBlock : 0;
  std::vector<float> scratch(count * (floats + sums));
  std::vector<TokenBlock> blocks(count);
  const auto arrange_block = [&](int64_t b, int64_t) {
    float* const x = scratch.data() + b * (floats + sums);
    TokenBlock& block = blocks[b];
    block.count = std::min(kTokenBlock, call.tokens - b * kTokenBlock);
    block.width = width_of(block.count);
    block.x = single ? call.x : x, block.sums = sums ? x + floats : nullptr;
    block.y = call.y + b * kTokenBlock * weights.outputs;
    arrange(call, b * kTokenBlock, block, x, sums ? x + floats : nullptr);
  };
  const int64_t work = inputs * weights.outputs * call.tokens;
  const int64_t most = std::max<int64_t>(1, work / kLeastWork);
  helpers = std::min(helpers, most - 1);
  run_tasks(count, std::min(helpers, count - 1), schedule, arrange_block);
  const int64_t together =  // blocks of a task
      std::clamp<int64_t>(kRowBytes / (inputs * kTokenBlock * 4), 1, count);
  const int64_t chunks = (count + together - 1) / together;
  const int64_t parts = std::clamp<int64_t>(kTasksOfThread * (helpers + 1) / chunks, 1,
                                            std::min(panels, std::max<int64_t>(1, most / chunks)));
  run_tasks(chunks * parts, helpers, schedule, [&](int64_t task, int64_t) {
    const int64_t chunk = task / parts, part = task % parts;
    PanelProduct product{&weights,
                         blocks.data(),
                         panels * part / parts,
                         panels * (part + 1) / parts,
                         chunk * together,
                         std::min(count, (chunk + 1) * together)};
    kernel(product);
  });
}

}  // namespace kvq
