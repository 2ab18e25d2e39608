// Bodies in runs with neighbouring tokens in the lanes of a register, as transposed.h reads uniform
// bodies. No lane is idle in short runs, keys are rotated without permutations, and scores need no
// sums over lanes.
#pragma once

#include "runs.h"
#include "transposed.h"

namespace {

#if defined(__AVX2__)

// The keys or values of one KV head. The scratch is the caller's, kvq::across_floats(body).
class RunsAcross {
 public:
  static bool served(const Body& body) { return readable(body) && !body.synthesis; }
  static bool readable(const Body& body) {
    for (int64_t channels : body.run_channels)
      if (channels % kWords) return false;
    return body.form == kvq::kRuns && body.span % kLanes == 0;
  }

  RunsAcross(const Runs& runs, float* scratch) : runs_(runs), body_(runs.body) {
    if (!readable(body_)) return;
    words_ = reinterpret_cast<Uints*>(scratch);
    int64_t place = 0, start = 0;
    for (int64_t width = kRunWidths; width > 0; width--) {
      const int64_t channels = body_.run_channels[width - 1], slots = kvq::run_slots(width);
      if (!channels) continue;
      ChannelRun& run = all_[count_++];
      run = {width,
             start,
             channels,
             body_.span / slots,
             Uints{} + uint32_t((127 + width) << kMantissa),
             {}};
      int64_t low = 0;
      for (int s = 0; s < __builtin_popcountll(width); s++) {
        Set& set = run.sets[s];
        const int64_t bits = kvq::run_set_bits(width, s), top = kMantissa - width + low;
        set.words = runs.arrays.words[width - 1][s], set.tiles = slots * bits / 16,
        set.place = place;
        const int64_t of_span = maximum(1, run.rows * set.tiles / kLanes),
                      vectors = body_.span / kLanes;  // words repeat in a span
        set.copies = of_span * kDecoded / body_.span;
        for (int v = 0; v < kVectors; v++)
          set.copy[v] = v / vectors * of_span + v % vectors % of_span;
        set.mask = Uints{} + uint32_t(((1 << bits) - 1) << top);
        for (int64_t t = 0; t < kDecoded; t++) {
          const int64_t slot = t % body_.span / run.rows;
          set.line[t] = int32_t((t % run.rows * set.tiles + slot % set.tiles) * channels);
          reinterpret_cast<int32_t*>(&set.shifts[t / kLanes])[t % kLanes] =
              int32_t(top - slot / set.tiles * bits);
        }
        place += kGroups * set.copies * channels;
        low += bits;
      }
      start += channels;
    }
    tables_ = scratch + place * kLanes;
  }

  // Put the tables of keys into the order of storage.
  void order_keys(const kvq::Turns& turns) const {
    const int64_t half = body_.channels / 2, stored = body_.stored_channels();
    // A calibration may give two channels the same place, and none to another.
    for (int64_t i = 0; i < (3 + kDecoded) * body_.channels; i++) tables_[i] = 0;
    for (int64_t i = 0; i < half; i++) {
      const int64_t pair = runs_.place_of(i) / 2;
      for (int64_t t = 0; t < kDecoded; t++) {
        cosines(pair)[t] = turns.steps[t * half + i];
        sines(pair)[t] = turns.steps[(kDecoded + t) * half + i];
      }
    }
    for (int64_t c = 0; c < body_.channels; c++) {
      const int64_t to = runs_.place_of(c);
      scale()[to] = runs_.arrays.scale[c], mean()[to] = runs_.arrays.mean[c];
    }
    for (int64_t c = stored; c < body_.channels; c += 2)
      for (int64_t t = 0; t < kDecoded; t++) {
        const float cosine = cosines(c / 2)[t], sine = sines(c / 2)[t];
        rest(c)[t] = mean()[c] * cosine - mean()[c + 1] * sine;
        rest(c + 1)[t] = mean()[c + 1] * cosine + mean()[c] * sine;
      }
    for_runs([&](auto, const ChannelRun& run) {
      for (int64_t c = run.start; c < run.start + run.channels; c++) {
        const float step = scale()[c] * runs_.arrays.steps[run.width - 1];
        scale()[c] = step, least()[c] = -step * offset_of(run);
      }
    });
  }

  // scores[r, t] = q[r] . k[t] for `count` tokens from body token `first` on, a multiple of
  // kDecoded, with queries in the order of storage. Tokens up to the next multiple get arbitrary
  // scores.
  void score(int64_t first, int64_t count, int64_t rows, const float* q, float* scores) const {
    float factors[kDecoded];
    powers_of_two(runs_.arrays.exponent + first, count, factors);
    for_rows(rows, [&](auto number) { score_rows<decltype(number)::value>(q, factors, scores); });
  }

  // Transpose the words of kDecoded tokens from body token `first` on, into group number `group` of
  // kGroups.
  void read(int64_t first, int64_t group) const {
    for_runs([&](auto sets, const ChannelRun& run) {
      for (int s = 0; s < decltype(sets)::value; s++) {
        const Set& set = run.sets[s];
        const int64_t of_span = set.copies * body_.span / kDecoded;
        for (int64_t copy = 0; copy < set.copies; copy++) {
          const int64_t token = first + copy / of_span * body_.span;
          if (token >= runs_.capacity) break;
          const uint16_t* words =
              set.words + token / body_.span * run.rows * set.tiles * run.channels;
          const int32_t* line = set.line + copy % of_span * kLanes;
          const auto place = [line](int64_t l) { return line[l]; };
          Uints* out = words_ + set.place + (group * set.copies + copy) * run.channels;
          for (int64_t c = 0; c < run.channels; c += kWords)
            transpose_eight(words + c, place, out + c);
        }
      }
    });
  }

  // Put the numbers of which a matrix makes keys (runs.h) in their places, for the group that was
  // read first.
  void put_numbers() const {
    typedef int16_t Halves __attribute__((vector_size(4 * kLanes)));
    for_runs([&](auto sets, const ChannelRun& run) {
      constexpr int kSets = decltype(sets)::value;
      const int16_t multiple = int16_t(runs_.multiple_of(run.width)),
                    least = int16_t(multiple * (1 - (1 << run.width)));
      const Shift unused = shift_by(int32_t(kMantissa - run.width));
      for (int64_t i = 0; i < run.channels; i += 2)
        for (int v = 0; v < kVectors; v++) {
          const Uints first = field_at<kSets>(run, i, 0, v, Uints{}) >> unused,
                      second = field_at<kSets>(run, i + 1, 0, v, Uints{}) >> unused;
          const Halves numbers = (Halves)(first | second << 16) * int16_t(2 * multiple) + least;
          std::memcpy(runs_.numbers_of((run.start + i) / 2) + 2 * v * kLanes, &numbers,
                      sizeof numbers);
        }
    });
  }

  // sums[r] += sum_t weights[r, t] u[t] for the `count` tokens, from body token `first` on, of the
  // groups that were read. The weights are not scaled. `scaled` [rows, kPadded] is scratch.
  void weigh(int64_t first, int64_t count, int64_t rows, const float* weights, float* scaled,
             float* sums) const {
    float factors[kTile];
    const int64_t groups = (count + kDecoded - 1) / kDecoded;
    for (int64_t g = 0; g < groups; g++)
      powers_of_two(runs_.arrays.exponent + first + g * kDecoded,
                    minimum(kDecoded, count - g * kDecoded), factors + g * kDecoded);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < groups * kDecoded; t++)
        scaled[r * kPadded + t] = t < count ? weights[r * kPadded + t] * factors[t] : 0.0f;
    for_rows(rows, [&](auto number) { weigh_rows<decltype(number)::value>(groups, scaled, sums); });
  }

 private:
  static constexpr int kVectors = kDecoded / kLanes, kWords = 8;
  static constexpr int64_t kGroups = kTile / kDecoded;

  struct Set {
    const uint16_t* words;
    int64_t tiles, place;  // of a row; of the transposed words
    int64_t copies;        // vectors of words of a group, before they repeat
    int64_t copy[kVectors];
    int32_t line[kDecoded];  // the beginning of a token's words, counted from its span's
    Uints mask;
    Shift shifts[kVectors];
  };

  struct ChannelRun {
    int64_t width, start, channels, rows;
    Uints exponent;
    Set sets[3];
  };

  const Runs runs_;
  const Body& body_;
  Uints* words_ = nullptr;  // of each set [kGroups, copies, channels]
  float* tables_ = nullptr;
  ChannelRun all_[kRunWidths];
  int count_ = 0;

  float* scale() const { return tables_; }
  float* least() const { return tables_ + body_.channels; }
  float* mean() const { return tables_ + 2 * body_.channels; }
  float* cosines(int64_t pair) const { return tables_ + 3 * body_.channels + 2 * pair * kDecoded; }
  float* sines(int64_t pair) const { return cosines(pair) + kDecoded; }
  float* rest(int64_t c) const {
    return tables_ + 3 * body_.channels + (body_.channels + c) * kDecoded;
  }

  // Return the offset of codes as numbers.
  static float offset_of(const ChannelRun& run) { return float(3 << run.width) / 2 - 0.5f; }

  template <class Function>
  void for_runs(Function function) const {
    for (const ChannelRun* run = all_; run < all_ + count_; run++)
      switch (__builtin_popcountll(run->width)) {
        case 1:
          function(Number<1>{}, *run);
          break;
        case 2:
          function(Number<2>{}, *run);
          break;
        default:
          function(Number<3>{}, *run);
      }
  }

  // 2^width + code of channel c of a run, for vector v of tokens of a group.
  template <int kSets>
  KVQ_INLINE Floats number_at(const ChannelRun& run, int64_t c, int64_t group, int v) const {
    return (Floats)field_at<kSets>(run, c, group, v, run.exponent);
  }

  // `bits` with the code in the highest bits of a mantissa.
  template <int kSets>
  KVQ_INLINE Uints field_at(const ChannelRun& run, int64_t c, int64_t group, int v,
                            Uints bits) const {
    for (int s = 0; s < kSets; s++) {
      const Set& set = run.sets[s];
      const Uints word = words_[set.place + (group * set.copies + set.copy[v]) * run.channels + c];
      bits = masked_or(word << set.shifts[v], set.mask, bits);
    }
    return bits;
  }

  template <int R>
  void score_rows(const float* q, const float* factors, float* scores) const {
    const int64_t stride = body_.row_floats(), stored = body_.stored_channels();
    for (int at = 0; at < kVectors; at += kAcross) {
      Floats sums[R][kAcross] = {}, factor[kAcross];
      for (int u = 0; u < kAcross; u++) factor[u] = load(factors + (at + u) * kLanes);
      for_runs([&](auto sets, const ChannelRun& run) {
        for (int64_t i = 0; i < run.channels; i += 2) {
          const int64_t c = run.start + i;
          for (int u = 0; u < kAcross; u++) {
            Floats x[2];
            for (int j = 0; j < 2; j++) {
              const Floats number = number_at<decltype(sets)::value>(run, i + j, 0, at + u);
              x[j] = (number * scale()[c + j] + least()[c + j]) * factor[u] + mean()[c + j];
            }
            const Floats cosine = load(cosines(c / 2) + (at + u) * kLanes),
                         sine = load(sines(c / 2) + (at + u) * kLanes);
            const Floats first = x[0] * cosine - x[1] * sine, second = x[1] * cosine + x[0] * sine;
            for (int r = 0; r < R; r++)
              sums[r][u] += first * q[r * stride + c] + second * q[r * stride + c + 1];
          }
        }
      });
      for (int64_t c = stored; c < body_.channels; c++)
        for (int u = 0; u < kAcross; u++)
          for (int r = 0; r < R; r++)
            sums[r][u] += load(rest(c) + (at + u) * kLanes) * q[r * stride + c];
      for (int r = 0; r < R; r++)
        for (int u = 0; u < kAcross; u++)
          store(scores + r * kPadded + (at + u) * kLanes, sums[r][u]);
    }
  }

  template <int R>
  void weigh_rows(int64_t groups, const float* weights, float* sums) const {
    const int64_t stride = body_.row_floats();
    for_runs([&](auto sets, const ChannelRun& run) {
      const float step = runs_.arrays.steps[run.width - 1], offset = offset_of(run);
      for (int64_t i = 0; i < run.channels; i += 2) {
        Floats acc[8] = {};
        for (int64_t g = 0; g < groups; g++)
          for (int v = 0; v < kVectors; v++) {
            Floats x[2];
            for (int j = 0; j < 2; j++)
              x[j] = number_at<decltype(sets)::value>(run, i + j, g, v) - offset;
            for (int r = 0; r < R; r++) {
              const Floats weight = load(weights + r * kPadded + g * kDecoded + v * kLanes);
              for (int j = 0; j < 2; j++) acc[2 * r + j] += x[j] * weight;
            }
          }
        float totals[8];
        add_lanes(acc, totals);
        for (int r = 0; r < R; r++)
          for (int j = 0; j < 2; j++)
            sums[r * stride + run.start + i + j] += totals[2 * r + j] * step;
      }
    });
  }
};

#else

// SSE2 and NEON: words are not transposed.
class RunsAcross {
 public:
  RunsAcross(const Runs&, float*) {}
  static bool served(const Body&) { return false; }
  static bool readable(const Body&) { return false; }
  void put_numbers() const {}
  void order_keys(const kvq::Turns&) const {}
  void score(int64_t, int64_t, int64_t, const float*, float*) const {}
  void read(int64_t, int64_t) const {}
  void weigh(int64_t, int64_t, int64_t, const float*, float*, float*) const {}
};

#endif

}  // namespace
