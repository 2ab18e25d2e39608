// The custom call `kvq_tabled_product`: checks the arguments from XLA, then splits the work over
// XLA's threads. It multiplies the rows of x with any number of matrices of codes that have levels
// of their output's own, and sparse entries.
//
//   arguments   x f32 [T, I]; then, for each matrix, codes u32 [O, I / 8]; levels f16, bf16 or f32
//               [O, 16]; and of the sparse entries, by output: starts s32 [O + 1], rising from 0 to
//               n; inputs u16 [n]; values as levels [n]
//   results     y f32 [T, O] for each matrix
//
// Arguments that do not fit together are an XLA error, never an access outside an array.
#include "handlers.h"
#include "processors.h"
#include "weights_call.h"

namespace {

constexpr char kName[] = "kvq_tabled_product";
constexpr size_t kArrays = 5;  // of a matrix

// Returns what is wrong with the sparse entries, or an empty text.
std::string check_sparse(const kvq::Tables& tables, int64_t outputs, int64_t inputs,
                         int64_t entries) {
  const int32_t* const starts = tables.starts;
  int32_t falls = 0;  // without early ends, so that vectors can follow
  for (int64_t o = 0; o < outputs; o++) falls |= starts[o + 1] < starts[o];
  if (falls || starts[0] != 0 || starts[outputs] != entries)
    return "starts must rise from 0 to the number of entries";
  uint16_t largest = 0;
  for (int64_t e = 0; e < entries; e++) largest = std::max(largest, tables.inputs[e]);
  return entries && largest >= inputs ? "the inputs of sparse entries must be below I" : "";
}

// Fill the product with matrix m. Returns what is wrong, or an empty text.
std::string read_product(const kvq::PackedCall& call, ffi::RemainingArgs arrays,
                         ffi::RemainingRets results, size_t m, kvq::PackedProduct& product) {
  using kvq::ScaleKind;
  const auto array = [&](size_t i) { return *arrays.get<ffi::AnyBuffer>(m * kArrays + i); };
  auto y = results.get<ffi::Buffer<ffi::F32>>(m);
  if (!y || (*y)->dimensions().size() != 2 || (*y)->dimensions()[0] != call.tokens)
    return "y must be [T, O]";
  product.y = (*y)->typed_data();
  const int64_t outputs = (*y)->dimensions()[1], inputs = call.inputs;
  const ffi::AnyBuffer codes = array(0), levels = array(1), starts = array(2), at = array(3),
                       values = array(4);
  if (inputs % 8 || codes.element_type() != ffi::U32 ||
      !shaped(codes.dimensions(), {outputs, inputs / 8}))
    return "codes must be u32 [O, I / 8]";
  const ffi::DataType type = levels.element_type();
  if ((type != ffi::F16 && type != ffi::BF16 && type != ffi::F32) ||
      !shaped(levels.dimensions(), {outputs, 16}))
    return "levels must be f16, bf16 or f32 [O, 16]";
  if (starts.element_type() != ffi::S32 || !shaped(starts.dimensions(), {outputs + 1}))
    return "starts must be s32 [O + 1]";
  const int64_t entries = int64_t(at.element_count());
  if (at.element_type() != ffi::U16 || !shaped(at.dimensions(), {entries}) ||
      values.element_type() != type || !shaped(values.dimensions(), {entries}))
    return "sparse entries must be inputs u16 [n] and values of the type of levels [n]";
  kvq::PackedMatrix& weights = product.weights;
  weights.bits = 4, weights.group = kvq::kWordInputs;
  weights.inputs = inputs, weights.outputs = outputs, weights.codes = codes.untyped_data();
  weights.tables = {levels.untyped_data(), static_cast<const int32_t*>(starts.untyped_data()),
                    static_cast<const uint16_t*>(at.untyped_data()), values.untyped_data(),
                    type == ffi::F16    ? ScaleKind::kFloat16
                    : type == ffi::BF16 ? ScaleKind::kBfloat16
                                        : ScaleKind::kFloat32};
  return check_sparse(weights.tables, outputs, inputs, entries);
}

std::string multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs arrays,
                     ffi::RemainingRets results) {
  if (x.dimensions().size() != 2) return "x must be [T, I]";
  if (arrays.size() != results.size() * kArrays)
    return "there must be five arrays and a result for each matrix";
  kvq::PackedCall call{x.typed_data(), x.dimensions()[0], x.dimensions()[1], kvq::kMaxDigits, {}};
  for (size_t m = 0; m < results.size(); m++) {
    kvq::PackedProduct product{};
    const std::string wrong = read_product(call, arrays, results, m, product);
    if (!wrong.empty()) return wrong;
    if (!call.inputs) std::fill_n(product.y, call.tokens * product.weights.outputs, 0.0f);
    if (call.inputs && product.weights.outputs) call.products.push_back(product);
  }
  kvq::multiply(call, *kvq::best_kernels().multiplier, helpers_of(pool), schedule_on(pool));
  return "";
}

}  // namespace

extern "C" KVQ_EXPORT XLA_FFI_Error* kvq_tabled_product(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .To(Reporting<kName, multiply>::call)
                             .release();
  return handler->Call(frame);
}
