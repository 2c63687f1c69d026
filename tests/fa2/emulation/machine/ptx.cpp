#include "ptx.h"

#include <cctype>
#include <cmath>
#include <map>

#include "machine.h"

namespace fa2::emulation {

struct Program {
  std::vector<Statement> statements;
  int locals = 0;
};

namespace {

void branch(const Call&) {}  // execute() does it

void set_predicate(const Call& call) {
  const int32_t a = static_cast<int32_t>(call.u32(1)), b = static_cast<int32_t>(call.u32(2));
  call.set(0, static_cast<uint64_t>(call.statement.has("ne") ? a != b : a == b));
}

void move(const Call& call) {
  call.set(0, call.u32(1));
}

uint64_t special_register(const std::string& name) {
  const Thread& thread = current();
  if (name == "cluster_ctarank") return thread.block->rank;
  if (name == "cluster_nctarank") return thread.block->cluster->blocks.size();
  if (name == "laneid") return thread.lane;
  fail("the emulator does not know the register %%%s", name.c_str());
}

void select(const Call& call) {
  call.set(0, static_cast<uint32_t>(call.value(3) ? call.u32(1) : call.u32(2)));
}

// 2^x to about 2 ulp; ftz: subnormal inputs and results are zeros.
void exp2_approx(const Call& call) {
  const float x = call.f32(1), y = std::exp2(x);
  call.set(0, y < 0x1p-126f ? 0.f : y);
}

Handler find_arithmetic(const std::string& opcode) {
  if (opcode == "bra") return branch;
  if (opcode == "mov.u32" || opcode == "mov.b32") return move;
  if (opcode == "setp.ne.b32" || opcode == "setp.eq.b32" || opcode == "setp.ne.s32") return set_predicate;
  if (opcode == "selp.b32" || opcode == "selp.u32") return select;
  if (opcode == "ex2.approx.ftz.f32") return exp2_approx;
  return nullptr;
}

struct Parser {
  std::string text;
  size_t at = 0;
  Program& program;
  std::map<std::string, int> names, labels;

  void skip() {
    while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) ++at;
  }
  bool take(char c) {
    skip();
    if (at >= text.size() || text[at] != c) return false;
    ++at;
    return true;
  }
  std::string word() {
    skip();
    const size_t begin = at;
    while (at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) ||
                                std::string("_.:%$").find(text[at]) != std::string::npos)) {
      // A label's colon ends the word; "shared::cta" has two.
      if (text[at] == ':' && !(at + 1 < text.size() && text[at + 1] == ':') &&
          !(at > begin && text[at - 1] == ':'))
        break;
      ++at;
    }
    return text.substr(begin, at - begin);
  }
  int local(const std::string& name) {
    return names.try_emplace(name, static_cast<int>(names.size())).first->second;
  }
  Argument parse_argument() {
    Argument argument;
    if (take('{') || take('[')) {
      const bool list = text[at - 1] == '{';
      argument.kind = list ? Argument::kList : Argument::kAddress;
      const char end = list ? '}' : ']';
      while (!take(end)) {
        argument.parts.push_back(parse_argument());
        if (!take(',') && !(skip(), at < text.size() && text[at] == end))
          fail("cannot parse: %s", text.c_str());
      }
      return argument;
    }
    std::string name = word();
    if (take('|')) name = word();  // elect.sync d|p: d is not used
    if (name == "_") return argument;
    if (name.rfind("%%", 0) == 0) {
      argument.kind = Argument::kSpecial;
      argument.name = name.substr(2);
    } else if (name[0] == '%') {
      argument.kind = Argument::kOperand;
      argument.index = std::stoi(name.substr(1));
    } else if (std::isdigit(static_cast<unsigned char>(name[0]))) {
      argument.kind = Argument::kImmediate;
      argument.value = std::stoull(name, nullptr, 0);
    } else if (!name.empty()) {
      argument.kind = Argument::kLocal;
      argument.index = local(name);
    } else {
      fail("cannot parse: %s", text.c_str());
    }
    return argument;
  }
  void parse_statement() {
    Statement statement;
    const size_t begin = at;
    if (take('@')) {
      statement.guard_negated = take('!');
      statement.guard = local(word());
    }
    statement.opcode = word();
    if (take(':')) {
      labels[statement.opcode] = static_cast<int>(program.statements.size());
      return;
    }
    if (statement.opcode == "bra") {
      statement.target = local(word());  // a name still
      take(';');
    } else {
      while (!take(';')) {
        skip();
        if (at >= text.size()) break;
        statement.arguments.push_back(parse_argument());
        take(',');
      }
    }
    if (statement.opcode.rfind(".reg", 0) == 0) return;
    statement.text = text.substr(begin, at - begin);
    for (auto find :
         {find_arithmetic, find_shared_memory, find_synchronisation, find_mma, find_wgmma, find_copies})
      if (statement.handler == nullptr) statement.handler = find(statement.opcode);
    if (statement.handler == nullptr)
      fail("the emulator does not know the instruction %s", statement.opcode.c_str());
    program.statements.push_back(std::move(statement));
  }
  void run() {
    while (skip(), at < text.size()) {
      if (take('{') || take('}') || take(';')) continue;  // a scope
      parse_statement();
    }
    for (Statement& statement : program.statements)
      if (statement.target >= 0)
        for (const auto& [name, index] : names)
          if (index == statement.target) {
            statement.target = labels.at(name);
            break;
          }
    program.locals = static_cast<int>(names.size());
  }
};

}  // namespace

const Program& parse(const char* text) {
  static std::map<std::string, std::unique_ptr<Program>> known;
  auto& program = known[text];
  if (!program) {
    auto parsed = std::make_unique<Program>();
    Parser{text, 0, *parsed, {}, {}}.run();
    program = std::move(parsed);
  }
  return *program;
}

void execute(const Program& program, std::initializer_list<Operand> operands) {
  uint64_t locals[16];
  if (program.locals > 16) fail("too many registers in one asm");
  const int count = static_cast<int>(program.statements.size());
  for (int at = 0; at < count;) {
    const Statement& statement = program.statements[at++];
    if (statement.guard >= 0 && (locals[statement.guard] != 0) == statement.guard_negated) continue;
    if (statement.target >= 0) {
      at = statement.target;
      continue;
    }
    statement.handler(Call{statement, operands.begin(), locals});
  }
}

const Argument& Call::argument(size_t i) const {
  if (i >= statement.arguments.size()) fail("an operand is missing: %s", statement.text.c_str());
  return statement.arguments[i];
}

void* Call::variable(const Argument& argument) const {
  if (argument.kind != Argument::kOperand || operands[argument.index].address == nullptr)
    fail("an operand should be a variable: %s", statement.text.c_str());
  return operands[argument.index].address;
}

uint64_t Call::value(const Argument& argument) const {
  switch (argument.kind) {
    case Argument::kOperand:
      return operands[argument.index].value;
    case Argument::kLocal:
      return locals[argument.index];
    case Argument::kImmediate:
      return argument.value;
    case Argument::kSpecial:
      return special_register(argument.name);
    case Argument::kAddress:
      return value(argument.parts.at(0));
    default:
      fail("an operand should have a value: %s", statement.text.c_str());
  }
}

}  // namespace fa2::emulation
