"""torch.export and AOTInductor: programs made in the mode, or of a converted model, keep their bits
for any batch, in a process that has nothing but the file and `import conv2d_ext`."""

from __future__ import annotations

import re
import textwrap
import typing

import pytest
import torch
import torch.nn.functional as F
from child import run_forked
from torch import Tensor, nn

import conv2d_ext

MODE_KEY = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")  # csrc/invariance.h
# Covered for some arguments only; squares, float32 and products of one dtype are exact.
EXACT = {"aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::mul.Tensor", "aten::div.Tensor"}
BATCHES = (1, 2, 5, 9)


class Layers(nn.Module):
    """One of each layer that the mode or `convert` turns; silu and mean for the mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.sequence = nn.Conv1d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.silu(self.stem(x)))
        return self.head(self.sequence(x.flatten(2)).mean(2))


class Functions(nn.Module):
    """What PyTorch composes of calls that the mode covers."""

    calls: typing.ClassVar = {
        "conv1d": lambda self, x: self.conv1d(x),
        "conv2d": lambda self, x: self.conv2d(x.unsqueeze(1)),
        "conv3d": lambda self, x: self.patches(x.unflatten(2, (2, 4)).unsqueeze(1)),
        "conv_transpose2d": lambda self, x: self.transposed(x.unsqueeze(1)),
        "attention": lambda self, x: self.attention(x, x, x, need_weights=False)[0],
        "gru": lambda self, x: self.gru(x)[0],
        "lstm": lambda self, x: self.lstm(x)[0],
        "rnn": lambda self, x: self.rnn(x)[0],
        "instance_norm": lambda self, x: F.instance_norm(x),
        "group_norm": lambda self, x: F.group_norm(x.transpose(1, 2), 2),
        "group_norm channels_last": lambda self, x: F.group_norm(_channels_last(x), 2),
        "layer_norm": lambda self, x: F.layer_norm(x, (8,)),
        "rms_norm": lambda self, x: F.rms_norm(x, (8,)),
        "bilinear": lambda self, x: self.bilinear(x, x),
        "einsum": lambda self, x: torch.einsum("bij,bkj->bik", x, x),
        "tensordot": lambda self, x: torch.tensordot(x, self.conv1d.weight, ((1,), (1,))),
        "inner": lambda self, x: torch.inner(x, x[0]),
        "cdist": lambda self, x: torch.cdist(x, x + 1),
        "softmax": lambda self, x: x.softmax(1),
        "log_softmax": lambda self, x: x.log_softmax(1),
        "selu": lambda self, x: F.selu(x),
        "logsigmoid": lambda self, x: F.logsigmoid(x),
        "expit": lambda self, x: torch.special.expit(x),
        "float_power": lambda self, x: x.abs().float_power(0.3),
        "std": lambda self, x: x.std(1),
        "var": lambda self, x: x.var((1, 2)),
        "avg_pool1d": lambda self, x: F.avg_pool1d(x, 2),
        "adaptive_avg_pool1d": lambda self, x: F.adaptive_avg_pool1d(x, 3),
        "adaptive_avg_pool2d": lambda self, x: F.adaptive_avg_pool2d(x, (1, 1)),
        "interpolate": lambda self, x: F.interpolate(x, scale_factor=1.5, mode="linear"),
        "cosine_similarity": lambda self, x: F.cosine_similarity(x, x + 1),
        "pairwise_distance": lambda self, x: F.pairwise_distance(x, x + 1),
        "norm": lambda self, x: torch.linalg.norm(x, dim=2),
        "cross_entropy": lambda self, x: F.cross_entropy(x, x.argmax(1), reduction="none"),
        "kl_div": lambda self, x: F.kl_div(x, x.exp(), reduction="none"),
        "binary_cross_entropy": lambda self, x: F.binary_cross_entropy_with_logits(
            x, x.abs(), reduction="none"
        ),
    }

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.conv1d = nn.Conv1d(3, 8, 4, padding="same")
        self.conv2d = nn.Conv2d(1, 8, 3, padding="same")
        self.patches = nn.Conv3d(1, 8, 2, stride=2)
        self.transposed = nn.ConvTranspose2d(1, 8, 3, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 6, num_layers=2, proj_size=4, bidirectional=True, batch_first=True)
        self.rnn = nn.RNN(8, 8, batch_first=True)
        self.bilinear = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.calls[self.name](self, x)


def _channels_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).unsqueeze(-1).contiguous(memory_format=torch.channels_last)


def example(model: nn.Module, batch: int) -> Tensor:
    return torch.randn(batch, 3, *((5, 4) if isinstance(model, Layers) else (8,)))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def export(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", max=64)
    return torch.export.export(model, (x,), dynamic_shapes=({0: batch},))


def is_covered(target: object) -> bool:
    """Whether the mode has a kernel for it: then a graph made in the mode should not hold it."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and target.name() not in EXACT
        and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), MODE_KEY)
    )


def test_what_is_covered_is_seen():
    assert is_covered(torch.ops.aten.conv2d.default)
    assert is_covered(torch.ops.aten.sigmoid.default)
    assert not is_covered(torch.ops.aten.relu.default)


class TestExport:
    @pytest.mark.parametrize("name", ["model", *Functions.calls])
    def test_a_program_made_in_the_mode(self, name):
        torch.manual_seed(0)
        model = (Layers() if name == "model" else Functions(name)).eval()
        with conv2d_ext.batch_invariant():
            program = export(model, example(model, 4)).run_decompositions()
        assert not [node.target for node in program.graph.nodes if is_covered(node.target)]
        module = program.module()
        x = example(model, max(BATCHES))
        with torch.no_grad():
            with conv2d_ext.batch_invariant():
                expected = model(x)
            if name == "interpolate":  # which a trace computes by formulas of its own
                torch.testing.assert_close(module(x), expected)
                expected = module(x)
            for batch in BATCHES:
                assert torch.equal(bits(module(x[:batch])), bits(expected[:batch]))

    def test_a_program_that_is_not_lowered_follows_the_mode_it_runs_in(self):
        model = Layers().eval()
        with conv2d_ext.batch_invariant():
            module = export(model, example(model, 4)).module()
        x = example(model, 5)
        with torch.no_grad():
            assert torch.equal(bits(module(x)), bits(model(x)))
            with conv2d_ext.batch_invariant():
                assert torch.equal(bits(module(x)), bits(model(x)))

    def test_training(self):
        """A program that is not lowered has derivatives, and their bits."""
        model = Layers()
        module = export(conv2d_ext.convert(model), example(model, 4)).module()
        x = example(model, 3).requires_grad_()
        with conv2d_ext.batch_invariant():
            ours, theirs = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (module, model))
        assert torch.equal(bits(ours), bits(theirs))


CHILD = """
    import sys, torch
    if "import" in sys.argv:
        import conv2d_ext
    x, expected = torch.load(sys.argv[1] + "/expected.pt")
    for name in sys.argv[2].split(","):
        if name.endswith("package"):
            function = torch._inductor.aoti_load_package(f"{sys.argv[1]}/{name}.pt2")
        else:
            function = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
        for batch in (1, 2, 5, 9):
            ours, theirs = function(x[:batch]), expected[name][:batch]
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), (name, batch)
    print("equal")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of files made in the mode ("mode") and of a converted model ("converted")."""
    folder = tmp_path_factory.mktemp("programs")
    torch.manual_seed(0)
    model = Layers().eval()
    x = example(model, max(BATCHES))
    expected = {}
    with torch.no_grad():
        with conv2d_ext.batch_invariant():
            expected["mode_program"] = expected["mode_package"] = model(x)
            program = export(model, x[:4])
            program = program.run_decompositions()
        # Lowered in the mode, it needs the mode no longer. (The documentation's packages, which are
        # tested as well, are of programs that were not lowered, compiled in the mode.)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "mode_package.pt2")
        )
        torch.export.save(program, folder / "mode_program.pt2")
        # Without mean and silu, which `convert` leaves to PyTorch.
        model = conv2d_ext.convert(
            nn.Sequential(model.stem, model.up, nn.Flatten(2), model.sequence)
        )
        expected["converted_program"] = expected["converted_package"] = model(x)
        program = export(model, x[:4])
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "converted_package.pt2")
        )
        torch.export.save(program, folder / "converted_program.pt2")
    torch.save((x, expected), folder / "expected.pt")
    return str(folder)


NAMES = "mode_program,mode_package,converted_program,converted_package"


class TestFreshProcess:
    def test_equal_bits(self, saved):
        done = run_forked("-c", textwrap.dedent(CHILD), saved, NAMES, "import")
        assert done.stdout == "equal\n", done.stderr

    @pytest.mark.parametrize("name", ["mode_program", "mode_package"])
    def test_without_the_library(self, saved, name):
        done = run_forked("-c", textwrap.dedent(CHILD), saved, name)
        assert done.returncode == 1
        # PyTorch's own words, which name the op; of a program in a warning before the error.
        words = {"mode_program": "failed to resolve torch.ops.", "mode_package": "schema for "}
        assert re.search(words[name] + r"conv2d_ext\W+conv2d", done.stderr), done.stderr
