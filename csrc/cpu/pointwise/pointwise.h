// Pointwise functions and their derivatives: the table of them, and runs of elements. An element's bits follow from its
// value alone, wherever it lies and whichever instruction set is in use (functions.h).
#pragma once

#include <cstdint>

#include "../../tensor_view.h"

namespace conv2d_ext::cpu::pointwise {

// The one table. X(class in functions.h, name in the operators, number of parameters, kind)
//   kFloat: 32- and 16-bit types are computed in float; kWide: in double, and rounded once
// Parameters: softplus (beta, threshold), elu (alpha, scale, input_scale), pow (exponent), exp_base (base > 0),
// softshrink (lambda >= 0), logit (eps, negative for none).
#define CONV2D_POINTWISE_FUNCTIONS(X)    \
  X(Sigmoid, "sigmoid", 0, kFloat)       \
  X(Silu, "silu", 0, kFloat)             \
  X(Gelu, "gelu", 0, kFloat)             \
  X(GeluTanh, "gelu_tanh", 0, kFloat)    \
  X(Tanh, "tanh", 0, kFloat)             \
  X(Exp, "exp", 0, kFloat)               \
  X(Erf, "erf", 0, kFloat)               \
  X(Softplus, "softplus", 2, kFloat)     \
  X(Mish, "mish", 0, kFloat)             \
  X(Elu, "elu", 3, kFloat)               \
  X(Softshrink, "softshrink", 1, kFloat) \
  X(Sqrt, "sqrt", 0, kFloat)             \
  X(Rsqrt, "rsqrt", 0, kFloat)           \
  X(ExpBase, "exp_base", 1, kWide)       \
  X(Pow, "pow", 1, kWide)                \
  X(Sinh, "sinh", 0, kWide)              \
  X(Cosh, "cosh", 0, kWide)              \
  X(Atanh, "atanh", 0, kWide)            \
  X(Logit, "logit", 1, kWide)

enum class Function {
#define CONV2D_NAME(Class, name, parameters, kind) k##Class,
  CONV2D_POINTWISE_FUNCTIONS(CONV2D_NAME)
#undef CONV2D_NAME
      kCount
};
enum class Kind { kFloat, kWide };

// Functions of two numbers, of all dtypes in double. X(class in functions.h, name in the operators)
#define CONV2D_POINTWISE_PAIRS(X) \
  X(Power, "pow")                 \
  X(Atan2, "atan2")               \
  X(LogAddExp, "logaddexp")       \
  X(LogAddExp2, "logaddexp2")

enum class PairFunction {
#define CONV2D_NAME(Class, name) k##Class,
  CONV2D_POINTWISE_PAIRS(CONV2D_NAME)
#undef CONV2D_NAME
      kCount
};
constexpr int kPairFunctions = int(PairFunction::kCount);
constexpr const char* kPairNames[kPairFunctions] = {
#define CONV2D_NAME(Class, name) name,
    CONV2D_POINTWISE_PAIRS(CONV2D_NAME)
#undef CONV2D_NAME
};

constexpr int kFunctions = int(Function::kCount);
constexpr int kMaxParameters = 3;

struct FunctionInfo {
  const char* name;
  int parameters;
};
constexpr FunctionInfo kInfo[kFunctions] = {
#define CONV2D_INFO(Class, name, parameters, kind) {name, parameters},
    CONV2D_POINTWISE_FUNCTIONS(CONV2D_INFO)
#undef CONV2D_INFO
};

// Runs of n elements that lie one after the other.
using ValueRow = void (*)(const void* input, void* output, int64_t n, const double* parameters);
// result = grad_output * f'(input)
using SlopeRow = void (*)(const void* grad_output, const void* input, void* result, int64_t n,
                          const double* parameters);

// result = f(first, second)
using PairRow = void (*)(const void* first, const void* second, void* result, int64_t n);

// What an instruction set provides.
struct Rows {
  ValueRow value[kFunctions][kFloatingDTypes];
  SlopeRow slope[kFunctions][kFloatingDTypes];
  PairRow pair[kPairFunctions][kFloatingDTypes];
};

// Of the instruction set in use. The dtype is one of the four.
ValueRow value_row(Function function, DType dtype);
SlopeRow slope_row(Function function, DType dtype);
PairRow pair_row(PairFunction function, DType dtype);

}  // namespace conv2d_ext::cpu::pointwise
