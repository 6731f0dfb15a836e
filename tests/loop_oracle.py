"""A convolution and its gradients by loops over taps, independent of F.conv2d and of unfold.

Floats are summed as pairs of float64 (value + tail, about 100 bits), so the results are an oracle
for float64 and complex128 as well; integers wrap around in int64. Slow: for small problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from conv2d_ext.testing import Oracle, Problem, Results, Tensors

_Pair = tuple[torch.Tensor, torch.Tensor]


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> _Pair:
    """a + b as the rounded sum and its exact rounding error (Knuth)."""
    total = a + b
    if not a.is_floating_point():
        return total, torch.zeros_like(total)
    b_seen = total - a
    return total, (a - (total - b_seen)) + (b - b_seen)


def _halves(a: torch.Tensor) -> _Pair:
    """a as a sum of two numbers of 26 bits, whose products are exact (Veltkamp)."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def _two_product(a: torch.Tensor, b: torch.Tensor) -> _Pair:
    """a * b as the rounded product and its exact rounding error (Dekker)."""
    product = a * b
    if not a.is_floating_point():
        return product, torch.zeros_like(product)
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    tail = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, tail


def _add(a: _Pair, b: _Pair) -> _Pair:
    total, tail = _two_sum(a[0], b[0])
    return _two_sum(total, tail + a[1] + b[1])


def _sum_last(a: _Pair) -> _Pair:
    """Sum over the last dimension, by halves."""
    while (length := a[0].shape[-1]) > 1:
        half = (length + 1) // 2
        rest = tuple(F.pad(part[..., half:], (0, 2 * half - length)) for part in a)
        a = _add(tuple(part[..., :half] for part in a), rest)
    if a[0].shape[-1] == 0:
        return a[0].sum(-1), a[1].sum(-1)
    return a[0][..., 0], a[1][..., 0]


def _taps(problem: Problem):
    """Each tap and the two slices of the padded image that its output pixels meet."""
    out_h, out_w = problem.output_shape[2:]
    for kh in range(problem.kernel[0]):
        for kw in range(problem.kernel[1]):
            h, w = kh * problem.dilation[0], kw * problem.dilation[1]
            rows = slice(h, h + (out_h - 1) * problem.stride[0] + 1, problem.stride[0])
            columns = slice(w, w + (out_w - 1) * problem.stride[1] + 1, problem.stride[1])
            yield kh, kw, rows, columns


def _pieces(channels: int, elements: int) -> Iterator[slice]:
    """Of the channels that are summed over, so many at a time that their products fit a cache."""
    piece = max(1, 2**16 // max(1, elements))
    return (slice(first, first + piece) for first in range(0, channels, piece))


def _padded_shape(problem: Problem) -> tuple[int, ...]:
    top, bottom, left, right = problem.padding4
    height, width = problem.in_size[0] + top + bottom, problem.in_size[1] + left + right
    return (problem.batch, problem.groups, problem.in_channels // problem.groups, height, width)


def _padded(problem: Problem, input: torch.Tensor) -> torch.Tensor:
    top, bottom, left, right = problem.padding4
    return F.pad(input, (left, right, top, bottom)).reshape(_padded_shape(problem))


def _grouped_weight(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(problem.groups, -1, *weight.shape[1:])


def _grouped_output(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    n, oc, oh, ow = problem.output_shape
    return tensor.reshape(n, problem.groups, oc // problem.groups, oh, ow)


def _forward(problem: Problem, input: torch.Tensor, weight: torch.Tensor) -> _Pair:
    image, kernel = _padded(problem, input), _grouped_weight(problem, weight)
    n, oc, oh, ow = problem.output_shape
    zeros = input.new_zeros(n, problem.groups, oc // problem.groups, oh, ow)
    total = zeros, zeros
    for kh, kw, rows, columns in _taps(problem):
        for ic in _pieces(kernel.shape[2], zeros.numel()):
            patch = image[:, :, None, ic, rows, columns]
            product = _two_product(patch, kernel[:, :, ic, kh, kw, None, None])
            total = _add(total, _sum_last(tuple(part.movedim(3, -1) for part in product)))
    return tuple(part.reshape(n, oc, oh, ow) for part in total)


def _grad_input(problem: Problem, grad_output: torch.Tensor, weight: torch.Tensor) -> _Pair:
    gradient, kernel = _grouped_output(problem, grad_output), _grouped_weight(problem, weight)
    total = tuple(grad_output.new_zeros(_padded_shape(problem)) for _ in range(2))
    for kh, kw, rows, columns in _taps(problem):
        here = tuple(part[..., rows, columns] for part in total)
        for oc in _pieces(kernel.shape[1], here[0].numel()):
            product = _two_product(gradient[:, :, oc, None], kernel[:, oc, :, kh, kw, None, None])
            summed = _sum_last(tuple(part.movedim(2, -1) for part in product))
            for part, new in zip(here, _add(here, summed), strict=True):
                part.copy_(new)
    top, _, left, _ = problem.padding4
    height, width = problem.in_size
    return tuple(
        part[..., top : top + height, left : left + width].reshape(problem.input_shape)
        for part in total
    )


def _grad_weight(problem: Problem, grad_output: torch.Tensor, input: torch.Tensor) -> _Pair:
    image, gradient = _padded(problem, input), _grouped_output(problem, grad_output)
    results = tuple(input.new_zeros(problem.weight_shape) for _ in range(2))
    for kh, kw, rows, columns in _taps(problem):
        for ic in _pieces(image.shape[2], gradient.numel()):
            product = _two_product(image[:, :, None, ic, rows, columns], gradient[:, :, :, None])
            summed = _sum_last(tuple(part.movedim(0, 3).flatten(3) for part in product))
            for result, part in zip(results, summed, strict=True):
                result[:, ic, kh, kw] = part.flatten(0, 1)
    return results


def _grad_bias(grad_output: torch.Tensor) -> _Pair:
    flat = grad_output.transpose(0, 1).flatten(1)
    return _sum_last((flat, torch.zeros_like(flat)))


def _bilinear(
    function: Callable[[torch.Tensor, torch.Tensor], _Pair],
    a: torch.Tensor,
    b: torch.Tensor,
    conjugate_b: bool,
) -> _Pair:
    """function(a, b), or function(a, conj(b)), from products of real tensors alone."""
    if not a.is_complex():
        return function(a, b)
    sign = -1 if conjugate_b else 1
    b_imag = b.imag * sign
    real = _add(function(a.real, b.real), function(-a.imag, b_imag))
    imag = _add(function(a.real, b_imag), function(a.imag, b.real))
    return torch.complex(real[0], imag[0]), torch.complex(real[1], imag[1])


def _by_parts(function: Callable[..., _Pair], *tensors: torch.Tensor) -> _Pair:
    """A linear function of the tensors, their real and imaginary parts taken one by one."""
    if not tensors[0].is_complex():
        return function(*tensors)
    real, imag = function(*(t.real for t in tensors)), function(*(t.imag for t in tensors))
    return torch.complex(real[0], imag[0]), torch.complex(real[1], imag[1])


def _with_bias(output: Oracle, bias: torch.Tensor) -> Oracle:
    def add(value: torch.Tensor, tail: torch.Tensor, bias: torch.Tensor) -> _Pair:
        return _add((value, tail), (bias, torch.zeros_like(bias)))

    shaped = bias.view(1, -1, 1, 1)
    value, tail = _by_parts(add, output.value, output.tail, shaped)
    return Oracle(value, tail, output.magnitude + shaped.abs())


def loop_oracle(problem: Problem, tensors: Tensors) -> Results:
    """The output and the gradients, each field a conv2d_ext.testing.Oracle (None without bias).

    Values are float64, complex128 or int64.
    """
    if tensors.input.is_complex():
        wide = torch.complex128
    else:
        wide = torch.float64 if tensors.input.is_floating_point() else torch.int64
    input, weight, bias, grad_output = (t if t is None else t.to(wide) for t in tensors)

    def oracle(function, a: torch.Tensor, b: torch.Tensor, conjugate_b: bool) -> Oracle:
        def bound(a: torch.Tensor, b: torch.Tensor) -> _Pair:
            return function(problem, a, b)

        return Oracle(*_bilinear(bound, a, b, conjugate_b), bound(a.abs(), b.abs())[0])

    output = oracle(_forward, input, weight, False)
    grad_bias = None
    if bias is not None:
        output = _with_bias(output, bias)
        magnitude = _grad_bias(grad_output.abs())[0]
        grad_bias = Oracle(*_by_parts(_grad_bias, grad_output), magnitude)
    return Results(
        output,
        oracle(_grad_input, grad_output, weight, True),
        oracle(_grad_weight, grad_output, input, True),
        grad_bias,
    )
