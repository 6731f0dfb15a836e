// The mode batch_invariant: while it is on in a thread, calls of PyTorch whose bits follow the batch, an example's
// place in it or the threads go to this library's ops.
//
// The mode is a dispatch key that the thread includes, above autograd, autocast and torch.func's transforms: kernels
// registered for aten's ops at that key (invariance.cpp) see every call, also those that PyTorch makes inside its own
// functions. So
//   - a call costs nothing more while the mode is off, until enable_batch_invariant has put up its gates, and nothing
//     more while it is on where it has no kernel there;
//   - what runs is one of this library's differentiable ops, so a backward keeps the bits wherever and whenever it
//     runs, and each level of a transform differentiates that op;
//   - torch.compile traces those ops, which it leaves alone, and its guards on a tensor's dispatch keys compile a
//     function anew where the mode has changed.
// The key is one that PyTorch has for tests of its dispatcher, without a kernel or a use outside of them. (The one
// below torch.func's keys that is free too, DeferredInit, is left out at every level of a transform.)
#pragma once

#include <c10/core/DispatchKey.h>

#include "export.h"

namespace conv2d_ext {

constexpr c10::DispatchKey kInvarianceKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// A thread's contexts are entered and left by the ops conv2d_ext::enter_batch_invariant and leave_batch_invariant. They
// nest.

// For the whole process. A thread that is running then joins with its first call of an op that is covered; one that
// starts later, with the first op that it runs. The first call registers kernels, for which PyTorch's dispatcher asks
// that no other thread be inside of a call of these ops.
CONV2D_EXT_EXPORT void enable_batch_invariant();
CONV2D_EXT_EXPORT void disable_batch_invariant();

// In this thread.
CONV2D_EXT_EXPORT bool is_batch_invariant();

// What a thread knows of the mode. Other code of the thread may be given another state for a while: the recomputation
// of a checkpoint has that of its forward.
struct InvarianceState {
  int contexts = 0;       // that the thread is in
  int traced = 0;         // contexts of a function that it is tracing
  bool joined = false;    // it follows the process
  bool kept_out = false;  // it does not follow the process
};
// For a trace that has ended with an exception, in contexts that it had entered.
CONV2D_EXT_EXPORT void leave_traced_contexts();
// Sets this thread's state; returns what it was.
CONV2D_EXT_EXPORT InvarianceState swap_invariance_state(const InvarianceState& state);

CONV2D_EXT_EXPORT bool is_enabled_in_process();

}  // namespace conv2d_ext
