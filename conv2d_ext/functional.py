"""Convolutions, the post's two functions, explain and build_config, over the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from torch._jit_internal import BroadcastingList1, BroadcastingList2
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _C, _build_info
from . import ops as ops  # registers the ops' vmap rules
from ._winograd import is_allowed as allows_winograd


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """2-D convolution, with the signature and the semantics of `torch.nn.functional.conv2d`.

    input: (N, C, H, W) or (C, H, W). weight: (OC, C/groups, KH, KW). bias: (OC,) or None.
    Returns (N, OC, H', W') or (OC, H', W'). Every tensor may have any strides.

    All are on one device (the CPU, or a GPU where the build has CUDA) and of one dtype: float32,
    float64, bfloat16, float16, complex64, complex128, and on the CPU int8, uint8, int16, int32,
    int64 (exact, wrapping around). On CUDA float32 is multiplied in TF32 where PyTorch's setting
    for convolutions allows it, as in F.conv2d.
    stride, padding, dilation: an int, or (height, width). padding may also be 'valid' (none) or
    'same' (an output of the input's size, at stride 1; where the padding is odd, the larger half
    is below and on the right).

    The output is channels_last where F.conv2d's is: where input or weight suggests it. An image's
    output has the same bits whatever the run, the thread count, the batch and the memory formats.
    Differentiable to any order, in reverse and forward mode, under torch.func, torch.compile and
    autocast. `allow_winograd` lets 3x3 kernels multiply less, for other bits.

    Raises TypeError for arguments of a wrong type, NotImplementedError (on CUDA RuntimeError) for
    other dtypes, and RuntimeError for ranks, sizes, dtypes, devices and hyper-parameters that don't
    fit together, in F.conv2d's words.
    """
    # (is_compiling() would take a thirtieth of a tiny call. It is true in an export without dynamo,
    # too, which records this op whichever way it is called.)
    if is_dynamo_compiling():
        # The graph gets the op itself: the compiled module's Python function would break it.
        return torch.ops.conv2d_ext.conv2d(
            input,
            weight,
            bias,
            *_hyper_parameters(weight, stride, padding, dilation, groups),
            allows_winograd(),
        )
    return _C.conv2d(input, weight, bias, stride, padding, dilation, groups)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, whose rows have the same bits in every batch.

    input: (*, K). weight: (N, K) or (K,). bias: (N,), another shape that expands to the output's,
    or None. Returns (*, N), or (*) for a weight (K,). Any strides; dtypes and devices as `conv2d`.

    The order of a sum follows from K, the dtype and the instruction set alone: an output row has
    the same bits whatever the run, the thread count, the other rows and the tensors' strides. On
    CUDA float32 is multiplied in TF32 where PyTorch's setting for matrix products allows it.
    Differentiable to any order, in reverse and forward mode, under torch.func, torch.compile and
    autocast.

    A nested input gives a nested output, as in F.linear.

    Raises TypeError for arguments of a wrong type, NotImplementedError for other dtypes (for
    integers on CUDA RuntimeError), and RuntimeError for sizes, dtypes and devices that don't fit
    together, in F.linear's words.
    """
    if is_compiling():
        return torch.ops.conv2d_ext.linear(input, weight, bias)
    return _C.linear(input, weight, bias)


def linear_of_nested(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What _C.linear does with a nested input: its rows are computed as those of dense tensors."""
    if input.layout != torch.jagged:
        outputs = [linear(part, weight, bias) for part in input.unbind()]
        return torch.nested.as_nested_tensor(outputs)
    ragged = input._ragged_idx
    if ragged == input.dim() - 1:
        raise RuntimeError(
            "linear(): expected a nested input whose last dimension has one size, but got one that "
            f"is ragged there, of shape {tuple(input.shape)}"
        )
    return torch.nested.nested_tensor_from_jagged(
        linear(input.values(), weight, bias),
        offsets=input.offsets(),
        lengths=input.lengths(),
        jagged_dim=ragged,
    )


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """1-D convolution, with the signature and the semantics of `torch.nn.functional.conv1d`.

    input: (N, C, L) or (C, L). weight: (OC, C/groups, K). bias: (OC,) or None.
    Returns (N, OC, L') or (OC, L'). Every tensor may have any strides.

    It is `conv2d` of an image of one row, through views: dtypes, guarantees and derivatives are
    `conv2d`'s. stride, padding, dilation: an int, or a list of one. padding may also be 'valid'
    (none) or 'same' (an output of the input's length, at stride 1; where the padding is odd, the
    larger half is on the right).

    Raises what `conv2d` raises, in F.conv1d's words.
    """
    if is_compiling():
        stride, dilation = (
            _list("conv1d", "stride", stride, 1),
            _list("conv1d", "dilation", dilation, 1),
        )
        _check_int("conv1d", "groups", groups, groups)
        if isinstance(padding, str):
            border = named_padding(padding, weight, stride, dilation)
        else:
            border = _list("conv1d", "padding", padding, 1) * 2
        return torch.ops.conv2d_ext.conv1d(input, weight, bias, stride, border, dilation, groups)
    return _C.conv1d(input, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """1-D transposed convolution, as `torch.nn.functional.conv_transpose1d`.

    input: (N, C, L) or (C, L). weight: (C, OC/groups, K). bias: (OC,) or None.
    Returns (N, OC, L') or (OC, L') with
    L' = (L - 1) * stride - 2 * padding + dilation * (K - 1) + output_padding + 1.

    It is `conv_transpose2d` of an image of one row, through views; all else is said there.
    """
    if is_compiling():
        return torch.ops.conv2d_ext.conv_transpose1d(
            input, weight, bias,
            *_transposed_parameters(1, stride, padding, output_padding, groups, dilation),
        )  # fmt: skip
    return _C.conv_transpose1d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """2-D transposed convolution, as `torch.nn.functional.conv_transpose2d`.

    input: (N, C, H, W) or (C, H, W). weight: (C, OC/groups, KH, KW). bias: (OC,) or None.
    Returns (N, OC, H', W') or (OC, H', W') with
    H' = (H - 1) * stride - 2 * padding + dilation * (KH - 1) + output_padding + 1, W' alike.
    Every tensor may have any strides.

    It is the input gradient of a `conv2d`, and the bias added to it: dtypes, guarantees and
    derivatives are `conv2d`'s. Where there is a bias, an element is rounded once before it is
    added and once after. An output_padding of stride and more, which takes a larger dilation,
    copies the input.
    stride, padding, output_padding, dilation: an int, or (height, width).

    Raises TypeError for arguments of a wrong type, NotImplementedError (on CUDA RuntimeError) for
    other dtypes, and RuntimeError for ranks, sizes, dtypes, devices and hyper-parameters that don't
    fit together, in F.conv_transpose2d's words; also for an output without elements that is not
    of an empty batch.
    """
    if is_compiling():
        return torch.ops.conv2d_ext.conv_transpose2d(
            input, weight, bias,
            *_transposed_parameters(2, stride, padding, output_padding, groups, dilation),
        )  # fmt: skip
    return _C.conv_transpose2d(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def forward(im: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The function of the forum post in docs/timing.md: stride 1, no padding, input channels first.

    im: (bs, di, H, W) or (di, H, W). kernel: (di, do, kh, kw). bias: (do,), (do, 1) or None.
    Returns (bs, do, H - kh + 1, W - kw + 1), or the same without bs.

    It is `conv2d(im, kernel.transpose(0, 1), bias.flatten())`, the kernel read through its strides,
    without a copy: dtypes, guarantees, derivatives and errors are `conv2d`'s. RuntimeError also
    where kernel or bias has another size than these.
    """
    if is_compiling():
        if bias is not None and bias.dim() == 2:
            bias = bias.squeeze(1)
        return conv2d(im, kernel.transpose(0, 1), bias)
    if has_torch_function_variadic(im, kernel, bias):
        return handle_torch_function(forward, (im, kernel, bias), im, kernel, bias)
    return _C.forward(im, kernel, bias)


def forward_unfold(im: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The composition of the forum post in docs/timing.md, in C++: unfold, matmul, add.

    It is the baseline that `conv2d` is compared with. Arguments and result are `forward`'s. It
    builds the whole column matrix, kh * kw times the size of im; speed, memory and bits are those
    of PyTorch's im2col and matmul. Floating-point and complex dtypes, on any device.

    Raises RuntimeError where sizes, dtypes or devices don't fit together, NotImplementedError for
    other dtypes.
    """
    if is_compiling():
        columns = torch.nn.functional.unfold(im, kernel.shape[2:])
        output = kernel.transpose(0, 1).flatten(1) @ columns
        if bias is not None:
            output = output + bias.reshape(-1, 1)
        out_h, out_w = im.size(-2) - kernel.size(2) + 1, im.size(-1) - kernel.size(3) + 1
        return output.unflatten(-1, (out_h, out_w))
    if has_torch_function_variadic(im, kernel, bias):
        return handle_torch_function(forward_unfold, (im, kernel, bias), im, kernel, bias)
    return _C.forward_unfold(im, kernel, bias)


@dataclass(frozen=True)
class DirectionExplanation:
    """How one direction of a convolution is computed on the CPU."""

    #: the driver, in words
    engine: str
    #: the micro-kernel: family, dtype, shape, instruction set; ``listed``: products with padding
    #: are left out where a tile has enough of them
    micro_kernel: str
    #: the instruction set
    isa: str
    #: the GEMM view, per group
    gemm_m: int
    gemm_n: int
    gemm_k: int
    #: pixels of one tile, and its extents
    tile_pixels: int
    tile_rows: int
    tile_cols: int
    tile_images: int
    #: the number of accumulation chains of a sum over K, each summed from zero. They are added in
    #: order, long sums chunk by chunk (docs/design.md). (On CUDA a segment of a weight
    #: gradient, or of a direct kernel, has several chains.)
    k_segments: int
    #: products of the longest chain
    k_segment_length: int
    #: shared out among the threads
    work_items: int
    #: scratch memory
    workspace_bytes_per_thread: int
    #: why a faster path is not taken; empty where there is none
    refused: str
    #: the drivers that were asked before the one that was taken, and why each refused
    candidates: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        if not self.work_items:  # an empty result
            return self.engine
        lines = [
            f"{self.engine}: {self.micro_kernel} ({self.isa})",
            f"GEMM per group: M={self.gemm_m} N={self.gemm_n} K={self.gemm_k}",
            f"tile: {self.tile_pixels} pixels ({self.tile_images} images x {self.tile_rows} rows x "
            f"{self.tile_cols} columns), {self.work_items} work items",
            f"K: {self.k_segments} chains of up to {self.k_segment_length} products",
            f"workspace: {self.workspace_bytes_per_thread} bytes per thread",
        ]
        if self.refused:
            lines.append(f"faster path refused: {self.refused}")
        lines += [f"not {name}: {reason}" for name, reason in self.candidates]
        return "\n".join(lines)


@dataclass(frozen=True)
class CudaDirectionExplanation:
    """How one direction of a convolution is computed on a GPU."""

    #: the engine, in words
    engine: str
    #: the kernel's name; empty for an empty result
    kernel: str
    #: of float32: "tf32" or "ieee", by PyTorch's setting; empty for other dtypes
    math: str
    #: the GEMM view, per group; where there are several GEMMs, that of the largest
    gemm_m: int
    gemm_n: int
    gemm_k: int
    #: what a CTA computes at a time
    tile_m: int
    tile_n: int
    tile_k: int
    #: threads of a CTA
    threads: int
    #: the number of segments of the sum over K: each summed from zero, and added in order
    k_segments: int
    #: products of the longest segment
    k_segment_length: int
    #: products of the longest chain: a segment is made of chains, each summed from zero
    k_chain_length: int
    #: segments run in CTAs of their own, and are added up through the workspace
    split: bool
    #: the number of CTAs
    ctas: int
    #: of the ring of tiles in shared memory; 0 where there is none
    stages: int
    #: shared memory of a CTA
    shared_bytes: int
    #: global memory, of the whole call
    workspace_bytes: int
    #: the weight is packed into the workspace first, in the kernel's order
    packed: bool
    #: why a faster kernel is not taken; empty where there is none
    refused: str
    #: what became of a choice that tuning asked for; empty where it asked for none
    wanted: str
    #: of a GEMM, by which the planner compares kernels
    estimated_cycles: float

    def __str__(self) -> str:
        if not self.kernel:  # an empty result
            return self.engine
        lines = [
            f"{self.engine}: {self.kernel}" + (f" ({self.math})" if self.math else ""),
            f"GEMM per group: M={self.gemm_m} N={self.gemm_n} K={self.gemm_k}",
            f"tile: {self.tile_m} x {self.tile_n} x {self.tile_k}, {self.ctas} CTAs of "
            f"{self.threads} threads with {self.shared_bytes} bytes of shared memory",
            f"K: {self.k_segments} segments of up to {self.k_segment_length} products, chains of "
            f"up to {self.k_chain_length}, segments {'side by side' if self.split else 'in turn'}",
            f"workspace: {self.workspace_bytes} bytes" + (", the weight packed" * self.packed),
        ]
        if self.refused:
            lines.append(f"faster kernel refused: {self.refused}")
        if self.wanted:
            lines.append(f"another kernel wanted: {self.wanted}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What a call of `conv2d` and its backward will do; `print` it, or read the fields."""

    input_size: tuple[int, int, int, int]
    weight_size: tuple[int, int, int, int]
    output_size: tuple[int, int, int, int]
    stride: tuple[int, int]
    #: top, bottom, left, right
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    dtype: torch.dtype
    device: torch.device
    #: of the CPU
    threads: int
    forward: DirectionExplanation | CudaDirectionExplanation | None
    grad_input: DirectionExplanation | CudaDirectionExplanation | None
    grad_weight: DirectionExplanation | CudaDirectionExplanation | None
    #: why nothing is computed; empty where the three directions are given
    refused: str

    def __str__(self) -> str:
        lines = [
            f"conv2d: {self.dtype} on {self.device}"
            + (f", {self.threads} threads" if self.device.type == "cpu" else ""),
            f"  input {self.input_size}, weight {self.weight_size}, output {self.output_size}",
            f"  stride {self.stride}, padding {self.padding} (top, bottom, left, right), "
            f"dilation {self.dilation}, groups {self.groups}",
        ]
        if self.refused:
            lines.append(f"  {self.refused}")
        for direction in ("forward", "grad_input", "grad_weight"):
            explanation = getattr(self, direction)
            if explanation is not None:
                lines.append(f"  {direction}")
                lines += [f"    {line}" for line in str(explanation).splitlines()]
        return "\n".join(lines)


def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Explanation:
    """What `conv2d` with these arguments, and its backward, will do. Nothing is computed.

    Arguments and errors are `conv2d`'s, except that no data is read: fake tensors, and tensors
    whose storage was freed, are explained too. An unbatched input is described as a batch of one.
    The directions are of type DirectionExplanation for CPU tensors, CudaDirectionExplanation for
    CUDA tensors. Where nothing is computed, they are None and `refused` says why.
    """
    if has_torch_function_variadic(input, weight, bias):
        arguments = (input, weight, bias, stride, padding, dilation, groups)
        return handle_torch_function(explain, (input, weight, bias), *arguments)
    parameters = _C.conv2d_parameters(input, weight, bias, stride, padding, dilation, groups)
    described = _C.explain(input, weight, bias, *parameters)
    return _explanation(described, input)


def explain_matmul(
    mat1: Tensor, mat2: Tensor, bias: Tensor | None = None
) -> DirectionExplanation | CudaDirectionExplanation:
    """What a product of matrices in `batch_invariant`, or `linear`, will do. Nothing is computed.

    mat1: (M, K), or (B, M, K).
    mat2: (K, N), or (B, K, N) with a mat1 of three dimensions.
    bias: (N,), with a mat2 of two.

    Only sizes, strides and dtypes are read. `linear(input, weight, bias)` is the product of input
    and weight.t(); the gradients of a product are products.

    Raises RuntimeError and NotImplementedError as torch.mm and torch.bmm do, and
    NotImplementedError for a device that this build has no kernels for.
    """
    fields = _C.explain_matmul(mat1, mat2, bias)
    if fields is None:
        raise NotImplementedError(
            f"explain_matmul: this build has no kernels for {mat1.device.type} tensors"
        )
    return (CudaDirectionExplanation if "kernel" in fields else DirectionExplanation)(**fields)


def _explanation(described: dict[str, dict], input: Tensor) -> Explanation:
    directions = {}
    for name in ("forward", "grad_input", "grad_weight"):
        fields = described.get(name)
        on_cuda = fields is not None and "kernel" in fields
        kind = CudaDirectionExplanation if on_cuda else DirectionExplanation
        directions[name] = None if fields is None else kind(**fields)
    refused = ""
    if directions["forward"] is None:
        if input.device.type == "meta":
            refused = "meta tensors hold no data: only sizes and strides are computed"
        elif described["problem"]["input_size"][1] == 0:
            refused = "input has no channels: the results are empty or zero"
        else:
            refused = f"this build has no kernels for {input.device.type} tensors"
    return Explanation(
        **described["problem"],
        dtype=input.dtype,
        device=input.device,
        threads=torch.get_num_threads(),
        **directions,
        refused=refused,
    )


class BuildConfig(TypedDict):
    """What `build_config` returns."""

    version: str
    torch: str
    compiler: str
    compiled_isas: tuple[str, ...]
    isa: str
    numerics: int
    cuda_architectures: str | None
    warnings: tuple[str, ...]


def build_config() -> BuildConfig:
    """How this library was built, and what it uses on this machine.

    version: the library's.
    torch: the version it was built with.
    compiler: of the C++ sources.
    compiled_isas: the CPU instruction sets in the build.
    isa: the one in use, the best of this machine or another named by the environment variable
    CONV2D_EXT_CPU_ISA ("amx_emulated" is for tests: AMX's bits on a CPU without it, slowly).
    numerics: a number that rises when a change alters bits of a result on the CPU: builds of one
    number, whatever their compiler and torch, give the same bits on the same instruction set.
    cuda_architectures: as TORCH_CUDA_ARCH_LIST writes them, None in a CPU-only build.
    warnings: what the build had to say.
    """
    compiled = _C.build_config()
    return {
        "version": _build_info.VERSION,
        "torch": _build_info.TORCH_VERSION,
        "compiler": _build_info.COMPILER,
        "compiled_isas": tuple(name.strip() for name in compiled["compiled_isas"].split(",")),
        "isa": compiled["isa"],
        "numerics": compiled["numerics"],
        "cuda_architectures": _build_info.CUDA_ARCHS,
        "warnings": _build_info.WARNINGS,
    }


def _hyper_parameters(
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
) -> tuple[list[int], list[int], list[int], int]:
    """F.conv2d's stride, padding, dilation and groups as the dispatcher op takes them.

    For where _C.conv2d, which does the same, is not called.
    """
    stride, dilation = _pair("stride", stride), _pair("dilation", dilation)
    _check_int("conv2d", "groups", groups, groups)
    if isinstance(padding, str):
        return stride, named_padding(padding, weight, stride, dilation), dilation, groups
    pad_h, pad_w = _pair("padding", padding)
    return stride, [pad_h, pad_h, pad_w, pad_w], dilation, groups


def _transposed_parameters(
    dims: int,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
) -> tuple[list[int], list[int], list[int], int, list[int]]:
    """F.conv_transpose2d's as the dispatcher op takes them."""
    function = f"conv_transpose{dims}d"
    _check_int(function, "groups", groups, groups)
    return (
        _list(function, "stride", stride, dims),
        _list(function, "padding", padding, dims),
        _list(function, "output_padding", output_padding, dims),
        groups,
        _list(function, "dilation", dilation, dims),
    )


def _pair(name: str, value: int | Sequence[int]) -> list[int]:
    return _list("conv2d", name, value, 2)


def _list(function: str, name: str, value: int | Sequence[int], dims: int) -> list[int]:
    if not isinstance(value, (tuple, list)):
        _check_int(function, name, value, value)
        return [value] * dims
    for place, element in enumerate(value):
        # A bool is refused in the first place alone, as by PyTorch's parser.
        if place == 0 or not isinstance(element, bool):
            _check_int(function, name, element, value)
    return height_and_width(name, value) if dims == 2 else one_dimension(name, value)


def _check_int(function: str, name: str, element: object, value: object) -> None:
    """Of a trace: a bool is an int to Python and to the ops, but not to PyTorch's functions.

    NumPy's scalars are traced as arrays; what they hold, the op checks.
    """
    if element is None or isinstance(element, (bool, float, str)):
        raise TypeError(
            f"{function}() received an invalid combination of arguments: expected "
            f"{name} to be of integers, but got {name}={value!r}"
        )


# ---- what TorchScript compiles too, for the layers


def height_and_width(name: str, value: BroadcastingList2[int]) -> list[int]:
    """A list of one value for both, or of one for each; to TorchScript also a single integer."""
    if len(value) != 1 and len(value) != 2:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 2 values to match the "
            f"convolution dimensions, but got {name}={list(value)}"
        )
    return [value[0], value[-1]]


def one_dimension(name: str, value: BroadcastingList1[int]) -> list[int]:
    """A list of one value; to TorchScript also a single integer."""
    if len(value) != 1:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 1 values to match the "
            f"convolution dimensions, but got {name}={list(value)}"
        )
    return [value[0]]


def named_padding(
    padding: str, weight: Tensor, stride: list[int], dilation: list[int]
) -> list[int]:
    """'same' or 'valid' as (left, right), in two dimensions (top, bottom, left, right)."""
    dims = len(stride)
    if padding != "same" and padding != "valid":
        raise RuntimeError(
            f"Invalid padding string: '{padding}': expected padding to be 'same', 'valid', "
            "an integer or a pair of integers"
        )
    border = [0] * (2 * dims)
    # The op refuses a weight of another rank, whatever the padding.
    if padding == "same" and weight.dim() == dims + 2:
        for i in range(dims):
            if stride[i] != 1:
                raise RuntimeError(
                    "padding='same' is not supported for strided convolutions: expected stride=1, "
                    f"but got stride={stride}"
                )
            total = dilation[i] * (weight.size(2 + i) - 1)
            border[2 * i] = total // 2
            border[2 * i + 1] = total - total // 2
    return border
