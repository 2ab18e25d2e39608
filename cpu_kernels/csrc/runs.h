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

using kvq::kMaxLanes;
using kvq::kRunWidths;

constexpr int64_t kMaxNumber = 255;  // 8 bits, counted from the middle in half steps
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
  int16_t* matrix;

  Runs(const Body& described, const kvq::RunArrays& stored, int64_t tokens, float* scratch)
      : body(described), arrays(stored), capacity(tokens),
        stride(described.row_floats() + kMaxLanes) {
    vectors = scratch;
    cosines = vectors + kDecoded * stride;
    sines = cosines + kDecoded * stride;
    scale = sines + kDecoded * stride;
    mean = scale + stride;
    turned = mean + stride;
    matrix = reinterpret_cast<int16_t*>(turned + stride);
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

  // Put RoPE's tables, scales and means of keys into the order of storage. Channels that are not
  // stored are set in `vectors` once.
  void order_keys(const kvq::Turns& turns) const {
    const int64_t half = body.channels / 2, stored = body.stored_channels();
    clear();
    if (body.synthesis) return order_matrix();
    for (int64_t i = 0; i < stride; i++) scale[i] = mean[i] = 0;
    for (int64_t i = 0; i < kDecoded * stride; i++) cosines[i] = sines[i] = 0;
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
  void keys(int64_t first, int64_t count, const void** at) const {
    read(first, count, [&](int64_t t, int64_t c, Floats u) { put_key(t, c, u); });
    for (int64_t i = 0; i < count; i++) at[i] = vectors + i * stride;
  }

  // If a matrix makes keys of their channels, there are no tables in their places: numbers of 16
  // bits of kDecoded tokens, those of two channels side by side, and a multiple for each width.
  int16_t* numbers_of(int64_t pair) const {
    return reinterpret_cast<int16_t*>(cosines) + pair * 2 * kDecoded;
  }
  int32_t& multiple_of(int64_t width) const { return reinterpret_cast<int32_t*>(sines)[width - 1]; }

  // Put the numbers of `count` tokens from body token `first` on in their places.
  void read_numbers(int64_t first, int64_t count) const {
    read_codes(first, count, [&](int64_t t, int64_t c, int64_t width, Uints code) {
      const int32_t multiple = multiple_of(width);
      const Ints numbers = (Ints)code * (2 * multiple) + multiple * (1 - (1 << width));
      for (int64_t i = 0; i < kLanes; i++)
        numbers_of((c + i) / 2)[2 * t + (c + i) % 2] = int16_t(numbers[i]);
    });
  }

  // Point at the keys of `count` tokens from body token `first` on whose numbers are in place.
  void synthesize_keys(int64_t first, int64_t count, const kvq::Turns& turns,
                       const void** at) const {
    float factors[kDecoded];
    powers_of_two(arrays.exponent + first, count, factors);
    const int64_t channels = body.channels, half = channels / 2;
    constexpr int kTokens = kLanes == 16 ? 8 : 4, kWide = 2;
    int64_t c = 0;
    for (; c + kLanes < channels; c += kWide * kLanes)
      for (int64_t t = 0; t < count; t += kTokens) mix<kTokens, kWide>(factors, t, c);
    for (; c < channels; c += kLanes)
      for (int64_t t = 0; t < count; t += kTokens) mix<kTokens, 1>(factors, t, c);
    for (int64_t t = 0; t < count; t++) {
      float* const vector = vectors + t * stride;
      turn<false>(vector, turns.steps + t * half, turns.steps + (kDecoded + t) * half, half,
                  vector);
      at[t] = vector;
    }
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
  // Two rows of the matrix, side by side.
  int16_t* entries_of(int64_t pair) const { return matrix + pair * 2 * stride; }

  // Round the matrix to 16 bits, each column by its own scale. Codes are whole numbers, so sums of
  // products have no other error. Runs whose entries are large for their codes would set the scale
  // of a column, and get larger numbers in place of larger entries.
  void order_matrix() const {
    const int64_t channels = body.channels, stored = body.stored_channels();
    const float max_entry = minimum(int64_t(32767), INT32_MAX / (kMaxNumber * maximum(stored, 1)));
    float peaks[kRunWidths] = {}, unit = 0;
    for (int64_t c = 0; c < stride; c++) scale[c] = mean[c] = 0;
    for (int64_t c = 0; c < channels; c++) mean[c] = arrays.mean[c];
    for_rows_of_matrix([&](int64_t, int64_t width, const float* row) {
      float& peak = peaks[width - 1];
      for (int64_t c = 0; c < channels; c++) {
        const float size = (row[c] < 0 ? -row[c] : row[c]) * arrays.steps[width - 1];
        peak = peak < size ? size : peak;
        mean[c] += row[c] * 0;  // NaN if an entry is not finite, which integers cannot be
      }
      const float needed = peak * float((1 << width) - 1) / kMaxNumber;
      unit = unit < needed ? needed : unit;
    });
    for (int64_t width = 1; width <= kRunWidths; width++) {
      int32_t& multiple = multiple_of(width) = 1;
      const int64_t limit = kMaxNumber / ((1 << width) - 1);
      while (multiple < limit && float(multiple) * unit < peaks[width - 1]) multiple++;
    }
    for_rows_of_matrix([&](int64_t, int64_t width, const float* row) {
      const float factor = factor_of(width);
      for (int64_t c = 0; c < channels; c++) {
        const float size = (row[c] < 0 ? -row[c] : row[c]) * factor / max_entry;
        scale[c] = scale[c] < size ? size : scale[c];
      }
    });
    for (int64_t i = 0; i < (stored + 1) / 2 * 2 * stride; i++) matrix[i] = 0;
    for (int64_t c = 0; c < channels; c++) turned[c] = scale[c] > 0 ? 1 / scale[c] : 0;
    for_rows_of_matrix([&](int64_t s, int64_t width, const float* row) {
      const float factor = factor_of(width);
      int16_t* const entries = entries_of(s / 2) + s % 2;
      for (int64_t c = 0; c < channels; c++)
        entries[2 * c] = int16_t(int32_t((row[c] * factor * turned[c] + kRounding) - kRounding));
    });
  }

  // Return what a number of a run is worth: numbers are odd multiples of half a step.
  float factor_of(int64_t width) const {
    return arrays.steps[width - 1] / float(2 * multiple_of(width));
  }

  // Call function(s, width, row s of the matrix) for the stored channels.
  template <class Function>
  void for_rows_of_matrix(Function function) const {
    int64_t s = 0;
    for (int64_t width = kRunWidths; width > 0; width--)
      for (int64_t i = 0; i < body.run_channels[width - 1]; i++, s++)
        function(s, width, arrays.synthesis + s * body.channels);
  }

  // Put u synthesis + mean of T tokens from token t of `vectors` on, V vectors from channel c on.
  template <int T, int V>
  KVQ_INLINE void mix(const float* factors, int64_t t, int64_t c) const {
    Ints sums[T][V] = {};
    for (int64_t s = 0; s < body.stored_channels(); s += 2)
      for (int v = 0; v < V; v++) {
        const Ints entries = load_ints(entries_of(s / 2) + 2 * (c + v * kLanes));
        for (int i = 0; i < T; i++)
          sums[i][v] = add_pairs(sums[i][v], entries, numbers_of(s / 2) + 2 * (t + i));
      }
    for (int i = 0; i < T; i++)
      for (int v = 0; v < V; v++) {
        const int64_t at = c + v * kLanes;
        store(vectors + (t + i) * stride + at,
              to_float((Uints)sums[i][v]) * (load(scale + at) * factors[t + i]) + load(mean + at));
      }
  }

  void put_key(int64_t t, int64_t c, Floats u) const {
    const int64_t at = t * stride + c;
    const Floats x = u * load(scale + c) + load(mean + c);
    store(vectors + at, x * load(cosines + at) + swap_pairs(x) * load(sines + at));
  }

  // Call put(token of `count`, channel, u of kLanes channels from it on) for all runs, one after
  // another.
  template <class Put>
  void read(int64_t first, int64_t count, Put put) const {
    float factors[kDecoded];
    powers_of_two(arrays.exponent + first, count, factors);
    read_codes(first, count, [&](int64_t t, int64_t c, int64_t width, Uints code) {
      const float offset = 0.5f - float(1 << (width - 1));
      put(t, c, (to_float(code) + offset) * (factors[t] * arrays.steps[width - 1]));
    });
  }

  // Call put(token of `count`, channel, width, codes of kLanes channels from it on) likewise. Codes
  // behind the last channel of a run are arbitrary, and the next run's call replaces them.
  template <class Put>
  void read_codes(int64_t first, int64_t count, Put put) const {
    int64_t start = 0;
    for (int64_t width = kRunWidths; width > 0; width--) {
      const int64_t channels = body.run_channels[width - 1];
      if (!channels) continue;
      const auto from = [&](int64_t t, int64_t c, Uints code) { put(t, start + c, width, code); };
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
            put(at + slot * rows + row, c, code);
          }
        }
    }
  }
};

}  // namespace
