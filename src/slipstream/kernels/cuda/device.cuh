// What the kernels use of the GPU beyond C++: half-precision pairs, matrix products of a warp, shared
// memory, copies to it, barriers. No header is needed, so NVRTC alone compiles this.
//
// `tests/kernels/cuda/emulator.h` defines the same functions for a CPU, with every thread as a fiber.

#pragma once

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifdef EMULATED
#include "emulator.h"
#else

#define GLOBAL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DEVICE __device__ __forceinline__

extern __shared__ __align__(128) u8 shared_memory[];

// fp16: what a pass saves for the other one, in every precision

DEVICE u32 pack_half(float lo, float hi) {
  u32 r;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm("{.reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b};}"
      : "=r"(r) : "f"(lo), "f"(hi));
#endif
  return r;
}

DEVICE float low_half(u32 v) {
  float r;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(r) : "r"(v));
  return r;
}

DEVICE float high_half(u32 v) {
  float r;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(r) : "r"(v));
  return r;
}

// Operands of products: fp16, or bf16 since Ampere

#if BF16
DEVICE u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE float low(u32 v) { return __uint_as_float(v << 16); }
DEVICE float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
#else
DEVICE u32 pack(float lo, float hi) { return pack_half(lo, hi); }
DEVICE float low(u32 v) { return low_half(v); }
DEVICE float high(u32 v) { return high_half(v); }
#endif

// tanh by the GPU's own instruction: its error of 2^-11 is what fp16 rounds off
DEVICE float tanh_fast(float v) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// d [16 x 8] += a [16 x 16] b [16 x 8]; thread (g, q) = (lane / 4, lane % 4) has rows g and g + 8 of
// columns 2 q and 2 q + 1 of d, columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the same rows of a, and
// those rows of column g of b
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
#if BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
  asm(MMA "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#define MMA "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
  asm(MMA "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm(MMA "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
#undef MMA
}

// A thread's constant that ptxas shall keep rather than compute again at each step
DEVICE int keep(int v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }

// Global memory, by reads and writes of 4, 8 and 16 bytes

DEVICE u32 load_4(const void *at) { return *(const u32 *)at; }
DEVICE uint2 load_8(const void *at) { return *(const uint2 *)at; }
DEVICE uint4 load_16(const void *at) { return *(const uint4 *)at; }
DEVICE void store_4(void *at, u32 v) { *(u32 *)at = v; }
DEVICE void store_8(void *at, uint2 v) { *(uint2 *)at = v; }
DEVICE void store_16(void *at, uint4 v) { *(uint4 *)at = v; }
DEVICE float load_float(const float *at) { return *at; }
DEVICE u32 load_2(const void *at) { return *(const u16 *)at; }
DEVICE void store_2(void *at, u32 v) { *(u16 *)at = (u16)v; }

// Shared memory, by 32-bit addresses

DEVICE u32 get_shared_base() { return (u32)__cvta_generic_to_shared(shared_memory); }

DEVICE uint4 read_16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

DEVICE u32 read_4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

DEVICE void write_4(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v)); }

DEVICE void write_16(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// Copies from global to shared memory that their own thread alone reads: no barrier, and none of the
// six scoreboards of a warp, among which the loads of several steps would share one.
template <int SIZE> DEVICE void copy(u32 to, const void *from) {
#if __CUDA_ARCH__ >= 800
  if (SIZE == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(SIZE));
#else  // waits for the data
  if (SIZE == 16) write_16(to, load_16(from));
  if (SIZE == 4) write_4(to, load_4(from));
#endif
}

DEVICE void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int MORE> DEVICE void await_copies() {  // all but the last MORE groups
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(MORE) : "memory");
#endif
}

// Bulk copies of rows, which complete on a barrier in shared memory (Hopper and later)

#if BULK
DEVICE void start_bulk_barrier(u32 bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void expect_bytes(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void copy_bulk(u32 to, const void *from, int bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void await_bulk(u32 bar, int parity) {
  asm volatile(
      "{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W;}"
      ::"r"(bar), "r"(parity) : "memory");
}
#endif

DEVICE void await_block() { __syncthreads(); }
DEVICE void await_warp() { __syncwarp(); }
// Warps 2 n and 2 n + 1 wait for each other
DEVICE void await_neighbour(int warp) {
  asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory");
}

#endif  // EMULATED
