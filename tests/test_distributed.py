"""torch.distributed over two gloo processes: DDP, FSDP2 and DTensor, as with PyTorch's layers."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
                layer.register_forward_hook(lambda m, args, y: dtypes.add(y.dtype))
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
