"""A program: the memory that each case needs beyond its results, as JSON, in bytes by case.

That is the peak of resident memory while a call ran, less what was resident before and less the
results. It runs in a process of its own, whose peak nothing else moves, and in which the C library
gives freed blocks back at once (MALLOC_MMAP_THRESHOLD_), so that no call lives on an earlier
call's memory. What the calls leave behind is measured at the end. test_workspace.py runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

import conv2d_ext
from conv2d_ext.testing import VIEWS

THREADS = 2

# Activations whose column matrices take 2.3 GiB and 27 MiB in float32.
SIZES = {"image": (1, 64, 1024, 1024), "row": (1, 3, 3, 262144)}
SMALL_SIZES = {"image": (1, 64, 3, 64), "row": (1, 3, 3, 64)}
OUT_CHANNELS = 8
DIRECTIONS = ("forward", "grad_input", "grad_weight", "grad_bias")
FAMILY = ("conv1d", "conv_transpose1d", "conv_transpose2d", "linear", "linear of images")
KINDS = ("contiguous", "channels_last", "sliced", "permuted", "expanded")
# What may reach the engines another way: other dtypes, groups, activations without a batch.
VARIANTS = {
    "float16": {"dtype": torch.float16},
    "float64": {"dtype": torch.float64},
    "complex64": {"dtype": torch.complex64},
    "int32": {"dtype": torch.int32},
    "groups": {"groups": 2},
    "unbatched": {"batched": False},
}
VARIANT_CASES = [
    (variant, direction, kind)
    for variant in VARIANTS
    for direction in DIRECTIONS
    for kind in ("sliced", "permuted")
    if variant != "int32" or direction == "forward"  # integers have no gradients
]

Call = Callable[[], tuple[torch.Tensor, ...]]


def _activation(
    kind: str, size: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Ones in the memory layout of the case; every page of them is touched."""
    n, c, h, w = size
    options = {"dtype": dtype, "device": device}
    if kind == "sliced":
        return torch.ones(n, c, h, 2 * w, **options)[..., ::2]
    if kind == "permuted":
        return torch.ones(w, n, h, c, **options).permute(1, 3, 2, 0)
    if kind == "expanded":
        return torch.ones(1, **options).expand(size)
    image = torch.ones(size, **options)
    return image if kind == "contiguous" else VIEWS[kind](image)


def _memory(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _extra_memory(call: Call) -> int:
    """What the process needed during the call, beyond the results."""
    with open("/proc/self/clear_refs", "w") as clear_refs:
        clear_refs.write("5")  # the peak becomes the present
    before = _memory("VmHWM")
    results = call()
    peak = _memory("VmHWM")
    return peak - before - sum(result.untyped_storage().nbytes() for result in results)


def extra_cuda_memory(call: Call) -> int:
    """The same of PyTorch's caching allocator, on the current GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return peak - before - sum(result.untyped_storage().nbytes() for result in results)


def measure_op(
    direction: str,
    kind: str,
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    measure: Callable[[Call], int] = _extra_memory,
    *,
    groups: int = 1,
    batched: bool = True,
) -> int:
    """One op, its activations all in one layout; batched=False: a batch of one without it."""
    weight = torch.ones(OUT_CHANNELS, size[1] // groups, 3, 3, dtype=dtype, device=device)
    geometry = ([1, 1], [1, 1, 1, 1], [1, 1], groups)
    ops = torch.ops.conv2d_ext
    if direction in ("forward", "grad_weight"):
        input = _activation(kind, size, dtype, device)
    if direction != "forward":
        grad_output = _activation(kind, (size[0], OUT_CHANNELS, *size[2:]), dtype, device)
    if not batched:
        size = size[1:]
        if direction in ("forward", "grad_weight"):
            input = input[0]
        if direction != "forward":
            grad_output = grad_output[0]
    calls = {
        "forward": lambda: ops.conv2d(input, weight, None, *geometry),
        "grad_input": lambda: ops.conv2d_grad_input(
            grad_output, weight, list(size), *geometry, False
        ),
        "grad_weight": lambda: ops.conv2d_grad_weight(
            grad_output, input, list(weight.shape), list(weight.stride()), *geometry
        ),
        "grad_bias": lambda: ops.conv2d_grad_bias(grad_output),
    }
    return measure(lambda: (calls[direction](),))


def measure_variant(variant: str, direction: str, kind: str, mib: int) -> int:
    """measure_op of one of VARIANTS, with activations of so many MiB each."""
    options = {"dtype": torch.float32, **VARIANTS[variant]}
    height = mib * 2**20 // (OUT_CHANNELS * 512 * options["dtype"].itemsize)
    return measure_op(direction, kind, (1, OUT_CHANNELS, height, 512), **options)


def measure_training_step(
    kind: str,
    size: tuple[int, ...],
    device: str = "cpu",
    measure: Callable[[Call], int] = _extra_memory,
) -> int:
    """Forward and backward of a sum, whose gradient is one number expanded."""
    weight = torch.ones(OUT_CHANNELS, size[1], 3, 3, device=device, requires_grad=True)
    bias = torch.ones(OUT_CHANNELS, device=device, requires_grad=True)
    input = _activation(kind, size, torch.float32, device).requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        output = conv2d_ext.conv2d(input, weight, bias, padding=1)
        return (output, *torch.autograd.grad(output.sum(), (input, weight, bias)))

    return measure(step)


def measure_family(name: str, pixels: int) -> int:
    """A call of another function on so many pixels of 64 channels, and its gradients."""
    side = int(pixels**0.5)
    shape, weight_shape, function = {
        "conv1d": ((2, 64, pixels // 2), (OUT_CHANNELS, 64, 5), conv2d_ext.conv1d),
        "conv_transpose1d": ((2, 64, pixels // 2), (64, OUT_CHANNELS, 4), _upsample(1)),
        "conv_transpose2d": ((1, 64, side, side), (64, OUT_CHANNELS, 4, 4), _upsample(2)),
        "linear": ((pixels, 64), (OUT_CHANNELS, 64), conv2d_ext.linear),
        "linear of images": ((2, 64, side, side // 2), (OUT_CHANNELS, 64), _linear_of_images),
    }[name]
    input = torch.ones(shape).requires_grad_()
    # A transposed convolution's bias and the weight of permuted images: exceptions that
    # docs/guarantees.md names.
    weight = torch.ones(weight_shape, requires_grad=name != "linear of images")
    bias = torch.ones(OUT_CHANNELS, requires_grad=not name.startswith("conv_transpose"))
    leaves = [leaf for leaf in (input, weight, bias) if leaf.requires_grad]

    def step() -> tuple[torch.Tensor, ...]:
        output = function(input, weight, bias)
        return (output, *torch.autograd.grad(output.sum(), leaves))

    return _extra_memory(step)


def _upsample(dims: int) -> Callable[..., torch.Tensor]:
    function = {1: conv2d_ext.conv_transpose1d, 2: conv2d_ext.conv_transpose2d}[dims]
    return lambda input, weight, bias: function(input, weight, bias, stride=2, padding=1)


def _linear_of_images(
    images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return conv2d_ext.linear(images.permute(0, 2, 3, 1), weight, bias)


def measure_all() -> dict[str, int]:
    found = {}
    # The first pass brings threads, code pages and the allocator's arenas into being.
    for sizes in (SMALL_SIZES, SIZES):
        before = _memory("VmRSS")
        for name, size in sizes.items():
            for kind in KINDS:
                found[f"training step, {name}, {kind}"] = measure_training_step(kind, size)
        for direction in DIRECTIONS:
            for dtype in (torch.float32, torch.bfloat16):
                for kind in KINDS:
                    case = f"{direction}, {str(dtype).removeprefix('torch.')}, {kind}"
                    found[case] = measure_op(direction, kind, sizes["image"], dtype)
        for variant, direction, kind in VARIANT_CASES:
            mib = 20 if sizes is SIZES else 1
            case = f"{variant}, {direction}, {kind}"
            found[case] = measure_variant(variant, direction, kind, mib)
        for name in FAMILY:
            found[name] = measure_family(name, 2**18 if sizes is SIZES else 2**8)
        found["kept"] = _memory("VmRSS") - before
    # For the measure's own test: a copy of 32 MiB, and nothing but a result.
    source = torch.ones(8 * 2**20)
    found["a copy"] = _extra_memory(lambda: (source.clone() * 2,))
    found["no copy"] = _extra_memory(lambda: (source * 2,))
    return found


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    json.dump(measure_all(), sys.stdout)
