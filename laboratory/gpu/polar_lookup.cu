// PolarQuant's look-up of query products for G query heads, at head dim 128 with 4 + 4 bits: the two
// loops of a kernel, for counting their instructions. Lanes are tokens of one group of 128.
//
//   for each group    table[pair][code][g] = q_g . (cos, sin)(code)        (build)
//   for each token    score_g = sum over pairs of radius * table[...][g]   (scores)
//
// nvcc -std=c++17 -arch=sm_90a -O3 -DG=4 -cubin polar_lookup.cu; nvdisasm polar_lookup.cubin
#include <cuda_fp16.h>
#include <stdint.h>
#ifndef G
#define G 4
#endif
#define PAIRS 64

__device__ inline half2 h2(uint32_t x) { return *reinterpret_cast<half2*>(&x); }
struct __align__(2 * G) Products {
  half v[G];
};

extern "C" __global__ void build(const half* q, const half* angles, Products* out) {
  __shared__ Products table[PAIRS * 16];
  // each of 128 threads makes 8 of 1024 entries
  for (int i = threadIdx.x; i < PAIRS * 16; i += 128) {
    int pair = i / 16, code = i % 16;
    float theta = (code + 0.5f) * __half2float(angles[pair]) + __half2float(angles[PAIRS + pair]);
    half2 c = __float2half2_rn(__cosf(theta)), s = __float2half2_rn(__sinf(theta));
    Products p;
    for (int g = 0; g < G; g += 2) {
      half2 x = *reinterpret_cast<const half2*>(q + (pair * 2) * G + g);
      half2 y = *reinterpret_cast<const half2*>(q + (pair * 2 + 1) * G + g);
      half2 t = __hfma2(x, c, __hmul2(y, s));
      p.v[g] = __low2half(t);
      if (g + 1 < G) p.v[g + 1] = __high2half(t);
    }
    table[i] = p;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < PAIRS * 16; i += 128) out[i] = table[i];
}

extern "C" __global__ void scores(const uint4* words, const Products* products, const uint2* radii,
                                  float* out, int tiles) {
  extern __shared__ uint4 shared[];
  Products* table = reinterpret_cast<Products*>(shared);
  uint2* of_radii = reinterpret_cast<uint2*>(table + PAIRS * 16);  // (step, offset) of two pairs
  uint4* rows = reinterpret_cast<uint4*>(of_radii + PAIRS / 2);
  for (int i = threadIdx.x; i < PAIRS * 16; i += 128) table[i] = products[i];
  if (threadIdx.x < PAIRS / 2) of_radii[threadIdx.x] = radii[threadIdx.x];
  for (int i = threadIdx.x; i < 1024; i += 128) rows[i] = words[i];
  __syncthreads();
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    float total[G] = {};
#pragma unroll
    for (int part = 0; part < 4; part++) {  // 8 words, 16 pairs
      uint4 w4 = rows[(tile * 128 + threadIdx.x) * 4 + part];
      const uint32_t* w = &w4.x;
      half2 acc[(G + 1) / 2];
      for (int g = 0; g < (G + 1) / 2; g++) acc[g] = __float2half2_rn(0.f);
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int high = 0; high < 2; high++) {
          uint32_t x = high ? w[i] >> 8 : w[i];
          int pair = part * 8 + i * 2 + 32 * high;
          half2 r = __hadd2(h2((x & 0x00f000f0u) | 0x54005400u), __float2half2_rn(-64.f));
          uint2 of = of_radii[pair / 2];
          r = __hfma2(r, h2(of.x), h2(of.y));
          uint32_t at = x & 0x000f000fu;
#pragma unroll
          for (int k = 0; k < 2; k++) {
            uint32_t code = k ? at >> 16 : at & 0xffff;
            Products p = table[(pair + k) * 16 + code];
            half2 rr = k ? __high2half2(r) : __low2half2(r);
            if (G == 1) acc[0] = __hfma2(rr, __half2half2(p.v[0]), acc[0]);
            else
#pragma unroll
              for (int g = 0; g < G; g += 2)
                acc[g / 2] = __hfma2(rr, *reinterpret_cast<half2*>(&p.v[g]), acc[g / 2]);
          }
        }
      }
      for (int g = 0; g < G; g++)
        total[g] += g % 2 ? __high2float(acc[g / 2]) : __low2float(acc[g / 2]);
    }
    for (int g = 0; g < G; g++) out[(tile * G + g) * 128 + threadIdx.x] = total[g];
  }
}
