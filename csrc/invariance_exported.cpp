// The mode in exported programs: PyTorch's functions that are made of calls which the mode covers.
//
// torch.export records each of them as one call, and ExportedProgram.run_decompositions takes them apart below the
// mode's key, where none of their calls would come here. So the mode takes them apart itself while a graph is traced,
// by the same kernel of PyTorch's. A trace of torch.compile takes them apart above the key's place anyway, but for
// those that have derivatives of their own (_foreach_ functions among them).
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "invariance_kernels.h"
#include "tracing.h"

namespace conv2d_ext {
namespace {

constexpr const char* kComposites[] = {
    "conv1d",
    "conv1d.padding",
    "conv2d",
    "conv2d.padding",
    "conv3d",
    "conv3d.padding",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "_convolution_mode",
    // products, beside matmul
    "linalg_matmul",
    "linalg_vecdot",
    "einsum",
    "inner",
    "bilinear",
    "cdist",
    "gru.input",
    "gru_cell",
    "lstm_cell",
    "rnn_tanh.input",
    "rnn_tanh.data",
    "rnn_relu.input",
    "rnn_relu.data",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    // functions
    "softmax.int",
    "log_softmax.int",
    "special_softmax",
    "special_log_softmax",
    "special_expit",
    "special_exp2",
    "special_expm1",
    "special_erf",
    "special_erfc",
    "special_erfinv",
    "special_i0",
    "special_log1p",
    "special_logit",
    "special_sinc",
    "special_ndtr",
    "special_gammaln",
    "special_digamma",
    "special_psi",
    "special_logsumexp",
    "log_sigmoid",
    "selu",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "float_power.Scalar",
    "float_power.Tensor_Scalar",
    "float_power.Tensor_Tensor",
    // sums
    "layer_norm",
    "rms_norm",
    "_fused_rms_norm",
    "sum_to_size",
    "nanmean",
    "var",
    "var.dim",
    "var_mean",
    "var_mean.dim",
    "std",
    "std.dim",
    "std_mean",
    "std_mean.dim",
    "norm_except_dim",
    "_weight_norm",
    "frobenius_norm.dim",
    "linalg_norm",
    "linalg_matrix_norm",
    "nuclear_norm",
    "cosine_similarity",
    "pairwise_distance",
    "trapezoid.x",
    "trapezoid.dx",
    "avg_pool1d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    // losses
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss2d",
    "nll_loss_nd",
    "l1_loss",
    "kl_div",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
    "triplet_margin_loss",
    "grid_sampler",
    // with derivatives of their own
    "rsub.Scalar",
    "dist",
    "_euclidean_dist",
};

// PyTorch's kernel that makes an op of others, on the CPU; none where it doesn't.
std::optional<c10::DispatchKey> composite_key(const c10::OperatorHandle& op) {
  constexpr auto kExplicit = c10::DispatchKey::CompositeExplicitAutograd;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    return c10::DispatchKey::CompositeImplicitAutograd;
  }
  const bool is_composed = op.hasKernelForDispatchKey(kExplicit) && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  return is_composed ? std::optional(kExplicit) : std::nullopt;
}

void take_apart_or_pass(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (invariance::is_taken_apart(keys)) {
    op.callBoxedForDispatchKey(*composite_key(op), *stack);
  } else {
    op.redispatchBoxed(keys & invariance::kBelow, stack);
  }
}

at::SymInt product_of(c10::SymIntArrayRef sizes) {
  at::SymInt product = 1;
  for (const at::SymInt& size : sizes) product *= size;
  return product;
}

// Whether PyTorch's kernel multiplies a vector, or a matrix, by batches as one product of transposed factors, so that
// the gradient of the former is one product too.
bool folds_second(const at::Tensor& first, const at::Tensor& second) {
  if (second.dim() <= 2 || first.dim() > 2) return false;
  if (first.requires_grad()) return true;
  if (first.dim() == 2) return false;
  const at::Tensor rows = second.mT();
  for (int64_t i = 0; i < rows.dim() - 2; ++i) {
    if (rows.sym_stride(i) != rows.sym_stride(i + 1) * rows.sym_size(i + 1)) return false;
  }
  return true;
}

// A product of batches of matrices, of which either may be one matrix or vector, of the calls that PyTorch's kernel
// makes: of others a gradient, or a complex product, would have other bits. That kernel asks for numbers where sizes
// are symbols, and so fixes them or fails.
at::Tensor multiply_batches(const at::Tensor& first, const at::Tensor& second) {
  if (folds_second(first, second)) {
    const at::Tensor folded = multiply_batches(second.mT(), first.dim() == 1 ? first : first.t());
    return first.dim() == 1 ? folded : folded.mT().contiguous();
  }
  const at::Tensor a = first.dim() == 1 ? first.unsqueeze(0) : first;
  const at::Tensor b = second.dim() == 1 ? second.unsqueeze(1) : second;
  const at::SymInt rows = a.sym_size(-2), inner = a.sym_size(-1), columns = b.sym_size(-1);
  const auto batch_of = [](const at::Tensor& matrices) { return matrices.sym_sizes().slice(0, matrices.dim() - 2); };
  // Of two, each size that is not known is compared.
  at::SymDimVector batch = a.dim() == 2   ? at::SymDimVector(batch_of(b))
                           : b.dim() == 2 ? at::SymDimVector(batch_of(a))
                                          : at::infer_size_symdimvector(batch_of(a), batch_of(b));
  at::Tensor product;
  if (b.dim() == 2) {
    product = at::mm(a.reshape_symint({product_of(batch) * rows, inner}), b);
  } else {
    const auto matrices = [&](const at::Tensor& of) {
      at::SymDimVector size = batch;
      size.append({of.sym_size(-2), of.sym_size(-1)});
      return of.expand_symint(size).reshape_symint({product_of(batch), of.sym_size(-2), of.sym_size(-1)});
    };
    product = at::bmm(matrices(a), matrices(b));
  }
  if (first.dim() > 1) batch.push_back(rows);
  if (second.dim() > 1) batch.push_back(columns);
  return product.reshape_symint(batch);
}

void take_matmul_apart_or_pass(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::Tensor first = torch::jit::peek(*stack, 0, 2).toTensor(),
                   second = torch::jit::peek(*stack, 1, 2).toTensor();
  const bool has_batches = std::max(first.dim(), second.dim()) > 2 && std::min(first.dim(), second.dim()) > 0;
  // Which nested tensors multiply by themselves.
  if (first.is_nested() || second.is_nested()) return op.redispatchBoxed(keys & invariance::kBelow, stack);
  if (!has_batches || !invariance::is_taken_apart(keys)) return take_apart_or_pass(op, keys, stack);
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, multiply_batches(first, second));
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  m.impl("matmul", torch::CppFunction::makeFromBoxedFunction<&take_matmul_apart_or_pass>());
  std::vector<std::string> names(std::begin(kComposites), std::end(kComposites));
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    constexpr std::string_view kForeach = "aten::_foreach_";
    if (op.name.compare(0, kForeach.size(), kForeach) != 0) continue;
    const std::string name = op.name.substr(6);
    names.push_back(op.overload_name.empty() ? name : name + "." + op.overload_name);
  }
  for (const std::string& name : names) {
    const auto op = invariance::find_overload("aten::" + name);
    // Not every version of PyTorch has all of them, nor composes them of others.
    if (op && composite_key(*op)) {
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&take_apart_or_pass>());
    }
  }
}

}  // namespace

bool invariance::is_taken_apart(DispatchKeySet keys) {
  constexpr DispatchKeySet kOthers({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
                                    c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return c10::impl::TorchDispatchModeTLS::any_modes_set() && !keys.has_any(kOthers) && traces_a_graph() && !has_left();
}

}  // namespace conv2d_ext
