#include "split.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

namespace kvq {
namespace {

constexpr int64_t kOfWindows = -1, kNoHead = -1;

// Neighbouring places of a body that some query sees. Places + offset are the numbers of tokens.
struct Piece {
  int64_t first, last, offset;
  bool before;  // the last whole round of a ring
};

// One KV head of one row of the batch, and those of the kTaskTokens places from stretch *
// kTaskTokens on that belong to the piece, or the windows.
struct Task {
  int64_t row, head;
  int64_t stretch;  // or kOfWindows
  Piece piece;
};

// Floats of a task's result: m and l of each query row, then o.
int64_t result_floats(const Call& call) { return call.rows * (2 + call.values.body.head_dim()); }

class Job {
 public:
  // The caller's thread allocates all memory here, because a helper that runs out of memory cannot
  // report it. Results and scratch are left as they are: tasks write before they read.
  Job(const Call& call, AttendTokens kernel, int64_t helpers) : call_(call), kernel_(kernel) {
    for (int64_t b = 0; b < call.batch; b++) {
      const std::vector<Piece> pieces = pieces_of(b);
      for (int64_t h = 0; h < call.heads; h++) {
        if (call.windows.q) tasks_.push_back({b, h, kOfWindows, {}});
        for (const Piece& piece : pieces)
          for (int64_t s = piece.first / kTaskTokens; s * kTaskTokens < piece.last; s++)
            tasks_.push_back({b, h, s, piece});
      }
    }
    // Tasks of the windows are short and come last, so that threads end at about the same time.
    for (const bool windows : {false, true})
      for (int64_t i = 0; i < size(); i++)
        if ((tasks_[i].stretch == kOfWindows) == windows) order_.push_back(i);
    results_.reset(new float[tasks_.size() * result_floats(call)]);
    helpers_ = std::max<int64_t>(0, std::min(helpers, size() - 1));
    room_ = (helpers_ + 1) * scratch() + 16;
    scratch_.reset(new float[room_]);
    ordered_.resize(helpers_ + 1, kNoHead);
  }

  int64_t helpers() const { return helpers_; }
  int64_t size() const { return int64_t(tasks_.size()); }

  // Run task number i, in the order in which they begin.
  void run(int64_t i, int64_t worker) { run_task(order_[i], worker); }

  void merge() const {
    size_t first = 0;
    for (int64_t b = 0; b < call_.batch; b++)
      for (int64_t h = 0; h < call_.heads; h++) {
        size_t last = first;
        while (last < tasks_.size() && tasks_[last].row == b && tasks_[last].head == h) last++;
        merge_head(b, h, first, last);
        first = last;
      }
  }

 private:
  // The pieces of a row's body that hold what its queries see, within the arrays.
  std::vector<Piece> pieces_of(int64_t b) const {
    const int32_t *limits = call_.limits + b * call_.queries,
                  *lower = call_.lower ? call_.lower + b * call_.queries : nullptr;
    const int64_t end = *std::max_element(limits, limits + call_.queries),
                  begin = lower ? std::max(0, *std::min_element(lower, lower + call_.queries)) : 0;
    std::vector<Piece> pieces;
    const auto add = [&](int64_t first, int64_t last, int64_t offset, bool before) {
      first = std::max(first, begin - offset), last = std::min(last, end - offset);
      if (first < last) pieces.push_back({first, last, offset, before});
    };
    const int64_t ring = call_.ring.tokens;
    if (!ring) {
      add(0, call_.capacity, 0, false);
      return pieces;
    }
    const int64_t written = std::max(0, call_.ring.written[b]), newer = written % ring;
    add(0, newer, written - newer, false);
    add(newer, ring, written - newer - ring, true);
    return pieces;
  }

  static Arrays arrays_of(const Side& side, int64_t b, int64_t h) {
    Arrays arrays{};
    for (int set = 0; set < 2; set++)
      arrays.words[set] = static_cast<const uint16_t*>(side.words[set].at(b, h, 1));
    arrays.scale = side.scale.at(b, h, side.body.heads);
    arrays.zero = side.zero.at(b, h, side.body.heads);
    arrays.angle_scale = side.angle_scale.at(b, h, 1),
    arrays.angle_zero = side.angle_zero.at(b, h, 1);
    arrays.table = side.table;
    const SparseSide& sparse = side.outliers;
    arrays.outliers = {static_cast<const uint16_t*>(sparse.index.at(b, 0, 1)),
                       sparse.residual.at(b, 0, 1),
                       static_cast<const uint16_t*>(sparse.ends.at(b, 0, 1)),
                       sparse.slots,
                       sparse.heads,
                       h};
    arrays.turns = side.turns;
    if (side.body.form == kRuns) arrays.runs = runs_of(side.runs, b, h);
    return arrays;
  }

  static RunArrays runs_of(const RunSide& side, int64_t b, int64_t h) {
    const auto floats = [h](const Strided& array) {
      return static_cast<const float*>(array.at(0, h, 1));
    };
    RunArrays runs{};
    for (int64_t width = 0; width < kRunWidths; width++)
      for (int set = 0; set < 3; set++)
        runs.words[width][set] = static_cast<const uint16_t*>(side.words[width][set].at(b, h, 1));
    runs.exponent = static_cast<const int8_t*>(side.exponent.at(b, h, 1));
    runs.steps = side.steps, runs.place = static_cast<const int32_t*>(side.place.at(0, h, 1));
    runs.scale = floats(side.scale), runs.synthesis = floats(side.synthesis),
    runs.mean = floats(side.mean);
    return runs;
  }

  Windows windows_of(int64_t b, int64_t h) const {
    const ExactSide& all = call_.windows;
    Windows windows{};
    for (int i = 0; i < 2; i++) {
      windows.keys[i] = all.keys[i].at(b, h, 1), windows.values[i] = all.values[i].at(b, h, 1);
      windows.tokens[i] = all.tokens[i];
    }
    const int64_t first = b * (all.tokens[0] + all.tokens[1]);
    windows.type = all.type, windows.seen = all.seen + first;
    for (int i = 0; i < 2 && call_.keys.body.rotated; i++)
      windows.turns[i] = all.turns[i] + first * call_.keys.body.head_dim() / 2;
    return windows;
  }

  // Floats of a worker, a multiple of 64 bytes.
  int64_t scratch() const {
    return (scratch_floats(call_.keys.body, call_.values.body, call_.rows) + 15) / 16 * 16;
  }

  void run_task(int64_t i, int64_t worker) {
    const auto [b, h, s, piece] = tasks_[i];
    const Body &k = call_.keys.body, &v = call_.values.body;
    void* start = scratch_.get();
    size_t room = room_ * sizeof(float);
    float* result = results_.get() + i * result_floats(call_);
    Work work{};
    work.k = &k, work.v = &v;
    work.keys = arrays_of(call_.keys, b, h), work.values = arrays_of(call_.values, b, h);
    const Windows windows = s == kOfWindows ? windows_of(b, h) : Windows{};
    work.windows = s == kOfWindows ? &windows : nullptr;
    const float* const q = work.windows                          ? call_.windows.q
                           : piece.before && call_.ring.q_before ? call_.ring.q_before
                                                                 : call_.q;
    work.q = q + (b * call_.heads + h) * call_.rows * k.head_dim();
    work.limits = call_.limits + b * call_.queries;
    work.lower = call_.lower ? call_.lower + b * call_.queries : nullptr;
    work.scale = call_.scale, work.soft_cap = call_.soft_cap;
    work.rows = call_.rows, work.queries = call_.queries, work.capacity = call_.capacity;
    if (s != kOfWindows)
      work.first = std::max(piece.first, s * kTaskTokens),
      work.last = std::min(piece.last, (s + 1) * kTaskTokens), work.offset = piece.offset;
    work.scratch = static_cast<float*>(std::align(64, 64, start, room)) + worker * scratch();
    // All rows of a batch share a head's matrix. Windows leave other things in the scratch.
    work.ordered = k.synthesis && s != kOfWindows && ordered_[worker] == h;
    ordered_[worker] = s == kOfWindows ? kNoHead : h;
    work.m = result, work.l = result + call_.rows, work.o = result + 2 * call_.rows;
    kernel_(work);
  }

  void merge_head(int64_t b, int64_t h, size_t first, size_t last) const {
    const int64_t rows = call_.rows, channels = call_.values.body.head_dim(),
                  at = (b * call_.heads + h) * rows;
    for (int64_t r = 0; r < rows; r++) {
      float largest = kNegInf, total = 0;
      float* o = call_.o + (at + r) * channels;
      std::memset(o, 0, channels * sizeof(float));
      for (size_t i = first; i < last; i++)
        largest = std::max(largest, results_[i * result_floats(call_) + r]);
      for (size_t i = first; i < last; i++) {
        const float* result = results_.get() + i * result_floats(call_);
        const float shrink = std::exp(result[r] - largest);
        total += result[rows + r] * shrink;
        for (int64_t c = 0; c < channels; c++) o[c] += result[2 * rows + r * channels + c] * shrink;
      }
      call_.m[at + r] = largest;
      call_.l[at + r] = total;
    }
  }

  const Call call_;
  const AttendTokens kernel_;
  std::vector<Task> tasks_;       // by row and head, as they are merged
  std::vector<int64_t> order_;    // the order in which they begin
  std::vector<int64_t> ordered_;  // the head whose matrix each worker's scratch holds
  std::unique_ptr<float[]> results_, scratch_;
  size_t room_ = 0;  // floats of the scratch
  int64_t helpers_ = 0;
};

}  // namespace

void attend(const Call& call, AttendTokens kernel, int64_t helpers, const Schedule& schedule) {
  Job job(call, kernel, helpers);
  run_tasks(job.size(), job.helpers(), schedule,
            [&job](int64_t i, int64_t worker) { job.run(i, worker); });
  job.merge();
}

}  // namespace kvq
