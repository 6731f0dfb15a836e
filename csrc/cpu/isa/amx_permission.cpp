// Whether this process may use AMX: the CPU has it, the system keeps its registers, and has been asked.
#include "engine.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace conv2d_ext::cpu {

namespace {

#if defined(__x86_64__) && defined(__linux__)

// Registers that the system saves for a process.
uint64_t saved_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

const char* find_refusal() {
  constexpr unsigned kTiles = 1u << 24, kBFloat16 = 1u << 22, kOsXsave = 1u << 27;
  constexpr uint64_t kTileState = uint64_t{3} << 17;  // their configuration and their data
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const char* const kAbsent = "it has no AMX tiles of bfloat16";
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsXsave) == 0) return kAbsent;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTiles) == 0 || (edx & kBFloat16) == 0) {
    return kAbsent;
  }
  // Palette 1, the one that kernels are written for: 8 tiles of 16 rows of 64 bytes.
  if (__get_cpuid_count(0x1d, 1, &eax, &ebx, &ecx, &edx) == 0 || ebx >> 16 < 8 || (ebx & 0xffff) != 64 ||
      (ecx & 0xffff) != 16) {
    return "its AMX tiles have other sizes";
  }
  if ((saved_state() & kTileState) != kTileState) return "the operating system does not keep AMX's registers";
  // Of a process, for all of its threads. (arch/x86/include/uapi/asm/prctl.h)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    return "the operating system refuses AMX's registers to this process (arch_prctl)";
  }
  return nullptr;
}

#else
const char* find_refusal() { return "AMX is asked for on Linux for x86-64 alone"; }
#endif

}  // namespace

const char* why_no_amx() {
  static const char* const refusal = find_refusal();
  return refusal;
}

}  // namespace conv2d_ext::cpu
