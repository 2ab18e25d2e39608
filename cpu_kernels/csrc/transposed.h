// Scores of neighbouring tokens in the lanes of a register. Words are transposed, so that a
// channel's codes of kLanes tokens meet one number of the query, and no sum over lanes is left to
// do.
//
// The slots of a span of words are runs of neighbouring tokens, so kLanes neighbouring tokens lie
// in kLanes rows of words at one shift, or in fewer rows, which are repeated, at several.
#pragma once

#include "products.h"

namespace {

#if defined(__AVX2__)

constexpr int kAcross = 2;  // vectors of tokens that share the query's numbers in registers

// words[w], lane l = word w of the eight from first + place(l) on.
template <class Place>
inline void transpose_eight(const uint16_t* first, Place place, Uints* words) {
#if defined(__AVX512F__)
  typedef __m256i Part;
  const auto part = [&](int64_t l) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + place(l)));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + place(l + 8)));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
  };
#define KVQ_UNPACK(way) _mm256_unpack##way
  const auto widen = [](Part x) { return (Uints)_mm512_cvtepu16_epi32(x); };
#else
  typedef __m128i Part;
  const auto part = [&](int64_t l) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + place(l)));
  };
#define KVQ_UNPACK(way) _mm_unpack##way
  const auto widen = [](Part x) { return (Uints)_mm256_cvtepu16_epi32(x); };
#endif
  Part pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {  // two lanes
    const Part a = part(i), b = part(i + 1);
    pairs[i] = KVQ_UNPACK(lo_epi16)(a, b), pairs[i + 1] = KVQ_UNPACK(hi_epi16)(a, b);
  }
  for (int i = 0; i < 8; i += 4)  // four lanes
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = KVQ_UNPACK(lo_epi32)(pairs[i + j], pairs[i + 2 + j]);
      fours[i + 2 * j + 1] = KVQ_UNPACK(hi_epi32)(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) {
    words[2 * j] = widen(KVQ_UNPACK(lo_epi64)(fours[j], fours[4 + j]));
    words[2 * j + 1] = widen(KVQ_UNPACK(hi_epi64)(fours[j], fours[4 + j]));
  }
#undef KVQ_UNPACK
}

// words[w], lane l = word w of row l % rows. rows is a power of two, and rows are `apart` words
// from each other.
inline void transpose(const uint16_t* first, int64_t apart, int64_t rows, Uints* words) {
  const auto place = [&](int64_t l) { return (l & (rows - 1)) * apart; };
  for (int64_t w = 0; w < kLanes; w += 8) transpose_eight(first + w, place, words + w);
}

// The keys of one KV head, a span of tokens at a time. The scratch is the caller's,
// kvq::transposed_floats(body).
class Transposed {
 public:
  Transposed(const Packed& packed, float* scratch) : packed_(packed), body_(packed.body) {
    words_ = reinterpret_cast<Uints*>(scratch);
    shifts_ = words_ + blocks() * (body_.row_words(0) + body_.row_words(1));
    places_ = reinterpret_cast<int32_t*>(shifts_ + 2 * vectors_of(body_) * body_.span / kLanes);
    if (!served(body_)) return;
    for (int64_t slot = 0; slot < body_.slots; slot++)
      for (const Bundle* bundle = packed.bundles_of(slot);
           bundle < packed.bundles_of(slot) + packed.count_of(slot); bundle++)
        for (int j = 0; j < bundle->size; j++)
          for (int set = 0; set < 2; set++) {
            const auto& field = bundle->fields[j];
            places_[2 * field.vector + set] = bundle->place[set];
            int64_t t = slot * rows();
            for (; t + kLanes <= (slot + 1) * rows(); t += kLanes)
              shift(t / kLanes, field.vector, set) = shift_by(field.shift[set]);
            for (; t < (slot + 1) * rows(); t++)
              reinterpret_cast<int32_t*>(&shift(t / kLanes, field.vector, set))[t % kLanes] =
                  field.shift[set];
          }
  }

  // True if this class reads such bodies.
  static bool served(const Body& body) {
    const bool groups = body.affine == kvq::kChannels ||
                        (body.affine == kvq::kTokenGroups ? body.group % (kAcross * kLanes) == 0
                                                          : body.whole_groups(kLanes));
    return !body.decoded() && groups && body.span % (kAcross * kLanes) == 0 &&
           Packed::alike(body) && body.row_words(0) % kLanes == 0 &&
           body.row_words(1) % kLanes == 0;
  }

  // Transpose the words of the span that begins at body token `first`.
  void read(int64_t first) const {
    for (int64_t block = 0; block < blocks(); block++) {
      const int64_t row = first / body_.slots + block * kLanes;
      Uints* out = words_ + block * (body_.row_words(0) + body_.row_words(1));
      for (int set = 0; set < body_.sets(); set++) {
        const int64_t apart = body_.row_words(set), count = minimum(rows(), kLanes);
        const uint16_t* words = packed_.arrays.words[set] + row * apart;
        for (int64_t w = 0; w < count * apart; w += 32)
          __builtin_prefetch(words + kAhead / body_.slots * apart + w);  // lines of 64 bytes
        for (int64_t w = 0; w < apart; w += kLanes, out += kLanes)
          transpose(words + w, apart, count, out);
      }
    }
  }

  // Compute scores[r, t] for `count` tokens of the span that was read, from its token `from` on:
  // starts[r] + q[r] . x[t], or, if groups g of channels have scales and zero points, both [groups,
  // kTile], the sum over groups of scale[g, t] q_g[r] . x_g[t] + zero[g, t] sums[r, g].
  void score(int64_t rows, const float* q, int64_t from, int64_t count, const float* starts,
             const float* sums, const ScaleAndZero& affine, float* scores) const {
    packed_.with_codes([&](const auto& numbers) {
      for_rows(rows, [&](auto number) {
        constexpr int R = decltype(number)::value;
        for (int64_t t = 0; t < count; t += kAcross * kLanes) {
          if (affine.scale)
            score_vectors<R, true>(numbers, q, from + t, nullptr, sums,
                                   {affine.scale + t, affine.zero + t}, scores + t);
          else score_vectors<R, false>(numbers, q, from + t, starts, nullptr, affine, scores + t);
        }
      });
    });
  }

 private:
  const Packed& packed_;
  const Body& body_;
  Uints *words_, *shifts_;  // [blocks, words of a row of both sets], [span / kLanes, vectors, 2]
  int32_t* places_;         // [vectors, 2]

  int64_t rows() const { return body_.span / body_.slots; }
  // Blocks of rows that are transposed together.
  int64_t blocks() const { return rows() > kLanes ? rows() / kLanes : 1; }
  Uints& shift(int64_t vector_of_tokens, int64_t vector, int set) const {
    return shifts_[(vector_of_tokens * vectors_of(body_) + vector) * 2 + set];
  }

  template <int R, bool kGroups, class Numbers>
  KVQ_INLINE void score_vectors(const Numbers& numbers, const float* q, int64_t at,
                                const float* starts, const float* sums, const ScaleAndZero& affine,
                                float* scores) const {
    const int64_t stride = body_.padded(), group = kGroups && body_.channel_groups() > 1
                                                       ? body_.group / kLanes
                                                       : vectors_of(body_);
    Floats totals[R][kAcross] = {}, acc[R][kAcross];
    for (int64_t first = 0, g = 0; first < vectors_of(body_); first += group, g++) {
      for (int r = 0; r < R; r++)
        for (int u = 0; u < kAcross; u++) acc[r][u] = kGroups ? Floats{} : splat(starts[r]);
      for (int64_t vector = first; vector < first + group; vector++) {
        const Uints *low[kAcross], *high[kAcross];
        Shift low_shift[kAcross], high_shift[kAcross];
        for (int u = 0; u < kAcross; u++) {
          const int64_t of_tokens = at / kLanes + u;
          low[u] = words_ + of_tokens % blocks() * (body_.row_words(0) + body_.row_words(1)) +
                   places_[2 * vector];
          high[u] = low[u] - places_[2 * vector] + body_.row_words(0) + places_[2 * vector + 1];
          low_shift[u] = shift(of_tokens, vector, 0), high_shift[u] = shift(of_tokens, vector, 1);
        }
        const float* query = q + vector * kLanes;
        for (int w = 0; w < kLanes; w++) {
          Floats x[kAcross];
          for (int u = 0; u < kAcross; u++)
            x[u] = numbers.at(low[u][w], Numbers::kTwoSets ? high[u][w] : Uints{}, low_shift[u],
                              high_shift[u]);
          for (int r = 0; r < R; r++)
            for (int u = 0; u < kAcross; u++) acc[r][u] += x[u] * query[r * stride + w];
        }
      }
      for (int r = 0; r < R; r++)
        for (int u = 0; u < kAcross; u++) {
          if (kGroups)
            totals[r][u] +=
                acc[r][u] * load(affine.scale + g * kTile + u * kLanes) +
                load(affine.zero + g * kTile + u * kLanes) * sums[r * body_.channel_groups() + g];
          else totals[r][u] = acc[r][u];
        }
    }
    for (int r = 0; r < R; r++)
      for (int u = 0; u < kAcross; u++) store(scores + r * kPadded + u * kLanes, totals[r][u]);
  }
};

#else

// With SSE2 and NEON, words are not transposed.
class Transposed {
 public:
  Transposed(const Packed&, float*) {}
  static bool served(const Body&) { return false; }
  void read(int64_t) const {}
  void score(int64_t, const float*, int64_t, int64_t, const float*, const float*,
             const ScaleAndZero&, float*) const {}
};

#endif

}  // namespace
