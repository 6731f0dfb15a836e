// The compiled module conv2d_ext._C; the only file with a Python symbol in it.
// torch's argument parser formats its errors with fmt, of which torch ships the headers but exports no symbol.
#define FMT_HEADER_ONLY
// With it the parser takes NumPy's integers, as F.conv2d does.
#define USE_NUMPY
#include <ATen/Parallel.h>
#include <ATen/ops/im2col.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_arg_parser.h>
#include <torch/csrc/utils/python_numbers.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv2d_checks.h"
#include "conv2d_format.h"
#include "conv2d_ops.h"
#include "conv2d_tensors.h"
#include "convolution_family.h"
#include "cpu/conv2d_cpu.h"
#include "invariance.h"
#include "invariance_recorded.h"
#include "matmul.h"
#include "numerics.h"
#if defined(CONV2D_EXT_WITH_CUDA)
#include "cuda/conv2d_cuda_ops.h"
#include "cuda/float32_math.h"
#include "cuda/plan.h"
#endif

namespace conv2d_ext {
namespace {

using at::Tensor;
namespace py = pybind11;

// ---- whether Winograd's F(2 x 2, 3 x 3) may be taken: an attribute of a thread-local object of Python's, which guards
// of torch.compile can read (conv2d_ext/_winograd.py)

PyObject* winograd_setting = nullptr;  // as long as the process
bool winograd_first = false;           // what a thread's is before it is set

void use_winograd_setting(const py::object& setting, bool first) {
  Py_XDECREF(winograd_setting);
  winograd_setting = setting.inc_ref().ptr();
  winograd_first = first;
}

// Of this thread, which holds the GIL.
bool allows_winograd() {
  if (winograd_setting == nullptr) {
    return false;
  }
  static PyObject* const name = PyUnicode_InternFromString("allowed");
  const auto allowed = py::reinterpret_steal<py::object>(PyObject_GetAttr(winograd_setting, name));
  if (allowed) {
    return allowed.ptr() == Py_True;
  }
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
    throw python_error();
  }
  PyErr_Clear();
  if (PyObject_SetAttr(winograd_setting, name, winograd_first ? Py_True : Py_False) != 0) {
    throw python_error();
  }
  return winograd_first;
}

// ---- the convolutions and linear, with the arguments of torch.nn.functional. Written without pybind11, whose argument
// conversion would be a fifth of the time of a tiny convolution; PyTorch's own parser also gives its TypeErrors,
// SymInts and __torch_function__.

constexpr int kArguments = 8;  // of the longest signature

// run turns the parsed arguments into the output.
template <class Run>
PyObject* call_from_python(torch::PythonArgParser& parser, const char* name, PyObject* args, PyObject* kwargs,
                           Run run) {
  HANDLE_TH_ERRORS
  torch::ParsedArgs<kArguments> parsed;
  auto arguments = parser.parse(args, kwargs, parsed);
  if (arguments.has_torch_function()) {
    const py::object function = py::module_::import("conv2d_ext").attr(name);
    return torch::handle_torch_function_no_python_arg_parser(arguments.overloaded_args, args, kwargs, name,
                                                             function.ptr(), "conv2d_ext");
  }
  return THPVariable_Wrap(run(arguments));
  END_HANDLE_TH_ERRORS
}

// Whether it is 'same'; it is 'valid' otherwise.
bool is_same_padding(c10::string_view padding) {
  TORCH_CHECK(padding == "same" || padding == "valid", "Invalid padding string: '", padding,
              "': expected padding to be 'same', 'valid', an integer or a pair of integers");
  return padding == "same";
}

torch::PythonArgParser& conv2d_parser() {
  static torch::PythonArgParser parser({
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymIntArrayRef[2] stride=1, SymIntArrayRef[2] padding=0, "
      "SymIntArrayRef[2] dilation=1, SymInt groups=1)",
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymIntArrayRef[2] stride=1, "
      "c10::string_view padding=\"valid\", SymIntArrayRef[2] dilation=1, SymInt groups=1)",
  });
  return parser;
}

// As PythonArgs::toSymInt, which converts an int by pybind11: that takes as long as all the parser does.
c10::SymInt sym_int(torch::PythonArgs& arguments, int index) {
  PyObject* const value = arguments.args[index];
  const bool is_int = value != nullptr && THPUtils_checkLongExact(value);
  return is_int ? c10::SymInt(THPUtils_unpackLong(value)) : arguments.toSymInt(index);
}

SymConv2dParams conv2d_params(torch::PythonArgs& arguments) {
  const auto stride = arguments.symintlist(3);
  const auto dilation = arguments.symintlist(5);
  const c10::SymInt groups = sym_int(arguments, 6);
  if (arguments.idx == 0) return params_from_pairs(stride, arguments.symintlist(4), dilation, groups);
  return is_same_padding(arguments.stringView(4))
             ? params_for_same_padding(arguments.tensor(1), stride, dilation, groups)
             : params_from_pairs(stride, {c10::SymInt(0)}, dilation, groups);
}

PyObject* python_conv2d(PyObject* /*self*/, PyObject* args, PyObject* kwargs) {
  return call_from_python(conv2d_parser(), "conv2d", args, kwargs, [](torch::PythonArgs& arguments) {
    const Tensor input = arguments.tensor(0);
    const Tensor weight = arguments.tensor(1);
    const std::optional<Tensor> bias = arguments.optionalTensor(2);
    check_not_nested("conv2d", input, weight, bias);
    const SymConv2dParams params = conv2d_params(arguments);
    const bool allow_winograd = allows_winograd();
    const py::gil_scoped_release no_gil;
    return conv2d(input, weight, bias, params, allow_winograd);
  });
}

// conv2d's arguments as explain takes them: stride, padding (top, bottom, left, right), dilation and groups.
PyObject* python_conv2d_parameters(PyObject* /*self*/, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  torch::ParsedArgs<kArguments> parsed;
  auto arguments = conv2d_parser().parse(args, kwargs, parsed);
  const SymConv2dParams params = conv2d_params(arguments);
  const auto ints = [](c10::SymIntArrayRef values) {
    py::list result;
    for (const c10::SymInt& value : values) result.append(value.guard_int(__FILE__, __LINE__));
    return result;
  };
  return py::make_tuple(ints(params.stride), ints(params.padding), ints(params.dilation),
                        params.groups.guard_int(__FILE__, __LINE__))
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* python_conv1d(PyObject* /*self*/, PyObject* args, PyObject* kwargs) {
  static torch::PythonArgParser parser({
      "conv1d(Tensor input, Tensor weight, Tensor? bias=None, SymIntArrayRef[1] stride=1, SymIntArrayRef[1] padding=0, "
      "SymIntArrayRef[1] dilation=1, SymInt groups=1)",
      "conv1d(Tensor input, Tensor weight, Tensor? bias=None, SymIntArrayRef[1] stride=1, "
      "c10::string_view padding=\"valid\", SymIntArrayRef[1] dilation=1, SymInt groups=1)",
  });
  return call_from_python(parser, "conv1d", args, kwargs, [](torch::PythonArgs& arguments) {
    const Tensor input = arguments.tensor(0);
    const Tensor weight = arguments.tensor(1);
    const std::optional<Tensor> bias = arguments.optionalTensor(2);
    const auto stride = arguments.symintlist(3);
    const auto dilation = arguments.symintlist(5);
    const c10::SymInt groups = sym_int(arguments, 6);
    c10::SmallVector<c10::SymInt, 2> padding{0, 0};
    if (arguments.idx == 0) {
      const auto both = arguments.symintlist(4);
      check_length("padding", both, 1);
      padding = {both[0], both[0]};
    } else if (is_same_padding(arguments.stringView(4))) {
      padding = conv1d_same_padding(weight, stride, dilation);
    }
    const py::gil_scoped_release no_gil;
    return conv1d_op().call(input, weight, bias, stride, padding, dilation, groups);
  });
}

Tensor call_conv_transpose(const c10::TypedOperatorHandle<ConvTransposeSignature>& op, torch::PythonArgs& arguments) {
  const Tensor input = arguments.tensor(0);
  const Tensor weight = arguments.tensor(1);
  const std::optional<Tensor> bias = arguments.optionalTensor(2);
  const auto stride = arguments.symintlist(3);
  const auto padding = arguments.symintlist(4);
  const auto output_padding = arguments.symintlist(5);
  const c10::SymInt groups = sym_int(arguments, 6);
  const auto dilation = arguments.symintlist(7);
  const py::gil_scoped_release no_gil;
  return op.call(input, weight, bias, stride, padding, output_padding, groups, dilation);
}

PyObject* python_conv_transpose1d(PyObject* /*self*/, PyObject* args, PyObject* kwargs) {
  static torch::PythonArgParser parser({
      "conv_transpose1d(Tensor input, Tensor weight, Tensor? bias=None, SymIntArrayRef[1] stride=1, "
      "SymIntArrayRef[1] padding=0, SymIntArrayRef[1] output_padding=0, SymInt groups=1, "
      "SymIntArrayRef[1] dilation=1)",
  });
  return call_from_python(parser, "conv_transpose1d", args, kwargs, [](torch::PythonArgs& arguments) {
    return call_conv_transpose(conv_transpose1d_op(), arguments);
  });
}

PyObject* python_conv_transpose2d(PyObject* /*self*/, PyObject* args, PyObject* kwargs) {
  static torch::PythonArgParser parser({
      "conv_transpose2d(Tensor input, Tensor weight, Tensor? bias=None, SymIntArrayRef[2] stride=1, "
      "SymIntArrayRef[2] padding=0, SymIntArrayRef[2] output_padding=0, SymInt groups=1, "
      "SymIntArrayRef[2] dilation=1)",
  });
  return call_from_python(parser, "conv_transpose2d", args, kwargs, [](torch::PythonArgs& arguments) {
    return call_conv_transpose(conv_transpose2d_op(), arguments);
  });
}

PyObject* python_linear(PyObject* /*self*/, PyObject* args, PyObject* kwargs) {
  static torch::PythonArgParser parser({"linear(Tensor input, Tensor weight, Tensor? bias=None)"});
  return call_from_python(parser, "linear", args, kwargs, [](torch::PythonArgs& arguments) {
    const Tensor input = arguments.tensor(0);
    const Tensor weight = arguments.tensor(1);
    const std::optional<Tensor> bias = arguments.optionalTensor(2);
    if (input.is_nested()) {
      return py::cast<Tensor>(
          py::module_::import("conv2d_ext.functional").attr("linear_of_nested")(input, weight, bias));
    }
    const py::gil_scoped_release no_gil;
    return linear_layer(input, weight, bias);
  });
}

// The documented way to register a function with keywords.
PyCFunction with_keywords(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"conv2d_parameters", with_keywords(python_conv2d_parameters), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"conv2d", with_keywords(python_conv2d), METH_VARARGS | METH_KEYWORDS,
     "conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)"},
    {"conv1d", with_keywords(python_conv1d), METH_VARARGS | METH_KEYWORDS,
     "conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)"},
    {"conv_transpose1d", with_keywords(python_conv_transpose1d), METH_VARARGS | METH_KEYWORDS,
     "conv_transpose1d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)"},
    {"conv_transpose2d", with_keywords(python_conv_transpose2d), METH_VARARGS | METH_KEYWORDS,
     "conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)"},
    {"linear", with_keywords(python_linear), METH_VARARGS | METH_KEYWORDS, "linear(input, weight, bias=None)"},
};

// ---- the post's functions

// A view: the op reads the kernel through its strides.
Tensor forward(const Tensor& im, const Tensor& kernel, const std::optional<Tensor>& bias) {
  check_forward(im, kernel, bias);
  const bool is_column = bias.has_value() && bias->dim() == 2;
  static const SymConv2dParams params{{1, 1}, {0, 0, 0, 0}, {1, 1}, 1};
  const bool allow_winograd = allows_winograd();
  const py::gil_scoped_release no_gil;
  return conv2d(im, kernel.transpose(0, 1), is_column ? bias->squeeze(1) : bias, params, allow_winograd);
}

Tensor forward_unfold(const Tensor& im, const Tensor& kernel, const std::optional<Tensor>& bias) {
  check_forward(im, kernel, bias);
  const int64_t kernel_h = kernel.size(2);
  const int64_t kernel_w = kernel.size(3);
  TORCH_CHECK(kernel_h >= 1 && kernel_w >= 1 && im.size(-2) >= kernel_h && im.size(-1) >= kernel_w,
              "expected a kernel of at least 1 x 1 that fits im, but got kernel of size ", kernel.sizes(),
              " and im of size ", im.sizes());
  const Tensor columns =
      at::im2col(im, {kernel_h, kernel_w}, /*dilation=*/{1, 1}, /*padding=*/{0, 0}, /*stride=*/{1, 1});
  Tensor output = at::matmul(kernel.transpose(0, 1).flatten(1), columns);
  if (bias.has_value()) {
    output = output.add(bias->dim() == 1 ? bias->unsqueeze(1) : *bias);
  }
  return output.unflatten(-1, {im.size(-2) - kernel_h + 1, im.size(-1) - kernel_w + 1});
}

// ---- what a call will do, as plain data for conv2d_ext.explain

py::dict describe(const Conv2dProblem& p) {
  py::dict result;
  result["input_size"] = py::make_tuple(p.batch, p.in_channels, p.in_h, p.in_w);
  result["weight_size"] = py::make_tuple(p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w);
  result["output_size"] = py::make_tuple(p.batch, result_channels<int64_t>(p), p.out_h, p.out_w);
  result["stride"] = py::make_tuple(p.stride_h, p.stride_w);
  result["padding"] = py::make_tuple(p.pad_top, p.pad_bottom, p.pad_left, p.pad_right);
  result["dilation"] = py::make_tuple(p.dilation_h, p.dilation_w);
  result["groups"] = p.groups;
  return result;
}

py::dict describe(const cpu::Explanation& e) {
  py::dict result;
  result["engine"] = e.engine;
  result["micro_kernel"] = e.micro_kernel;
  result["isa"] = e.isa;
  result["gemm_m"] = e.gemm_m;
  result["gemm_n"] = e.gemm_n;
  result["gemm_k"] = e.gemm_k;
  result["tile_pixels"] = e.tile_pixels;
  result["tile_rows"] = e.tile_rows;
  result["tile_cols"] = e.tile_cols;
  result["tile_images"] = e.tile_images;
  result["k_segments"] = e.k_segments;
  result["k_segment_length"] = e.k_segment_length;
  result["work_items"] = e.work_items;
  result["workspace_bytes_per_thread"] = e.workspace_bytes_per_thread;
  result["refused"] = e.refused;
  result["candidates"] = py::tuple(py::cast(e.candidates));
  return result;
}

py::dict explain_on_cpu(const Conv2dProblem& p, const Tensor& input, const Tensor& weight) {
  const bool channels_last = output_is_channels_last(input, weight);
  const ConstTensorView x = view(input), w = view(weight);
  const TensorView y = dense_view({p.batch, p.out_channels, p.out_h, p.out_w}, channels_last);
  const TensorView grad_input = dense_view({p.batch, p.in_channels, p.in_h, p.in_w}, channels_last);
  TensorView grad_weight{};
  const auto strides = grad_weight_strides(weight);
  std::transform(strides.begin(), strides.end(), grad_weight.stride,
                 [](const c10::SymInt& stride) { return stride.expect_int(); });
  const auto explained = [&](cpu::Direction direction, const ConstTensorView& a, const ConstTensorView& b,
                             const TensorView& to) {
    const cpu::Call call{direction, p, to_dtype(input.scalar_type()), a, b, to, /*bias=*/{}, allows_winograd()};
    return describe(cpu::explain(call, at::get_num_threads()));
  };
  py::dict result;
  result["forward"] = explained(cpu::Direction::kForward, x, w, y);
  result["grad_input"] = explained(cpu::Direction::kGradInput, y, w, grad_input);
  result["grad_weight"] = explained(cpu::Direction::kGradWeight, y, x, grad_weight);
  return result;
}

#if defined(CONV2D_EXT_WITH_CUDA)

const char* name_of(cuda::Float32Math math) { return math == cuda::Float32Math::kTF32 ? "tf32" : "ieee"; }

const char* name_of(cuda::Engine engine) {
  switch (engine) {
    case cuda::Engine::kNothing:
      return "none: the result is empty";
    case cuda::Engine::kImplicitGemm:
      return "implicit GEMM";
    case cuda::Engine::kDirect:
      return "direct, without tiles of a GEMM";
  }
  return "";
}

py::dict describe(const cuda::Plan& plan) {
  py::dict result;
  result["engine"] = plan.error[0] != '\0' ? std::string("none: ") + plan.error : name_of(plan.engine);
  result["kernel"] = plan.kernel;
  result["math"] = plan.dtype == DType::kFloat32 ? name_of(plan.math) : "";
  result["gemm_m"] = plan.gemm_m;
  result["gemm_n"] = plan.gemm_n;
  result["gemm_k"] = plan.gemm_k;
  result["tile_m"] = plan.tile_m;
  result["tile_n"] = plan.tile_n;
  result["tile_k"] = plan.tile_k;
  result["threads"] = plan.threads;
  result["k_segments"] = plan.segments;
  result["k_segment_length"] = plan.segment_length;
  result["k_chain_length"] = std::min(plan.chain_length, plan.segment_length);
  result["split"] = plan.split;
  result["ctas"] = plan.ctas;
  result["stages"] = plan.stages;
  result["shared_bytes"] = plan.shared_bytes;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["packed"] = plan.packed_row != 0;
  result["refused"] = plan.refused;
  result["wanted"] = plan.wanted;
  result["estimated_cycles"] = plan.cycles;
  return result;
}

// grad_output and grad_input are taken to have the output's format.
py::dict explain_on_cuda(const Conv2dProblem& p, const Tensor& input, const Tensor& weight, bool channels_last,
                         cuda::Float32Math math, const cuda::Machine& machine) {
  const auto activation = [&](int64_t channels, int64_t height, int64_t width) {
    return view(empty_activation<int64_t>(p.batch, channels, height, width, /*unbatched=*/false, channels_last,
                                          input.options().device(c10::kMeta)));
  };
  const auto dtype = to_dtype(input.scalar_type());
  const auto x = view(input);
  const auto w = view(weight);
  const auto y = activation(p.out_channels, p.out_h, p.out_w);
  const auto gx = activation(p.in_channels, p.in_h, p.in_w);
  py::dict result;
  result["forward"] = describe(cuda::plan_forward(p, dtype, math, x, w, y.stride, machine));
  result["grad_input"] = describe(cuda::plan_grad_input(p, dtype, math, y, w, gx.stride, machine));
  result["grad_weight"] = describe(cuda::plan_grad_weight(p, dtype, math, y, x, machine));
  return result;
}

#endif

#if defined(CONV2D_EXT_WITH_CUDA)
cuda::Machine described_gpu(const std::pair<int, int>& gpu) {
  TORCH_CHECK_VALUE(gpu.first > 0 && gpu.second >= 0, "gpu: expected the number of SMs, 1 or more, and the bytes of ",
                    "shared memory that a CTA may have, 0 or more, but got (", gpu.first, ", ", gpu.second, ")");
  return cuda::with_wants({gpu.first, gpu.second});
}
#endif

// padding: (top, bottom, left, right). gpu: (SM count, bytes of shared memory a CTA may have) describes a GPU that need
// not be there, for which the call is explained whatever the tensors' device.
py::dict explain(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                 const std::vector<int64_t>& dilation, int64_t groups,
                 [[maybe_unused]] const std::optional<std::pair<int, int>>& gpu) {
  check_not_nested("conv2d", input, weight, bias);
  const auto problem =
      check_conv2d<int64_t>(input, weight, bias, make_params<int64_t>(stride, padding, dilation, groups));
  py::dict result;
  if (problem.in_channels != 0) {
#if defined(CONV2D_EXT_WITH_CUDA)
    if (gpu.has_value() || input.is_cuda()) {
      const auto machine = gpu.has_value() ? described_gpu(*gpu) : cuda::machine_of(input.device().index());
      result = explain_on_cuda(problem, input, weight, output_is_channels_last(input, weight), cuda::float32_math(),
                               machine);
    } else
#endif
        if (input.device().is_cpu()) {
      result = explain_on_cpu(problem, input, weight);
    }
  }
  result["problem"] = describe(problem);
  return result;
}

// The same of a product of matrices; None where there are no kernels.
py::object explain_matmul(const Tensor& mat1, const Tensor& mat2, const std::optional<Tensor>& bias,
                          [[maybe_unused]] const std::optional<std::pair<int, int>>& gpu) {
  check_matmul(mat1, mat2, bias);
  const auto dtype = to_dtype(mat1.scalar_type());
  const auto size = matmul_sizes(mat1, mat2);
  const auto unread = [](const Tensor& matrix) {
    return ConstMatrixView{nullptr, matrix.dim() == 3 ? matrix.stride(0) : 0, matrix.stride(-2), matrix.stride(-1)};
  };
  const MatrixView result{nullptr, size.m * size.n, size.n, 1};
#if defined(CONV2D_EXT_WITH_CUDA)
  if (gpu.has_value() || mat1.is_cuda()) {
    const auto machine = gpu.has_value() ? described_gpu(*gpu) : cuda::machine_of(mat1.device().index());
    return describe(
        cuda::plan_matmul(size, dtype, cuda::float32_matmul_math(), unread(mat1), unread(mat2), result, machine));
  }
#endif
  if (!mat1.device().is_cpu()) return py::none();
  return describe(cpu::explain_matmul(size, dtype, unread(mat1), unread(mat2), result, at::get_num_threads()));
}

#if defined(CONV2D_EXT_WITH_CUDA)

// The GEMM kernels that calls on tensors of this dtype choose from: what want_on_cuda counts.
std::vector<std::string> cuda_kernels(const Tensor& tensor, bool tf32) {
  const auto table =
      cuda::gemm_table(to_dtype(tensor.scalar_type()), tf32 ? cuda::Float32Math::kTF32 : cuda::Float32Math::kIeee);
  std::vector<std::string> names;
  for (int i = 0; i < table.count; ++i) names.emplace_back(table.kernels[i].name);
  return names;
}

void want_on_cuda(int64_t variant, int64_t split, int64_t packed) {
  if (!cuda::want(variant, split, packed))
    throw py::value_error("want_on_cuda: no kernel has number " + std::to_string(variant) +
                          ", or one of split and packed is none of -1, 0 and 1: " + std::to_string(split) + ", " +
                          std::to_string(packed));
}

#endif

// For callers that split a call up: the error that the whole call would raise for its sizes. Nothing is computed, and a
// trace sees nothing of it.
void check_sizes(const std::vector<c10::SymInt>& input, const std::vector<c10::SymInt>& weight,
                 const std::optional<std::vector<c10::SymInt>>& bias, const std::vector<c10::SymInt>& stride,
                 const std::vector<c10::SymInt>& padding, const std::vector<c10::SymInt>& dilation,
                 const c10::SymInt& groups, int64_t itemsize) {
  std::optional<c10::SymIntArrayRef> bias_size;
  if (bias.has_value()) {
    bias_size = *bias;
  }
  check_conv2d_sizes<c10::SymInt>(input, weight, bias_size, make_params<c10::SymInt>(stride, padding, dilation, groups),
                                  itemsize);
}

using Sizes = std::vector<c10::SymInt>;

bool takes_convolution_of_lists(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                const Sizes& stride, const Sizes& padding, const Sizes& dilation, bool transposed,
                                const Sizes& /*output_padding*/, const c10::SymInt& groups) {
  return takes_convolution(input, weight, bias, stride, padding, dilation, transposed, groups);
}

Tensor convolution_of_lists(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                            const Sizes& stride, const Sizes& padding, const Sizes& dilation, bool transposed,
                            const Sizes& output_padding, const c10::SymInt& groups) {
  return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

py::dict build_config() {
  py::dict result;
  result["compiled_isas"] = cpu::compiled_isas();
  result["isa"] = cpu::isa_name();
  result["numerics"] = kNumerics;
  return result;
}

}  // namespace
}  // namespace conv2d_ext

PYBIND11_MODULE(_C, m) {
  using namespace conv2d_ext;
  m.doc() = "Implementation of a forward pass of conv2d in C++";  // the post's
  const auto name = py::str("conv2d_ext._C");
  for (PyMethodDef& method : methods) {
    m.add_object(method.ml_name,
                 py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, /*self=*/nullptr, name.ptr())));
  }
  // For tests: aten::convolution's arguments.
  m.def("takes_convolution", &takes_convolution_of_lists);
  m.def("convolution", &convolution_of_lists, py::call_guard<py::gil_scoped_release>());
  m.def("enable_batch_invariant", &enable_batch_invariant);
  m.def("disable_batch_invariant", &disable_batch_invariant);
  m.def("is_batch_invariant", &is_batch_invariant);
  m.def("is_enabled_in_process", &is_enabled_in_process);
  m.def("leave_traced_contexts", &leave_traced_contexts);
  m.def("settle_recorded_results", &settle_recorded_results);
  m.def("use_winograd_setting", &use_winograd_setting);
  m.def("swap_invariance_state", [](int contexts, int traced, bool joined, bool kept_out) {
    const InvarianceState before = swap_invariance_state({contexts, traced, joined, kept_out});
    return py::make_tuple(before.contexts, before.traced, before.joined, before.kept_out);
  });
  m.def("forward", &forward, py::arg("im"), py::arg("kernel"), py::arg("bias"));
  m.def("forward_unfold", &forward_unfold, py::arg("im"), py::arg("kernel"), py::arg("bias"),
        py::call_guard<py::gil_scoped_release>());
  m.def("explain", &explain, py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("gpu") = py::none());
  m.def("explain_matmul", &explain_matmul, py::arg("mat1"), py::arg("mat2"), py::arg("bias"),
        py::arg("gpu") = py::none());
  m.def("check_sizes", &check_sizes, py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("itemsize"));
  m.def("build_config", &build_config);
#if defined(CONV2D_EXT_WITH_CUDA)
  m.def("float32_math_on_cuda", [] { return name_of(cuda::float32_math()); });
  m.def("float32_matmul_math_on_cuda", [] { return name_of(cuda::float32_matmul_math()); });
  m.def("cuda_kernels", &cuda_kernels, py::arg("tensor"), py::arg("tf32") = false);
  m.def("want_on_cuda", &want_on_cuda, py::arg("variant") = -1, py::arg("split") = -1, py::arg("packed") = -1);
#endif
}
