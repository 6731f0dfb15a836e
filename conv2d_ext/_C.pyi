# The compiled module. conv2d_ext.functional documents these; use them from there.
from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

class _BuildConfig(TypedDict):
    compiled_isas: str  # comma-separated
    isa: str
    numerics: int

def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor: ...
def conv2d_parameters(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[list[int], list[int], list[int], int]: ...  # as explain takes them
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
def enable_batch_invariant() -> None: ...
def disable_batch_invariant() -> None: ...
def is_batch_invariant() -> bool: ...  # in this thread
def is_enabled_in_process() -> bool: ...  # in the process
def settle_recorded_results(  # strides and types of what a recorded call returns
    name: str, arguments: Sequence[Tensor | None], results: Sequence[Tensor | None], /
) -> list[Tensor | None]: ...
def leave_traced_contexts() -> None: ...  # those that a failed trace left behind
def use_winograd_setting(  # whose `allowed` says what calls may do; before it is set: first
    setting: object, first: bool, /
) -> None: ...
def swap_invariance_state(
    contexts: int,  # that this thread is in
    traced: int,  # contexts of a function that it is tracing
    joined: bool,  # it follows the process
    kept_out: bool,  # it does not
    /,
) -> tuple[int, int, bool, bool]: ...  # what they were
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor: ...
def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor: ...
def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor: ...
def forward(im: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor: ...
def forward_unfold(im: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor: ...
def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    gpu: tuple[int, int] | None = None,  # SM count, bytes of shared memory a CTA may have
) -> dict[str, dict[str, object]]: ...
def explain_matmul(
    mat1: Tensor,
    mat2: Tensor,
    bias: Tensor | None,
    gpu: tuple[int, int] | None = None,
) -> dict[str, object] | None: ...
def check_sizes(
    input: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],  # top, bottom, left, right
    dilation: Sequence[int],
    groups: int,
    itemsize: int,
) -> None: ...

# For tests: a call of aten::convolution; and whether `convolution` computes it.
def takes_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    /,
) -> bool: ...
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    /,
) -> Tensor: ...
def build_config() -> _BuildConfig: ...
def float32_math_on_cuda() -> str: ...  # "tf32" or "ieee"; in builds with CUDA
def float32_matmul_math_on_cuda() -> str: ...  # of matrix products, whose setting is another

# For tests and tuning, in builds with CUDA: the GEMM kernels of the tensor's dtype; and what later
# calls of this process take instead of the planner's choice, where they can (-1: nothing). Bits
# stay the same; `wanted` of explain tells.
def cuda_kernels(tensor: Tensor, tf32: bool = False) -> list[str]: ...

# ValueError: no kernel has this number, or the others are none of -1, 0 and 1.
def want_on_cuda(variant: int = -1, split: int = -1, packed: int = -1) -> None: ...
