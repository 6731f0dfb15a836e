"""The mode among PyTorch's other mechanisms: dispatch modes, tensors of other classes, compilers.

Seen to fail: without the second names of ops that are made of calls (csrc/invariance_compiled.cpp)
`test_calls_below_dispatch_modes`; with the strides that PyTorch's functions of shapes give,
`test_recorded_calls_return_what_compilers_expect`; with oneDNN's LSTM `test_lstms_with_dropout`.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import conv2d_ext


def _modules() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return {
            "LSTM": nn.LSTM(32, 24, 2, batch_first=True, bidirectional=True),
            "GRU": nn.GRU(32, 24, batch_first=True),
            "MultiheadAttention": nn.MultiheadAttention(32, 4, batch_first=True),
            "TransformerEncoderLayer": nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            "Bilinear": nn.Bilinear(32, 32, 11),
        }


MODULES = {name: module.eval() for name, module in _modules().items()}


def run_module(name: str, x: Tensor) -> Tensor:
    module = MODULES[name]
    if name == "MultiheadAttention":
        return module(x, x, x, need_weights=False)[0]
    if name == "Bilinear":
        return module(x, x.flip(1))
    result = module(x)
    return result[0] if isinstance(result, tuple) else result


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("surroundings", [
    lambda: FlopCounterMode(display=False), _Passes, lambda: _two(_Passes(), _Passes()),
], ids=["flops", "passes", "two"])  # fmt: skip
@pytest.mark.parametrize("name", MODULES)
def test_calls_below_dispatch_modes(name, surroundings, with_gradients):
    """Such a mode is called without the keys above it, as are the calls that it makes."""
    x = torch.randn(5, 9, 32)

    def results(examples: slice) -> list[Tensor]:
        leaf = x[examples].requires_grad_(with_gradients)
        with contextlib.nullcontext() if with_gradients else torch.no_grad():
            output = run_module(name, leaf)
        if not with_gradients:
            return [output]
        output.square().sum().backward()
        return [output.detach(), leaf.grad]

    with conv2d_ext.batch_invariant():
        expected = results(slice(None))
        with surroundings():
            whole, part = results(slice(None)), results(slice(1, 3))
    for a, b, c in zip(expected, whole, part, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, b[1:3])


@contextlib.contextmanager
def _two(first, second):
    with first, second:
        yield


class _Unwraps(torch.Tensor):
    """A tensor of another class that takes itself apart."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(t):
            return t.inner if isinstance(t, cls) else t

        args, kwargs = pytree.tree_map(unwrap, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("name", ["Bilinear", "TransformerEncoderLayer", "LSTM"])
def test_calls_of_tensors_that_unwrap(name):
    x = torch.randn(5, 9, 32)
    with conv2d_ext.batch_invariant(), torch.no_grad():
        expected = run_module(name, x)
        assert torch.equal(run_module(name, _Unwraps(x)).inner, expected)
        assert torch.equal(run_module(name, _Unwraps(x[1:2])).inner, expected[1:2])


def test_a_recomputed_lstm():
    """Selective activation checkpointing recomputes below a dispatch mode."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def policy():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    x = torch.randn(5, 9, 32)

    def gradient(examples: slice, recompute: bool) -> list[Tensor]:
        leaf = x[examples].requires_grad_()
        if recompute:
            output = checkpoint(run_module, "LSTM", leaf, use_reentrant=False, context_fn=policy)
        else:
            output = run_module("LSTM", leaf)
        output.square().sum().backward()
        return [output.detach(), leaf.grad]

    with conv2d_ext.batch_invariant():
        expected = gradient(slice(None), recompute=False)
        for a, b in zip(expected, gradient(slice(None), recompute=True), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(expected, gradient(slice(2, 3), recompute=True), strict=True):
            assert torch.equal(a[2:3], b)


def test_certify_names_no_calls_of_its_recorder_alone():
    report = conv2d_ext.certify(MODULES["LSTM"], torch.randn(3, 9, 32))
    assert report.passed
    _, in_the_mode = str(report).split("Under conv2d_ext.batch_invariant()")
    assert "mkldnn" not in in_the_mode


# ---- recorded calls: what they return, and what a compiler is told that they do

EAGER = {
    name.removeprefix("conv2d_ext::eager_")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("conv2d_ext::eager_")
}


class _Collects(TorchDispatchMode):
    """The calls that a graph would record."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").removeprefix("conv2d_ext::eager_")
        full = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
        if full in EAGER and not kwargs:
            self.calls.append((full, args))
        return func(*args, **(kwargs or {}))


_W, _B = torch.linspace(0.5, 2, 12), torch.linspace(-1, 1, 12)
_GRID = torch.rand(3, 12, 20, 2) * 2 - 1


def _norm_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(t.to(dtype, copy=True).requires_grad_() for t in (_W, _B))


def _stats(of: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(of[0]), torch.ones_like(of[0])


_FUNCTIONS = {
    "layer_norm": lambda x, y, w: F.layer_norm(x, x.shape[-1:]),
    "layer_norm of channels": lambda x, y, w: F.layer_norm(x.transpose(1, -1), (12,), *w),
    "group_norm": lambda x, y, w: F.group_norm(x, 3, *w),
    "batch_norm": lambda x, y, w: F.batch_norm(x, *_stats(w), *w),
    "batch_norm, training": lambda x, y, w: F.batch_norm(x, None, None, *w, training=True),
    "instance_norm": lambda x, y, w: F.instance_norm(x, None, None, *w),
    "logsigmoid": lambda x, y, w: F.logsigmoid(x),
    "xlogy": lambda x, y, w: torch.xlogy(x, y.abs() + 1),
    "xlogy, the other way": lambda x, y, w: torch.xlogy(y, x.abs() + 1),
    "xlog1py": lambda x, y, w: torch.special.xlog1py(x, y.abs()),
    "exp": lambda x, y, w: torch.exp(x),
    "cumsum": lambda x, y, w: x.cumsum(1),
    "logsumexp": lambda x, y, w: x.logsumexp(1),
    "logit": lambda x, y, w: torch.logit(x.sigmoid(), 1e-3),
    "bce": lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="none"),
    "bce with logits": lambda x, y, w: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), reduction="none"
    ),
    "mse": lambda x, y, w: F.mse_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y, w: F.smooth_l1_loss(x, y, reduction="none"),
    "huber": lambda x, y, w: F.huber_loss(x, y, reduction="none"),
    "soft_margin": lambda x, y, w: F.soft_margin_loss(x, y.sign(), reduction="none"),
    "nll": lambda x, y, w: F.nll_loss(
        x.contiguous(), torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.long), reduction="none"
    ),
    "bilinear": lambda x, y, w: F.bilinear(x, y, x.new_ones(4, x.shape[-1], x.shape[-1])),
    "index_add": lambda x, y, w: x.index_add(1, torch.arange(12), y),
    "index_put": lambda x, y, w: x.index_put((torch.tensor([0, 0]),), y[:2], accumulate=True),
    "scatter_add": lambda x, y, w: x.scatter_add(1, torch.zeros(x.shape, dtype=torch.long), y),
    "weight_norm": lambda x, y, w: torch._weight_norm(
        x, y[:1, :1] if x.dim() == 3 else y[:1, :1, :, :1], 2
    ),
}  # fmt: skip
_OF_IMAGES = {
    "avg_pool2d": lambda x, y, w: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, y, w: F.adaptive_avg_pool2d(x, 3),
    "bilinear resizing": lambda x, y, w: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "bicubic resizing": lambda x, y, w: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "grid_sample": lambda x, y, w: F.grid_sample(x, _GRID.to(x.dtype), align_corners=False),
}
_LAYOUTS = {
    3: {
        "contiguous": lambda x: x,
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "batch inside": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    },
    4: {
        "contiguous": lambda x: x,
        "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "columns": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    },
}


def _described(results) -> list[tuple]:
    found = []
    for result in pytree.tree_leaves(results):
        if isinstance(result, Tensor):
            steps = [s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1]
            found.append((result.shape, steps if result.numel() else None, result.dtype))
    return found


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
], ids=["float32", "mixed", "bfloat16"])  # fmt: skip
@pytest.mark.parametrize("name", [*_FUNCTIONS, *_OF_IMAGES])
def test_recorded_calls_return_what_compilers_expect(name, dtypes, dims):
    """Inductor asserts the strides, and reads memory as the types say."""
    if dims == 3 and name in _OF_IMAGES:
        pytest.skip("of images")
    shape = (3, 12, 20) if dims == 3 else (3, 12, 8, 20)
    function = (_FUNCTIONS | _OF_IMAGES)[name]
    collected = _Collects()
    layouts = _LAYOUTS[dims]
    for of_x in layouts.values():
        for of_y in layouts.values():
            x = of_x(torch.randn(shape, dtype=dtypes[0])).requires_grad_()
            y = of_y(torch.randn(shape, dtype=dtypes[0]))
            with conv2d_ext.batch_invariant(), collected:
                output = function(x, y, _norm_of(dtypes[1]))
                grad = torch.randn_like(output)
                same = output.dim() == dims
                torch.autograd.grad(output, x, of_y(grad) if same else grad)
    assert collected.calls or name in ("instance_norm", "logit", "logsumexp", "nll")
    for call, args in collected.calls:
        function, _, overload = call.partition(".")
        op = getattr(getattr(torch.ops.conv2d_ext, f"eager_{function}"), overload or "default")
        args = pytree.tree_map_only(Tensor, Tensor.detach, args)
        real = op(*args)
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = pytree.tree_map_only(Tensor, fake_mode.from_tensor, args)
        with fake_mode:
            fake = op(*fakes)
        assert _described(real) == _described(fake), (call, _described(args))


@pytest.mark.parametrize("types", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
], ids=["mixed", "float16"])  # fmt: skip
def test_types_on_cuda_are_pytorchs(types):
    """Where statistics are float32 whatever the input is. Without a GPU: of fake tensors."""
    with FakeTensorMode():
        x = torch.empty(3, 12, 8, 20, device="cuda", dtype=types[0])
        w = torch.empty(12, device="cuda", dtype=types[1])
        calls = {
            "native_layer_norm": (x.transpose(1, 3), [12], w, w, 1e-5),
            "native_group_norm": (x, w, w, 3, 12, 160, 3, 1e-5),
            "native_batch_norm": (x, w, w, w, w, False, 0.1, 1e-5),
        }
        for name, arguments in calls.items():
            ours = getattr(torch.ops.conv2d_ext, f"eager_{name}")(*arguments)
            theirs = getattr(torch.ops.aten, name)(*arguments)
            assert [t.dtype for t in ours] == [t.dtype for t in theirs]


def test_compiled_layer_norm_of_transposed_gradients():
    """The gradient of PyTorch's kernel lies otherwise than its function of shapes says."""
    weight, bias = _norm_of(torch.float32)

    def function(x):
        return F.gelu(F.layer_norm(x.transpose(1, 2), (12,), weight, bias).transpose(1, 2))

    x, grad = torch.randn(4, 12, 39), torch.randn(4, 12, 39)

    def gradient(call, examples: slice) -> Tensor:
        leaf = x[examples].requires_grad_()
        return torch.autograd.grad(call(leaf), leaf, grad[examples])[0]

    with conv2d_ext.batch_invariant():
        whole = gradient(torch.compile(function), slice(None))
        torch.testing.assert_close(whole, gradient(function, slice(None)))
        assert torch.equal(gradient(torch.compile(function), slice(1, 2)), whole[1:2])


# ---- calls that follow other things than the batch's size


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "proj_size": 5}], ids=str)
def test_lstms_with_dropout(options, packed):
    """Between layers. (One that drops nothing: draws follow an element's place.)"""
    model = nn.LSTM(32, 24, 3, batch_first=True, dropout=1e-30, **options)
    plain = nn.LSTM(32, 24, 3, batch_first=True, **options)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(10, 6, 32)

    def results(examples: slice, model=model) -> list[Tensor]:
        leaf = x[examples].requires_grad_()
        lengths = [6] * leaf.shape[0]
        pack = nn.utils.rnn.pack_padded_sequence
        output, (h, c) = model(pack(leaf, lengths, batch_first=True) if packed else leaf)
        if packed:
            output = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0]
        gradient = torch.autograd.grad(output.square().sum(), leaf)[0]
        return [output.detach(), h.detach().transpose(0, 1), c.detach().transpose(0, 1), gradient]

    expected = results(slice(None), plain)
    with conv2d_ext.batch_invariant():
        whole = results(slice(None))
        for examples in (slice(0, 1), slice(3, 5), slice(9, 10)):
            for a, b in zip(results(examples), whole, strict=True):
                assert torch.equal(a, b[examples])
    for a, b in zip(whole, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_between_layers_draws_as_pytorchs(packed):
    model, x = nn.LSTM(8, 16, 2, dropout=0.5), torch.randn(7, 4, 8)
    given = nn.utils.rnn.pack_padded_sequence(x, [7, 6, 3, 2]) if packed else x
    torch.manual_seed(3)
    expected = model(given)[0]
    with conv2d_ext.batch_invariant():
        torch.manual_seed(3)
        found = model(given)[0]
    torch.testing.assert_close(found[0] if packed else found, expected[0] if packed else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm_follows_no_threads(dim, dtype):
    v = torch.randn(64, 32, 3).to(dtype).requires_grad_()
    size = [1, 1, 1]
    size[dim] = v.shape[dim]
    g, grad = torch.randn(size).to(dtype).requires_grad_(), torch.randn(64, 32, 3).to(dtype)

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        output = torch._weight_norm(v, g, dim)
        return [output.detach(), *torch.autograd.grad(output, (v, g), grad)]

    threads = torch.get_num_threads()
    try:
        with conv2d_ext.batch_invariant():
            expected = results(1)
            for count in (2, 3, 8):
                for a, b in zip(results(count), expected, strict=True):
                    assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(results(threads), expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_wrong_numbers_of_parameters_are_pytorchs_errors(kind, count):
    weights = list({"gru": nn.GRU, "lstm": nn.LSTM}[kind](5, 6, 2).parameters())[:count]
    data, sizes, h = torch.randn(9, 5), torch.tensor([3, 3, 2, 1]), torch.zeros(1, 3, 6)
    state = h if kind == "gru" else [h, h]
    function = getattr(torch, kind)
    for mode in (contextlib.nullcontext, conv2d_ext.batch_invariant):
        with mode(), pytest.raises(RuntimeError):
            function(data, sizes, state, weights, True, 1, 0.0, False, False)


@pytest.mark.parametrize("sizes", [[2, 1, 2], [3, 3], [6, -1]], ids=str)
def test_wrong_sizes_of_steps_are_pytorchs_errors(sizes):
    model = nn.LSTM(5, 6)
    data, h = torch.randn(5, 5), torch.zeros(1, sizes[0], 6)
    for mode in (contextlib.nullcontext, conv2d_ext.batch_invariant):
        with mode(), pytest.raises(RuntimeError):
            torch.lstm(
                data,
                torch.tensor(sizes),
                [h, h],
                list(model.parameters()),
                True,
                1,
                0.0,
                False,
                False,
            )


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM], ids=lambda kind: kind.__name__)
def test_traces_of_packed_sequences_hold_for_other_lengths(kind):
    model = kind(5, 6).eval().requires_grad_(False)

    def run(data: Tensor, sizes: Tensor) -> Tensor:
        return model(nn.utils.rnn.PackedSequence(data, sizes))[0].data

    with conv2d_ext.batch_invariant(), torch.no_grad():
        trace = torch.jit.trace(
            run, (torch.randn(6, 5), torch.tensor([3, 2, 1])), check_trace=False
        )
        data, sizes = torch.randn(9, 5), torch.tensor([3, 3, 2, 1])
        assert torch.equal(trace(data, sizes), run(data, sizes))


@pytest.mark.parametrize("options", [{"proj_size": 4}, {"bidirectional": True}], ids=str)
def test_autocast_types_of_packed_sequences(options):
    model, x = nn.LSTM(8, 6, 2, **options), torch.randn(5, 3, 8)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
    with torch.autocast("cpu", torch.bfloat16):
        expected, states = model(packed)
        with conv2d_ext.batch_invariant():
            found, found_states = model(packed)
    assert found.data.dtype == expected.data.dtype
    assert [s.dtype for s in found_states] == [s.dtype for s in states]
    torch.testing.assert_close(found.data, expected.data, atol=0.02, rtol=0.02)


def test_nested_tensors_below_dispatch_modes():
    """Which PyTorch's fast path makes where a mask is given."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    mask[1, 5:] = True
    with torch.no_grad(), conv2d_ext.batch_invariant():
        expected = encoder(x, src_key_padding_mask=mask)
        with FlopCounterMode(display=False):
            found = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["mse", "logsigmoid", "xlogy", "layer_norm"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 0, 1), (0, 2, 1, 3)], ids=str)
def test_recorded_calls_of_a_batch_of_one_lie_as_those_of_several(name, order):
    """As a compiled program expects them that takes batches of any size. order: of dimensions in
    memory."""
    back = [order.index(d) for d in range(4)]

    def results(n: int) -> list[Tensor]:
        x = torch.rand(n, 4, 5, 6).permute(order).contiguous().permute(back)
        if name == "mse":
            return [torch.ops.conv2d_ext.eager_mse_loss(x, x / 2, 0)]
        if name == "logsigmoid":
            return list(torch.ops.conv2d_ext.eager_log_sigmoid_forward(x))
        if name == "xlogy":
            return [torch.ops.conv2d_ext.eager_xlogy.Tensor(x, x)]
        return list(torch.ops.conv2d_ext.eager_native_layer_norm(x, [6], None, None, 1e-5))

    def places(results: list[Tensor]) -> list[list[int]]:
        return [
            [s for s, size in zip(t.stride()[1:], t.shape[1:], strict=True) if size > 1]
            for t in results
        ]

    assert places(results(1)) == places(results(3))


def test_grid_sample_of_a_grid_that_lies_otherwise_in_a_batch_of_one():
    """As deformable attention makes it."""
    value, places = torch.randn(2, 4, 8, 8, 8), torch.rand(2, 16, 4, 4, 2) * 2 - 1

    def gradient(n: int) -> Tensor:
        leaf = value[:n].clone().requires_grad_()
        grid = places[:n].transpose(1, 2).flatten(0, 1)
        output = F.grid_sample(leaf.flatten(0, 1), grid, align_corners=False)
        return torch.autograd.grad(output.square().sum(), leaf)[0]

    expected = gradient(2)
    with conv2d_ext.batch_invariant():
        assert torch.equal(gradient(1)[0], gradient(2)[0])
        torch.testing.assert_close(gradient(2), expected)
