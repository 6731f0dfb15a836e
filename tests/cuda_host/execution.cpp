#include "execution.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>

#include "fiber.h"
#include "sanitizer.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

namespace conv2d_ext::cuda_host {
namespace {

constexpr int kLanes = 32;
constexpr int kSharedBytesOfAll = 48 << 10;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kMostGridY = 65535;

enum class State { kReady, kAtBlockBarrier, kAtWarpOperation, kDone };

// Between its issue and the wait for it.
struct Copy {
  Site site;
  void* to;
  int bytes;
  alignas(16) char data[16];
};

struct Thread {
  Fiber fiber;
  uint3 index{};
  State state = State::kDone;
  Site site{};  // where it waits
  const char* operation = nullptr;
  void* lane = nullptr;       // what it brings to the warp's operation
  std::deque<Copy> copies;    // in flight, oldest first
  std::deque<size_t> groups;  // how many of these each committed group has
  size_t uncommitted = 0;
};

// The lanes of a warp that have come to its next operation.
struct Meeting {
  size_t arrived;
  int first;  // the thread that came first
};

std::string text_of(const uint3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string name_of(const void* kernel) {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != kernel) return "a kernel";
  int status = 0;
  char* const demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = demangled == nullptr ? info.dli_sname : demangled;
  std::free(demangled);
  return name;
}

class Machine {
 public:
  void run(dim3 grid, dim3 block, int shared_bytes, const void* kernel, Body body, const void* arguments);

  [[noreturn]] void fail(const std::string& what);
  void wait(State state, Site site);
  void meet_warp(const char* operation, Site site, void* lane, Complete complete);
  void exit_thread();
  Thread& current() { return *threads_[current_]; }
  bool runs_a_thread() const { return current_ >= 0; }
  int current_number() const { return current_; }
  Fiber& scheduler() { return scheduler_; }

  SharedMemory shared;
  Session* session = nullptr;
  Body body = nullptr;
  const void* arguments = nullptr;

 private:
  void run_cta();
  bool run_ready_threads();
  bool release_block_barrier();
  std::string who_waits_where() const;
  template <class T>
  void arrange(std::vector<T>& numbers);

  std::vector<std::unique_ptr<Thread>> threads_;
  size_t count_ = 0;               // of the CTA
  std::vector<Meeting> meetings_;  // of each warp
  std::vector<int> sequence_;
  Fiber scheduler_;
  std::mt19937_64 random_;
  std::string kernel_;
  std::string failure_;
  int current_ = -1;
};

Machine& machine() {
  static Machine only;
  return only;
}

void run_thread() {
  Fiber::arrived(machine().scheduler());
  machine().body(machine().arguments);
  machine().exit_thread();
}

template <class T>
void Machine::arrange(std::vector<T>& numbers) {
  if (session->settings.order == Order::kReverse) std::reverse(numbers.begin(), numbers.end());
  if (session->settings.order == Order::kShuffled) std::shuffle(numbers.begin(), numbers.end(), random_);
}

void Machine::run(dim3 grid, dim3 block, int shared_bytes, const void* kernel, Body kernel_body,
                  const void* kernel_arguments) {
  body = kernel_body;
  arguments = kernel_arguments;
  kernel_ = name_of(kernel);
  failure_.clear();
  random_.seed(session->settings.seed);
  gridDim = grid;
  blockDim = block;
  count_ = static_cast<size_t>(block.x) * block.y * block.z;
  while (threads_.size() < count_) threads_.push_back(std::make_unique<Thread>());
  for (size_t i = 0; i < count_; ++i) {
    const unsigned number = static_cast<unsigned>(i);
    threads_[i]->index = {number % block.x, number / block.x % block.y, number / block.x / block.y};
  }
  shared.begin_grid(shared_bytes, static_cast<int>(count_), session->settings.counts_banks);

  std::vector<uint64_t> ctas(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < ctas.size(); ++i) ctas[i] = i;
  arrange(ctas);
  for (const uint64_t cta : ctas) {
    blockIdx = {static_cast<unsigned>(cta % grid.x), static_cast<unsigned>(cta / grid.x % grid.y),
                static_cast<unsigned>(cta / grid.x / grid.y)};
    run_cta();
    if (!failure_.empty()) throw Failure(failure_);
  }
  if (session->settings.counts_banks)
    for (const AccessSite& site : shared.sites()) session->traffic.push_back({kernel_, site});
  ++session->launches;
}

void Machine::run_cta() {
  shared.begin_cta();
  meetings_.assign((count_ + kLanes - 1) / kLanes, Meeting{0, 0});
  for (size_t i = 0; i < count_; ++i) {
    Thread& thread = *threads_[i];
    thread.state = State::kReady;
    thread.copies.clear();
    thread.groups.clear();
    thread.uncommitted = 0;
    thread.fiber.prepare(run_thread);
  }
  while (true) {
    const bool ran = run_ready_threads();
    if (!failure_.empty()) return;
    if (ran || release_block_barrier()) continue;
    const auto is_done = [](const auto& thread) { return thread->state == State::kDone; };
    if (std::all_of(threads_.begin(), threads_.begin() + static_cast<std::ptrdiff_t>(count_), is_done)) break;
    failure_ =
        kernel_ + ", CTA " + text_of(blockIdx) + ": threads wait for others that never come:" + who_waits_where();
    return;
  }
  shared.end_cta();
}

// Each thread that is ready goes on to where it waits next.
bool Machine::run_ready_threads() {
  sequence_.clear();
  for (size_t i = 0; i < count_; ++i)
    if (threads_[i]->state == State::kReady) sequence_.push_back(static_cast<int>(i));
  arrange(sequence_);
  for (const int number : sequence_) {
    current_ = number;
    threadIdx = current().index;
    scheduler_.switch_to(current().fiber);
    current_ = -1;
    if (!failure_.empty()) return false;
  }
  return !sequence_.empty();
}

bool Machine::release_block_barrier() {
  for (size_t i = 0; i < count_; ++i)
    if (threads_[i]->state != State::kAtBlockBarrier || threads_[i]->site != threads_[0]->site) return false;
  shared.pass_block_barrier();
  for (size_t i = 0; i < count_; ++i) threads_[i]->state = State::kReady;
  return true;
}

// Runs of neighbouring threads that do the same.
std::string Machine::who_waits_where() const {
  const auto describe = [](const Thread& thread) {
    if (thread.state == State::kDone) return std::string("have ended");
    return std::string("at ") + thread.operation + " (" + thread.site.text() + ")";
  };
  std::string text;
  int listed = 0;
  for (size_t begin = 0; begin < count_;) {
    const std::string what = describe(*threads_[begin]);
    size_t end = begin + 1;
    while (end < count_ && describe(*threads_[end]) == what) ++end;
    if (++listed > 8) return text + "; ...";
    text += (listed == 1 ? " threads " : "; ") + std::to_string(begin) + "-" + std::to_string(end - 1) + " " + what;
    begin = end;
  }
  return text;
}

void Machine::fail(const std::string& what) {
  failure_ = kernel_ + ", CTA " + text_of(blockIdx);
  if (current_ >= 0) failure_ += ", thread " + std::to_string(current_);
  failure_ += ": " + what;
  if (current_ < 0) throw Failure(failure_);
  current().fiber.leave_to(scheduler_, false);
}

void Machine::wait(State state, Site site) {
  current().state = state;
  current().site = site;
  current().fiber.switch_to(scheduler_);
}

void Machine::meet_warp(const char* operation, Site site, void* lane, Complete complete) {
  const int warp = current_ / kLanes;
  const size_t first = static_cast<size_t>(warp) * kLanes;
  const size_t lanes = std::min<size_t>(kLanes, count_ - first);
  current().operation = operation;
  current().lane = lane;
  Meeting& meeting = meetings_[warp];
  if (meeting.arrived++ == 0) meeting.first = current_;
  const Thread& other = *threads_[meeting.first];
  if (&other != &current() && (other.site != site || std::strcmp(other.operation, operation) != 0))
    fail(std::string("divergence: comes to ") + operation + " (" + site.text() + ") while thread " +
         std::to_string(meeting.first) + " of its warp waits at " + other.operation + " (" + other.site.text() + ")");
  if (meeting.arrived < lanes) return wait(State::kAtWarpOperation, site);
  meeting.arrived = 0;
  if (complete == nullptr) {
    shared.pass_warp_barrier(warp);
  } else {
    if (lanes != kLanes) fail(std::string(operation) + " (" + site.text() + ") in a warp of fewer than 32 threads");
    void* brought[kLanes];
    for (size_t i = 0; i < kLanes; ++i) brought[i] = threads_[first + i]->lane;
    shared.pass_warp_operation(warp);
    complete(warp, site, brought);
  }
  for (size_t i = first; i < first + lanes; ++i) threads_[i]->state = State::kReady;
  // In turn with the others, so that the last lane to come is not always the first to go on.
  wait(State::kReady, site);
}

void Machine::exit_thread() {
  if (!current().copies.empty())
    fail("ends with an asynchronous copy in flight (" + current().copies.front().site.text() + ")");
  current().state = State::kDone;
  current().fiber.leave_to(scheduler_, true);
}

// ---- faults of the host that stand for faults of a kernel: accesses past load_shared and its like, integer division
// by zero (which the device answers with garbage)

class FaultHandler {
 public:
  FaultHandler() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // it may never return
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGFPE, &action, &previous_fpe);
  }
  ~FaultHandler() { restore(); }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  static void handle(int signal, siginfo_t* info, void*) {
    if (machine().runs_a_thread()) {
      if (signal == SIGFPE) machine().fail("divides by zero");
      if (machine().shared.reserves(info->si_addr))
        machine().fail("reaches shared memory past load_shared, store_shared, copy_async and load_matrix_x4");
    }
    restore();  // and the faulting instruction runs again
  }
  static void restore() {
    sigaction(SIGSEGV, &previous_segv, nullptr);
    sigaction(SIGFPE, &previous_fpe, nullptr);
  }
  inline static struct sigaction previous_segv, previous_fpe;
};

}  // namespace

// ---- what host threads share

namespace {

thread_local Session* own_session = nullptr;

struct Host {
  std::mutex running;  // a grid
  std::mutex mutex;    // of all below
  std::vector<int> devices;
  std::map<std::pair<const void*, int>, int> shared_limits;  // by kernel and device
  std::condition_variable changed;
  int held = 0;
  uint64_t grids = 0;
};

Host& host() {
  static Host only;
  return only;
}

int device_of(const Session& session) {
  auto& devices = host().devices;
  const auto found = std::find(devices.begin(), devices.end(), session.settings.shared_bytes_per_block);
  if (found != devices.end()) return static_cast<int>(found - devices.begin());
  devices.push_back(session.settings.shared_bytes_per_block);
  return static_cast<int>(devices.size()) - 1;
}

Session& session_here() {
  if (own_session == nullptr) throw std::logic_error("CUDA is called without a session");
  return *own_session;
}

// What a launch of this thread may ask for.
int shared_limit(const void* kernel) {
  const std::lock_guard lock(host().mutex);
  const auto found = host().shared_limits.find({kernel, device_of(session_here())});
  return found == host().shared_limits.end() ? kSharedBytesOfAll : std::max(kSharedBytesOfAll, found->second);
}

void hold() {
  std::unique_lock lock(host().mutex);
  const uint64_t before = host().grids;
  ++host().held;
  const bool came = host().changed.wait_for(lock, std::chrono::minutes(1), [&] { return host().grids != before; });
  --host().held;
  if (!came) throw Failure("a launch was held, and no other thread launched anything");
}

}  // namespace

int held_sessions() {
  const std::lock_guard lock(host().mutex);
  return host().held;
}

Session::Session(const Settings& session_settings) : settings(session_settings) {
  if (own_session != nullptr) throw std::logic_error("this thread has a session already");
  own_session = this;
}

Session::~Session() { own_session = nullptr; }

cudaError_t run_grid(dim3 grid, dim3 block, int shared_bytes, const void* kernel, Body body, const void* arguments) {
  Session& session = session_here();
  if (session.is_running) throw std::logic_error("a kernel launches a kernel");
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu ||
      grid.y > kMostGridY || grid.z > kMostGridY)
    return cudaErrorInvalidConfiguration;
  if (session.settings.holds && !session.has_held && shared_bytes > kSharedBytesOfAll) {
    session.has_held = true;
    hold();
  }
  if (shared_bytes < 0 || shared_bytes > shared_limit(kernel)) return cudaErrorInvalidValue;
  {
    const std::lock_guard running(host().running);
    const FaultHandler handler;
    session.is_running = true;
    machine().session = &session;
    machine().run(grid, block, shared_bytes, kernel, body, arguments);
    session.is_running = false;
  }
  const std::lock_guard lock(host().mutex);
  ++host().grids;
  host().changed.notify_all();
  return cudaSuccess;
}

void fail(const std::string& what) { machine().fail(what); }

SharedMemory& shared_memory() { return machine().shared; }
int current_thread() { return machine().current_number(); }

void wait_at_block_barrier(Site site) {
  machine().current().operation = "sync_threads";
  machine().wait(State::kAtBlockBarrier, site);
}

void wait_at_warp_barrier(Site site) { machine().meet_warp("sync_warp", site, nullptr, nullptr); }

void meet_warp(const char* operation, Site site, void* lane, Complete complete) {
  machine().meet_warp(operation, site, lane, complete);
}

void check_global(Site site, const void* address, int bytes, int alignment) {
  const auto what = [&] { return "reads " + std::to_string(bytes) + " bytes of global memory (" + site.text() + ")"; };
  const uintptr_t past = reinterpret_cast<uintptr_t>(address) % alignment;
  if (past != 0)
    fail("misaligned: " + what() + " " + std::to_string(past) + " past a multiple of " + std::to_string(alignment));
#if defined(CONV2D_ADDRESS_SANITIZER)
  // It would find this as well, but only if the compiler needs all that the device loads.
  if (__asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr)
    fail("out of range: " + what() + " that belong to no tensor");
#endif
}

void begin_copy(Site site, void* shared, const void* global, int bytes, bool inside) {
  if (inside || reinterpret_cast<uintptr_t>(global) % bytes != 0) check_global(site, global, bytes, bytes);
  shared_memory().begin_copy(current_thread(), site, shared, bytes);
  Copy copy{site, shared, bytes, {}};
  if (inside) std::memcpy(copy.data, global, bytes);
  machine().current().copies.push_back(copy);
  ++machine().current().uncommitted;
}

void commit_copies() {
  Thread& thread = machine().current();
  thread.groups.push_back(thread.uncommitted);
  thread.uncommitted = 0;
}

void wait_copies(int pending) {
  Thread& thread = machine().current();
  for (; thread.groups.size() > static_cast<size_t>(pending); thread.groups.pop_front())
    for (size_t i = 0; i < thread.groups.front(); ++i) {
      const Copy& copy = thread.copies.front();
      shared_memory().land_copy(current_thread(), copy.site, copy.to, copy.bytes, copy.data);
      thread.copies.pop_front();
    }
}

}  // namespace conv2d_ext::cuda_host

namespace cuda_host = conv2d_ext::cuda_host;

cudaError_t cudaGetDevice(int* device) {
  const std::lock_guard lock(cuda_host::host().mutex);
  *device = cuda_host::device_of(cuda_host::session_here());
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin) return cudaErrorInvalidValue;
  const std::lock_guard lock(cuda_host::host().mutex);
  *value = cuda_host::host().devices.at(device);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  const std::lock_guard lock(cuda_host::host().mutex);
  const int device = cuda_host::device_of(cuda_host::session_here());
  if (value < 0 || value > cuda_host::host().devices[device]) return cudaErrorInvalidValue;
  cuda_host::host().shared_limits[{kernel, device}] = value;
  return cudaSuccess;
}
