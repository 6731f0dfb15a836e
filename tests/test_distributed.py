"""torch.distributed over two gloo processes: DDP, FSDP2 and DTensor, as with PyTorch's layers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from child import run_python
from distributed import RANKS, run_ranks
from torch import Tensor, nn

import conv2d_ext

STEPS = 3


def bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, (3, 2), padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.Flatten(2),
        nn.Conv1d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 29, 5),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """The whole batch of each step; a rank takes its half."""
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 3, 4), torch.randn(4, 5)) for _ in range(STEPS)]


def train(model: nn.Module, share: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for input, target in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(input[share]).float(), target[share])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def my_share() -> slice:
    size = 4 // RANKS
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


# ---- DistributedDataParallel


def ddp():
    """For each format of the weights: losses of PyTorch's layers, of converted ones and in the
    mode; what DDP warned of; the weights in the end."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        theirs, converted = make_model(), conv2d_ext.convert(make_model())
        for model in (theirs, converted):
            for layer in model:
                if isinstance(layer, nn.Conv2d):
                    layer.to(memory_format=memory_format)
        in_mode = copy.deepcopy(theirs)
        expected = train(nn.parallel.DistributedDataParallel(theirs), my_share())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = train(nn.parallel.DistributedDataParallel(converted), my_share())
            with conv2d_ext.batch_invariant():
                mode = train(nn.parallel.DistributedDataParallel(in_mode), my_share())
        warned = [str(w.message) for w in caught if "strides" in str(w.message)]
        weights = [p.detach() for model in (converted, in_mode) for p in model.parameters()]
        results.append((expected, ours, mode, warned, weights))
    return results


def test_ddp():
    ranks = run_ranks("test_distributed:ddp")
    whole = train(conv2d_ext.convert(make_model()))
    for of_ranks in zip(*ranks, strict=True):
        for expected, ours, mode, warned, _ in of_ranks:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mode, expected, rtol=1e-5, atol=1e-6)
            assert warned == []
        for first, second in zip(*(result[-1] for result in of_ranks), strict=True):
            assert torch.equal(bits(first), bits(second))
        # The mean of both halves' losses is the loss of the whole batch.
        mean = [sum(pair) / RANKS for pair in zip(*(r[1] for r in of_ranks), strict=True)]
        torch.testing.assert_close(mean, whole, rtol=1e-5, atol=1e-6)


# ---- FSDP2


def fsdp():
    """Losses of PyTorch's layers, of converted ones and in the mode: in float32, in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    results = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        losses, dtypes = [], set()
        for how in ("theirs", "converted", "mode"):
            model = make_model()
            if how == "converted":
                conv2d_ext.convert(model)
            mesh = dist.init_device_mesh("cpu", (RANKS,))
            for layer in model:
                layer.register_forward_hook(lambda m, args, y, seen=dtypes: seen.add(y.dtype))
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            if how == "mode":
                with conv2d_ext.batch_invariant():
                    losses.append(train(model, my_share()))
            else:
                losses.append(train(model, my_share()))
        results.append((losses, dtypes))
    return results


def test_fsdp():
    for (exact, dtypes), (mixed, mixed_dtypes) in run_ranks("test_distributed:fsdp"):
        assert dtypes == {torch.float32}
        assert mixed_dtypes == {torch.bfloat16}
        expected, *ours = exact
        for losses in ours:
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        for losses in mixed:
            torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)


# ---- DTensor


class Case:
    """A function of tensors; ways to shard them, each with that of the output."""

    def __init__(self, ours, theirs, sizes, ways) -> None:
        self.ours, self.theirs, self.sizes, self.ways = ours, theirs, sizes, ways


def winograd(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with conv2d_ext.allow_winograd(True):
        return conv2d_ext.conv2d(x, w, b, padding=1, groups=2)


def dtensor_cases():
    """Ways: (input, weight, bias) -> output, as dimensions that are sharded; None: replicated."""
    batch, replicated = ((0, None, None), 0), ((None, None, None), None)
    channels = ((None, 0, 0), 1)
    layers = [batch, replicated, channels, ((None, 0, None), 1)]
    transposed = [batch, replicated, ((None, 1, 0), 1)]
    rows = [batch, replicated, ((None, 0, 0), -1)]
    return {
        "conv2d": Case(
            lambda x, w, b: conv2d_ext.conv2d(x, w, b, (2, 1), (1, 0)),
            lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0)),
            ((5, 3, 6, 7), (4, 3, 3, 2), (4,)),
            layers,
        ),
        "grouped conv2d": Case(
            lambda x, w, b: conv2d_ext.conv2d(x, w, b, padding="same", groups=2),
            lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=2),
            ((3, 4, 6, 7), (4, 2, 3, 2), (4,)),
            [batch, replicated],
        ),
        # Arguments that others leave out; a gradient takes what its forward took.
        "Winograd": Case(
            winograd,
            lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2),
            ((3, 32, 8, 8), (32, 16, 3, 3), (32,)),
            [batch, replicated],
        ),
        "conv1d": Case(conv2d_ext.conv1d, F.conv1d, ((5, 3, 9), (4, 3, 3), (4,)), layers),
        "conv_transpose2d": Case(
            lambda x, w, b: conv2d_ext.conv_transpose2d(x, w, b, (2, 1), (1, 0), (1, 0)),
            lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 1), (1, 0), (1, 0)),
            ((3, 4, 5, 4), (4, 6, 3, 2), (6,)),
            transposed,
        ),
        "conv_transpose1d": Case(
            conv2d_ext.conv_transpose1d,
            F.conv_transpose1d,
            ((3, 4, 5), (4, 6, 3), (6,)),
            transposed,
        ),
        "linear": Case(conv2d_ext.linear, F.linear, ((5, 7), (4, 7), (4,)), rows),
        # PyTorch joins rows of a sharded batch for the weight's gradient: only where it divides.
        "linear of sequences": Case(conv2d_ext.linear, F.linear, ((4, 5, 7), (4, 7), (4,)), rows),
    }


def distribute(tensor: Tensor, mesh, dim: int | None) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    # The last dimension of the mesh, so that one of two dimensions is tested too.
    placements = [Replicate()] * (mesh.ndim - 1) + [Replicate() if dim is None else Shard(dim)]
    return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()


def check_case(case: Case, mesh, ways: tuple[int | None, ...], output_dim: int | None) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(size).requires_grad_() for size in case.sizes]
    expected = case.ours(*plain)
    whole = [distribute(t, mesh, dim) for t, dim in zip(plain, ways, strict=True)]
    output = case.ours(*whole)
    if output_dim is not None:
        output_dim %= output.dim()
    like = distribute(expected, mesh, output_dim)
    assert output.placements == like.placements
    assert output.shape == expected.shape
    assert output.to_local().stride() == output.to_local().contiguous().stride()
    assert torch.equal(bits(output.full_tensor()), bits(expected))

    grad = torch.randn(expected.shape)
    grad_inputs = torch.autograd.grad(output, whole, distribute(grad, mesh, output_dim))
    doubles = [t.detach().double().requires_grad_() for t in plain]
    oracle = torch.autograd.grad(case.theirs(*doubles), doubles, grad.double())
    ours = torch.autograd.grad(expected, plain, grad)
    for given, exact, single in zip(grad_inputs, oracle, ours, strict=True):
        partial = any(p.is_partial() for p in given.placements)
        full = given.full_tensor()
        torch.testing.assert_close(full.double(), exact, rtol=1e-5, atol=1e-5)
        assert partial or torch.equal(bits(full), bits(single))


def dtensor():
    """Every case; what is refused; tensor parallelism in the mode."""
    meshes = [dist.init_device_mesh("cpu", (RANKS,)), dist.init_device_mesh("cpu", (1, RANKS))]
    for name, case in dtensor_cases().items():
        for mesh in meshes:
            for ways, output in case.ways:
                try:
                    check_case(case, mesh, ways, output)
                except Exception as error:
                    raise AssertionError(f"{name}: {ways} -> {output}, {mesh}") from error
    check_refusals(meshes[0])
    check_reductions(meshes[0])
    check_partial(meshes[0])
    check_parallel_model(meshes[0])


def check_refusals(mesh) -> None:
    x, w = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 3, 3)
    whole = distribute(w, mesh, None)
    with pytest.raises(
        ValueError, match=r"no sharding rule .*Shard\(2\).*batch: .*output channels"
    ):
        conv2d_ext.conv2d(distribute(x, mesh, 2), whole)
    with pytest.raises(ValueError, match=r"no sharding rule .*Shard\(0\), Shard\(0\)"):
        conv2d_ext.conv2d(distribute(x, mesh, 0), distribute(w, mesh, 0))
    with pytest.raises(ValueError, match="too small to be sharded over 2 ranks"):
        conv2d_ext.conv2d(distribute(x, mesh, None), distribute(w[:1], mesh, 0))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        conv2d_ext.conv2d(distribute(x, mesh, 0), w)
    with pytest.raises(RuntimeError, match=r"expected input.* to have 3 channels"):
        conv2d_ext.conv2d(distribute(x[:, :2], mesh, 0), whole)
    groups = [torch.randn(2, 32, 8, 8), torch.randn(32, 16, 3, 3), torch.randn(32)]
    for function in (winograd, lambda x, w, b: conv2d_ext.conv2d(x, w, b, padding=1, groups=2)):
        with pytest.raises(
            ValueError, match=r"no sharding rule .*Replicate, Shard\(0\), Shard\(0\)"
        ):
            function(*(distribute(t, mesh, d) for t, d in zip(groups, (None, 0, 0), strict=True)))
    # A batch of one: one rank has no image.
    one = conv2d_ext.conv2d(distribute(x[:1], mesh, 0), whole)
    assert torch.equal(one.full_tensor(), conv2d_ext.conv2d(x[:1], w))


def check_reductions(mesh) -> None:
    """In the mode: over dimensions that are sharded means and variances have no rule."""
    x = torch.randn(4, 6, 5)
    with conv2d_ext.batch_invariant():
        for function in (torch.mean, torch.var, torch.sum):
            for keepdim in (False, True):
                expected = function(x, dim=(1,), keepdim=keepdim)
                for dim in (0, 2, None):
                    found = function(distribute(x, mesh, dim), dim=(1,), keepdim=keepdim)
                    assert torch.equal(bits(found.full_tensor()), bits(expected)), (function, dim)
        for function in (torch.mean, torch.var):
            with pytest.raises(ValueError, match="any dimension that stays"):
                function(distribute(x, mesh, 1), dim=(1,))
        nothing = torch.ops.conv2d_ext.sum(distribute(x, mesh, 0), [], False)  # reduces nothing
        assert nothing.placements[0].is_shard(0)
        assert torch.equal(nothing.full_tensor(), x)
        y = torch.rand(4, 6, 5) + 0.5
        found = torch.pow(distribute(y, mesh, 1), distribute(x, mesh, 1))
        assert torch.equal(bits(found.full_tensor()), bits(torch.pow(y, x)))


def check_partial(mesh) -> None:
    """Products over sharded channels are pending sums, and a call sums up what it is given."""
    x, w, b = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 3, 3), torch.randn(3)
    whole = [distribute(x, mesh, 1), distribute(w, mesh, 1), distribute(b, mesh, None)]
    output = conv2d_ext.conv2d(*whole)
    assert output.placements[0].is_partial()
    expected = conv2d_ext.conv2d(x, w, b)
    torch.testing.assert_close(output.full_tensor(), expected)
    k = torch.randn(2, 3, 1, 1)
    with torch.inference_mode():
        following = conv2d_ext.conv2d(output, distribute(k, mesh, None))
        torch.testing.assert_close(following.full_tensor(), conv2d_ext.conv2d(expected, k))


def check_parallel_model(mesh) -> None:
    """PyTorch's tensor parallelism of a model, in the mode and converted."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5))
    x = torch.randn(3, 6)
    expected = model(x)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for how in ("mode", "converted"):
        parallel = parallelize_module(copy.deepcopy(model), mesh, plan)
        if how == "converted":
            conv2d_ext.convert(parallel)
            output = parallel(x)
        else:
            with conv2d_ext.batch_invariant():
                output = parallel(x)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        assert parallel[0].weight.grad.placements[0].is_shard(0)


def test_dtensor():
    run_ranks("test_distributed:dtensor")


def test_importing_the_library_does_not_import_dtensor():
    code = "import conv2d_ext, sys; print('torch.distributed.tensor' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"


def test_dtensor_imported_first():
    code = """
import torch.distributed.tensor
import conv2d_ext
print('conv2d_ext._dtensor' in __import__('sys').modules)
"""
    assert run_python("-c", code).stdout == "True\n"


def test_dtensor_looked_for_before_it_is_imported():
    """Seen to fail: with what waits for an import gone once the module is found."""
    code = """
import conv2d_ext, importlib.util, sys
assert importlib.util.find_spec("torch.distributed.tensor") is not None
assert "conv2d_ext._dtensor" not in sys.modules
import torch.distributed.tensor
print("conv2d_ext._dtensor" in sys.modules)
"""
    assert run_python("-c", code).stdout == "True\n"
