// The custom call `kvq_packed_product`: checks the arguments from XLA, then splits the work over
// XLA's threads. It multiplies the rows of x with any number of matrices.
//
//   arguments   x f32 [T, I]; chosen s32 [T], or empty; then, for each matrix,
//               codes u32 [P, I / 8, 32] of 4 bits, s8 or f8e4m3fn [P, I / 4, 32, 4] of 8 bits, or
//               bf16 or f16 [P, I, 32] without scales;
//               scales f16, bf16 or f32 [P, I / group, 32], or s8 with coarse_scales f16
//               [P, I / 256, 32], or u8 exponents of MXFP4; minima likewise, but not exponents,
//               or s8 factors of the scales. An array that is left out is empty.
//   attributes  centres f32 [matrices], integers from 0 to 15, and 0 unless codes are integers of 4
//               bits; levels f32 [matrices, 16], what
//               codes of 4 bits stand for, or NaN for integers; digits s64, 3, or 1 to round
//               activations to 8 bits; experts s64, of stacks of matrices, whose first axes are
//               [experts P] then, and row t of x meets matrix chosen[t]
//   results     y f32 [T, O] for each matrix, 32 (P - 1) < O <= 32 P
//
// Arguments that do not fit together are an XLA error, never an access outside an array.
#include <cmath>

#include "handlers.h"
#include "processors.h"
#include "weights_call.h"

namespace {

constexpr char kName[] = "kvq_packed_product";

using Halves = ffi::Buffer<ffi::F16>;

// Fill `scales` of a stack of matrices. Returns what is wrong, or an empty text.
std::string read_scales(const kvq::PackedMatrix& weights, int64_t experts,
                        const ffi::AnyBuffer& fine, const Halves& coarse, bool minima,
                        kvq::Scales& scales) {
  using kvq::ScaleKind;
  const std::vector<int64_t> every{experts * weights.panels(), weights.inputs / weights.group,
                                   kvq::kPanelOutputs};
  if (!shaped(fine.dimensions(), every)) return "scales and minima must be [P, I / group, 32]";
  scales.fine = fine.untyped_data();
  const ffi::DataType type = fine.element_type();
  if (type == ffi::F16 || type == ffi::BF16 || type == ffi::F32) {
    scales.kind = type == ffi::F16    ? ScaleKind::kFloat16
                  : type == ffi::BF16 ? ScaleKind::kBfloat16
                                      : ScaleKind::kFloat32;
    return coarse.element_count() ? "scales of 16 or 32 bits have no coarse ones" : "";
  }
  if (type == ffi::U8) {
    scales.kind = ScaleKind::kExponents;
    return coarse.element_count() || weights.bits != 4 || minima
               ? "exponents are scales of 4-bit codes"
               : "";
  }
  if (type != ffi::S8) return "scales and minima must be float16, bfloat16, float32, int8 or uint8";
  scales.kind = minima && !coarse.element_count() ? ScaleKind::kOfScale : ScaleKind::kOfCoarse;
  if (scales.kind == ScaleKind::kOfScale) return "";
  if (weights.inputs % kvq::kCoarse ||
      !shaped(coarse.dimensions(),
              {experts * weights.panels(), weights.inputs / kvq::kCoarse, kvq::kPanelOutputs}))
    return "coarse scales must be [P, I / 256, 32]";
  scales.coarse = reinterpret_cast<const uint16_t*>(coarse.typed_data());
  return "";
}

int64_t bits_of(ffi::DataType codes) {
  if (codes == ffi::BF16 || codes == ffi::F16) return 16;
  if (codes == ffi::S8 || codes == ffi::F8E4M3FN) return 8;
  return codes == ffi::U32 ? 4 : 0;
}

// Fill `weights`. Returns what is wrong, or an empty text.
std::string read_matrix(int64_t inputs, int64_t outputs, int64_t experts,
                        const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales,
                        const Halves& coarse_scales, const ffi::AnyBuffer& mins,
                        const Halves& coarse_mins, kvq::PackedMatrix& weights) {
  weights.inputs = inputs, weights.outputs = outputs;
  weights.bits = bits_of(codes.element_type());
  weights.bfloat16 = codes.element_type() == ffi::BF16;
  weights.e4m3 = codes.element_type() == ffi::F8E4M3FN;
  if (!weights.bits) return "codes must be u32, s8, f8e4m3fn, bf16 or f16";
  if (inputs % kvq::kWordInputs) return "I must be a multiple of 32";
  std::vector<int64_t> whole{experts * weights.panels(), inputs * weights.bits / 32,
                             kvq::kPanelOutputs};
  if (weights.bits == 8) whole.push_back(4);
  if (weights.bits == 16) whole[1] = inputs;
  if (!shaped(codes.dimensions(), whole))
    return "codes must be [P, I / 8, 32] of 4 bits, [P, I / 4, 32, 4] of 8, or [P, I, 32] of 16";
  weights.codes = codes.untyped_data();
  if (weights.levels && (weights.bits != 4 || weights.centre != 0 || mins.element_count()))
    return "levels are for codes of 4 bits without centre and minima";
  const bool counted = weights.bits == 4 && scales.element_type() != ffi::U8;
  if (weights.centre != 0 && !counted) return "a centre is for integers of 4 bits";
  weights.group = kvq::kWordInputs;
  if (weights.bits == 16)
    return scales.element_count() || mins.element_count()
               ? "numbers of 16 bits have no scales and minima"
               : "";
  if (scales.dimensions().size() != 3) return "scales must have three axes";
  weights.group = scales.dimensions()[1] * 32 == inputs ? 32 : 16;
  if ((weights.bits == 4 || weights.e4m3) && weights.group != 32)
    return "groups of 4-bit codes and of FP8 must be of 32";
  const std::string wrong =
      read_scales(weights, experts, scales, coarse_scales, false, weights.scales);
  if (weights.levels && weights.e2m1()) return "exponents are scales of numbers, not of levels";
  if (!wrong.empty() || !mins.element_count()) return wrong;
  return read_scales(weights, experts, mins, coarse_mins, true, weights.mins);
}

constexpr size_t kArrays = 5, kLevels = 16;  // of a matrix

// Fill the product with matrix m. Returns what is wrong, or an empty text.
std::string read_product(const kvq::PackedCall& call, int64_t experts, ffi::RemainingArgs arrays,
                         ffi::RemainingRets results, size_t m, kvq::PackedProduct& product) {
  const auto array = [&](size_t i) { return arrays.get<ffi::AnyBuffer>(m * kArrays + i); };
  const auto coarse_scales = arrays.get<Halves>(m * kArrays + 2);
  const auto coarse_mins = arrays.get<Halves>(m * kArrays + 4);
  auto y = results.get<ffi::Buffer<ffi::F32>>(m);
  const auto codes = array(0), scales = array(1), mins = array(3);
  if (!codes || !scales || !coarse_scales || !mins || !coarse_mins)
    return "coarse scales and minima must be float16";
  if (!y || (*y)->dimensions().size() != 2 || (*y)->dimensions()[0] != call.tokens)
    return "y must be [T, O]";
  product.y = (*y)->typed_data();
  if (!call.inputs) std::fill_n(product.y, (*y)->element_count(), 0.0f);
  if (!call.inputs || !(*y)->element_count()) return "";
  return read_matrix(call.inputs, (*y)->dimensions()[1], experts, *codes, *scales, *coarse_scales,
                     *mins, *coarse_mins, product.weights);
}

std::string multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> chosen,
                     ffi::RemainingArgs arrays, ffi::RemainingRets results,
                     ffi::Span<const float> centres, ffi::Span<const float> levels, int64_t digits,
                     int64_t experts) {
  if (x.dimensions().size() != 2) return "x must be [T, I]";
  if (digits != 1 && digits != kvq::kMaxDigits) return "digits must be 1 or 3";
  const bool chooses = chosen.element_count() > 0;
  const int32_t* const choice = chosen.typed_data();
  if (experts < 1 || (chooses ? int64_t(chosen.element_count()) != x.dimensions()[0]
                              : experts > 1 && x.dimensions()[0] > 0))
    return "chosen must be [T] for stacks of matrices";
  for (size_t t = 0; t < chosen.element_count(); t++)
    if (choice[t] < 0 || choice[t] >= experts) return "chosen must be from 0 to experts - 1";
  const size_t count = centres.size();
  if (arrays.size() != count * kArrays || results.size() != count ||
      levels.size() != count * kLevels)
    return "there must be five arrays, a centre, 16 levels and a result for each matrix";
  kvq::PackedCall call{x.typed_data(), x.dimensions()[0], x.dimensions()[1], digits, {}};
  for (size_t m = 0; m < count; m++) {
    kvq::PackedProduct product{};
    const float centre = product.weights.centre = centres.begin()[m];
    if (!(centre >= 0 && centre <= 15 && centre == std::floor(centre)))
      return "centres must be integers from 0 to 15";
    const float* const table = levels.begin() + m * kLevels;
    if (!std::isnan(table[0])) product.weights.levels = table;
    const std::string wrong = read_product(call, experts, arrays, results, m, product);
    if (!wrong.empty()) return wrong;
    if (product.weights.inputs && product.weights.outputs) call.products.push_back(product);
  }
  const kvq::Multiplier& kernel = *kvq::best_kernels().multiplier;
  const int64_t helpers = helpers_of(pool);
  const auto schedule = schedule_on(pool);
  if (chooses) kvq::multiply_chosen(call, choice, experts, kernel, helpers, schedule);
  else kvq::multiply(call, kernel, helpers, schedule);
  return "";
}

}  // namespace

extern "C" KVQ_EXPORT XLA_FFI_Error* kvq_packed_product(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<ffi::Span<const float>>("centres")
                             .Attr<ffi::Span<const float>>("levels")
                             .Attr<int64_t>("digits")
                             .Attr<int64_t>("experts")
                             .To(Reporting<kName, multiply>::call)
                             .release();
  return handler->Call(frame);
}
