// Kernels that are wrong in one way each, and right ones beside them: what tests/test_cuda_shim.py runs.
//
// Every kernel has 64 threads, two warps, and writes a float for each to `out`. Its name is what the test calls it by.
#include "../../csrc/cuda/device.cuh"

#include <cstring>
#include <string>

// Not an unnamed namespace: failures name the kernel, which takes a symbol.
namespace conv2d_ext::cuda_selftest {

using namespace conv2d_ext::cuda;  // NOLINT(google-build-using-namespace)
using conv2d_ext::cuda_host::Failure;
using conv2d_ext::cuda_host::Order;
using conv2d_ext::cuda_host::Session;
using conv2d_ext::cuda_host::Settings;

constexpr int kThreads = 64;
constexpr int kSharedBytes = 4096;

enum class Barrier { kNone, kWarp, kBlock, kShuffle };

template <Barrier BARRIER>
void pass() {
  if constexpr (BARRIER == Barrier::kWarp) sync_warp();
  if constexpr (BARRIER == Barrier::kBlock) sync_threads();
  if constexpr (BARRIER == Barrier::kShuffle) shuffle_xor(0, 1);
}

static float* shared_floats() { return reinterpret_cast<float*>(dynamic_shared()); }

// ---- barriers between a write and a read, and between a read and a write

template <Barrier BARRIER, int DISTANCE>
__global__ void exchange(const float*, float* out) {
  const int thread = threadIdx.x;
  store_shared(shared_floats() + thread, static_cast<float>(thread));
  pass<BARRIER>();
  out[thread] = load_shared(shared_floats() + (thread ^ DISTANCE));
}

template <Barrier BARRIER>
__global__ void overwrite(const float*, float* out) {
  const int thread = threadIdx.x;
  store_shared(shared_floats() + thread, 1.0f);
  sync_threads();
  out[thread] = load_shared(shared_floats() + (thread ^ 1));
  pass<BARRIER>();
  store_shared(shared_floats() + thread, 2.0f);
}

__global__ void all_write_one_word(const float*, float* out) {
  store_shared(shared_floats(), 1.0f);
  out[threadIdx.x] = 0;
}

__global__ void write_halves_of_words(const float*, float* out) {
  const int thread = threadIdx.x;
  auto* const halves = reinterpret_cast<uint16_t*>(dynamic_shared());
  store_shared(halves + thread, static_cast<uint16_t>(thread));
  sync_threads();
  const uint32_t word = load_shared(reinterpret_cast<const uint32_t*>(halves) + thread / 2);
  out[thread] = static_cast<float>(word >> thread % 2 * 16 & 0xffff);
}

// Three threads read a word; warp 0 then orders its lanes and writes it. If the third is of warp 1, nothing orders
// that.
template <int THIRD>
__global__ void three_readers(const float*, float* out) {
  const int thread = threadIdx.x;
  if (thread == 0) store_shared(shared_floats(), 5.0f);
  sync_threads();
  if (thread < 2 || thread == THIRD) out[thread] = load_shared(shared_floats());
  sync_warp();
  if (thread == 0) store_shared(shared_floats(), 6.0f);
}

// ---- asynchronous copies

template <bool WAITS, Barrier BARRIER, int DISTANCE>
__global__ void copy(const float* in, float* out) {
  const int thread = threadIdx.x;
  copy_async<4>(shared_floats() + thread, in + thread, thread % 2 == 0);
  commit_copies();
  if (WAITS) wait_copies<0>();
  pass<BARRIER>();
  out[thread] = load_shared(shared_floats() + (thread ^ DISTANCE));
  wait_copies<0>();
}

// Two groups are in flight, and the newer one is read after a wait for all but PENDING.
template <int PENDING>
__global__ void newest_of_two_groups(const float* in, float* out) {
  const int thread = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    copy_async<4>(shared_floats() + group * kThreads + thread, in + thread, true);
    commit_copies();
  }
  wait_copies<PENDING>();
  out[thread] = load_shared(shared_floats() + kThreads + thread);
  wait_copies<0>();
}

// A ring of two buffers: the copy into one is issued while others may still read it, unless there is a barrier.
template <Barrier BARRIER>
__global__ void ring(const float* in, float* out) {
  const int thread = threadIdx.x;
  float* const buffers[2] = {shared_floats(), shared_floats() + kThreads};
  float sum = 0;
  copy_async<4>(buffers[0] + thread, in + thread, true);
  commit_copies();
  for (int step = 0; step < 4; ++step) {
    copy_async<4>(buffers[(step + 1) % 2] + thread, in + thread, true);
    commit_copies();
    wait_copies<1>();
    sync_threads();
    sum += load_shared(buffers[step % 2] + (thread ^ 33));
    pass<BARRIER>();
  }
  wait_copies<0>();
  out[thread] = sum;
}

template <bool COMMITS>
__global__ void end_with_copy_in_flight(const float* in, float* out) {
  copy_async<4>(shared_floats() + threadIdx.x, in, true);
  if (COMMITS) commit_copies();
  out[threadIdx.x] = 0;
}

__global__ void copy_over_copy(const float* in, float* out) {
  copy_async<4>(shared_floats() + threadIdx.x, in, true);
  copy_async<4>(shared_floats() + threadIdx.x, in, true);
  commit_copies();
  wait_copies<0>();
  out[threadIdx.x] = 0;
}

// ---- addresses

template <int OFFSET, int BYTES>
__global__ void store_at(const float*, float* out) {
  struct alignas(BYTES) Value {
    char bytes[BYTES];
  };
  if (threadIdx.x == 0) store_shared(reinterpret_cast<Value*>(dynamic_shared() + OFFSET), Value{});
  out[threadIdx.x] = 0;
}

template <int OFFSET>
__global__ void load_at(const float*, float* out) {
  out[threadIdx.x] = load_shared(reinterpret_cast<const float*>(dynamic_shared() + OFFSET));
}

template <int SHARED_OFFSET, int GLOBAL_OFFSET>
__global__ void copy_16_bytes(const float* in, float* out) {
  if (threadIdx.x == 0)
    copy_async<16>(dynamic_shared() + SHARED_OFFSET, reinterpret_cast<const char*>(in) + GLOBAL_OFFSET, true);
  commit_copies();
  wait_copies<0>();
  out[threadIdx.x] = 0;
}

template <int OFFSET>
__global__ void load_global_at(const float* in, float* out) {
  out[threadIdx.x] = load_global(reinterpret_cast<const float2*>(reinterpret_cast<const char*>(in) + OFFSET)).x;
}

__global__ void dereference_shared(const float*, float* out) {
  if (threadIdx.x == 5) *static_cast<volatile float*>(shared_floats()) = 1.0f;
  out[threadIdx.x] = 0;
}

__global__ void divide_by_zero(const float* in, float* out) {
  const int quotient = 7 / static_cast<int>(in[threadIdx.x] * 0);
  out[threadIdx.x] = static_cast<float>(quotient);
}

// Nothing is ever stored in what is read, in any CTA before this one's.
__global__ void read_unwritten(const float*, float* out) {
  out[threadIdx.x] = load_shared(shared_floats() + threadIdx.x);
  store_shared(shared_floats() + threadIdx.x, 1.0f);
}

// ---- who comes to a barrier

__global__ void barrier_of_some(const float*, float* out) {
  if (threadIdx.x < 40) sync_threads();
  out[threadIdx.x] = 0;
}

__global__ void different_barriers(const float*, float* out) {
  if (threadIdx.x < 32) {  // NOLINT(bugprone-branch-clone)
    sync_threads();
  } else {
    sync_threads();
  }
  out[threadIdx.x] = 0;
}

__global__ void barrier_too_often(const float*, float* out) {
  for (unsigned i = 0; i < (threadIdx.x < 32 ? 2u : 3u); ++i) sync_threads();
  out[threadIdx.x] = 0;
}

template <bool ENDS>
__global__ void shuffle_without_a_lane(const float*, float* out) {
  const int thread = threadIdx.x;
  if (thread != 7) {
    out[thread] = shuffle_xor(1.0f, 1);
  } else if (!ENDS) {
    sync_threads();
  }
}

__global__ void shuffles_of_half_warps(const float*, float* out) {
  const int thread = threadIdx.x;
  if (thread % 32 < 16) {  // NOLINT(bugprone-branch-clone)
    out[thread] = shuffle_xor(1.0f, 1);
  } else {
    out[thread] = shuffle_xor(1.0f, 1);
  }
}

__global__ void shuffle_sum(const float* in, float* out) {
  float sum = in[threadIdx.x];
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  out[threadIdx.x] = sum;
}

// ---- tensor cores

template <Barrier BARRIER>
__global__ void matrices_of_other_lanes(const float*, float* out) {
  const int thread = threadIdx.x;
  float4* const rows = reinterpret_cast<float4*>(dynamic_shared()) + thread / 32 * 32;
  store_shared(rows + thread % 32, float4{});
  pass<BARRIER>();
  uint32_t result[4];
  load_matrix_x4(result, rows + thread % 32);
  out[thread] = 0;
}

__global__ void unrounded_tf32(const float*, float* out) {
  float d[4] = {};
  const uint32_t a[4] = {0x3f800001u}, b[2] = {};
  mma_tf32(d, a, b);
  out[threadIdx.x] = d[0];
}

// ---- order

static int arrivals;  // selftest_run begins with 0

__global__ void arrival(const float*, float* out) { out[threadIdx.x] = static_cast<float>(arrivals++); }

__global__ void cta_arrival(const float*, float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>(arrivals++);
}

using Kernel = void (*)(const float*, float*);
struct Case {
  const char* name;
  Kernel kernel;
  int ctas;
};

constexpr int kPastEnd = kSharedBytes;
static const Case kCases[] = {
    {"exchange, no barrier", exchange<Barrier::kNone, 1>, 1},
    {"exchange, sync_warp in a warp", exchange<Barrier::kWarp, 1>, 2},
    {"exchange, sync_warp between warps", exchange<Barrier::kWarp, 32>, 1},
    {"exchange, shuffle as a barrier", exchange<Barrier::kShuffle, 1>, 1},
    {"exchange, sync_threads", exchange<Barrier::kBlock, 33>, 2},
    {"exchange with itself, no barrier", exchange<Barrier::kNone, 0>, 1},
    {"overwrite, no barrier", overwrite<Barrier::kNone>, 1},
    {"overwrite, sync_warp", overwrite<Barrier::kWarp>, 1},
    {"overwrite, sync_threads", overwrite<Barrier::kBlock>, 1},
    {"all write one word", all_write_one_word, 1},
    {"write halves of words", write_halves_of_words, 1},
    {"three readers of a warp", three_readers<2>, 1},
    {"three readers of two warps", three_readers<32>, 1},
    {"copy, wait and sync_threads", copy<true, Barrier::kBlock, 33>, 2},
    {"copy, wait and sync_warp", copy<true, Barrier::kWarp, 1>, 1},
    {"copy, own element, wait", copy<true, Barrier::kNone, 0>, 1},
    {"copy, wait, no barrier", copy<true, Barrier::kNone, 1>, 1},
    {"copy, sync_threads, no wait", copy<false, Barrier::kBlock, 33>, 1},
    {"copy, own element, no wait", copy<false, Barrier::kNone, 0>, 1},
    {"two groups, wait for both", newest_of_two_groups<0>, 1},
    {"two groups, wait for the older", newest_of_two_groups<1>, 1},
    {"ring, sync_threads", ring<Barrier::kBlock>, 2},
    {"ring, copy begins too early", ring<Barrier::kNone>, 1},
    {"ring, sync_warp", ring<Barrier::kWarp>, 1},
    {"end with a committed copy in flight", end_with_copy_in_flight<true>, 1},
    {"end with an uncommitted copy", end_with_copy_in_flight<false>, 1},
    {"copy over a copy", copy_over_copy, 1},
    {"store past the end", store_at<kPastEnd, 4>, 1},
    {"store across the end", store_at<kPastEnd - 8, 16>, 1},
    {"store before the beginning", store_at<-4, 4>, 1},
    {"store the last bytes", store_at<kPastEnd - 16, 16>, 1},
    {"store misaligned", store_at<8, 16>, 1},
    {"load past the end", load_at<kPastEnd>, 1},
    {"load misaligned", load_at<2>, 1},
    {"copy aligned", copy_16_bytes<16, 32>, 1},
    {"copy to a misaligned address", copy_16_bytes<8, 0>, 1},
    {"copy from a misaligned address", copy_16_bytes<0, 4>, 1},
    {"copy past the end", copy_16_bytes<kPastEnd, 0>, 1},
    {"load global", load_global_at<8>, 1},
    {"load global misaligned", load_global_at<4>, 1},
    {"dereference shared", dereference_shared, 1},
    {"divide by zero", divide_by_zero, 1},
    {"read unwritten", read_unwritten, 3},
    {"barrier of some", barrier_of_some, 1},
    {"different barriers", different_barriers, 1},
    {"barrier too often", barrier_too_often, 1},
    {"shuffle without a lane that ended", shuffle_without_a_lane<true>, 1},
    {"shuffle without a lane that waits", shuffle_without_a_lane<false>, 1},
    {"shuffles of half warps", shuffles_of_half_warps, 1},
    {"shuffle sum", shuffle_sum, 1},
    {"matrices, sync_warp", matrices_of_other_lanes<Barrier::kWarp>, 1},
    {"matrices, no barrier", matrices_of_other_lanes<Barrier::kNone>, 1},
    {"unrounded tf32", unrounded_tf32, 1},
    {"arrival", arrival, 1},
    {"arrival of CTAs", cta_arrival, kThreads},
};

// ---- bank conflicts: lane l of one warp reaches element l * stride

template <class T, bool STORES>
__global__ void strided(int stride) {
  T* const address = reinterpret_cast<T*>(dynamic_shared()) + threadIdx.x * stride;
  if (STORES) {
    store_shared(address, T{});
  } else {
    load_shared(address);
  }
}

// Lanes 0-15 only, and as many as fit.
__global__ void half_warp(int stride) {
  if (threadIdx.x < 16) load_shared(shared_floats() + threadIdx.x * stride);
}

template <int BYTES>
__global__ void strided_copy(int stride) {
  copy_async<BYTES>(dynamic_shared() + threadIdx.x * stride * BYTES, nullptr, false);
  commit_copies();
  wait_copies<0>();
}

// Rows of matrices are `stride` bytes apart; SWIZZLED: 16-byte groups of a row trade places by (row / 2) % 4.
template <bool SWIZZLED>
__global__ void matrices(int stride) {
  const int row = threadIdx.x % 8;
  const int group = threadIdx.x / 8;
  uint32_t result[4];
  load_matrix_x4(result, dynamic_shared() + row * stride + (SWIZZLED ? (group ^ (row / 2)) % 4 : group) * 16);
}

struct FourWords {
  int32_t at[4];
};

struct Pattern {
  const char* name;
  void (*kernel)(int);
};
static const Pattern kPatterns[] = {
    {"load 2", strided<uint16_t, false>},
    {"load 4", strided<float, false>},
    {"load 8", strided<float2, false>},
    {"load 16", strided<float4, false>},
    {"load 4 words", strided<FourWords, false>},
    {"load 4, half a warp", half_warp},
    {"store 4", strided<float, true>},
    {"store 16", strided<float4, true>},
    {"copy 4", strided_copy<4>},
    {"copy 8", strided_copy<8>},
    {"copy 16", strided_copy<16>},
    {"matrices", matrices<false>},
    {"matrices, swizzled", matrices<true>},
};

// ---- numbers, lane by lane

__global__ void multiply_fragments(int kind, const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = threadIdx.x;
  uint32_t a_values[4], b_values[2];
  float d_values[4];
  std::memcpy(a_values, a + lane * 4, sizeof(a_values));
  std::memcpy(b_values, b + lane * 2, sizeof(b_values));
  std::memcpy(d_values, d + lane * 4, sizeof(d_values));
  if (kind == 0) {
    mma_tf32(d_values, a_values, b_values);
  } else if (kind == 1) {
    mma_f16(d_values, a_values, b_values);
  } else {
    mma_bf16(d_values, a_values, b_values);
  }
  std::memcpy(d + lane * 4, d_values, sizeof(d_values));
}

// rows: 32 rows of 16 bytes; lane l names row order[l].
__global__ void load_fragments(const float4* rows, const int* order, int transposed, uint32_t* out) {
  const int lane = threadIdx.x;
  auto* const shared = reinterpret_cast<float4*>(dynamic_shared());
  store_shared(shared + lane, rows[lane]);
  sync_warp();
  uint32_t result[4];
  if (transposed != 0) {
    load_matrix_x4_transposed(result, shared + order[lane]);
  } else {
    load_matrix_x4(result, shared + order[lane]);
  }
  std::memcpy(out + lane * 4, result, sizeof(result));
}

static std::string last_error;

template <class Run>
const char* guarded(const Settings& settings, Run run) {
  last_error.clear();
  try {
    Session session(settings);
    const cudaError_t error = run(session);
    if (error != cudaSuccess) last_error = cudaGetErrorString(error);
  } catch (const Failure& failure) {
    last_error = failure.what();
  }
  return last_error.c_str();
}

static Settings settings_of(int order, uint64_t seed) {
  Settings settings;
  settings.order = static_cast<Order>(order);
  settings.seed = seed;
  return settings;
}
static Settings counting_banks(Settings settings) {
  settings.counts_banks = true;
  return settings;
}

}  // namespace conv2d_ext::cuda_selftest

using namespace conv2d_ext::cuda_selftest;  // NOLINT(google-build-using-namespace)

// Each returns the failure's text, "" for none.
extern "C" {

// The names, separated by newlines.
const char* selftest_cases() {
  static std::string names;
  if (names.empty())
    for (const Case& it : kCases) names += std::string(names.empty() ? "" : "\n") + it.name;
  return names.c_str();
}

// in, out: 64 floats, aligned to 16.
const char* selftest_run(const char* name, int order, uint64_t seed, const float* in, float* out) {
  arrivals = 0;
  for (const Case& it : kCases)
    if (std::strcmp(it.name, name) == 0)
      return guarded(settings_of(order, seed), [&](Session&) {
        return launch(it.kernel, dim3(it.ctas), dim3(kThreads), kSharedBytes, nullptr, in, out);
      });
  return "no such case";
}

// traffic: accesses, wavefronts, ideal.
const char* selftest_banks(const char* name, int stride, int order, uint64_t* traffic) {
  for (const Pattern& it : kPatterns)
    if (std::strcmp(it.name, name) == 0)
      return guarded(counting_banks(settings_of(order, 1)), [&](Session& session) {
        const cudaError_t error = launch(it.kernel, dim3(1), dim3(32), 48 * 1024, nullptr, stride);
        for (const auto& at : session.traffic) {
          traffic[0] += at.access.traffic.accesses;
          traffic[1] += at.access.traffic.wavefronts;
          traffic[2] += at.access.traffic.ideal;
        }
        return error;
      });
  return "no such pattern";
}

const char* selftest_mma(int kind, int order, const uint32_t* a, const uint32_t* b, float* d) {
  return guarded(settings_of(order, 1),
                 [&](Session&) { return launch(multiply_fragments, dim3(1), dim3(32), 0, nullptr, kind, a, b, d); });
}

const char* selftest_matrices(const void* rows, const int* order, int transposed, uint32_t* out) {
  return guarded({}, [&](Session&) {
    return launch(load_fragments, dim3(1), dim3(32), 512, nullptr, static_cast<const float4*>(rows), order, transposed,
                  out);
  });
}

// kind: 0 to tf32, 1 to float16, 2 to bfloat16, 3 from float16, 4 from bfloat16; numbers as their bits.
void selftest_convert(int kind, int64_t count, const uint32_t* in, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = float_of(in[i]);
    Float16 half{static_cast<uint16_t>(in[i])};
    BFloat16 brain{static_cast<uint16_t>(in[i])};
    if (kind == 0) {
      out[i] = round_to_tf32(value);
    } else if (kind == 1) {
      narrow(value, half);
      out[i] = half.bits;
    } else if (kind == 2) {
      narrow(value, brain);
      out[i] = brain.bits;
    } else {
      out[i] = bits_of(kind == 3 ? widen(half) : widen(brain));
    }
  }
}

// A launch of so many CTAs and threads that does nothing. shared_limit: the kernel's, set before; 0: left as it is.
const char* selftest_launch(unsigned ctas, unsigned grid_y, unsigned threads, int shared_bytes, int shared_limit) {
  return guarded({}, [&](Session&) {
    void (*const kernel)(int) = [](int) {};
    if (shared_limit != 0) {
      const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit);
      if (error != cudaSuccess) return error;
    }
    return launch(kernel, dim3(ctas, grid_y), dim3(threads), shared_bytes, nullptr, 0);
  });
}
}
