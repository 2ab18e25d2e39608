// Vectors of a body in runs of channels of one width each, in the order of storage. The first run
// is the widest.
//
//   u_c = 2^(e / 8) (code_c + 1/2 - 2^(b - 1)) step_b       e: a token's scale
//                                                           b: the width of channel c's run
//
//   keys     k = R(p) (u s + mean), pairs side by side. Channels that are not stored are the mean.
//            k = R(p) (u synthesis + mean), in the model's order, if the body says so.
//   values   sum_t w_t v_t = (sum_t w_t u_t) synthesis + (sum_t w_t) mean
#pragma once

#include "decoded.h"
#include "exact.h"

namespace {

using kvq::kLongest;
using kvq::kRunWidths;

constexpr float kEighths[16] = {1.0f,       1.0905077f, 1.1892071f, 1.2968396f,
                                1.4142135f, 1.5422108f, 1.6817929f, 1.8340081f};

// out[t] = 2^(exponents[t] / 8) for t < count <= kDecoded, and 0 for the other tokens.
inline void powers_of_two(const int8_t* exponents, int64_t count, float* out) {
  const Table fractions(kEighths);
  int32_t wide[kDecoded] = {};
  for (int64_t t = 0; t < count; t++) wide[t] = exponents[t];
  for (int64_t t = 0; t < kDecoded; t += kLanes) {
    Ints eighths;
    std::memcpy(&eighths, wide + t, sizeof eighths);
    store(out + t, fractions.at((Uints)(eighths & 7)) * (Floats)(((eighths >> 3) + 127) << 23));
  }
  for (int64_t t = count; t < kDecoded; t++) out[t] = 0;
}

// The keys or values of one KV head. The scratch is the caller's, kvq::run_floats(body).
struct Runs {
  const Body& body;
  const kvq::RunArrays& arrays;
  int64_t capacity, stride;
  float *vectors, *cosines, *sines, *scale, *mean, *turned;

  Runs(const Body& described, const kvq::RunArrays& stored, int64_t tokens, float* scratch)
      : body(described), arrays(stored), capacity(tokens),
        stride(described.row_floats() + kLongest) {
    vectors = scratch;
    cosines = vectors + kDecoded * stride;
    sines = cosines + kDecoded * stride;
    scale = sines + kDecoded * stride;
    mean = scale + stride;
    turned = mean + stride;
  }

  // Nothing outside a row is written, whatever a calibration says.
  int64_t place_of(int64_t c) const {
    return maximum(0, minimum(arrays.place[c], body.channels - 1));
  }

  // Vectors of a token that hold any stored channel.
  int64_t vectors_of_values() const { return (body.stored_channels() + kLanes - 1) / kLanes; }

  void clear() const {
    for (int64_t i = 0; i < kDecoded * stride; i++) vectors[i] = 0;
  }

  // u of kDecoded tokens, if a matrix makes the keys of them: such keys have no tables.
  float* channels_of_keys() const { return cosines; }

  // Put RoPE's tables, scales and means of keys into the order of storage. Channels that are not
  // stored are set in `vectors` once.
  void order_keys(const kvq::Turns& turns) const {
    const int64_t half = body.channels / 2, stored = body.stored_channels();
    for (int64_t i = 0; i < stride; i++) scale[i] = mean[i] = 0;
    for (int64_t i = 0; i < kDecoded * stride; i++) cosines[i] = sines[i] = 0;
    clear();
    if (body.synthesis) return;
    for (int64_t c = 0; c < body.channels; c++) {
      const int64_t to = place_of(c);
      if (to < stored) scale[to] = arrays.scale[c];
      mean[to] = arrays.mean[c];
    }
    for (int64_t t = 0; t < kDecoded; t++)
      for (int64_t i = 0; i < half; i++) {
        const int64_t first = t * stride + place_of(i), second = t * stride + place_of(half + i);
        const float sine = turns.steps[(kDecoded + t) * half + i];
        cosines[first] = cosines[second] = turns.steps[t * half + i];
        sines[first] = -sine, sines[second] = sine;
      }
    for (int64_t t = 0; t < kDecoded; t++)
      for (int64_t c = stored / kLanes * kLanes; c < body.row_floats(); c += kLanes)
        put_key(t, c, Floats{});
  }

  // Put the channels of queries into the order of storage.
  void order(int64_t rows, float* q) const {
    if (body.synthesis) return;
    const int64_t floats = body.row_floats();
    for (int64_t r = 0; r < rows; r++, q += floats) {
      std::memcpy(turned, q, sizeof(float) * body.channels);
      for (int64_t c = 0; c < body.channels; c++) q[place_of(c)] = turned[c];
    }
  }

  // Point at the keys of `count` tokens from body token `first` on, a multiple of kDecoded.
  void keys(int64_t first, int64_t count, const kvq::Turns& turns, const void** at) const {
    if (body.synthesis) synthesize_keys(first, count, turns);
    else read(first, count, [&](int64_t t, int64_t c, Floats u) { put_key(t, c, u); });
    for (int64_t i = 0; i < count; i++) at[i] = vectors + i * stride;
  }

  // Point at u of `count` tokens from body token `first` on.
  void values(int64_t first, int64_t count, const void** at) const {
    read(first, count, [&](int64_t t, int64_t c, Floats u) { store(vectors + t * stride + c, u); });
    for (int64_t i = 0; i < count; i++) at[i] = vectors + i * stride;
  }

  // out = sums synthesis + total mean
  void synthesize(const float* sums, float total, float* out) const {
    const int64_t channels = body.channels, stored = body.stored_channels();
    for (int64_t c = 0; c < channels; c++) out[c] = total * arrays.mean[c];
    for (int64_t i = 0; i < stored; i++)
      for (int64_t c = 0; c < channels; c++) out[c] += sums[i] * arrays.synthesis[i * channels + c];
  }

 private:
  void synthesize_keys(int64_t first, int64_t count, const kvq::Turns& turns) const {
    float* const u = channels_of_keys();
    read(first, count, [&](int64_t t, int64_t c, Floats x) { store(u + t * stride + c, x); });
    const int64_t channels = body.channels, half = channels / 2;
    constexpr int kTokens = kLanes == 16 ? 8 : 4, kWide = 2;
    for (int64_t t = 0; t < count; t += kTokens) {
      int64_t c = 0;
      for (; c + kWide * kLanes <= channels; c += kWide * kLanes) mix<kTokens, kWide>(u, t, c);
      for (; c + kLanes <= channels; c += kLanes) mix<kTokens, 1>(u, t, c);
      for (; c < channels; c++)
        for (int64_t i = t; i < t + kTokens; i++) {
          float sum = arrays.mean[c];
          for (int64_t s = 0; s < body.stored_channels(); s++)
            sum += u[i * stride + s] * arrays.synthesis[s * channels + c];
          vectors[i * stride + c] = sum;
        }
    }
    for (int64_t t = 0; t < count; t++) {
      float* const vector = vectors + t * stride;
      turn<false>(vector, turns.steps + t * half, turns.steps + (kDecoded + t) * half, half,
                  vector);
    }
  }

  // Put u synthesis + mean of T tokens from token t of `vectors` on, in V vectors from channel c on.
  template <int T, int V>
  KVQ_INLINE void mix(const float* u, int64_t t, int64_t c) const {
    const int64_t stored = body.stored_channels();
    const float *row = u + t * stride, *column = arrays.synthesis + c;
    Floats sums[T][V];
    for (int i = 0; i < T; i++)
      for (int v = 0; v < V; v++) sums[i][v] = load(arrays.mean + c + v * kLanes);
    for (int64_t s = 0; s < stored; s++, column += body.channels)
      for (int v = 0; v < V; v++) {
        const Floats entries = load(column + v * kLanes);
        for (int i = 0; i < T; i++) sums[i][v] += entries * row[i * stride + s];
      }
    for (int i = 0; i < T; i++)
      for (int v = 0; v < V; v++) store(vectors + (t + i) * stride + c + v * kLanes, sums[i][v]);
  }

  void put_key(int64_t t, int64_t c, Floats u) const {
    const int64_t at = t * stride + c;
    const Floats x = u * load(scale + c) + load(mean + c);
    store(vectors + at, x * load(cosines + at) + swap_pairs(x) * load(sines + at));
  }

  // Call put(token of `count`, channel, u of kLanes channels from it on) for all runs, one after
  // another. Numbers behind the last channel of a run are finite, and the next run's call replaces
  // them.
  template <class Put>
  void read(int64_t first, int64_t count, Put put) const {
    float factors[kDecoded];
    powers_of_two(arrays.exponent + first, count, factors);
    int64_t start = 0;
    for (int64_t width = kRunWidths; width > 0; width--) {
      const int64_t channels = body.run_channels[width - 1];
      if (!channels) continue;
      const auto from = [&](int64_t t, int64_t c, Floats u) {
        put(t, start + c, u * (factors[t] * arrays.steps[width - 1]));
      };
      switch (__builtin_popcountll(width)) {
        case 1:
          read_run<1>(width, first, count, from);
          break;
        case 2:
          read_run<2>(width, first, count, from);
          break;
        default:
          read_run<3>(width, first, count, from);
      }
      start += channels;
    }
  }

  struct Set {
    const uint16_t *words, *end;
    int64_t bits, tiles;
    Uints mask;
    Shift low;  // bits of the sets before it
  };

  template <int kSets, class Put>
  void read_run(int64_t width, int64_t first, int64_t count, Put put) const {
    const int64_t channels = body.run_channels[width - 1], slots = kvq::run_slots(width),
                  rows = body.span / slots;
    Set sets[kSets];
    int64_t low = 0;
    for (int s = 0; s < kSets; s++) {
      const int64_t bits = kvq::run_set_bits(width, s);
      const uint16_t* first_words = arrays.words[width - 1][s];
      sets[s] = {first_words,
                 first_words + capacity / slots * (slots * channels * bits / 16),
                 bits,
                 slots * bits / 16,
                 Uints{} + uint32_t((1 << bits) - 1),
                 shift_by(int32_t(low))};
      low += bits;
    }
    const float offset = 0.5f - float(1 << (width - 1));
    for (int64_t at = 0; at < count; at += body.span) {
      for (int64_t slot = 0; slot < slots; slot++)
        for (int64_t row = 0; row < rows; row++) {
          const int64_t number = (first + at) / body.span * rows + row;
          const uint16_t* words[kSets];
          Shift shifts[kSets];
          for (int s = 0; s < kSets; s++) {
            words[s] = sets[s].words + (number * sets[s].tiles + slot % sets[s].tiles) * channels;
            shifts[s] = shift_by(int32_t(slot / sets[s].tiles * sets[s].bits));
          }
          for (int64_t c = 0; c < channels; c += kLanes) {
            Uints code = {};
            for (int s = 0; s < kSets; s++) {
              const uint16_t* channel_words = words[s] + c;
              const Uints word =
                  sets[s].end - channel_words >= kLanes
                      ? load_words(channel_words)
                      : load_some_words(channel_words, minimum(kLanes, channels - c));
              code |= ((word >> shifts[s]) & sets[s].mask) << sets[s].low;
            }
            put(at + slot * rows + row, c, to_float(code) + offset);
          }
        }
    }
  }
};

}  // namespace
