// The custom call `kvq_exact_attention`: checks the arguments from XLA, then splits the work over
// XLA's threads.
//
//   arguments   q f32 [B, K, R, H], R = G * T; keys, values f32, f16 or bf16 [B, K, E, H];
//               reach s32 [B, E0], E0 <= E; counts s32 [B, T]; queries s32 [B], the number of
//               tokens that are not padding
//   attributes  window: query token t sees no new row before t - window + 1, or 0 for none;
//               scale f32; soft_cap f32: the bound of scores, or 0 for none
//   results     m, l f32 [B, K, R, 1], o f32 [B, K, R, H]
//
// Arguments that do not fit together are an XLA error, never an access outside an array.
#include <atomic>

#include "handlers.h"
#include "processors.h"
#include "prompt_call.h"

namespace {

constexpr char kName[] = "kvq_exact_attention";

std::atomic<uint64_t> prompts_attended{0};

std::string attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer keys,
                   ffi::AnyBuffer values, ffi::Buffer<ffi::S32> reach, ffi::Buffer<ffi::S32> counts,
                   ffi::Buffer<ffi::S32> queries, ffi::Result<ffi::Buffer<ffi::F32>> m,
                   ffi::Result<ffi::Buffer<ffi::F32>> l, ffi::Result<ffi::Buffer<ffi::F32>> o,
                   int64_t window, float scale, float soft_cap) {
  if (q.dimensions().size() != 4 || keys.dimensions().size() != 4)
    return "q and keys must have four axes";
  if (reach.dimensions().size() != 2 || counts.dimensions().size() != 2)
    return "reach and counts must have two axes";
  kvq::PromptCall call{};
  call.batch = q.dimensions()[0], call.heads = q.dimensions()[1];
  call.queries = counts.dimensions()[1], call.channels = q.dimensions()[3];
  const int64_t rows = q.dimensions()[2], tokens = keys.dimensions()[2];
  call.old = reach.dimensions()[1], call.fresh = tokens - call.old;
  if (call.queries < 1 || rows % call.queries) return "counts must be [B, T], R = G * T";
  call.group = rows / call.queries;
  if (call.channels < 1 || call.channels > kvq::kMaxChannels) return "H must be from 1 to 1024";
  if (call.group < 1) return "G must be at least 1";
  if (call.fresh < 0) return "reach has more rows than keys";
  if (window < 0 || !(soft_cap >= 0)) return "a window and a soft cap must be positive, or 0";
  const std::vector<int64_t> stored{call.batch, call.heads, tokens, call.channels};
  if (!shaped(keys.dimensions(), stored) || !shaped(values.dimensions(), stored))
    return "keys and values must be [B, K, E, H]";
  if (!shaped(reach.dimensions(), {call.batch, call.old}) ||
      !shaped(counts.dimensions(), {call.batch, call.queries}) ||
      !shaped(queries.dimensions(), {call.batch}))
    return "reach, counts and queries must have the rows of q";
  const std::vector<int64_t> columns{call.batch, call.heads, rows, 1};
  if (!shaped(m->dimensions(), columns) || !shaped(l->dimensions(), columns) ||
      !shaped(o->dimensions(), {call.batch, call.heads, rows, call.channels}))
    return "the results have other shapes";
  const ffi::DataType type = keys.element_type();
  if (values.element_type() != type || (type != ffi::F32 && type != ffi::F16 && type != ffi::BF16))
    return "keys and values must be of fp32, fp16 or bf16";
  call.type = type == ffi::F32 ? kvq::kFloat32 : type == ffi::F16 ? kvq::kFloat16 : kvq::kBfloat16;
  call.q = q.typed_data(), call.counts = counts.typed_data();
  call.keys = static_cast<const char*>(keys.untyped_data());
  call.values = static_cast<const char*>(values.untyped_data());
  call.reach = reach.typed_data(), call.real = queries.typed_data();
  call.window = window, call.scale = scale, call.soft_cap = soft_cap;
  call.m = m->typed_data(), call.l = l->typed_data(), call.o = o->typed_data();
  kvq::attend_prompt(call, kvq::best_kernels().attend_rows, helpers_of(pool), schedule_on(pool));
  if (call.fresh > 0) ++prompts_attended;  // not for what a prompt reads of older bodies
  return "";
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
                             .To(Reporting<kName, attend>::call)
                             .release();
  return handler->Call(frame);
}
