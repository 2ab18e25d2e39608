// The custom call `kvq_decode_attention`: checks the arguments from XLA, then splits the work over
// XLA's threads.
//
//   arguments   q f32 [B, K, R, H], limits s32 [B, T], then the arrays of the keys, and the same of
//               the values:
//               - codes: words s16 [B, K, S / n, w] of each plane set, a table f32 [2^bits] if
//                 there is one, the scale, the zero point if one is stored (of polar keys: of the
//                 radii, then of the angles)
//               - rows in full precision: only the rows, [B, K, S, H]
//               - E4M3 numbers: only the words
//               - runs: the words of each run, the widest first, and of each of its plane sets
//                 [B, K, S / slots, w], the exponents s8 [B, K, S] and the steps f32 [8]; for keys
//                 then place s32, scale and mean f32 [K, H], for values and keys with `synthesis`
//                 synthesis f32 [K, H, H] and mean f32 [K, H]
//               - outliers, after the others: index u16 and residual [B, S / pool, P], ends u16
//                 [B, S / pool, K]
//               - keys before RoPE, after the others: cosines and sines f32 [2, n, H / 2] of the
//                 n = kDecoded first tokens, of the first kNear multiples of kDecoded tokens (as
//                 many as S holds), and of the position of every (kNear * kDecoded)-th token
//               and, if there are windows, their queries q f32 [B, K, R, H], which tokens they see
//               pred [B, E0 + E1], and the keys [B, K, E0, H], [B, K, E1, H] and values of both in
//               f32, f16 or bf16; for keys before RoPE also the cosines and the sines of these
//               tokens f32 [B, E0 + E1, H / 2]
//               and, if `bounded`, the first token that each query sees s32 [B, T]
//               and, if the body is a ring, its tokens written so far s32 [B] and, for keys before
//               RoPE, the queries of its last whole round f32 [B, K, R, H]
//   attributes  keys, values: the fields of a Body; capacity: S; windows: true if there are any;
//               bounded: true if tokens have a lower limit too; ring: the tokens of a ring, or 0;
//               scale f32: of scores; soft_cap f32: their bound, or 0
//   results     m, l f32 [B, K, R, 1], o f32 [B, K, R, H]
//
// Arguments that do not fit together are an XLA error, never an access outside an array.
#include <sstream>

#include "handlers.h"
#include "processors.h"
#include "split.h"

namespace {

using kvq::Body;
using kvq::Side;
using kvq::Strided;
using Dimensions = std::vector<int64_t>;

constexpr char kName[] = "kvq_decode_attention";

std::string text(ffi::Span<const int64_t> dimensions) {
  std::string all;
  for (int64_t size : dimensions) all += (all.empty() ? "" : ", ") + std::to_string(size);
  return "[" + all + "]";
}

std::string text(ffi::DataType type) {
  std::ostringstream name;
  name << type;
  return name.str();
}

// Return why these fields describe no body that the kernels read, or an empty string if they do.
std::string refused(const Body& b, bool keys) {
  const int64_t high_bits = b.bits - b.low_bits;
  const auto power = [](int64_t n) { return n == 1 || n == 2 || n == 4 || n == 8; };
  const bool rows = b.form == kvq::kRows, polar = b.form == kvq::kPolar;
  const bool runs = b.form == kvq::kRuns, floats = b.form == kvq::kFloats;
  if (b.form < 0 || b.form > 4 || b.rotated < 0 || b.rotated > 1 || b.root < 0 || b.root > 1)
    return "form";
  if (rows || runs ? b.bits || b.low_bits : b.bits < 1 || b.bits > 12 || !power(b.low_bits))
    return "bits";
  if (high_bits && (!power(high_bits) || high_bits >= b.low_bits)) return "bits";
  if (b.channels < 1 || b.channels > kvq::kMaxChannels || b.chunks < 1 ||
      (b.width != 16 && b.width != 32))
    return "channels";
  if (b.chunks > 2048 || b.padded() < b.channels || b.padded() >= b.channels + 512)
    return "padding";
  if (b.span < 1 || b.span > kvq::kTile || kvq::kTile % b.span || b.slots < 1 || b.span % b.slots)
    return "span";
  for (int64_t set = 0; set < b.sets(); set++)
    if (b.slots * b.chunks * b.set_bits(set) % 16) return "slots";
  if (b.affine < 0 || b.affine > 2 || b.group < 1 || b.heads < 1 || b.scale_type < 0 ||
      b.scale_type > 4)
    return "groups";
  if (b.scale_type > 2 && (b.form != kvq::kCodes || b.affine != kvq::kChannelGroups))
    return "scales";
  if (b.affine == kvq::kChannelGroups && b.channels % b.group) return "groups";
  if (b.affine != kvq::kChannelGroups && b.heads != 1) return "groups";
  if (b.centre >= 256 || b.table < 0 || b.table > 1 || (b.table && (b.bits > 4 || b.centre > 0)))
    return "table";
  if (floats && (b.bits != 8 || b.affine != kvq::kChannels || b.table || b.pool)) return "floats";
  if (rows && (b.affine != kvq::kChannels || b.slots != 1 || b.table || b.rotated || b.pool))
    return "rows";
  if (runs &&
      (b.affine != kvq::kChannels || b.slots != 1 || b.table || b.pool || kvq::kDecoded % b.span))
    return "runs";
  for (int64_t width = 1; width <= kvq::kRunWidths; width++) {
    const int64_t channels = b.run_channels[width - 1];
    if (channels && (!runs || channels < 0 || channels > b.channels || channels % 2 ||
                     b.span % kvq::run_slots(width)))
      return "runs";
  }
  if (keys ? runs && !b.rotated : b.rotated) return "rotation";  // values have no positions
  if (runs && (b.stored_channels() < 2 || b.stored_channels() > b.channels)) return "runs";
  if (b.synthesis && (b.synthesis != 1 || !runs || !b.rotated)) return "synthesis";
  if (polar ? b.affine != kvq::kTokenGroups || b.table || b.rotated || b.pool || b.angle_bits < 1 ||
                  b.angle_bits >= b.bits || b.centre >= 0
            : b.angle_bits || b.root)
    return "angles";
  if (b.rotated && b.channels % 2) return "pairs";
  if (b.pool < 0 || b.pool > 65536 || (b.pool && b.pool * b.channels > 65536)) return "pool";
  if (b.residual_type < 0 || b.residual_type > 2) return "residuals";
  return "";
}

// Takes arguments one after another and checks each.
struct Taker {
  ffi::RemainingArgs arguments;
  size_t next = 0;
  std::string wrong = "";

  Strided take(const std::string& name, ffi::DataType type, const Dimensions& wanted,
               bool batched = true) {
    if (!wrong.empty()) return {};
    const auto buffer = arguments.get<ffi::AnyBuffer>(next++);
    if (!buffer.has_value()) {
      wrong = name + " is missing";
      return {};
    }
    const auto dimensions = buffer->dimensions();
    if (buffer->element_type() != type || !shaped(dimensions, wanted)) {
      wrong = name + " must be " + text(type) + " " +
              text(ffi::Span<const int64_t>(wanted.data(), wanted.size())) + ", got " +
              text(buffer->element_type()) + " " + text(dimensions);
      return {};
    }
    int64_t head = int64_t(ffi::ByteWidth(type));
    for (size_t i = batched ? 2 : 1; i < wanted.size(); i++) head *= wanted[i];
    return {static_cast<const char*>(buffer->untyped_data()), batched ? head * wanted[1] : 0, head};
  }

  Side side(const std::string& name, const Body& body, int64_t batch, int64_t heads,
            int64_t capacity, std::vector<float>& table) {
    Side side{};
    side.body = body;
    for (int64_t set = 0; set < body.sets() && body.bits; set++)
      side.words[set] = take("words of " + name, ffi::S16,
                             {batch, heads, capacity / body.slots, body.row_words(set)});
    if (body.form == kvq::kRuns) {
      side.runs = runs(name, body, batch, heads, capacity);
      if (body.rotated) side.turns = turns(name, body, capacity);
      return side;
    }
    if (body.form == kvq::kFloats) {
      if (body.rotated) side.turns = turns(name, body, capacity);
      return side;
    }
    if (body.table) {
      const Strided entries = take("table of " + name, ffi::F32, {int64_t(1) << body.bits}, false);
      table.assign(16, 0.0f);
      if (entries.data)
        std::copy_n(reinterpret_cast<const float*>(entries.data), size_t(1) << body.bits,
                    table.begin());
      side.table = table.data();
    }
    const ffi::DataType type = body.scale_type == kvq::kFloat32  ? ffi::F32
                               : body.scale_type > kvq::kFloat32 ? ffi::U8
                                                                 : ffi::U16;
    Dimensions shape{batch, heads / body.heads, capacity / body.group, body.channels};
    if (body.affine == kvq::kChannelGroups)
      shape = {batch, heads / body.heads, body.channels / body.group, capacity};
    if (body.affine == kvq::kChannels) shape = {heads, body.channels};
    if (body.form == kvq::kRows) {
      side.scale = take("rows of " + name, type, {batch, heads, capacity, body.channels});
      return side;
    }
    const bool batched = body.affine != kvq::kChannels;
    side.scale = take("scale of " + name, type, shape, batched);
    if (body.stores_zero()) side.zero = take("zero point of " + name, type, shape, batched);
    if (body.form == kvq::kPolar) {
      side.angle_scale = take("scale of the angles of " + name, type, shape);
      side.angle_zero = take("zero point of the angles of " + name, type, shape);
    }
    if (body.pool)
      side.outliers = outliers(name, body.residual_type == kvq::kFloat32 ? ffi::F32 : ffi::U16,
                               batch, heads, capacity / body.pool);
    if (body.rotated) side.turns = turns(name, body, capacity);
    return side;
  }

  kvq::Turns turns(const std::string& name, const Body& body, int64_t capacity) {
    const int64_t half = body.channels / 2, count = (capacity + kvq::kDecoded - 1) / kvq::kDecoded;
    const int64_t near_count = std::min(count, kvq::kNear),
                  far_count = (count + kvq::kNear - 1) / kvq::kNear;
    const Strided steps = take("turns of " + name, ffi::F32, {2, kvq::kDecoded, half}, false);
    const Strided near = take("near positions of " + name, ffi::F32, {2, near_count, half}, false);
    const Strided far = take("far positions of " + name, ffi::F32, {2, far_count, half}, false);
    return {reinterpret_cast<const float*>(steps.data), reinterpret_cast<const float*>(near.data),
            reinterpret_cast<const float*>(far.data), near_count, far_count};
  }

  kvq::RunSide runs(const std::string& name, const Body& body, int64_t batch, int64_t heads,
                    int64_t capacity) {
    kvq::RunSide runs{};
    for (int64_t width = kvq::kRunWidths; width > 0; width--) {
      const int64_t channels = body.run_channels[width - 1], slots = kvq::run_slots(width);
      for (int set = 0; channels && set < __builtin_popcountll(width); set++) {
        const int64_t words = slots * channels * kvq::run_set_bits(width, set) / 16;
        runs.words[width - 1][set] =
            take("words of " + name, ffi::S16, {batch, heads, capacity / slots, words});
      }
    }
    runs.exponent = take("exponents of " + name, ffi::S8, {batch, heads, capacity});
    runs.steps = reinterpret_cast<const float*>(
        take("steps of " + name, ffi::F32, {kvq::kRunWidths}, false).data);
    if (body.rotated && !body.synthesis) {
      runs.place = take("places of " + name, ffi::S32, {heads, body.channels}, false);
      runs.scale = take("scale of " + name, ffi::F32, {heads, body.channels}, false);
    } else {
      runs.synthesis =
          take("synthesis of " + name, ffi::F32, {heads, body.channels, body.channels}, false);
    }
    runs.mean = take("mean of " + name, ffi::F32, {heads, body.channels}, false);
    return runs;
  }

  kvq::SparseSide outliers(const std::string& name, ffi::DataType type, int64_t batch,
                           int64_t heads, int64_t pools) {
    const auto index = arguments.get<ffi::AnyBuffer>(next);
    kvq::SparseSide sparse{};
    if (index.has_value() && index->dimensions().size() == 3) sparse.slots = index->dimensions()[2];
    sparse.heads = heads;
    sparse.index = take("outliers of " + name, ffi::U16, {batch, pools, sparse.slots});
    sparse.residual = take("residuals of " + name, type, {batch, pools, sparse.slots});
    sparse.ends = take("ends of the outliers of " + name, ffi::U16, {batch, pools, heads});
    return sparse;
  }
};

// The arrays of the windows, for one query of each head.
void take_windows(Taker& taker, int64_t batch, int64_t heads, int64_t rows, int64_t queries,
                  int64_t channels, bool rotated, kvq::ExactSide& windows) {
  if (queries != 1) taker.wrong = "windows are read with one query of each head";
  const Strided q = taker.take("queries of the windows", ffi::F32, {batch, heads, rows, channels});
  const size_t first = taker.next + 1;
  ffi::DataType type = ffi::F32;
  for (int i = 0; i < 2 && taker.wrong.empty(); i++) {
    const auto buffer = taker.arguments.get<ffi::AnyBuffer>(first + i);
    if (!buffer.has_value() || buffer->dimensions().size() != 4) {
      taker.wrong = "the windows are missing";
      return;
    }
    windows.tokens[i] = buffer->dimensions()[2];
    type = buffer->element_type();
  }
  if (type != ffi::F32 && type != ffi::F16 && type != ffi::BF16)
    taker.wrong = "windows are of fp32, fp16 or bf16";
  windows.type = type == ffi::F32   ? kvq::kFloat32
                 : type == ffi::F16 ? kvq::kFloat16
                                    : kvq::kBfloat16;
  const Strided seen =
      taker.take("seen tokens", ffi::PRED, {batch, windows.tokens[0] + windows.tokens[1]}, false);
  for (Strided* side : {windows.keys, windows.values})
    for (int i = 0; i < 2; i++)
      side[i] = taker.take("rows of a window", type, {batch, heads, windows.tokens[i], channels});
  const Dimensions turns{batch, windows.tokens[0] + windows.tokens[1], channels / 2};
  for (int i = 0; i < 2 && rotated; i++)
    windows.turns[i] = reinterpret_cast<const float*>(
        taker.take("cosines and sines of the windows", ffi::F32, turns, false).data);
  windows.q = reinterpret_cast<const float*>(q.data);
  windows.seen = reinterpret_cast<const uint8_t*>(seen.data);
}

// What queries see of a body that is a ring, or of one with lower limits.
void take_limits(Taker& taker, bool bounded, int64_t ring, kvq::Call& call) {
  const Dimensions queries{call.batch, call.queries};
  if (bounded)
    call.lower =
        reinterpret_cast<const int32_t*>(taker.take("lower limits", ffi::S32, queries, false).data);
  if (!ring) return;
  for (const Body* body : {&call.keys.body, &call.values.body})
    if (ring < 0 || ring > call.capacity || ring % body->span ||
        (body->affine == kvq::kTokenGroups && ring % body->group) ||
        (body->pool && ring % body->pool))
      taker.wrong = "a ring must be a whole number of spans, groups and pools";
  call.ring.tokens = ring;
  call.ring.written = reinterpret_cast<const int32_t*>(
      taker.take("tokens of the ring", ffi::S32, {call.batch}, false).data);
  if (call.keys.body.rotated)
    call.ring.q_before = reinterpret_cast<const float*>(
        taker
            .take("queries of the last round", ffi::F32,
                  {call.batch, call.heads, call.rows, call.keys.body.head_dim()}, false)
            .data);
}

std::string attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::S32> limits,
                   ffi::RemainingArgs arrays, ffi::Result<ffi::Buffer<ffi::F32>> m,
                   ffi::Result<ffi::Buffer<ffi::F32>> l, ffi::Result<ffi::Buffer<ffi::F32>> o,
                   ffi::Span<const int64_t> keys, ffi::Span<const int64_t> values, int64_t capacity,
                   bool windows, bool bounded, int64_t ring, float scale, float soft_cap) {
  if (int64_t(keys.size()) != kvq::kBodyFields || int64_t(values.size()) != kvq::kBodyFields)
    return "keys and values take " + std::to_string(kvq::kBodyFields) +
           " fields: another version of cpu_kernels was compiled";
  Body k, v;
  std::copy_n(keys.begin(), kvq::kBodyFields, reinterpret_cast<int64_t*>(&k));
  std::copy_n(values.begin(), kvq::kBodyFields, reinterpret_cast<int64_t*>(&v));
  if (q.dimensions().size() != 4) return "q must be [B, K, R, H], got " + text(q.dimensions());
  if (!(soft_cap >= 0)) return "a soft cap must be positive, or 0 for none";
  if (limits.dimensions().size() != 2)
    return "limits must be [B, T], got " + text(limits.dimensions());
  const int64_t batch = q.dimensions()[0], heads = q.dimensions()[1], rows = q.dimensions()[2],
                channels = q.dimensions()[3];
  const int64_t queries = limits.dimensions()[1];
  if (queries < 1 || rows % queries || limits.dimensions()[0] != batch)
    return "limits must be [B, T] for R = G * T query rows, got " + text(limits.dimensions()) +
           " for " + text(q.dimensions());
  for (const Body* body : {&k, &v}) {
    const std::string name = body == &k ? "keys" : "values", reason = refused(*body, body == &k);
    if (!reason.empty()) return "the description of the " + name + " has unknown " + reason;
    if (body->head_dim() != channels)
      return "q has " + std::to_string(channels) + " channels, the " + name + " do not";
    if (heads % body->heads) return "the heads of a group do not divide those of the " + name;
    if (capacity < 0 || capacity % body->span ||
        (body->affine == kvq::kTokenGroups && capacity % body->group) ||
        (body->pool && capacity % body->pool))
      return "capacity " + std::to_string(capacity) +
             " is not a whole number of spans, groups and pools";
  }
  std::vector<float> tables[2];
  Taker taker{arrays};
  kvq::Call call{};
  call.keys = taker.side("keys", k, batch, heads, capacity, tables[0]);
  call.values = taker.side("values", v, batch, heads, capacity, tables[1]);
  if (windows) take_windows(taker, batch, heads, rows, queries, channels, k.rotated, call.windows);
  call.batch = batch, call.heads = heads, call.rows = rows, call.queries = queries,
  call.capacity = capacity, call.scale = scale, call.soft_cap = soft_cap;
  take_limits(taker, bounded, ring, call);
  if (!taker.wrong.empty()) return taker.wrong;
  if (taker.next != arrays.size()) return "too many arrays";
  const Dimensions columns{batch, heads, rows, 1}, whole{batch, heads, rows, channels};
  for (const auto& [result, shape] :
       {std::pair(&m, &columns), std::pair(&l, &columns), std::pair(&o, &whole)}) {
    const auto dimensions = (*result)->dimensions();
    if (!shaped(dimensions, *shape)) return "a result has the shape " + text(dimensions);
  }
  call.q = q.typed_data(), call.limits = limits.typed_data();
  call.m = m->typed_data(), call.l = l->typed_data(), call.o = o->typed_data();
  kvq::attend(call, kvq::best_kernels().attend_tokens, helpers_of(pool), schedule_on(pool));
  return "";
}

}  // namespace

extern "C" KVQ_EXPORT XLA_FFI_Error* kvq_decode_attention(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .RemainingArgs()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attr<ffi::Span<const int64_t>>("keys")
                             .Attr<ffi::Span<const int64_t>>("values")
                             .Attr<int64_t>("capacity")
                             .Attr<bool>("windows")
                             .Attr<bool>("bounded")
                             .Attr<int64_t>("ring")
                             .Attr<float>("scale")
                             .Attr<float>("soft_cap")
                             .To(Reporting<kName, attend>::call)
                             .release();
  return handler->Call(frame);
}

extern "C" KVQ_EXPORT const char* kvq_kernel_name() { return kvq::best_kernels().name; }
extern "C" KVQ_EXPORT const char* kvq_sources() { return KVQ_SOURCES; }
