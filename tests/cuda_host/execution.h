// Runs grids on the host: CTAs one after the other, the threads of a CTA as fibers that switch where they wait.
//
// A thread runs until it comes to a barrier or to an operation of its whole warp. So what a kernel fails to order
// happens in the order that the session asks for. A kernel that does something wrong ends its launch with a Failure:
// its other threads are not gone on with, and nothing of them is left for the next launch.
//
// Host threads may each have a session. Their grids run one at a time; what they set between is shared, as a device's
// settings are.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cuda_names.h"
#include "shared_memory.h"
#include "site.h"

namespace conv2d_ext::cuda_host {

// Of CTAs, and of the threads of a CTA whenever several can run.
enum class Order : int { kForward, kReverse, kShuffled };

struct Settings {
  Order order = Order::kForward;
  uint64_t seed = 0;                       // of kShuffled
  int shared_bytes_per_block = 227 << 10;  // a launch that asks for more is refused
  // The session's first launch of more than 48 KiB waits, all that leads to it done, until another thread's has run:
  // the worst moment for what the two share.
  bool holds = false;
  bool counts_banks = false;  // else Session::traffic stays empty, and the run is a tenth shorter
};

// Sessions whose launch waits now.
int held_sessions();

// What launches did at one line of source.
struct KernelTraffic {
  std::string kernel;
  AccessSite access;
};

// A thread's launches are possible while it has a session, one at a time.
class Session {
 public:
  explicit Session(const Settings& settings);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Settings settings;
  std::vector<KernelTraffic> traffic;  // of all launches
  uint64_t launches = 0;
  bool has_held = false, is_running = false;
};

using Body = void (*)(const void* arguments);
cudaError_t run_grid(dim3 grid, dim3 block, int shared_bytes, const void* kernel, Body body, const void* arguments);

// ---- what the thread that runs does; used by the device primitives

SharedMemory& shared_memory();
int current_thread();  // number in its CTA
void wait_at_block_barrier(Site site);
void wait_at_warp_barrier(Site site);
void begin_copy(Site site, void* shared, const void* global, int bytes, bool inside);
void commit_copies();
void wait_copies(int pending);
void check_global(Site site, const void* address, int bytes, int alignment);

// All 32 lanes come here with a Lane each; the last one runs complete(warp, site, lanes) for all.
using Complete = void (*)(int warp, Site site, void* const (&lanes)[32]);
void meet_warp(const char* operation, Site site, void* lane, Complete complete);

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, const Args&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args));
  static_assert((sizeof(Params) + ... + 0) <= 4096, "more than a kernel's parameters have room for");
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::decay_t<Params>...> params;
  };
  const Call call{kernel, std::tuple<std::decay_t<Params>...>(args...)};
  return run_grid(
      grid, block, shared_bytes, reinterpret_cast<const void*>(kernel),
      [](const void* arguments) {
        const Call& it = *static_cast<const Call*>(arguments);
        std::apply(it.kernel, it.params);
      },
      &call);
}

}  // namespace conv2d_ext::cuda_host
