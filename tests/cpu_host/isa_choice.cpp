// Which instruction set isa/select.cpp chooses on a machine whose vendor and features are the arguments.
#include <cstdio>
#include <cstring>
#include <exception>
#include <set>
#include <string>

namespace {

std::string vendor;
std::set<std::string> features;
bool made_up_vendor(const char* name) { return vendor == name; }
// Features of AVX-512 go together here.
bool made_up_feature(const char* name) {
  const std::string asked = name;
  if (asked == "fma") return features.count("avx2") != 0;
  return features.count(asked == "avx512bf16" ? asked : asked.substr(0, 6) == "avx512" ? "avx512" : asked) != 0;
}

}  // namespace

#define __builtin_cpu_is made_up_vendor
#define __builtin_cpu_supports made_up_feature
#include "../../csrc/cpu/isa/machine.cpp"
#include "../../csrc/cpu/isa/select.cpp"

namespace conv2d_ext::cpu {

namespace {
Engine made_up(const char* isa) {
  Engine engine{};
  engine.isa = isa;
  return engine;
}
}  // namespace

#define CONV2D_MADE_UP(isa)                     \
  const Engine* isa##_engine() {                \
    static const Engine engine = made_up(#isa); \
    return &engine;                             \
  }
CONV2D_MADE_UP(portable)
CONV2D_MADE_UP(avx2)
CONV2D_MADE_UP(avx512)
CONV2D_MADE_UP(avx512_bf16)
CONV2D_MADE_UP(amx)
CONV2D_MADE_UP(amx_emulated)

const char* why_no_amx() { return features.count("amx") != 0 ? nullptr : "the system refuses"; }

}  // namespace conv2d_ext::cpu

int main(int count, char** arguments) {
  vendor = arguments[1];
  features.insert(arguments + 2, arguments + count);
  try {
    std::puts(conv2d_ext::cpu::isa_name());
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
