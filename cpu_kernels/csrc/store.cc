// The custom call `kvq_store_blocks`: writes blocks of tokens into the arrays of a body, in place.
//
//   arguments   first s32 [B], count s32 [B], then the arrays of the body [B, ..., S, ...], then as
//               many arrays of new blocks [B, ..., W, ...]
//   attributes  axes, entries: for each array, which axis S is, and how many entries a block has
//   results     the arrays of the body, meant to share the memory of the arguments. Entries that
//               are not written stay as they were.
//
// Row b takes the leading count[b] of its new blocks, from block first[b] on. What lies behind the
// end of the array is left out, and a row whose first block lies before its start is left as it is.
#include <cstring>
#include <numeric>

#include "handlers.h"

namespace {

constexpr char kName[] = "kvq_store_blocks";

int64_t product(ffi::Span<const int64_t> sizes, size_t from, size_t to) {
  return std::accumulate(sizes.begin() + from, sizes.begin() + to, int64_t(1), std::multiplies<>());
}

// An array of the body and its new blocks: `outer` runs of entries in each row of the batch,
// `entry` bytes apart.
struct Target {
  char* stored;
  const char* blocks;
  int64_t outer, size, width, entry, per_block;

  void write(int64_t b, int64_t first, int64_t count) const {
    const int64_t at = first * per_block, entries = std::min({count * per_block, width, size - at});
    if (at < 0 || entries <= 0) return;
    for (int64_t run = b * outer; run < (b + 1) * outer; run++)
      std::memcpy(stored + (run * size + at) * entry, blocks + run * width * entry,
                  entries * entry);
  }
};

std::string store(ffi::Buffer<ffi::S32> first, ffi::Buffer<ffi::S32> count,
                  ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  ffi::Span<const int64_t> axes, ffi::Span<const int64_t> entries) {
  const size_t arrays = axes.size();
  if (entries.size() != arrays || arguments.size() != 2 * arrays || results.size() != arrays)
    return "an axis, a number of entries, new blocks and a result are needed for each array";
  if (first.dimensions().size() != 1 || count.dimensions().size() != 1 ||
      first.element_count() != count.element_count())
    return "first and count must be [B]";
  const int64_t batch = first.element_count();
  for (size_t i = 0; i < arrays; i++) {
    const auto old = arguments.get<ffi::AnyBuffer>(i),
               blocks = arguments.get<ffi::AnyBuffer>(arrays + i);
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!old.has_value() || !blocks.has_value() || !result.has_value())
      return "an array is missing";
    const auto shape = old->dimensions(), new_shape = blocks->dimensions(),
               returned = (*result)->dimensions();
    const size_t axis = size_t(axes[i]);
    if (axis < 1 || axis >= shape.size() || new_shape.size() != shape.size() || shape[0] != batch ||
        entries[i] < 1)
      return "array " + std::to_string(i) + " has no such axis";
    for (size_t d = 0; d < shape.size(); d++)
      if (d != axis && new_shape[d] != shape[d])
        return "the blocks of array " + std::to_string(i) + " have another shape";
    if (blocks->element_type() != old->element_type() ||
        (*result)->element_type() != old->element_type() ||
        !std::equal(returned.begin(), returned.end(), shape.begin(), shape.end()))
      return "array " + std::to_string(i) + ", its blocks and its result are not of one kind";
    const int64_t bytes = old->element_count() ? old->size_bytes() / old->element_count() : 0;
    const Target target{static_cast<char*>((*result)->untyped_data()),
                        static_cast<const char*>(blocks->untyped_data()),
                        product(shape, 1, axis),
                        shape[axis],
                        new_shape[axis],
                        product(shape, axis + 1, shape.size()) * bytes,
                        entries[i]};
    if (target.stored != old->untyped_data())
      std::memcpy(target.stored, old->untyped_data(), old->size_bytes());
    for (int64_t b = 0; b < batch; b++)
      target.write(b, first.typed_data()[b], count.typed_data()[b]);
  }
  return "";
}

}  // namespace

extern "C" KVQ_EXPORT XLA_FFI_Error* kvq_store_blocks(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<ffi::Span<const int64_t>>("axes")
                             .Attr<ffi::Span<const int64_t>>("entries")
                             .To(Reporting<kName, store>::call)
                             .release();
  return handler->Call(frame);
}
