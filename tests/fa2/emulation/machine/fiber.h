// A GPU thread's own stack, and the switch between two of them. x86-64 in a few instructions (the System V
// ABI's callee-saved registers), ucontext elsewhere. Knows nothing of GPUs.
#pragma once
#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace fa2::emulation {

struct Fiber {
#ifdef __x86_64__
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

// `fiber` will begin with entry(), which must never return, on this stack.
void prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)());

// Goes on where `to` stopped; returns when something switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace fa2::emulation
