// The custom call `kvq_exact_attention`: checks the arguments from XLA, then splits the work over
// XLA's threads.
//
//   arguments   q f32 [B, K, R, H], R = G * T; keys, values f32, f16 or bf16 [B, K, E, H];
//               reach s32 [B, E0], E0 <= E; counts s32 [B, T]; queries s32 [B], the number of
//               tokens that are no padding
//   attributes  window: query token t sees no new row before t - window + 1, or 0; scale f32;
//               soft_cap f32: the bound of scores, or 0
//   results     m, l f32 [B, K, R, 1], o f32 [B, K, R, H]
//
// Arguments that do not fit together are an XLA error, never an access outside an array.
#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <vector>

#include "export.h"
#include "processors.h"
#include "prompt_call.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kMaxChannels = 1024;

std::atomic<uint64_t> prompts_attended{0};

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("kvq_exact_attention: " + message);
}

bool shaped(ffi::Span<const int64_t> dimensions, const std::vector<int64_t>& wanted) {
  return std::equal(dimensions.begin(), dimensions.end(), wanted.begin(), wanted.end());
}

ffi::Error attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, ffi::Buffer<ffi::S32> reach, ffi::Buffer<ffi::S32> counts,
                  ffi::Buffer<ffi::S32> queries, ffi::Result<ffi::Buffer<ffi::F32>> m,
                  ffi::Result<ffi::Buffer<ffi::F32>> l, ffi::Result<ffi::Buffer<ffi::F32>> o,
                  int64_t window, float scale, float soft_cap) {
  if (q.dimensions().size() != 4 || keys.dimensions().size() != 4)
    return invalid("q and keys must have four axes");
  if (reach.dimensions().size() != 2 || counts.dimensions().size() != 2)
    return invalid("reach and counts must have two axes");
  kvq::PromptCall call{};
  call.batch = q.dimensions()[0], call.heads = q.dimensions()[1];
  call.queries = counts.dimensions()[1], call.channels = q.dimensions()[3];
  const int64_t rows = q.dimensions()[2], tokens = keys.dimensions()[2];
  call.old = reach.dimensions()[1], call.fresh = tokens - call.old;
  if (call.queries < 1 || rows % call.queries) return invalid("counts must be [B, T], R = G * T");
  call.group = rows / call.queries;
  if (call.channels < 1 || call.channels > kMaxChannels) return invalid("H must be 1 to 1024");
  if (call.group < 1 || call.group > kvq::kMinRows) return invalid("G must be 1 to 96");
  if (call.fresh < 0) return invalid("reach has more rows than keys");
  if (window < 0) return invalid("a window must be positive");
  const std::vector<int64_t> stored{call.batch, call.heads, tokens, call.channels};
  if (!shaped(keys.dimensions(), stored) || !shaped(values.dimensions(), stored))
    return invalid("keys and values must be [B, K, E, H]");
  if (!shaped(reach.dimensions(), {call.batch, call.old}) ||
      !shaped(counts.dimensions(), {call.batch, call.queries}) ||
      !shaped(queries.dimensions(), {call.batch}))
    return invalid("reach, counts and queries must have the rows of q");
  const std::vector<int64_t> columns{call.batch, call.heads, rows, 1};
  if (!shaped(m->dimensions(), columns) || !shaped(l->dimensions(), columns) ||
      !shaped(o->dimensions(), {call.batch, call.heads, rows, call.channels}))
    return invalid("the results have other shapes");
  const ffi::DataType type = keys.element_type();
  if (values.element_type() != type || (type != ffi::F32 && type != ffi::F16 && type != ffi::BF16))
    return invalid("keys and values must be of fp32, fp16 or bf16");
  call.type = type == ffi::F32 ? kvq::kFloat32 : type == ffi::F16 ? kvq::kFloat16 : kvq::kBfloat16;
  call.q = q.typed_data(), call.counts = counts.typed_data();
  call.keys = static_cast<const char*>(keys.untyped_data());
  call.values = static_cast<const char*>(values.untyped_data());
  call.reach = reach.typed_data(), call.real = queries.typed_data();
  call.window = window, call.scale = scale, call.soft_cap = soft_cap;
  call.m = m->typed_data(), call.l = l->typed_data(), call.o = o->typed_data();
  try {
    kvq::attend_prompt(call, kvq::best_kernels().attend_rows,
                       std::max<int64_t>(0, pool.num_threads() - 1),
                       [&pool](std::function<void()> work) { pool.Schedule(std::move(work)); });
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kvq_exact_attention: out of memory");
  }
  if (call.fresh > 0) ++prompts_attended;  // not for what a prompt reads of older bodies
  return ffi::Error::Success();
}

}  // namespace

// How many layers of prompts this process has attended to. A program that reads a prompt is one
// call from Python, and this is what it has done so far.
extern "C" KVQ_EXPORT uint64_t kvq_prompts_attended() { return prompts_attended.load(); }

extern "C" KVQ_EXPORT XLA_FFI_Error* kvq_exact_attention(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attr<int64_t>("window")
                             .Attr<float>("scale")
                             .Attr<float>("soft_cap")
                             .To(attend)
                             .release();
  return handler->Call(frame);
}
