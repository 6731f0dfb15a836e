"""The dispatcher ops, `torch.ops.conv2d_ext.*`, and how torch.func.vmap batches them.

Activations are (N, C, H, W), or (C, H, W) throughout a call; weights (OC, C/groups, KH, KW);
padding is (top, bottom, left, right). Registered for the CPU, for CUDA in builds with it, and for
fake tensors, which get the real strides. Without bias the first three are linear in each tensor and
the derivatives of each are the other two, so every op has derivatives of every order:

    conv2d(input, weight, bias, stride, padding, dilation, groups, allow_winograd=False) -> output
        output[n, oc, oh, ow] = bias[oc] + the sum over (ic, kh, kw) of
            weight[oc, ic, kh, kw] * input[n, g * C/groups + ic, ih, iw]
        with g the group of oc, ih = oh * stride - top + kh * dilation, iw alike, and zeros in the
        padding.
    conv2d_grad_input(grad_output, weight, input_size, stride, padding, dilation, groups,
                      channels_last, allow_winograd=False) -> grad_input
        The sum of grad_output * conj(weight), of input_size, channels_last or contiguous.
        allow_winograd: as conv2d_ext.allow_winograd says; derivatives take what the call took.
    conv2d_grad_weight(grad_output, input, weight_size, weight_stride, stride, padding, dilation,
                       groups) -> grad_weight
        The sum of grad_output * conj(input), of weight_size, with the strides weight_stride, which
        are non-overlapping and dense.
    conv2d_grad_bias(grad_output) -> grad_bias
        The sum over all dimensions but the channels.
    conv2d_add_bias(output, bias) -> output
        output + bias, with output's strides; its gradients are grad_output and conv2d_grad_bias.

    matmul(mat1, mat2, bias) -> result
        Of (M, K) or (B, M, K), and (K, N), with bias (N,) or None; or of (B, M, K) and (B, K, N):
        (M, N) or (B, M, N). Sums in an order that follows from K alone. The dtypes of conv2d; one
        for all. RuntimeError where sizes, dtypes or devices don't fit, NotImplementedError for
        other dtypes.

And made of these, with PyTorch's arguments but for conv1d's padding, (left, right):

    conv1d(input, weight, bias, stride, padding, dilation, groups) -> output
    conv_transpose1d, conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups,
                                       dilation) -> output

    linear(input, weight, bias) -> output
        torch.nn.functional.linear, made of matmul.

    sum, mean(input, dim, keepdim) -> result
    var(input, dim, divisor, keepdim) -> result
        The sum of squared distances from the mean, over divisor. Means and variances of 16-bit
        types are made of sums that were rounded to these types: widen the input where they are
        long. (The mode does.)
    softmax(input, dim, log) -> output
        torch.softmax, or with log torch.log_softmax.
    softmax_grad(grad_output, output, dim, log) -> grad_input
        These on the CPU, for float32, float64, bfloat16 and float16, in an order that the
        position along the reduced dimensions fixes. No dimension, [], is none to reduce, where
        torch.sum takes all. Several dimensions are reduced as they follow
        one another in memory: x.sum((2, 3)) of a transposed image has other bits.
        NotImplementedError for other dtypes, IndexError for dimensions that the input lacks,
        RuntimeError for one that is named twice and for gradients that don't fit.
    attention(q, k, v, mask, causal, scale, fused_layout) -> output
        softmax(scale * q k^T + mask) v of q (N, heads, L, E), k (N, kv_heads, S, E) and v (N,
        kv_heads, S, Ev), none of them empty: (N, heads, L, Ev). heads is a multiple of kv_heads.
        The mask: None, or of 4 dimensions that expand to (N, heads, L, S), bool or added. causal: a
        query meets the keys up to its own number.
    attention_grad(grad_output, q, k, v, mask, causal, scale, fused_layout, wanted) -> gradients
        Of q, k, v and the mask; those that are not wanted have no elements. Both on the CPU, in the
        same dtypes, with memory that grows with S beyond the results'. fused_layout: strides are
        those of PyTorch's fused kernel, else those of its sequence of products. NotImplementedError
        for other dtypes, RuntimeError for sizes and devices that don't fit and for empty tensors.

`conv2d_ext.conv2d` is the friendlier way to call the first, and says which dtypes they take and
which errors they raise.

Pointwise functions, of float32, float64, bfloat16 and float16 tensors of any sizes and strides on
the CPU; an element's bits follow from its value alone, wherever it lies:

    pointwise(input, function, parameters) -> f(input), with the input's strides where it is dense
    pointwise_grad(grad_output, input, function, parameters) -> grad_output * f'(input), likewise;
        grad_output has the input's sizes and dtype
    function (parameters): sigmoid, silu, gelu, gelu_tanh, tanh, exp, erf, mish, sqrt, rsqrt, sinh,
        cosh, atanh, softplus (beta, threshold), elu (alpha, scale, input_scale),
        softshrink (lambda), pow (exponent), exp_base (base > 0: base ** input), logit (eps, or a
        negative number for none)
    pointwise_pair(first, second, function) -> f(first, second), of tensors of one size and dtype:
        pow, atan2, logaddexp, logaddexp2; with the strides of first + second

They raise ValueError for other functions and numbers of parameters, NotImplementedError for other
dtypes, RuntimeError where grad_output doesn't fit the input, or the pair's tensors each other. They
have derivatives of every order.

Other names in `torch.ops.conv2d_ext` are internal and may change: copy_as, and in graphs of
torch.compile enter_batch_invariant and leave_batch_invariant (the mode), rounded (a result in 16
bits), eager_* (PyTorch's ops, recorded so that compilers leave them alone).
"""

from __future__ import annotations

import enum
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _C as _C  # defines the ops
from ._on_import import when_imported

conv2d = torch.ops.conv2d_ext.conv2d
conv2d_grad_input = torch.ops.conv2d_ext.conv2d_grad_input
conv2d_grad_weight = torch.ops.conv2d_ext.conv2d_grad_weight
conv2d_grad_bias = torch.ops.conv2d_ext.conv2d_grad_bias
matmul = torch.ops.conv2d_ext.matmul
linear = torch.ops.conv2d_ext.linear
conv2d_add_bias = torch.ops.conv2d_ext.conv2d_add_bias
conv1d = torch.ops.conv2d_ext.conv1d
conv_transpose1d = torch.ops.conv2d_ext.conv_transpose1d
conv_transpose2d = torch.ops.conv2d_ext.conv_transpose2d
pointwise = torch.ops.conv2d_ext.pointwise
pointwise_grad = torch.ops.conv2d_ext.pointwise_grad
pointwise_pair = torch.ops.conv2d_ext.pointwise_pair
sum_over = torch.ops.conv2d_ext.sum
mean_over = torch.ops.conv2d_ext.mean
var_over = torch.ops.conv2d_ext.var
softmax = torch.ops.conv2d_ext.softmax
softmax_grad = torch.ops.conv2d_ext.softmax_grad
attention = torch.ops.conv2d_ext.attention
attention_grad = torch.ops.conv2d_ext.attention_grad

# ---- vmap: one call of the op, with vmap's dimension folded into another one
#
# Three tensors take part in each of the first three ops: the input's side x (N, C, H, W), the
# output's side y (N, OC, H', W') and the weight w (OC, C/groups, KH, KW). Two are arguments, one is
# the result. vmap's dimension, of size B, is in the result and in one or both arguments; which of
# the three have it decides where it goes.


class _Fold(enum.Enum):
    BATCH = "x, y: N -> B * N"
    GROUPS = "x, y, w: groups -> B * groups, so C -> B * C and OC -> B * OC"
    OUT_CHANNELS = "y, w: OC/groups -> B * OC/groups"
    IN_CHANNELS = "x, w: C/groups -> B * C/groups"


def _fold_activation(tensor: Tensor, fold: _Fold, groups: int) -> Tensor:
    """(B, N, C, H, W) to 4-D."""
    if fold is _Fold.BATCH:
        return tensor.flatten(0, 1)
    if fold is _Fold.GROUPS:
        return tensor.movedim(0, 1).flatten(1, 2)
    return _split(tensor, 2, groups).movedim(0, 2).flatten(1, 3)


def _unfold_activation(tensor: Tensor, fold: _Fold, groups: int, batch: int, n: int) -> Tensor:
    """4-D to (B, N, C, H, W)."""
    if fold is _Fold.BATCH:
        return tensor.unflatten(0, (batch, n))
    if fold is _Fold.GROUPS:
        return _split(tensor, 1, batch).movedim(1, 0)
    return _split(tensor, 1, groups, batch).movedim(2, 0).flatten(2, 3)


def _fold_rows(tensor: Tensor, fold: _Fold, groups: int) -> Tensor:
    """(B, OC, ...), a weight or a bias, without the dimension of size B."""
    if fold is _Fold.GROUPS:
        return tensor.flatten(0, 1)
    return _split(tensor, 1, groups).movedim(0, 1).flatten(0, 2)


def _fold_weight(tensor: Tensor, fold: _Fold, groups: int) -> Tensor:
    """(B, OC, C/groups, KH, KW) to 4-D."""
    if fold is _Fold.IN_CHANNELS:
        return tensor.movedim(0, 1).flatten(1, 2)
    return _fold_rows(tensor, fold, groups)


def _unfold_weight(tensor: Tensor, fold: _Fold, groups: int, batch: int) -> Tensor:
    """4-D to (B, OC, C/groups, KH, KW)."""
    if fold is _Fold.IN_CHANNELS:
        return _split(tensor, 1, batch).movedim(1, 0)
    if fold is _Fold.GROUPS:
        return _split(tensor, 0, batch)
    return _split(tensor, 0, groups, batch).movedim(1, 0).flatten(1, 2)


def _split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """Splits a dimension into `sizes` and the rest, also where that is empty."""
    return tensor.unflatten(dim, (*sizes, tensor.size(dim) // math.prod(sizes)))


def _activation(tensor: Tensor, dim: int | None) -> tuple[Tensor, bool]:
    """Moves vmap's dimension to the front; an unbatched tensor becomes a batch of one (True)."""
    front = tensor if dim is None else tensor.movedim(dim, 0)
    unbatched = front.dim() == (3 if dim is None else 4)
    return front.unsqueeze(-4) if unbatched else front, unbatched


def _check_one_example(
    input_size: list[int], weight_size: list[int], bias_size: list[int] | None, *parameters: Any
) -> None:
    """Raises what a call of one example would: folding would name other sizes, or hide a fault.

    Of sizes alone: the op sees to dtypes, which are what autocast makes of them.
    """
    _C.check_sizes(input_size, weight_size, bias_size, *parameters)


def _example_size(tensor: Tensor, dim: int | None) -> list[int]:
    return [size for i, size in enumerate(tensor.shape) if i != dim]


def _no_example(tensor: Tensor, dim: int | None) -> Tensor:
    """Of a vmap over nothing: a tensor of an example's size that depends on `tensor`, zeros."""
    return tensor if dim is None else tensor.sum(dim, dtype=tensor.dtype)


def _conv2d_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    allow_winograd: bool = False,
) -> tuple[Tensor, int]:
    batch = info.batch_size
    input_dim, weight_dim, bias_dim = in_dims[:3]
    _check_one_example(
        _example_size(input, input_dim),
        _example_size(weight, weight_dim),
        None if bias is None else _example_size(bias, bias_dim),
        stride,
        padding,
        dilation,
        groups,
        input.element_size(),
    )
    input, unbatched = _activation(input, input_dim)
    n = input.size(-4)
    if batch == 0:  # a batch of no images; the other folds would have no groups or no channels
        input = input if input_dim is not None else input.expand(0, *input.shape)
        weight = _no_example(weight, weight_dim)
        bias = None if bias is None else _no_example(bias, bias_dim)
        input_dim, weight_dim, bias_dim = 0, None, None
    late_bias = None
    if bias_dim is not None:
        bias = bias.movedim(bias_dim, 0)
    if weight_dim is None:
        fold = _Fold.BATCH
        if bias_dim is not None:
            # Zeros of its dtype stand in for it, so that the op checks that, and autocast casts it.
            late_bias = bias
            bias = torch.zeros(bias.size(1), dtype=bias.dtype, device=bias.device)
        if input_dim is not None:
            input = _fold_activation(input, fold, groups)
    else:
        fold = _Fold.OUT_CHANNELS if input_dim is None else _Fold.GROUPS
        weight = _fold_weight(weight.movedim(weight_dim, 0), fold, groups)
        if bias is not None:
            bias = _fold_rows(bias.expand(batch, -1), fold, groups)
        if input_dim is not None:
            input = _fold_activation(input, fold, groups)
    folded_groups = groups * batch if fold is _Fold.GROUPS else groups
    output = conv2d(input, weight, bias, stride, padding, dilation, folded_groups, allow_winograd)
    if input_dim is not None or weight_dim is not None:
        output = _unfold_activation(output, fold, groups, batch, n)
    if late_bias is not None:
        output = output + late_bias.to(output.dtype)[:, None, :, None, None]
    return output.squeeze(1) if unbatched else output, 0


def _conv2d_grad_input_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    weight: Tensor,
    input_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels_last: bool,
    allow_winograd: bool = False,
) -> tuple[Tensor, int]:
    batch = info.batch_size
    grad_output_dim, weight_dim = in_dims[:2]
    _check_one_example(
        input_size,
        _example_size(weight, weight_dim),
        None,
        stride,
        padding,
        dilation,
        groups,
        weight.element_size(),
    )
    grad_output, unbatched = _activation(grad_output, grad_output_dim)
    n, c, h, w = (1, *input_size) if unbatched else input_size
    if batch == 0:
        if grad_output_dim is None:
            grad_output = grad_output.expand(0, *grad_output.shape)
        weight = _no_example(weight, weight_dim)
        grad_output_dim, weight_dim = 0, None
    if weight_dim is None:
        fold = _Fold.BATCH
    else:
        fold = _Fold.IN_CHANNELS if grad_output_dim is None else _Fold.GROUPS
        weight = _fold_weight(weight.movedim(weight_dim, 0), fold, groups)
    if grad_output_dim is not None:
        grad_output = _fold_activation(grad_output, fold, groups)
    size = [batch * n, c, h, w] if fold is _Fold.BATCH else [n, batch * c, h, w]
    folded_groups = groups * batch if fold is _Fold.GROUPS else groups
    grad_input = conv2d_grad_input(
        grad_output,
        weight,
        size,
        stride,
        padding,
        dilation,
        folded_groups,
        channels_last,
        allow_winograd,
    )
    grad_input = _unfold_activation(grad_input, fold, groups, batch, n)
    return grad_input.squeeze(1) if unbatched else grad_input, 0


def _conv2d_grad_weight_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    input: Tensor,
    weight_size: list[int],
    weight_stride: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[Tensor, int]:
    batch = info.batch_size
    grad_output_dim, input_dim = in_dims[:2]
    _check_one_example(
        _example_size(input, input_dim),
        weight_size,
        None,
        stride,
        padding,
        dilation,
        groups,
        input.element_size(),
    )
    grad_output, _ = _activation(grad_output, grad_output_dim)
    input, _ = _activation(input, input_dim)
    if batch == 0:
        grad_weight = conv2d_grad_weight(
            _no_example(grad_output, None if grad_output_dim is None else 0)[:0],
            _no_example(input, None if input_dim is None else 0)[:0],
            weight_size,
            weight_stride,
            stride,
            padding,
            dilation,
            groups,
        )
        return grad_weight.expand(0, *weight_size), 0
    if input_dim is None:
        fold = _Fold.OUT_CHANNELS
    else:
        fold = _Fold.IN_CHANNELS if grad_output_dim is None else _Fold.GROUPS
    if grad_output_dim is not None:
        grad_output = _fold_activation(grad_output, fold, groups)
    if input_dim is not None:
        input = _fold_activation(input, fold, groups)
    oc, ic, kh, kw = weight_size
    size = [oc, batch * ic, kh, kw] if fold is _Fold.IN_CHANNELS else [batch * oc, ic, kh, kw]
    contiguous = [size[1] * kh * kw, kh * kw, kw, 1]
    folded_groups = groups * batch if fold is _Fold.GROUPS else groups
    grad_weight = conv2d_grad_weight(
        grad_output, input, size, contiguous, stride, padding, dilation, folded_groups
    )
    return _unfold_weight(grad_weight, fold, groups, batch), 0


def _conv2d_grad_bias_vmap(
    info: Any, in_dims: tuple[int | None, ...], grad_output: Tensor
) -> tuple[Tensor, int]:
    grad_output, _ = _activation(grad_output, in_dims[0])
    folded = _fold_activation(grad_output, _Fold.GROUPS, groups=1)
    channels = grad_output.size(-3)
    return conv2d_grad_bias(folded).unflatten(0, (info.batch_size, channels)), 0


def _matmul_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    mat1: Tensor,
    mat2: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, int]:
    batch = info.batch_size
    mat1_dim, mat2_dim, bias_dim = in_dims[:3]
    mat1 = mat1.expand(batch, *mat1.shape) if mat1_dim is None else mat1.movedim(mat1_dim, 0)
    if mat2_dim is not None:
        mat2 = mat2.movedim(mat2_dim, 0)
    late_bias = None
    if bias_dim is not None:
        late_bias, bias = bias.movedim(bias_dim, 0), None
    elif bias is not None and mat2_dim is not None:
        late_bias, bias = bias.expand(batch, -1), None
    # The examples and a batch of theirs as one batch; one mat2 for all stays one.
    examples = mat1.dim() == 4
    matrices = mat1.flatten(0, 1) if examples else mat1
    if mat2_dim is not None or mat2.dim() == 3:
        count = mat1.shape[:2] if examples else mat1.shape[:1]
        if mat2_dim is None:
            mat2 = mat2.expand(batch, *mat2.shape)
        elif examples and mat2.dim() == 3:
            mat2 = mat2.unsqueeze(1)
        mat2 = mat2.expand(*count, *mat2.shape[-2:])
        mat2 = mat2.flatten(0, 1) if examples else mat2
    output = matmul(matrices, mat2, bias)
    output = output.unflatten(0, mat1.shape[:2]) if examples else output
    if late_bias is not None:
        output = output + late_bias.reshape(batch, *(1,) * (output.dim() - 2), late_bias.shape[-1])
    return output, 0


def _conv2d_add_bias_vmap(
    info: Any, in_dims: tuple[int | None, ...], output: Tensor, bias: Tensor
) -> tuple[Tensor, int]:
    output_dim, bias_dim = in_dims
    if output_dim is None:
        output = output.expand(info.batch_size, *output.shape)
    else:
        output = output.movedim(output_dim, 0)
    channels = output.size(-3)
    if bias_dim is None:
        folded = output.flatten(0, -4)  # an unbatched example's dimension is a batch by itself
        return conv2d_add_bias(folded, bias).unflatten(0, output.shape[:-3]), 0
    folded = output.movedim(0, -4).flatten(-4, -3)
    result = conv2d_add_bias(folded, bias.movedim(bias_dim, 0).flatten())
    return result.unflatten(-3, (info.batch_size, channels)).movedim(-4, 0), 0


def _pointwise_vmap(
    _info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    function: str,
    parameters: list[float],
) -> tuple[Tensor, int | None]:
    return pointwise(input, function, parameters), in_dims[0]


def _pointwise_grad_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    input: Tensor,
    function: str,
    parameters: list[float],
) -> tuple[Tensor, int]:
    grad_output, input = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((grad_output, input), in_dims[:2], strict=True)
    )
    return pointwise_grad(grad_output, input, function, parameters), 0


def _pointwise_pair_vmap(
    info: Any, in_dims: tuple[int | None, ...], first: Tensor, second: Tensor, function: str
) -> tuple[Tensor, int]:
    first, second = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((first, second), in_dims[:2], strict=True)
    )
    return pointwise_pair(first, second, function), 0


def _example_dim(dim: int, dims: int) -> int:
    """A dimension of an example with so many of them, in a batch whose first one is vmap's."""
    dims = max(dims, 1)
    if not -dims <= dim < dims:
        expected = f"[{-dims}, {dims - 1}]"
        raise IndexError(
            f"Dimension out of range (expected to be in range of {expected}, but got {dim})"
        )
    return dim % dims + 1


def _sum_vmap(
    op: Callable[..., Tensor],
    _info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    dim: list[int],
    *options: Any,
) -> tuple[Tensor, int]:
    input = input.movedim(in_dims[0], 0)
    dims = input.dim() - 1
    if dims == 0:
        return op(input, [], *options), 0
    return op(input, [_example_dim(d, dims) for d in dim], *options), 0


def _softmax_vmap(
    info: Any, in_dims: tuple[int | None, ...], input: Tensor, dim: int, log: bool
) -> tuple[Tensor, int]:
    input = input.movedim(in_dims[0], 0)
    rows = input.unsqueeze(1) if input.dim() == 1 else input
    output = softmax(rows, _example_dim(dim, rows.dim() - 1), log)
    return output.reshape(input.shape), 0


def _softmax_grad_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    log: bool,
) -> tuple[Tensor, int]:
    grad_output, output = (
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip((grad_output, output), in_dims[:2], strict=True)
    )
    shape = output.shape
    if output.dim() == 1:
        grad_output, output = grad_output.unsqueeze(1), output.unsqueeze(1)
    result = softmax_grad(grad_output, output, _example_dim(dim, output.dim() - 1), log)
    return result.reshape(shape), 0


def _images(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """(N, ...) of each example as (batch * N, ...)."""
    front = tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return front.flatten(0, 1)


def _masks(mask: Tensor | None, dim: int | None, batch: int, n: int) -> Tensor | None:
    if mask is None or (dim is None and mask.size(0) == 1):
        return mask
    front = mask.expand(batch, *mask.shape) if dim is None else mask.movedim(dim, 0)
    return front.expand(batch, n, *front.shape[2:]).flatten(0, 1)


def _attention_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, int]:
    n = _example_size(q, in_dims[0])[0]
    folded = [_images(t, d, info.batch_size) for t, d in zip((q, k, v), in_dims[:3], strict=True)]
    masks = _masks(mask, in_dims[3], info.batch_size, n)
    return attention(*folded, masks, *options).unflatten(0, (info.batch_size, n)), 0


def _attention_grad_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    fused_layout: bool,
    wanted: list[bool],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    batch, n = info.batch_size, _example_size(q, in_dims[1])[0]
    tensors = (grad_output, q, k, v)
    folded = [_images(t, d, batch) for t, d in zip(tensors, in_dims[:4], strict=True)]
    masks = _masks(mask, in_dims[4], batch, n)
    if wanted[3]:  # each image's own gradient, which a mask for all of them is to get the sum of
        masks = mask.unsqueeze(0) if in_dims[4] is None else mask.movedim(in_dims[4], 0)
        masks = masks.expand(batch, n, *masks.shape[2:]).flatten(0, 1)
    found = attention_grad(*folded, masks, causal, scale, fused_layout, wanted)
    results = [g.unflatten(0, (batch, n)) if w else g for g, w in zip(found, wanted, strict=True)]
    if wanted[3] and n != 1 and _example_size(mask, in_dims[4])[0] == 1:
        results[3] = sum_over(results[3], [1], True)
    return tuple(results), tuple(0 if w else None for w in wanted)


def _register_vmap(name: str, rule: Callable[..., tuple[Tensor, int]]) -> None:
    """A rule's own calls are none of the caller's: subclasses and modes don't see them, as they
    don't see those of PyTorch's rules, which are C++."""

    def unseen(*args: Any) -> tuple[Tensor, int]:
        with torch._C.DisableTorchFunction():
            return rule(*args)

    torch.library.register_vmap(f"conv2d_ext::{name}", unseen)


def _copy_as_vmap(
    info: Any, in_dims: tuple[int | None, ...], input: Tensor, *formats: bool
) -> tuple[Tensor, int]:
    folded = _images(input, in_dims[0], info.batch_size)
    copy = torch.ops.conv2d_ext.copy_as(folded, *formats)
    return copy.unflatten(0, (info.batch_size, -1)), 0


def _rounded_vmap(
    info: Any, in_dims: tuple[int | None, ...], input: Tensor, dtype: torch.dtype
) -> tuple[Tensor, int | None]:
    return torch.ops.conv2d_ext.rounded(input, dtype), in_dims[0]


_register_vmap("conv2d", _conv2d_vmap)
_register_vmap("conv2d_grad_input", _conv2d_grad_input_vmap)
_register_vmap("conv2d_grad_weight", _conv2d_grad_weight_vmap)
_register_vmap("conv2d_grad_bias", _conv2d_grad_bias_vmap)
_register_vmap("matmul", _matmul_vmap)
_register_vmap("conv2d_add_bias", _conv2d_add_bias_vmap)
_register_vmap("pointwise", _pointwise_vmap)
_register_vmap("pointwise_grad", _pointwise_grad_vmap)
_register_vmap("pointwise_pair", _pointwise_pair_vmap)
_register_vmap("sum", functools.partial(_sum_vmap, sum_over))
_register_vmap("var", functools.partial(_sum_vmap, var_over))
_register_vmap("mean", functools.partial(_sum_vmap, mean_over))
_register_vmap("softmax", _softmax_vmap)
_register_vmap("softmax_grad", _softmax_grad_vmap)
_register_vmap("copy_as", _copy_as_vmap)
_register_vmap("rounded", _rounded_vmap)
_register_vmap("attention", _attention_vmap)
_register_vmap("attention_grad", _attention_grad_vmap)


# What torch.utils.flop_counter.FlopCounterMode counts: a multiplication and an addition for each
# product, as it does for PyTorch's own convolutions. (Importing it imports Triton.)


def _conv2d_flops(
    input: list[int], weight: list[int], *_args: Any, out_shape: list[int], **_kwargs: Any
) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


def _conv2d_grad_input_flops(
    grad_output: list[int], weight: list[int], *_args: Any, **_kwargs: Any
) -> int:
    return 2 * math.prod(grad_output) * math.prod(weight[1:])


def _conv2d_grad_weight_flops(
    grad_output: list[int], input: list[int], weight_size: list[int], *_args: Any, **_kwargs: Any
) -> int:
    return 2 * math.prod(grad_output) * math.prod(weight_size[1:])


def _matmul_flops(
    mat1: list[int], mat2: list[int], *_args: Any, out_shape: list[int], **_kwargs: Any
) -> int:
    return 2 * math.prod(out_shape) * mat1[-1]


def _register_flop_formulas() -> None:
    register = importlib.import_module("torch.utils.flop_counter").register_flop_formula
    register(conv2d)(_conv2d_flops)
    register(conv2d_grad_input)(_conv2d_grad_input_flops)
    register(conv2d_grad_weight)(_conv2d_grad_weight_flops)
    register(matmul)(_matmul_flops)


when_imported("torch.utils.flop_counter", _register_flop_formulas)


# DTensor's rules, when there is a DTensor: importing it takes as long as importing torch.


def _register_dtensor_rules() -> None:
    importlib.import_module("conv2d_ext._dtensor").register()


when_imported("torch.distributed.tensor", _register_dtensor_rules)
