#include "fiber.h"

#include <cstdint>
#include <cstring>

#ifdef __x86_64__
extern "C" void fa2_emulation_switch(void** from, void* to);
asm(R"(
.text
.type fa2_emulation_switch, @function
fa2_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fa2_emulation_switch, . - fa2_emulation_switch
)");
#endif

namespace fa2::emulation {

#ifdef __x86_64__

void prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)()) {
  uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{63};
  void** slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // entry's return address; with it the stack is aligned as after a call
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;  // the registers that the switch pops
  fiber.stack_pointer = slot;
}

void switch_fiber(Fiber& from, Fiber& to) {
  fa2_emulation_switch(&from.stack_pointer, to.stack_pointer);
}

#else

void prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) {
  swapcontext(&from.context, &to.context);
}

#endif

}  // namespace fa2::emulation
