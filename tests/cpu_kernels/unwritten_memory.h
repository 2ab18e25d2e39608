// New arrays hold NaN, so that a kernel that reads memory before it writes it gives a wrong result.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

void* operator new[](std::size_t size) {
  void* const memory = std::malloc(size ? size : 1);
  if (!memory) throw std::bad_alloc();
  return std::memset(memory, 0xFF, size);
}

void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
