"""matmul and linear: values, bits that follow k alone, derivatives, errors, transforms.

Seen to fail: with the rules of a 1x1 convolution in matmul's place, test_a_row_has_the_same_bits
failed for one row (dot products along k) and for bfloat16 of few columns (no pairs).
"""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from accuracy import over_draws, times_pytorchs
from observing import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_versions import IS_OLDER, not_in_older

import conv2d_ext
from conv2d_ext.testing import Oracle, unit_roundoff

matmul = torch.ops.conv2d_ext.matmul

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
over_real = pytest.mark.parametrize("dtype", REAL, ids=str)
over_all = pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)

# M, N, K: one of each, tails of vectors and panels, several segments, several chunks of segments.
SIZES = (
    (1, 1, 1),
    (1, 300, 129),
    (2, 3, 5),
    (7, 1, 64),
    (33, 17, 127),
    (5, 70, 128),
    (19, 35, 300),
    (130, 66, 257),
    (3, 9, 2300),
    (1, 20, 4100),
)
over_sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))


def operands(size: tuple[int, int, int], dtype: torch.dtype, seed: int = 0):
    m, n, k = size
    wide = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=wide, generator=generator).to(dtype)

    return draw(m, k), draw(k, n), draw(n)


@over_all
@over_sizes
def test_values(size, dtype, device):
    """As guarantee 3 has it, over several draws, since few results' errors are chance."""
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def draw(seed: int) -> tuple[torch.Tensor, ...]:
        args = [t.to(device) for t in operands(size, dtype, seed)]
        widened = [t.to(wide) for t in args]
        exact, magnitude = (a @ b + c for a, b, c in (widened, [t.abs() for t in widened]))
        mat1, mat2, bias = args
        return matmul(*args), torch.addmm(bias, mat1, mat2), exact, magnitude

    def check(count: int) -> None:
        draws = [draw(seed) for seed in range(100 * count, 101 * count)]
        ours, theirs, value, magnitude = (torch.stack(same) for same in zip(*draws, strict=True))
        oracle = Oracle(value, None, magnitude)
        times = max(times_pytorchs(device), 3 if size[1] < 16 else 2)
        # For float64, whose oracle is of its own precision, the oracle's roundings as well.
        slack = unit_roundoff(dtype) + size[2] ** 0.5 * torch.finfo(wide).eps
        for measure in (oracle.relative_l2, oracle.max_scaled_error):
            assert measure(ours) <= times * measure(theirs) + slack, measure.__name__

    over_draws(check)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_exact(dtype):
    mat1 = torch.randint(0, 100, (7, 40)).to(dtype)
    mat2 = torch.randint(0, 100, (40, 5)).to(dtype)
    assert torch.equal(matmul(mat1, mat2, None), mat1 @ mat2)


@over_all
@over_sizes
def test_a_row_has_the_same_bits(size, dtype, device):
    """Alone, beside others, in another form of the call, on other threads and in other strides."""
    m, n, k = size
    mat1, mat2, bias = (t.to(device) for t in operands(size, dtype))
    whole = matmul(mat1, mat2, bias)
    for row in {0, m // 2, m - 1}:
        assert same_bits(matmul(mat1[row : row + 1], mat2, bias), whole[row : row + 1])
    for columns in ({0}, {n - 1}, range(n // 2, n)):
        index = torch.tensor(list(columns), device=device)
        assert same_bits(matmul(mat1, mat2[:, index], bias[index]), whole[:, index])
    for strided1, strided2 in itertools.product(
        (mat1.t().contiguous().t(), torch.stack((mat1, mat1), -1)[..., 0]),
        (mat2.t().contiguous().t(), torch.cat((mat2, mat2), 1)[:, :n]),
    ):
        assert same_bits(matmul(strided1, strided2, bias), whole)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert same_bits(matmul(mat1, mat2, bias), whole)
    batch = torch.stack((mat1 * 2, mat1, -mat1))
    assert same_bits(matmul(batch, mat2, bias)[1], whole)
    plain = matmul(mat1, mat2, None)
    assert same_bits(matmul(batch, mat2.expand(3, k, n), None)[1], plain)
    assert same_bits(matmul(batch, torch.stack((mat2, mat2, mat2 * 3)), None)[1], plain)
    assert same_bits(conv2d_ext.linear(mat1, mat2.t(), bias), whole)
    if not dtype.is_complex:  # an imaginary part's two products follow the factors' roles
        assert same_bits(matmul(mat2.t(), mat1.t(), None).t(), plain)


@over_all
def test_gradients_keep_a_row_s_bits(dtype):
    """In every layout of the factors, which the gradients take over where no bit depends on it."""
    mat1, mat2, _ = operands((40, 70, 200), dtype)
    grad = operands((40, 70, 1), dtype, seed=1)[0].expand(40, 70).contiguous()

    def gradients(rows: slice, by_columns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = [mat1[rows], mat2]
        if by_columns:
            leaves = [leaf.t().contiguous().t() for leaf in leaves]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(matmul(*leaves, None), leaves, grad[rows])

    whole, of_mat2 = gradients(slice(None))
    assert same_bits(gradients(slice(None), by_columns=True)[1], of_mat2)
    for by_columns in (False, True):
        for rows in (slice(None), slice(0, 1), slice(3, 20), slice(39, 40)):
            assert same_bits(gradients(rows, by_columns)[0], whole[rows])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.bool, torch.complex32])
def test_other_dtypes_are_refused(dtype):
    factor = torch.zeros(2, 2, dtype=dtype)
    with pytest.raises(NotImplementedError, match='"matmul" not implemented for'):
        matmul(factor, factor, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_refused_on_cuda(dtype):
    """As torch.mm refuses them; its kernels have no integers. Fake tensors need no GPU."""
    with FakeTensorMode():
        factor = torch.empty(2, 2, dtype=dtype, device="cuda")
        with pytest.raises(RuntimeError, match='"addmm_cuda" not implemented for'):
            matmul(factor, factor, None)


@hypothesis.given(
    size=st.tuples(*(st.integers(0, 40),) * 3), batch=st.integers(0, 3), dtype=st.sampled_from(REAL)
)
def test_random_sizes_and_empty_ones(size, batch, dtype):
    m, n, k = size
    generator = torch.Generator().manual_seed(m * 1681 + n * 41 + k)
    mat1 = torch.randn(batch, m, k, generator=generator).to(dtype)
    mat2 = torch.randn(batch, k, n, generator=generator).to(dtype)
    result = matmul(mat1, mat2, None)
    expected = torch.bmm(mat1.double(), mat2.double())
    assert result.shape == expected.shape
    assert result.is_contiguous()
    scale = torch.bmm(mat1.double().abs(), mat2.double().abs()) + 1e-30
    assert ((result.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * scale).all()


class TestLinear:
    @pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5)])
    @pytest.mark.parametrize("bias", ["none", "vector", "row", "scalar", "whole"])
    def test_values_and_strides(self, shape, bias):
        input, weight = torch.randn(shape), torch.randn(7, 5)
        size = {"vector": (7,), "row": (1, 7), "scalar": (), "whole": (*shape[:-1], 7)}
        if bias == "row" and len(shape) == 1:
            pytest.skip("F.linear takes no bias of more dimensions than its result")
        if bias == "whole" and IS_OLDER:
            pytest.skip("F.linear of older versions of PyTorch doesn't always take it")
        b = None if bias == "none" else torch.randn(size[bias])
        result, expected = conv2d_ext.linear(input, weight, b), F.linear(input, weight, b)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
    def test_rows_have_the_bits_of_contiguous_ones(self, order, dtype):
        """Images permuted and sliced in any way: rows of a matrix, of a batch of them, of none."""
        weight, bias = torch.randn(7, 20, dtype=dtype), torch.randn(7, dtype=dtype)
        shape = [2, 3, 5, 20]
        base = torch.randn([shape[order.index(i)] for i in range(4)], dtype=dtype)
        whole = base.permute(order)
        for input in (
            whole,
            whole[:, 1:],
            whole[:, :, ::2],
            whole[:, :, :0],
            whole[:1],
            whole[None],
        ):
            results = []
            for leaf in (input.detach(), input.detach().contiguous()):
                leaves = [t.detach().requires_grad_() for t in (leaf, weight, bias)]
                output = conv2d_ext.linear(*leaves)
                assert output.stride() == F.linear(leaf, weight, bias).stride()
                grad = torch.ones_like(output).cumsum(-1)
                results.append((output, *torch.autograd.grad(output, leaves, grad)))
            assert all(same_bits(a, b) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
    @pytest.mark.parametrize("by_columns", [False, True])
    def test_gradients_lie_as_their_arguments(self, dtype, by_columns):
        def make(rows, columns):
            matrix = torch.randn(columns, rows, dtype=dtype).t()
            return (matrix if by_columns else matrix.contiguous()).requires_grad_()

        input, weight = make(3, 8), make(5, 8)
        output = conv2d_ext.linear(input, weight)
        for leaf, grad in zip(
            (input, weight),
            torch.autograd.grad(output, (input, weight), torch.ones_like(output)),
            strict=True,
        ):
            assert grad.stride() == leaf.stride()

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("make", [
        lambda: torch.randn(1, 8, 12).transpose(1, 2),
        lambda: torch.randn(2, 8, 12).transpose(1, 2),
        lambda: torch.randn(8, 12).t().unsqueeze(0),
        lambda: torch.randn(1, 8, 1).transpose(1, 2),
        lambda: torch.randn(1, 8, 12)[:, :, ::2].transpose(1, 2),
    ])  # fmt: skip
    def test_gradients_of_tokens_lie_as_pytorchs(self, make, frozen):
        """Of an image's pixels as tokens. PyTorch's batch norm before them mistakes other strides
        in a batch of one (at 2.11), and passes wrong gradients on."""
        weight = torch.randn(5, 8).requires_grad_(not frozen)
        tokens = make().requires_grad_()
        strides = []
        for linear in (F.linear, conv2d_ext.linear):
            output = linear(tokens, weight)
            (grad,) = torch.autograd.grad(output, tokens, torch.ones_like(output))
            strides.append(grad.stride())
        assert strides[0] == strides[1]

    @over_all
    def test_gradients_of_tokens_follow_no_batch(self, dtype):
        """That of one image lies by columns, those of several by rows."""
        images = torch.randn(3, 24, 35).to(dtype)
        weight = torch.randn(19, 24).to(dtype).requires_grad_()
        grad_output = torch.randn(3, 35, 19).to(dtype)

        def gradient(which: slice) -> torch.Tensor:
            leaf = images[which].requires_grad_()
            output = conv2d_ext.linear(leaf.transpose(1, 2), weight)
            (grad,) = torch.autograd.grad(output, leaf, grad_output[which], create_graph=True)
            return grad

        whole = gradient(slice(None))
        for i in range(3):
            assert same_bits(gradient(slice(i, i + 1))[0], whole[i])
        (second,) = torch.autograd.grad(
            gradient(slice(1)).sum(), weight, torch.ones((), dtype=dtype)
        )
        exact = grad_output[0].to(torch.complex128).sum(0)[:, None].expand(19, 24)
        if not dtype.is_complex:
            torch.testing.assert_close(second.double(), exact.real, rtol=0.02, atol=0.05)

    def test_traces_hold_for_other_strides(self):
        """Of images whose permutation is contiguous, run with those for which it is not."""
        layer = conv2d_ext.Linear(6, 7).requires_grad_(False)

        def run(images: torch.Tensor) -> torch.Tensor:
            return layer(images.permute(0, 2, 3, 1))

        images = torch.randn(2, 6, 3, 5)
        last = images.contiguous(memory_format=torch.channels_last)
        for example, other in ((last, images), (images, last)):
            assert same_bits(torch.jit.trace(run, example)(other), run(other))

    def test_exports_with_a_size_that_data_decides(self):
        class Chosen(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = conv2d_ext.Linear(6, 7)

            def forward(self, images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                return self.layer(images[mask].permute(0, 2, 3, 1))

        module, images = Chosen(), torch.randn(4, 6, 3, 5)
        exported = torch.export.export(module, (images, torch.tensor([True, False, True, True])))
        mask = torch.tensor([False, True, True, False])
        assert same_bits(exported.module()(images, mask), module(images, mask))

    def test_weight_of_one_row_without_its_dimension(self):
        input, weight = torch.randn(4, 5), torch.randn(5)
        torch.testing.assert_close(conv2d_ext.linear(input, weight), F.linear(input, weight))

    @not_in_older
    @pytest.mark.parametrize("bias", [(), (1, 1), (2, 4)], ids=str)
    def test_weight_of_one_row_without_its_dimension_and_a_bias(self, bias):
        """One that F.linear adds to the product; others it refuses."""
        input, weight, bias = torch.randn(2, 4, 5), torch.randn(5), torch.randn(bias)
        expected = F.linear(input, weight, bias)
        torch.testing.assert_close(conv2d_ext.linear(input, weight, bias), expected)

    @pytest.mark.parametrize(
        ("input", "weight", "bias"),
        [
            (torch.randn(4, 5), torch.randn(7, 6), None),
            (torch.randn(2, 4, 5), torch.randn(7, 6), None),
            (torch.randn(4, 5), torch.randn(7, 5).double(), None),
            (torch.randn(4, 5), torch.randn(7, 5), torch.randn(6)),
            (torch.randn(4, 5), torch.randn(7, 5), torch.randn(2, 3, 7)),
            (torch.randn(4, 5), torch.randn(7, 5, 1), None),
            (torch.randn(()), torch.randn(7, 5), None),
            (torch.randn(4, 5), torch.randn(5), torch.randn(1)),
            (torch.randn(4, 5), torch.randn(5), torch.randn(())),
            (torch.randn(5), torch.randn(5), torch.randn(1)),
        ],
    )
    def test_what_linear_refuses_is_refused(self, input, weight, bias):
        with pytest.raises(RuntimeError):
            F.linear(input, weight, bias)
        with pytest.raises(RuntimeError):
            conv2d_ext.linear(input, weight, bias)

    def test_messages(self):
        with pytest.raises(RuntimeError, match=r"cannot be multiplied \(4x5 and 6x7\)"):
            conv2d_ext.linear(torch.randn(4, 5), torch.randn(7, 6))
        with pytest.raises(RuntimeError, match="must have the same dtype, but got Float and Doub"):
            conv2d_ext.linear(torch.randn(4, 5), torch.randn(7, 5).double())
        with pytest.raises(TypeError, match="linear"):
            conv2d_ext.linear(torch.randn(4, 5), None)

    def test_autocast(self):
        input, weight, bias = torch.randn(4, 5), torch.randn(7, 5), torch.randn(7)
        with torch.autocast("cpu", torch.bfloat16):
            result = conv2d_ext.linear(input, weight, bias)
            assert result.dtype == F.linear(input, weight, bias).dtype == torch.bfloat16

    def test_compiles_whole(self):
        def layer(x, w, b):
            return conv2d_ext.linear(x, w, b).relu()

        args = torch.randn(4, 6, 5), torch.randn(7, 5), torch.randn(7)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(*args), layer(*args))


def _doubles(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


FORMS = (((4, 5), (5, 2), (2,)), ((3, 4, 5), (5, 2), (2,)), ((3, 4, 5), (3, 5, 2)))
over_forms = pytest.mark.parametrize("shapes", FORMS, ids=str)


def _arguments(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return [*tensors, *[None] * (3 - len(tensors))]


@over_forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_derivatives(shapes, dtype):
    args = _arguments(_doubles(*shapes, dtype=dtype))
    torch.autograd.gradcheck(matmul, args, check_forward_ad=True)
    torch.autograd.gradgradcheck(matmul, args)


@over_forms
def test_opcheck(shapes):
    torch.library.opcheck(matmul.default, tuple(_arguments(_doubles(*shapes))))


@over_forms
@pytest.mark.parametrize("batched", [*itertools.product((True, False), repeat=3)], ids=str)
def test_vmap(shapes, batched):
    args = [
        torch.randn((6, *shape) if b else shape) for shape, b in zip(shapes, batched, strict=False)
    ]
    dims = [0 if b else None for b, _ in zip(batched, args, strict=False)]
    if all(dim is None for dim in dims):
        return
    missing = [None] * (3 - len(args))
    result = torch.func.vmap(matmul, in_dims=(*dims, *missing))(*args, *missing)
    for i in range(6):
        one = [arg if dim is None else arg[i] for arg, dim in zip(args, dims, strict=True)]
        torch.testing.assert_close(result[i], matmul(*one, *missing))


def test_transforms():
    mat1, mat2, _ = (t.detach() for t in _doubles((4, 5), (5, 2), (2,)))
    ours = torch.func.jacrev(lambda a: matmul(a, mat2, None))(mat1)
    torch.testing.assert_close(ours, torch.func.jacrev(lambda a: a @ mat2)(mat1))
    hessian = torch.func.hessian(lambda a: matmul(a, mat2, None).pow(3).sum())(mat1)
    torch.testing.assert_close(hessian, torch.func.hessian(lambda a: (a @ mat2).pow(3).sum())(mat1))


# ---- explain_matmul


@pytest.mark.skipif(
    conv2d_ext.build_config()["isa"] == "portable", reason="needs a vector engine, which has them"
)
def test_explain_names_the_driver_of_few_rows():
    weight = torch.randn(300, 64)
    bias = torch.randn(300)
    few, many = torch.randn(2, 64), torch.randn(100, 64)
    along_k = conv2d_ext.explain_matmul(few, weight.t(), bias)
    side_by_side = conv2d_ext.explain_matmul(few, weight.t().contiguous(), bias)
    assert along_k.engine == "columns times factors"
    assert along_k.micro_kernel.startswith("column_ukernel_f32_2x")
    assert side_by_side.engine == "rows times factors"
    packed = conv2d_ext.explain_matmul(many, weight.t(), bias)
    assert packed.engine.startswith("implicit GEMM")
    assert any("rows" in reason for _, reason in packed.candidates)
    # The choice changes no bit, so the chains are the same.
    for plan in (along_k, side_by_side, packed):
        assert (plan.gemm_m, plan.gemm_k, plan.k_segments) == (300, 64, 1)
        assert 0 < plan.workspace_bytes_per_thread <= 4 * 2**20
    assert (along_k.gemm_n, packed.gemm_n) == (2, 100)


def test_explain_takes_the_rows_of_a_batch_for_those_of_one_matrix():
    batch, mat2 = torch.randn(5, 7, 64), torch.randn(64, 20)
    plan = conv2d_ext.explain_matmul(batch, mat2)
    assert plan == conv2d_ext.explain_matmul(batch.view(35, 64), mat2)
    assert plan.gemm_n == 35


def test_explain_counts_the_work_items_of_every_product():
    mat1, mat2 = torch.randn(6, 3, 20), torch.randn(6, 20, 5)
    one = conv2d_ext.explain_matmul(mat1[:1], mat2[:1])
    every = conv2d_ext.explain_matmul(mat1, mat2)
    assert every.work_items == 6 * one.work_items
    assert every.micro_kernel == one.micro_kernel


def test_explain_reads_no_data_and_refuses_what_the_product_refuses():
    huge = torch.ones(1).expand(2**20, 2**20)
    assert conv2d_ext.explain_matmul(huge, huge).gemm_k == 2**20
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        conv2d_ext.explain_matmul(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(RuntimeError, match="same dtype"):
        conv2d_ext.explain_matmul(torch.ones(2, 3), torch.ones(3, 5).double())
    meta = torch.empty(2, 2, device="meta")
    with pytest.raises(NotImplementedError, match="no kernels for meta"):
        conv2d_ext.explain_matmul(meta, meta)
    assert "empty" in conv2d_ext.explain_matmul(torch.ones(0, 3), torch.ones(3, 5)).engine


@pytest.mark.needs_cuda_build
def test_explain_of_a_described_gpu():
    """In the order of k alone, whatever the rows."""
    plans = [
        conv2d_ext._C.explain_matmul(
            torch.ones(m, 300), torch.ones(300, 64), None, gpu=(132, 232448)
        )
        for m in (1, 500)
    ]
    for key in ("k_segments", "k_segment_length", "k_chain_length", "gemm_k"):
        assert plans[0][key] == plans[1][key]


@pytest.mark.parametrize("rows", range(1, 11))
@over_real
def test_few_rows_have_the_bits_of_many(rows, dtype):
    """Whichever driver takes them, of either layout of mat2, several segments and chunks of them,
    tails of lanes and of k, and factors that have to be copied."""
    for n, k in ((1, 300), (17, 9), (33, 145), (70, 577), (37, 9001)):
        mat1, mat2, bias = operands((12, n, k), dtype)
        expected = matmul(mat1, mat2, bias)[:rows]
        gaps = torch.cat([mat1, mat1], dim=1)[:, :k]
        for first in (mat1[:rows], mat1.t().contiguous().t()[:rows], gaps[:rows]):
            for second in (mat2, mat2.t().contiguous().t(), torch.cat([mat2, mat2], 1)[:, :n]):
                assert same_bits(matmul(first, second, bias), expected), (n, k)
        assert same_bits(matmul(mat1[:rows].unsqueeze(1), mat2, bias).squeeze(1), expected), (n, k)


@pytest.mark.parametrize("k", [7, 8, 9, 12, 15, 16, 17, 18])
@over_real
def test_short_sums_take_the_bias_alike(k, dtype):
    """Of few rows and of many, whichever of elements and pairs a step takes."""
    generator = torch.Generator().manual_seed(k)
    mat1 = torch.randn(300, k, generator=generator).to(dtype)
    weight = torch.randn(40, k, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype)
    for scale in (1.0, 2.0**-130):  # denormal numbers count, or do not, in every row alike
        whole = conv2d_ext.linear(mat1, weight, bias * scale)
        zeros = conv2d_ext.linear(mat1 * 0, weight, bias * scale)
        for rows in (1, 2, 7):
            assert same_bits(conv2d_ext.linear(mat1[:rows], weight, bias * scale), whole[:rows])
            assert same_bits(conv2d_ext.linear(mat1[:rows] * 0, weight, bias * scale), zeros[:rows])


# ---- other biases, nested inputs

BIASES = {
    "one element": torch.tensor(2.0),
    "one element, float64": torch.tensor(2.0, dtype=torch.float64),
    "one element, bool": torch.tensor(True),
    "one element, complex": torch.tensor(1j),
    "(1,), float64": torch.ones(1, dtype=torch.float64),
    "(2, 3)": torch.arange(6.0).reshape(2, 3),
    "(2, 3), float64": torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    "(1, 3)": torch.arange(3.0).reshape(1, 3),
}


@not_in_older
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_biases_of_other_shapes_and_dtypes(bias, dim):
    """The dtype of F.linear's output, or its error."""
    x, w = torch.randn((1,) * (dim - 2) + (2, 5)[-dim:]), torch.randn(3, 5)
    try:
        wanted = F.linear(x, w, bias)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            conv2d_ext.linear(x, w, bias)
        return
    found = conv2d_ext.linear(x, w, bias)
    torch.testing.assert_close(found, wanted)  # dtypes, too


@pytest.mark.parametrize("size", [(1, 1, 3), (1, 2, 3), (1, 1, 1), (1, 1, 1, 1, 3)], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
def test_biases_of_more_dimensions_than_the_output_are_refused(dim, size):
    x, w, bias = torch.randn((2, 5)[-dim:]), torch.randn(3, 5), torch.zeros(size)
    for linear in (F.linear, conv2d_ext.linear):
        with pytest.raises(RuntimeError):
            linear(x, w, bias)


def test_another_bias_under_autocast():
    x, w, bias = torch.randn(2, 5), torch.randn(3, 5), torch.tensor(2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv2d_ext.linear(x, w, bias).dtype == F.linear(x, w, bias).dtype == torch.bfloat16


def test_a_bias_of_another_layout_is_named():
    x, w = torch.randn(2, 5), torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="expected a dense tensor for bias"):
        conv2d_ext.linear(x, w, torch.randn(3).to_mkldnn())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_inputs(layout):
    parts = [torch.randn(rows, 5) for rows in (2, 4, 1)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    layer = conv2d_ext.convert(torch.nn.Linear(5, 3))
    output = layer(nested)
    assert output.is_nested
    assert output.layout == layout
    for part, found in zip(parts, output.unbind(), strict=True):
        assert torch.equal(found, layer(part))
    sum(part.sum() for part in output.unbind()).backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), 7.0))
    torch.testing.assert_close(layer.weight.grad, torch.cat(parts).sum(0).expand(3, 5))
    if layout == torch.jagged:
        assert (output + output).shape == output.shape  # the ragged dimension is still the same
        with pytest.raises(RuntimeError, match="whose last dimension has one size"):
            layer(nested.transpose(1, 2))
