// Inline assembly, interpreted. asm volatile(text : outputs : inputs : clobbers) is translated to
// execute(program, {operands}), where the program is the text, parsed once. What an instruction does stands
// in ptx_*.cpp, each named in full: an instruction or a modifier that is not known there is an error.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace fa2::emulation {

struct Operand {
  void* address;   // of the variable; null where the input is an expression
  uint64_t value;  // of an input
};

template <class T>
Operand output(T& variable) {
  static_assert(sizeof(T) <= 8);
  return {&variable, 0};
}
template <class T>
Operand input(T&& expression) {
  using Value = std::decay_t<T>;
  static_assert(sizeof(Value) <= 8);
  const Value value = expression;
  Operand operand{nullptr, 0};
  if constexpr (std::is_lvalue_reference_v<T>)
    operand.address = const_cast<std::remove_const_t<std::remove_reference_t<T>>*>(&expression);
  if constexpr (std::is_integral_v<Value> && sizeof(Value) <= 4) {
    operand.value = static_cast<uint32_t>(value);
  } else {
    std::memcpy(&operand.value, &value, sizeof(Value));
  }
  return operand;
}

struct Program;
const Program& parse(const char* text);
void execute(const Program& program, std::initializer_list<Operand> operands);

// --- for the instructions

struct Argument {
  enum Kind { kOperand, kLocal, kImmediate, kSpecial, kSink, kList, kAddress } kind = kSink;
  int index = 0;                // of an operand or a local register
  uint64_t value = 0;           // immediate
  std::string name;             // of a special register
  std::vector<Argument> parts;  // of {a, b} or [a, b]
};

struct Call;
using Handler = void (*)(const Call&);

struct Statement {
  std::string text, opcode;
  Handler handler = nullptr;
  int guard = -1;  // local register
  bool guard_negated = false;
  int target = -1;  // of a branch
  std::vector<Argument> arguments;
  bool has(const char* modifier) const {
    return (opcode + ".").find(std::string(".") + modifier + ".") != std::string::npos;
  }
};

// One execution of one statement by one thread.
struct Call {
  const Statement& statement;
  const Operand* operands;
  uint64_t* locals;

  const Argument& argument(size_t i) const;
  uint64_t value(const Argument& argument) const;  // outputs: what they hold now
  uint64_t value(size_t i) const { return value(argument(i)); }
  uint32_t u32(size_t i) const { return static_cast<uint32_t>(value(i)); }
  float f32(size_t i) const {
    const uint32_t bits = u32(i);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  // The one address in [address].
  uint64_t address(size_t i) const { return value(argument(i).parts.at(0)); }
  void* variable(const Argument& argument) const;
  template <class T>
  void set(const Argument& argument, T x) const {
    if (argument.kind == Argument::kLocal) {
      locals[argument.index] = 0;
      std::memcpy(&locals[argument.index], &x, sizeof(T));
    } else if (argument.kind != Argument::kSink) {
      std::memcpy(variable(argument), &x, sizeof(T));
    }
  }
  template <class T>
  void set(size_t i, T x) const {
    set(argument(i), x);
  }
  // {a, b, ..} or a alone.
  size_t count(size_t i) const { return argument(i).kind == Argument::kList ? argument(i).parts.size() : 1; }
  const Argument& part(size_t i, size_t j) const {
    return argument(i).kind == Argument::kList ? argument(i).parts.at(j) : argument(i);
  }
};

// The handler of an opcode, or null. Each file of instructions has one.
Handler find_shared_memory(const std::string& opcode);
Handler find_synchronisation(const std::string& opcode);
Handler find_mma(const std::string& opcode);
Handler find_wgmma(const std::string& opcode);
Handler find_copies(const std::string& opcode);

}  // namespace fa2::emulation
