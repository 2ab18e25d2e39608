// The custom call `kvq_packed_product`: checks the arguments from XLA, then splits the work over
// XLA's threads.
//
//   arguments   x f32 [T, I]; codes u32 [P, I / 8, 32] of 4 bits or s8 [P, I, 32] of 8 bits;
//               scales f16 [P, I / group, 32], or s8 with coarse_scales f16 [P, I / 256, 32];
//               minima likewise. An array that there is none of is empty.
//   attributes  centre f32
//   results     y f32 [T, O], 32 (P - 1) < O <= 32 P
//
// Arguments that do not fit together are an XLA error, never an access outside an array.
#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "export.h"
#include "processors.h"
#include "weights_call.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Halves = ffi::Buffer<ffi::F16>;

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("kvq_packed_product: " + message);
}

bool shaped(ffi::Span<const int64_t> dimensions, const std::vector<int64_t>& wanted) {
  return std::equal(dimensions.begin(), dimensions.end(), wanted.begin(), wanted.end());
}

// Fill `scales`. Returns what is wrong, or an empty text.
std::string read_scales(const kvq::PackedMatrix& weights, const ffi::AnyBuffer& fine,
                        const Halves& coarse, kvq::Scales& scales) {
  const std::vector<int64_t> every{weights.panels(), weights.inputs / weights.group,
                                   kvq::kPanelOutputs};
  if (!shaped(fine.dimensions(), every)) return "scales and minima must be [P, I / group, 32]";
  scales.fine = fine.untyped_data();
  if (fine.element_type() == ffi::F16)
    return coarse.element_count() ? "float16 scales have no coarse ones" : "";
  if (fine.element_type() != ffi::S8) return "scales and minima must be float16 or int8";
  if (weights.inputs % kvq::kCoarse ||
      !shaped(coarse.dimensions(),
              {weights.panels(), weights.inputs / kvq::kCoarse, kvq::kPanelOutputs}))
    return "coarse scales must be [P, I / 256, 32]";
  scales.coarse = reinterpret_cast<const uint16_t*>(coarse.typed_data());
  return "";
}

// Fill `weights`. Returns what is wrong, or an empty text.
std::string read_matrix(int64_t inputs, int64_t outputs, const ffi::AnyBuffer& codes,
                        const ffi::AnyBuffer& scales, const Halves& coarse_scales,
                        const ffi::AnyBuffer& mins, const Halves& coarse_mins,
                        kvq::PackedMatrix& weights) {
  weights.inputs = inputs, weights.outputs = outputs;
  weights.bits = codes.element_type() == ffi::U32 ? 4 : 8;
  if (weights.bits == 8 && codes.element_type() != ffi::S8) return "codes must be u32 or s8";
  if (inputs % kvq::kWordInputs) return "I must be a multiple of 32";
  if (!shaped(codes.dimensions(),
              {weights.panels(), weights.bits == 4 ? inputs / 8 : inputs, kvq::kPanelOutputs}))
    return "codes must be [P, I / 8, 32] of 4 bits or [P, I, 32] of 8 bits";
  weights.codes = codes.untyped_data();
  if (scales.dimensions().size() != 3) return "scales must have three axes";
  weights.group = scales.dimensions()[1] * 32 == inputs ? 32 : 16;
  if (weights.bits == 4 && weights.group != 32) return "groups of 4-bit codes must be of 32";
  std::string wrong = read_scales(weights, scales, coarse_scales, weights.scales);
  if (wrong.empty() && mins.element_count())
    wrong = read_scales(weights, mins, coarse_mins, weights.mins);
  return wrong;
}

ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes,
                    ffi::AnyBuffer scales, Halves coarse_scales, ffi::AnyBuffer mins,
                    Halves coarse_mins, ffi::Result<ffi::Buffer<ffi::F32>> y, float centre) {
  if (x.dimensions().size() != 2 || y->dimensions().size() != 2 ||
      x.dimensions()[0] != y->dimensions()[0])
    return invalid("x must be [T, I], and y [T, O]");
  kvq::PackedCall call{};
  call.tokens = x.dimensions()[0], call.x = x.typed_data(), call.y = y->typed_data();
  call.weights.centre = centre;
  if (!x.dimensions()[1] || !y->element_count()) {
    std::fill_n(call.y, y->element_count(), 0.0f);
    return ffi::Error::Success();
  }
  const std::string wrong = read_matrix(x.dimensions()[1], y->dimensions()[1], codes, scales,
                                        coarse_scales, mins, coarse_mins, call.weights);
  if (!wrong.empty()) return invalid(wrong);
  try {
    kvq::multiply(call, kvq::best_kernels().multiply_panels,
                  std::max<int64_t>(0, pool.num_threads() - 1),
                  [&pool](std::function<void()> work) { pool.Schedule(std::move(work)); });
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kvq_packed_product: out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" KVQ_EXPORT XLA_FFI_Error* kvq_packed_product(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<Halves>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<Halves>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attr<float>("centre")
                             .To(multiply)
                             .release();
  return handler->Call(frame);
}
