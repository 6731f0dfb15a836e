"""What the host execution of CUDA kernels promises: it finds what hardware wouldn't tell.

Kernels with one fault each (tests/cuda_host/shim_selftest.cpp) fail with that fault named, whatever
the order of threads; their right forms pass. Bank conflicts are counted exactly, and the device's
numbers and matrix fragments are those that PTX documents.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda_host.build import run_sanitized
from cuda_host.selftest import Order, Selftest, build_selftest, selftest

# A piece of what the failure must say, or None where the kernel is right.
RACE = "no barrier is between them"
IN_FLIGHT = "has not been waited for"
EXPECTED = {
    "exchange, no barrier": RACE,
    "exchange, sync_warp in a warp": None,
    "exchange, sync_warp between warps": RACE,
    "exchange, shuffle as a barrier": RACE,
    "exchange, sync_threads": None,
    "exchange with itself, no barrier": None,
    "overwrite, no barrier": RACE,
    "overwrite, sync_warp": None,
    "overwrite, sync_threads": None,
    "all write one word": RACE,
    "write halves of words": None,
    "three readers of a warp": None,
    "three readers of two warps": RACE,
    "copy, wait and sync_threads": None,
    "copy, wait and sync_warp": None,
    "copy, own element, wait": None,
    "copy, wait, no barrier": "race",
    "copy, sync_threads, no wait": IN_FLIGHT,
    "copy, own element, no wait": IN_FLIGHT,
    "two groups, wait for both": None,
    "two groups, wait for the older": IN_FLIGHT,
    "ring, sync_threads": None,
    "ring, copy begins too early": "race",
    "ring, sync_warp": "race",
    "end with a committed copy in flight": "ends with an asynchronous copy in flight",
    "end with an uncommitted copy": "ends with an asynchronous copy in flight",
    "copy over a copy": IN_FLIGHT,
    "store past the end": "out of range",
    "store across the end": "out of range",
    "store before the beginning": "out of range",
    "store the last bytes": None,
    "store misaligned": "misaligned",
    "load past the end": "out of range",
    "load misaligned": "misaligned",
    "copy aligned": None,
    "copy to a misaligned address": "misaligned",
    "copy from a misaligned address": "misaligned",
    "copy past the end": "out of range",
    "load global": None,
    "load global misaligned": "misaligned",
    "dereference shared": "reaches shared memory past load_shared",
    "divide by zero": "divides by zero",
    "read unwritten": None,
    "barrier of some": "wait for others that never come",
    "different barriers": "wait for others that never come",
    "barrier too often": "wait for others that never come",
    "shuffle without a lane that ended": "wait for others that never come",
    "shuffle without a lane that waits": "wait for others that never come",
    "shuffles of half warps": "divergence",
    "shuffle sum": None,
    "matrices, sync_warp": None,
    "matrices, no barrier": RACE,
    "unrounded tf32": "was not rounded to tf32",
    "arrival": None,
    "arrival of CTAs": None,
}
ORDERS = [(Order.FORWARD, 0), (Order.REVERSE, 0), *((Order.SHUFFLED, seed) for seed in range(3))]


def check_cases(library: Selftest, left_out: tuple[str, ...] = ()) -> None:
    """Every case in every order; also run with sanitizers."""
    assert library.cases() == list(EXPECTED)
    for name, (order, seed) in itertools.product(EXPECTED, ORDERS):
        if name in left_out:
            continue
        error, out = library.run(name, order, seed)
        expected = EXPECTED[name]
        if expected is None:
            assert not error, name
            assert -1.0 not in out or name == "three readers of a warp", name
        else:
            assert expected in error, name
            # Where: the kernel, the CTA, and the line (of faults of the host, the thread).
            assert "conv2d_ext::cuda_selftest::" in error, name
            assert "CTA (0, 0, 0)" in error, name
            without_line = name in ("dereference shared", "divide by zero")
            assert (", thread " if without_line else "shim_selftest.cpp:") in error, name


def test_each_fault_is_found_in_every_order():
    check_cases(selftest())


def test_sanitizers_agree():
    """Fibers and failures leave nothing that AddressSanitizer or UBSan object to."""
    program = (
        "import sys; from cuda_host.selftest import Selftest; import test_cuda_shim;"
        # UBSan ends the process at the division itself.
        "test_cuda_shim.check_cases(Selftest(sys.argv[1]), ('divide by zero',)); print('checked')"
    )
    done = run_sanitized("-c", program, str(build_selftest(sanitize=True)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "checked\n"
    assert not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("load global", "out of range: reads 8 bytes of global memory (shim_selftest.cpp:"),
        ("shuffle sum", "heap-buffer-overflow"),  # by plain access, which ends the process
    ],
)
def test_sanitizers_see_reads_beyond_a_tensor(case, expected):
    program = (
        "import ctypes, sys; from cuda_host.selftest import Order, Selftest;"
        "malloc = ctypes.CDLL(None).malloc; malloc.restype = ctypes.c_void_p;"
        "print(Selftest(sys.argv[1]).run(sys.argv[2], Order.FORWARD, 1, malloc(12))[0])"
    )
    done = run_sanitized("-c", program, str(build_selftest(sanitize=True)), case)
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_results(order, seed):
    """What right kernels compute, among them the landing of asynchronous copies."""

    def run(name):
        error, out = selftest().run(name, order, seed)
        assert not error, error
        return out

    assert run("exchange, sync_threads") == [i ^ 33 for i in range(64)]
    assert run("exchange, sync_warp in a warp") == [i ^ 1 for i in range(64)]
    assert run("write halves of words") == list(range(64))
    landed = [i if i % 2 == 0 else 0 for i in range(64)]
    assert run("copy, own element, wait") == landed
    assert run("copy, wait and sync_threads") == [landed[i ^ 33] for i in range(64)]
    assert run("ring, sync_threads") == [4 * (i ^ 33) for i in range(64)]
    assert run("shuffle sum") == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32
    assert run("three readers of a warp")[:3] == [5, 5, 5]


@pytest.mark.parametrize("order", Order)
def test_unwritten_shared_memory_is_nan(order):
    """In each CTA, and in the launch after one that failed."""
    for _ in range(2):
        error, out = selftest().run("read unwritten", order)
        assert not error, error
        assert all(value != value for value in out)
        assert selftest().run("exchange, no barrier", order)[0]


@pytest.mark.parametrize("case", ["arrival", "arrival of CTAs"])
def test_orders(case):
    def run(order, seed=1):
        return selftest().run(case, order, seed)[1]

    assert run(Order.FORWARD) == list(range(64))
    assert run(Order.REVERSE) == list(reversed(range(64)))
    first, again, other = (run(Order.SHUFFLED, seed) for seed in (1, 1, 2))
    assert first == again
    assert sorted(first) == sorted(other) == list(range(64))
    assert len({tuple(found) for found in (first, other, run(Order.FORWARD))}) == 3


# Pattern, stride in elements (bytes for matrices): (accesses, wavefronts, ideal).
BANKS = {
    ("load 4", 0): (1, 1, 1),
    ("load 4", 1): (1, 1, 1),
    ("load 4", 2): (1, 2, 1),
    ("load 4", 3): (1, 1, 1),
    ("load 4", 4): (1, 4, 1),
    ("load 4", 32): (1, 32, 1),
    ("load 4", 33): (1, 1, 1),
    ("load 4, half a warp", 2): (1, 1, 1),
    ("load 4, half a warp", 32): (1, 16, 1),
    ("store 4", 1): (1, 1, 1),
    ("store 4", 32): (1, 32, 1),
    ("store 4", 33): (1, 1, 1),
    ("load 2", 1): (1, 1, 1),
    ("load 2", 2): (1, 1, 1),
    ("load 2", 4): (1, 2, 1),
    ("load 2", 64): (1, 32, 1),
    ("load 8", 0): (1, 2, 2),
    ("load 8", 1): (1, 2, 2),
    ("load 8", 2): (1, 4, 2),
    ("load 8", 16): (1, 32, 2),
    ("load 8", 17): (1, 2, 2),
    ("load 16", 0): (1, 4, 4),
    ("load 16", 1): (1, 4, 4),
    ("load 16", 2): (1, 8, 4),
    ("load 16", 8): (1, 32, 4),
    ("load 16", 9): (1, 4, 4),
    ("store 16", 1): (1, 4, 4),
    ("store 16", 8): (1, 32, 4),
    # 16 bytes that a compiler takes to be aligned to 4 only.
    ("load 4 words", 1): (4, 16, 4),
    ("copy 4", 1): (1, 1, 1),
    ("copy 4", 32): (1, 32, 1),
    ("copy 8", 1): (1, 2, 2),
    ("copy 16", 1): (1, 4, 4),
    ("copy 16", 8): (1, 32, 4),
    # Four matrices of 8 rows. Rows of 64 bytes meet 4 times on the same banks, unless swizzled.
    ("matrices", 16): (1, 4, 4),
    ("matrices", 64): (1, 16, 4),
    ("matrices", 80): (1, 4, 4),
    ("matrices", 128): (1, 32, 4),
    ("matrices, swizzled", 64): (1, 4, 4),
}


@pytest.mark.parametrize(("pattern", "stride"), BANKS)
def test_bank_conflicts(pattern, stride):
    for order in Order:
        assert selftest().banks(pattern, stride, order) == BANKS[pattern, stride]


# As PTX documents mma.m16n8k8 (tf32) and mma.m16n8k16 (16 bits): (row, column) of element i of the
# lane with group g = lane / 4 and thread t = lane % 4.
def a_position(k_size, g, t, i):
    if k_size == 8:
        return g + 8 * (i in (1, 3)), t + 4 * (i >= 2)
    return g + 8 * (i in (2, 3, 6, 7)), 2 * t + (i & 1) + 8 * (i >= 4)


def b_position(k_size, g, t, i):
    return (t + 4 * i, g) if k_size == 8 else (2 * t + (i & 1) + 8 * (i >= 2), g)


def d_position(g, t, i):
    return g + 8 * (i >= 2), 2 * t + (i & 1)


def fragments(matrix, position, elements):
    """[lane][element] of a matrix."""
    return torch.stack(
        [
            torch.stack([matrix[position(lane // 4, lane % 4, i)] for i in range(elements)])
            for lane in range(32)
        ]
    ).contiguous()


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("kind", range(3))
def test_mma_is_the_matrix_product(kind, order):
    k = (8, 16, 16)[kind]
    dtype = (torch.float32, torch.float16, torch.bfloat16)[kind]
    # Few bits each, so that tf32 holds them and sums are exact.
    a = torch.randint(-100, 100, (16, k)).to(dtype) / 16
    b = torch.randint(-100, 100, (k, 8)).to(dtype) / 16
    d = torch.randint(-1000, 1000, (16, 8)).float() / 8
    in_registers = (4, 8, 8)[kind], (2, 4, 4)[kind]
    result = selftest().mma(
        kind,
        order,
        fragments(a, lambda *at: a_position(k, *at), in_registers[0]),
        fragments(b, lambda *at: b_position(k, *at), in_registers[1]),
        fragments(d, d_position, 4),
    )
    expected = (d.double() + a.double() @ b.double()).float()
    assert torch.equal(result, fragments(expected, d_position, 4))


def test_mma_rounds_once():
    """1 + 2^-24 + 2^-24: rounded after each addition this is 1."""
    a = torch.zeros(16, 16, dtype=torch.float16)
    b = torch.zeros(16, 8, dtype=torch.float16)
    a[:, :3] = torch.tensor([1.0, 2.0**-12, 2.0**-12])
    b[:3] = torch.tensor([1.0, 2.0**-12, 2.0**-12])[:, None]
    result = selftest().mma(
        1,
        Order.FORWARD,
        fragments(a, lambda *at: a_position(16, *at), 8),
        fragments(b, lambda *at: b_position(16, *at), 4),
        torch.zeros(32, 4),
    )
    assert (result == 1 + 2.0**-23).all()


def test_load_matrix():
    """Lane l names row l % 8 of matrix l / 8; element pairs go to lanes row by row."""
    elements = torch.arange(32 * 8, dtype=torch.int16).reshape(32, 8)
    order = torch.randperm(32, dtype=torch.int32)
    found = selftest().matrices(elements, order).view(torch.int16).reshape(32, 4, 2)
    for lane, matrix in itertools.product(range(32), range(4)):
        row = elements[order[matrix * 8 + lane // 4]]
        assert found[lane, matrix].tolist() == row[lane % 4 * 2 :][:2].tolist()
    found = selftest().matrices(elements, order, transposed=True).view(torch.int16)
    found = found.reshape(32, 4, 2)
    for lane, matrix in itertools.product(range(32), range(4)):
        rows = order[matrix * 8 + lane % 4 * 2 :][:2].long()
        assert found[lane, matrix].tolist() == elements[rows, lane // 4].tolist()


def float32_samples():
    """Every exponent, with significands around every rounding border, of both signs."""
    exponents = torch.arange(256, dtype=torch.int64) << 23
    borders = torch.tensor(
        [0, 1 << 10, 1 << 12, 1 << 13, 1 << 15, 1 << 16, 3 << 12, 3 << 15, 1 << 23]
    )
    near = (borders[:, None] + torch.arange(-2, 3)).flatten().clamp(0, (1 << 23) - 1)
    significands = torch.cat([near, torch.randint(0, 1 << 23, (400,))])
    bits = (exponents[:, None] + significands).flatten()
    return torch.cat([bits, bits + (1 << 31)]).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_numbers(dtype):
    """Against torch: each number of the format, and rounding over all of float32's range."""
    name = str(dtype).removeprefix("torch.")
    every = torch.arange(1 << 16, dtype=torch.int32)
    widened = every.to(torch.int16).view(dtype).float()
    found = selftest().convert(f"from {name}", every).view(torch.float32)
    torch.testing.assert_close(found, widened, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), widened.signbit())

    bits = float32_samples()
    exact = bits.view(torch.float32)
    found = selftest().convert(f"to {name}", bits).to(torch.int16).view(dtype)
    torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    numbers = ~exact.isnan()
    assert torch.equal(found[numbers].signbit(), exact[numbers].signbit())


def test_tf32():
    """The nearest multiple of 2^-10 of the number's power of two, ties away from zero."""
    bits = float32_samples()
    exact = bits.view(torch.float32)
    found_bits = selftest().convert("to tf32", bits)
    found = found_bits.view(torch.float32)
    assert (found_bits & 0x1FFF == 0).all()
    assert torch.equal(found.isnan(), exact.isnan())

    exact, found = exact[~exact.isnan()].double(), found[~exact.isnan()].double()
    quantum = 2.0 ** (exact.abs().frexp().exponent.clamp(min=-125) - 11).double()
    expected = (exact.abs() / quantum + 0.5).floor() * quantum * exact.sign()
    expected = torch.where(exact.isinf(), exact, expected).float()  # the largest become Inf
    assert torch.equal(found.float(), expected)


def test_tf32_of_particular_numbers():
    def convert(bits):
        return selftest().convert(
            "to tf32", torch.tensor([bits], dtype=torch.int64).to(torch.int32)
        )

    for nan in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000):
        assert convert(nan).view(torch.float32).isnan().all()
    assert convert(0x7F800000).item() == 0x7F800000  # Inf
    assert convert(0x3F801000).item() == 0x3F802000  # ties, up and away from zero
    assert convert(0x3F803000).item() == 0x3F804000
    assert convert(0x3F800FFF).item() == 0x3F800000
    assert convert(0x7F7FFFFF).item() == 0x7F800000  # rounds beyond the largest number


@pytest.mark.parametrize(
    ("configuration", "error"),
    [
        ((1, 1, 1024, 48 << 10), ""),
        ((1, 1, 1024, 227 << 10, 227 << 10), ""),
        ((0, 1, 32, 0), "invalid configuration argument"),
        ((1, 65536, 32, 0), "invalid configuration argument"),
        ((1, 1, 0, 0), "invalid configuration argument"),
        ((1, 1, 1025, 0), "invalid configuration argument"),
        ((1, 1, 32, 227 << 10, (227 << 10) + 1), "invalid argument"),
    ],
)
def test_launches_are_refused_as_the_device_does(configuration, error):
    assert selftest().launch(*configuration) == error


def test_a_kernels_limit_of_shared_memory_is_the_last_that_was_set():
    """Also where that is lower, and for all later launches."""
    assert selftest().launch(1, 1, 32, 100 << 10, 126 << 10) == ""
    assert selftest().launch(1, 1, 32, 126 << 10) == ""
    assert selftest().launch(1, 1, 32, 77 << 10, 77 << 10) == ""
    assert selftest().launch(1, 1, 32, (77 << 10) + 1) == "invalid argument"
    assert selftest().launch(1, 1, 32, 48 << 10, 1) == ""
