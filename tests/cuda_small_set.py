"""A program: every kind of CUDA kernel once on small problems, for compute-sanitizer.

Prints how many calls it made; with --every 10 it makes a tenth of them. Everything is drawn on the
CPU, and no other library convolves here: under the sanitizer each kernel takes long.
"""

from __future__ import annotations

import argparse
import itertools

import torch

from conv2d_ext import _C, testing
from conv2d_ext.testing import VIEWS, Problem, Tensors, make_tensors, real_layer

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
)  # fmt: skip
# Every hyper-parameter; tails; rows of 16 bytes; sums that are cut; depthwise, of which some walk;
# few channels.
PROBLEMS = (
    testing.ASYMMETRIC[0],
    Problem("tails", 2, 19, (7, 9), 35, (3, 3), padding=(1, 1)),
    Problem("vectors", 2, 32, (8, 8), 40, (3, 3), (2, 2), (1, 1)),
    Problem("vectors of pixels", 2, 64, (4, 6), 72, (1, 1)),
    real_layer("resnet50 512@7-512/k3p1").shrunk(5),
    testing.DEPTHWISE[1],
    Problem("walk 3 x 3, stride 2", 3, 4, (31, 13), 4, (3, 3), (2, 2), (1, 1), groups=4),
    Problem("walk 5 x 5", 2, 6, (19, 8), 6, (5, 5), padding=(2, 2), groups=6),
    Problem("walk 7 x 7", 1, 3, (24, 8), 3, (7, 7), padding=(3, 3), groups=3),
    Problem("few channels", 1, 3, (9, 11), 2, (3, 2), padding=(1, 0)),
    Problem("many pixels", 1, 3, (70, 70), 33, (3, 3), padding=(1, 1)),
)
LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "channels_last": VIEWS["channels_last"],
    "unaligned": VIEWS["unaligned"],
}


def run(problem: Problem, dtype: torch.dtype, layout: str) -> int:
    """The ops without autograd; their number."""
    tensors = make_tensors(problem, dtype, device="cuda")
    input, weight, bias, grad_output = Tensors(
        *(t if t is None or t.dim() != 4 else LAYOUTS[layout](t) for t in tensors)
    )
    args = problem.op_args()
    ops = torch.ops.conv2d_ext
    ops.conv2d(input, weight, bias, *args)
    size, stride = list(weight.shape), list(tensors.weight.stride())
    ops.conv2d_grad_input(grad_output, weight, list(input.shape), *args, layout == "channels_last")
    ops.conv2d_grad_weight(grad_output, input, size, stride, *args)
    ops.conv2d_grad_bias(grad_output)
    # The GEMM of a group as matrices: shared second factors, and each its own.
    m, n, k = problem.gemm_mnk
    rows, factor = torch.randn(2, min(n, 80), k), torch.randn(2, k, m)
    if layout == "channels_last":
        rows, factor = rows.mT.contiguous().mT, factor.mT.contiguous().mT
    rows, factor = rows.to("cuda", dtype), factor.to("cuda", dtype)
    ops.matmul(rows, factor[0], None if bias is None else bias[:m].contiguous())
    ops.matmul(rows, factor, None)
    return 6


def chosen(every: int) -> list[tuple[torch.dtype, bool, Problem, str]]:
    """Of all dtypes, TF32 settings, problems and formats, every so-manyth."""
    maths = [(dtype, False) for dtype in DTYPES] + [(torch.float32, True)]
    every_one = itertools.product(maths, PROBLEMS, LAYOUTS)
    return [(*math, *rest) for math, *rest in itertools.islice(every_one, 0, None, every)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="(%(default)s)")
    calls = 0
    _C.want_on_cuda(packed=1)  # by itself only long sums pack their weight
    for dtype, tf32, problem, layout in chosen(parser.parse_args().every):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        with torch.backends.cudnn.flags(allow_tf32=tf32):
            calls += run(problem, dtype, layout)
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
