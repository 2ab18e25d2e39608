// What the handlers of custom calls share: how they report errors, compare shapes, and reach the
// threads of XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "export.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// The handler of the custom call `kName`. `kFunction` returns what is wrong with its arguments, or
// an empty text.
template <const char* kName, auto kFunction, class = decltype(kFunction)>
struct Reporting;

template <const char* kName, auto kFunction, class... Arguments>
struct Reporting<kName, kFunction, std::string (*)(Arguments...)> {
  static ffi::Error call(Arguments... arguments) {
    const auto named = [](const std::string& text) { return std::string(kName) + ": " + text; };
    try {
      const std::string wrong = kFunction(std::move(arguments)...);
      return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(named(wrong));
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, named("out of memory"));
    }
  }
};

inline bool shaped(ffi::Span<const int64_t> dimensions, const std::vector<int64_t>& wanted) {
  return std::equal(dimensions.begin(), dimensions.end(), wanted.begin(), wanted.end());
}

// How many threads may help the caller.
inline int64_t helpers_of(const ffi::ThreadPool& pool) {
  return std::max<int64_t>(0, pool.num_threads() - 1);
}

// `pool` must live as long as the result.
inline kvq::Schedule schedule_on(ffi::ThreadPool& pool) {
  return [&pool](std::function<void()> work) { pool.Schedule(std::move(work)); };
}

}  // namespace
