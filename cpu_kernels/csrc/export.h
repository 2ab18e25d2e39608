// Functions that the library shows to its loader.
#pragma once

#if defined(_WIN32)
#define KVQ_EXPORT __declspec(dllexport)
#else
#define KVQ_EXPORT __attribute__((visibility("default")))
#endif
