// The device primitives that the kernels are written in.
//
// Kernels name no CUDA built-in beside threadIdx, blockIdx and the functions here, so that the same source also runs on
// the host: tests/cuda_host/ supplies the same names with CONV2D_CUDA_ON_HOST, and checks what hardware wouldn't tell
// (races, reads of copies that have not landed, bank conflicts). Hence also the rule that shared memory is reached
// through load_shared, store_shared, copy_async and load_matrix_x4 alone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(CONV2D_CUDA_ON_HOST)
#include "cuda_on_host.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace conv2d_ext::cuda {

__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char conv2d_ext_shared[];
  return conv2d_ext_shared;
}

// T has 1, 2, 4, 8 or 16 bytes and lies at a multiple of them.
template <class T>
__device__ __forceinline__ T load_shared(const T* address) {
  return *address;
}
template <class T>
__device__ __forceinline__ void store_shared(T* address, T value) {
  *address = value;
}

// Memory that nothing writes while the kernel runs.
template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return __ldg(address);
}

// To memory whose address came as a number, of which the compiler doesn't know that it is global. No fence for the
// compiler: a kernel doesn't read what it has stored.
template <class T>
__device__ __forceinline__ void store_global(T* address, T value) {
  constexpr int kBytes = alignof(T);
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  const size_t to = __cvta_generic_to_global(address);
#pragma unroll
  for (int at = 0; at < static_cast<int>(sizeof(T)); at += kBytes) {
    const char* const from = reinterpret_cast<const char*>(&value) + at;
    if constexpr (kBytes == 16) {
      uint4 bits;
      std::memcpy(&bits, from, kBytes);
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + at), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                   "r"(bits.w));
    } else if constexpr (kBytes == 8) {
      uint64_t bits;
      std::memcpy(&bits, from, kBytes);
      asm volatile("st.global.b64 [%0], %1;" ::"l"(to + at), "l"(bits));
    } else if constexpr (kBytes == 4) {
      uint32_t bits;
      std::memcpy(&bits, from, kBytes);
      asm volatile("st.global.b32 [%0], %1;" ::"l"(to + at), "r"(bits));
    } else {
      uint16_t bits;
      std::memcpy(&bits, from, kBytes);
      asm volatile("st.global.b16 [%0], %1;" ::"l"(to + at), "h"(bits));
    }
  }
}

__device__ __forceinline__ void sync_threads() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
// All 32 lanes call it.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// An asynchronous copy of BYTES (4, 8 or 16, both sides aligned) to shared memory; zeros where not `inside`, and then
// `global` is not read. It has landed for this thread after wait_copies, for others after a barrier that follows.
// PAST_L1: only of 16 bytes.
template <int BYTES, bool PAST_L1 = false>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  static_assert(!PAST_L1 || BYTES == 16);
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (PAST_L1) {
    asm volatile(
        "{ .reg .pred outside; setp.eq.b32 outside, %3, 0; cp.async.cg.shared.global [%0], [%1], %2, outside; }" ::"r"(
            to),
        "l"(global), "n"(BYTES), "r"(static_cast<int>(inside))
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred outside; setp.eq.b32 outside, %3, 0; cp.async.ca.shared.global [%0], [%1], %2, outside; }" ::"r"(
            to),
        "l"(global), "n"(BYTES), "r"(static_cast<int>(inside))
        : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` of this thread's committed groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lane l names row l % 8 (16 bytes, aligned) of matrix l / 8, and receives of
// matrix i, in result[i], the elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l / 4.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&result)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}
// The same with each matrix transposed: elements (2 * (l % 4), l / 4) and (2 * (l % 4) + 1, l / 4).
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&result)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}

// d[16 x 8] += a[16 x K] * b[K x 8], in the fragment layouts of PTX's mma.m16n8k8 (tf32) and mma.m16n8k16 (16 bits).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// To the nearest tf32, ties away from zero, as a float32 whose 13 low bits are zero. NaN stays NaN.
__device__ __forceinline__ uint32_t round_to_tf32(float value) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

// 16-bit storage types.
struct Float16 {
  static constexpr bool kIsBFloat16 = false;
  uint16_t bits;
};
struct BFloat16 {
  static constexpr bool kIsBFloat16 = true;
  uint16_t bits;
};
__device__ __forceinline__ float widen(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ __forceinline__ float widen(BFloat16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }
// To the nearest, ties to even.
__device__ __forceinline__ void narrow(float value, Float16& result) {
  result.bits = __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ void narrow(float value, BFloat16& result) {
  result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// The same value, of which the compiler knows nothing: what is computed from it again isn't kept in registers
// meanwhile.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ int64_t opaque(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// Fused: one rounding.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

template <class T>
struct Same {
  using Type = T;
};

// Queues the kernel. shared_bytes beyond 48 KiB need a SharedMemoryLimit (shared_memory_limit.h).
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                   typename Same<Params>::Type... args) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, shared_bytes, stream);
}

}  // namespace conv2d_ext::cuda
#endif
