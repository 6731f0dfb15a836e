// What an instruction set provides: its drivers, and what planning needs to know of it.
#pragma once

#include "../../tensor_view.h"
#include "../base/executor.h"
#include "../plan/candidates.h"

namespace conv2d_ext::cpu {

// One for each instruction set; a null engine means "not compiled into this build".
struct Engine {
  const char* isa;
  const char* kernels;  // the instruction set that its kernels are compiled for: its own, or one that it includes
  void (*run)(DType, const Task&, const Executor&);  // any task but kPadding and those of `pairs` and `amx`
  void (*grad_bias)(const TensorSizes&, DType, ConstTensorView, void*, const Executor&);
  IsaShape (*shape)(DType);
  int (*rows)(DType, int64_t vectors);  // MR of the GEMM micro-kernels that are so many vectors wide
  // The engine of integers (AVX-512 has AVX2's). nullptr: this one.
  const Engine* (*integers)() = nullptr;
  // The engine of bfloat16 pairs, which runs kPairsOfGroups, kPairs, kWeightPairs and kColumns, and that of AMX tiles;
  // nullptr where there is none.
  const Engine* pairs = nullptr;
  const Engine* amx = nullptr;
};
// Whoever chooses an engine asks for all of them. So these functions run on CPUs that lack the instruction set: they
// are compiled for any CPU, as is all that they call.
const Engine* portable_engine();
const Engine* avx2_engine();
const Engine* avx512_engine();
const Engine* avx512_bf16_engine();
const Engine* amx_engine();
const Engine* amx_emulated_engine();

// `base`, which has the engine of all other tasks, with that of pairs or of tiles: &Engine::pairs or &Engine::amx.
Engine with_steps(const Engine& base, const Engine& steps, const Engine* Engine::* member);

// Whether this machine runs an instruction set.
bool machine_has(const char* isa);
// Whether an instruction set that the machine has is the better choice than those it includes. If not, it runs where it
// is asked for by name.
bool machine_prefers(const char* isa);
// Why the machine has no AMX that this process may use; nullptr where it has.
const char* why_no_amx();

// Whether CONV2D_EXT_CPU_ISA names the one in use.
bool isa_is_forced();
// The one in use; isa_name() says which. (It is apart, in select.cpp, for a test to put another in its place.)
const Engine& engine();

// The one of a dtype.
const Engine& engine_for(DType dtype);
IsaShape shape_for(DType dtype);
// The one that a task runs on.
const Engine& engine_for(DType dtype, const Task& task);

}  // namespace conv2d_ext::cpu
