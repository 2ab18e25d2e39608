#include "prompt_call.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace kvq {
namespace {

// Query tokens of a task: as many as share the packing of keys well, but enough tasks for all
// threads.
int64_t tokens_of_task(const PromptCall& call, int64_t threads) {
  const int64_t rows = call.batch * call.heads * call.queries * call.group;
  const int64_t fair = rows / (4 * threads) + 1;
  return std::max<int64_t>(1, std::clamp(fair, kMinRows, kMaxRows) / call.group);
}

// The older rows that any query of a row of the batch sees, in the order in which they are left,
// and how many of them each query token has left.
struct OldRows {
  std::vector<int32_t> seen, left;

  OldRows(const PromptCall& call, int64_t b) : left(call.queries) {
    const int32_t* const reach = call.reach + b * call.old;
    for (int64_t i = 0; i < call.old; i++)
      if (reach[i] > 0) seen.push_back(int32_t(i));
    std::stable_sort(seen.begin(), seen.end(),
                     [reach](int32_t i, int32_t j) { return reach[i] < reach[j]; });
    size_t count = 0;
    for (int64_t t = 0; t < call.queries; t++) {
      while (count < seen.size() && reach[seen[count]] <= t) count++;
      left[t] = int32_t(count);
    }
  }
};

// How many new rows each query token of a row of the batch sees: within the rows that there are,
// and never fewer than the token before.
std::vector<int32_t> counts_of(const PromptCall& call) {
  std::vector<int32_t> counts(call.batch * call.queries);
  for (int64_t b = 0; b < call.batch; b++) {
    int64_t largest = 0;
    for (int64_t t = 0; t < call.queries; t++) {
      const int64_t i = b * call.queries + t;
      largest = std::max<int64_t>(largest, std::min<int64_t>(call.counts[i], call.fresh));
      counts[i] = int32_t(largest);
    }
  }
  return counts;
}

int64_t real_queries(const PromptCall& call, int64_t b) {
  return std::clamp<int64_t>(call.real[b], 0, call.queries);
}

// Fill the results of padding.
void see_nothing(const PromptCall& call, int64_t pair) {
  const int64_t real = real_queries(call, pair / call.heads), padding = call.queries - real;
  for (int64_t g = 0; g < call.group; g++) {
    const int64_t first = (pair * call.group + g) * call.queries + real;
    std::fill_n(call.m + first, padding, kNegInf);
    std::fill_n(call.l + first, padding, 0.0f);
    std::fill_n(call.o + first * call.channels, padding * call.channels, 0.0f);
  }
}

}  // namespace

void attend_prompt(const PromptCall& call, AttendRows kernel, int64_t helpers,
                   const Schedule& schedule) {
  std::vector<OldRows> old;
  for (int64_t b = 0; b < call.batch; b++) old.emplace_back(call, b);
  const auto counts = counts_of(call);
  std::vector<int32_t> begins(call.queries);
  for (int64_t t = 0; call.window && t < call.queries; t++)
    begins[t] = int32_t(std::max<int64_t>(0, t + 1 - call.window));
  const int64_t tokens = tokens_of_task(call, helpers + 1);
  const int64_t blocks = (call.queries + tokens - 1) / tokens, pairs = call.batch * call.heads;
  helpers = std::min(helpers, pairs * blocks - 1);
  // The caller's thread allocates all memory, because a helper that runs out of it cannot report
  // it.
  const int64_t floats = (prompt_scratch(tokens * call.group, call.channels) + 15) / 16 * 16;
  size_t room = ((helpers + 1) * floats + 16) * sizeof(float);
  const std::unique_ptr<float[]> scratch(new float[room / sizeof(float)]);
  void* start = scratch.get();
  float* const aligned = static_cast<float*>(std::align(64, 64, start, room));
  const int64_t rows = call.old + call.fresh, per_token = call.group * call.queries;
  const int64_t bytes = call.type == kFloat32 ? 4 : 2;
  for (int64_t pair = 0; pair < pairs; pair++) see_nothing(call, pair);
  // The last tokens see the most rows, and begin first.
  run_tasks(pairs * blocks, helpers, schedule, [&](int64_t task, int64_t worker) {
    const int64_t pair = task % pairs, block = blocks - 1 - task / pairs, b = pair / call.heads;
    PromptRows part{};
    part.q = call.q + pair * per_token * call.channels;
    part.keys = call.keys + pair * rows * call.channels * bytes;
    part.values = call.values + pair * rows * call.channels * bytes;
    part.seen = old[b].seen.data(), part.seen_count = int64_t(old[b].seen.size());
    part.left = old[b].left.data(), part.begins = begins.data();
    part.counts = counts.data() + b * call.queries;
    part.type = call.type, part.group = call.group, part.queries = call.queries;
    part.channels = call.channels, part.old = call.old;
    part.first = block * tokens;
    part.last = std::min(real_queries(call, b), part.first + tokens);
    if (part.first >= part.last) return;
    part.scale = call.scale, part.soft_cap = call.soft_cap;
    part.scratch = aligned + worker * floats;
    part.m = call.m + pair * per_token, part.l = call.l + pair * per_token;
    part.o = call.o + pair * per_token * call.channels;
    kernel(part);
  });
}

}  // namespace kvq
