"""conv2d_ext.certify on models whose variation is known, and its command line."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import certify_models as models
import pytest
import torch
from child import run_python
from torch import nn

import conv2d_ext
from conv2d_ext._certify import bits, command, leaves
from conv2d_ext._certify.runs import filler_rows
from conv2d_ext.certify import Difference, read_certificate

SMALL = {"batch_sizes": (1, 2, 3), "threads": (1, 2), "runs": 2, "modes": "F.*"}


def rows(*shape: int) -> torch.Tensor:
    return torch.rand(1, *shape) + 0.5


def certify(model, *inputs, **options):
    inputs = inputs or (rows(models.FEATURES),)
    return conv2d_ext.certify(model, *inputs, **{**SMALL, **options})


def axes(certificate) -> dict:
    return certificate.modes[certificate.mode].axes


def differing(certificate) -> set[str]:
    """Such as {"batch outputs", "batch gradients"}."""
    return {
        f"{name} {what}"
        for name, axis in axes(certificate).items()
        for what in ("outputs", "gradients")
        if getattr(axis, what).status == "differs"
    }


# ---- what varies is found, and named


def test_a_steady_model_passes():
    certificate = certify(models.Steady(), rows(2, 4, 4))
    assert certificate.passed
    assert not differing(certificate)
    for axis in axes(certificate).values():
        assert (axis.outputs.status, axis.gradients.status) == ("equal", "equal")
        assert axis.outputs.first is None
    assert "PASSED" in str(certificate)


def test_the_batch_mean_is_named():
    certificate = certify(models.TwoLayers(models.BatchMean()))
    assert not certificate.passed
    assert "batch outputs" in differing(certificate)
    finding = axes(certificate)["batch"].outputs
    assert len(finding.differing) == finding.runs == 2
    assert finding.difference.differing > 0
    assert finding.difference.largest > 0
    first = finding.first
    assert (first.call.module, first.call.module_class) == ("1", "BatchMean")
    assert first.call.function == "torch.Tensor.mean"
    assert first.call.op == "aten::mean"
    assert "tests/certify_models.py:" in first.call.where
    assert first.inputs_equal
    assert "FAILED" in str(certificate)


def test_what_was_not_run_is_not_promised():
    certificate = certify(models.Steady(), threads=(1,))
    assert certificate.passed
    assert str(certificate).endswith("do not depend on batch, place, runs (not run: threads)")


def test_a_module_of_torch_has_no_line_of_its_own():
    first = axes(certify(nn.Sequential(nn.ReLU(), nn.Softmax(0))))["batch"].outputs.first
    assert (first.call.module, first.call.function) == ("1", "torch.nn.functional.softmax")
    assert first.call.where == ""


def test_the_thread_count_is_named():
    certificate = certify(models.TwoLayers(models.ThreadCount()))
    assert differing(certificate) == {"threads outputs", "threads gradients"}
    first = axes(certificate)["threads"].outputs.first
    assert (first.call.module, first.call.op) == ("1", "aten::mul")
    assert first.inputs_equal
    assert "other numbers" in first.note


def test_the_third_call_by_place_is_named():
    certificate = certify(models.TwoLayers(models.ByPlace()))
    assert differing(certificate) >= {"place outputs"}
    assert "batch outputs" not in differing(certificate)
    call = axes(certificate)["place"].outputs.first.call
    assert (call.module, call.op) == ("1", "aten::cumsum")
    assert (call.function, call.function_call, call.op_call) == ("torch.cumsum", 3, 3)


def test_a_call_without_tensors_is_named_where_nothing_else_varies():
    first = axes(certify(models.TwoLayers(models.RowNumber())))["place"].outputs.first
    assert first.call.function == "torch.arange"
    assert first.note == "it was given no tensors"


def test_a_module_called_twice_is_named_by_its_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = models.Steady()
            self.calls = 0

        def forward(self, x):
            y = self.shared(x)
            if x.shape[0] > 1:
                # What goes in is equal; the second call is what varies.
                handle = self.shared.register_forward_pre_hook(lambda m, a: None)
                y = self._varied(y)
                handle.remove()
                return y
            return self.shared(y)

        def _varied(self, y):
            relu = torch.Tensor.relu
            try:
                torch.Tensor.relu = lambda t: relu(t * 1.0 + 2**-10)
                return self.shared(y)
            finally:
                torch.Tensor.relu = relu

    first = axes(certify(Twice()))["batch"].outputs.first
    assert (first.call.module, first.call.module_call) == ("shared", 2)


def test_gradients_alone():
    certificate = certify(models.TwoLayers(models.GradientOnly()))
    assert differing(certificate) == {"batch gradients"}
    first = axes(certificate)["batch"].gradients.first
    assert first.call.backward
    assert first.call.node == "_ScaledBackwardBackward"
    assert first.call.module == "1"
    assert first.inputs_equal


def test_every_run():
    certificate = certify(models.EveryRun())
    assert "runs outputs" in differing(certificate)
    assert not certificate.passed


def test_the_format_decides_on_request_alone():
    image = rows(3, 4, 5)
    certificate = certify(models.FormatOnly(), image)
    assert {"format outputs", "format gradients"} == differing(certificate)
    assert certificate.passed
    assert not certify(models.FormatOnly(), image, require="format").passed


@pytest.mark.parametrize("varies", ["", "heads", "tokens"])
def test_a_batch_folded_into_other_dimensions(varies):
    certificate = certify(models.Heads(varies), rows(5, 4))
    assert certificate.passed == (not varies)
    held = {row.op: row for row in certificate.modes["F.*"].calls}["aten::mul"]
    if not varies:
        assert held.unknown == 0
    else:
        first = axes(certificate)["batch"].outputs.first
        assert first.call.function == "torch.mul"
        assert first.call.function_call == ("heads", "tokens").index(varies) + 1
        assert first.inputs_equal
        assert first.not_comparable == 0


def test_batch_norm_in_training_and_dropout_are_named():
    model = nn.Sequential(nn.BatchNorm1d(models.FEATURES), models.Dropped()).train()
    # A batch norm in training mode takes no example alone.
    with pytest.raises(RuntimeError, match="more than 1 value per channel") as raised:
        certify(model)
    assert isinstance(raised.value.__cause__, ValueError)
    model[0] = nn.BatchNorm2d(3)
    certificate = certify(model, rows(3, 4, 4))
    couples = "\n".join(certificate.modes["F.*"].couples)
    assert "0 (BatchNorm2d), call 1: aten::native_batch_norm: batch norm in training" in couples
    assert "random numbers" in couples
    first = axes(certificate)["batch"].outputs.first
    assert first.couples.startswith("batch norm in training")
    # Named, not failed.
    assert axes(certificate)["batch"].is_coupled
    assert axes(certificate)["batch"].passed
    assert "coupled by definition, see above: batch" in str(certificate).splitlines()[-1]
    # Its own statistics are as they were.
    assert model[0].num_batches_tracked == 0
    assert torch.equal(model[0].running_mean, torch.zeros(3))


def test_an_instance_norm_couples_nothing():
    certificate = certify(nn.InstanceNorm2d(3), rows(3, 4, 4), gradients=False)
    assert certificate.modes["F.*"].couples == ()


# ---- inputs and outputs


def test_integer_inputs():
    ids = torch.randint(50, (1, 7))
    mask = torch.ones(1, 7, dtype=torch.bool)
    certificate = certify(models.Tokens(), ids, mask)
    assert certificate.passed
    assert axes(certificate)["batch"].gradients.status == "skipped"
    assert "floating-point" in axes(certificate)["batch"].gradients.reason
    assert certificate.inputs[0]["dtype"] == "int64"
    assert "the same integers in another order" in certificate.notes[0]


def test_rows_that_share_the_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(12).reshape(1, 12)
    others = filler_rows(ids, 5, generator)
    assert others.shape == (5, 12)
    assert others.dtype == torch.int64
    assert all(sorted(row.tolist()) == list(range(12)) for row in others)
    assert not torch.equal(others[0], ids[0])
    images = torch.rand(1, 3, 4)
    others = filler_rows(images, 5, generator)
    assert others.min() >= images.min()
    assert others.max() <= images.max()
    assert len(torch.unique(others, dim=0)) == 5
    assert len(torch.unique(filler_rows(torch.zeros(1, 8), 3, generator), dim=0)) == 3


def test_nested_outputs():
    certificate = certify(models.Nested(), rows(4))
    assert {"place outputs", "batch outputs"}.isdisjoint(differing(certificate))
    notes = "\n".join(certificate.notes)
    assert "output['constant'] has no batch dimension" in notes
    assert "output['similar']: no part of it" in notes
    names = next(iter(certificate.modes["F.*"].digests.values()))
    for name in ("['out']", "['list'][0]", "['list'][1][0]", "['pair'].first", "['pair'].size"):
        assert f"output{name}" in names


def test_one_entry_for_each_image():
    certificate = certify(models.Detector())
    assert certificate.passed
    assert "output[0]['boxes']" in next(iter(certificate.modes["F.*"].digests.values()))


def test_outputs_without_tensors():
    with pytest.raises(TypeError, match="wanted an output that holds tensors, got str"):
        certify(lambda x: "no tensor")


def test_an_output_that_cannot_be_told_does_not_pass():
    certificate = certify(lambda x: x @ x.T)
    assert not certificate.passed
    assert axes(certificate)["batch"].outputs.status == "not comparable"


def test_outputs_that_show_nothing_do_not_pass():
    certificate = certify(models.ZeroHead())
    assert not certificate.passed
    assert "same for another example" in axes(certificate)["batch"].outputs.reason
    assert any("gradient of input 0 is zero everywhere" in note for note in certificate.notes)
    command._draw_zero_weights(model := models.ZeroHead())
    assert model.weight.any()


def test_no_gradients():
    certificate = certify(models.Steady(), gradients=False)
    assert axes(certificate)["batch"].gradients.reason == "not asked for"
    certificate = certify(lambda x: x.detach() * 2)
    assert axes(certificate)["batch"].gradients.status == "skipped"


# ---- bits


def test_equal_means_bits():
    zero = torch.tensor([0.0, 1.0])
    assert bits.digest(torch.tensor([-0.0])) != bits.digest(torch.tensor([0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert len({bits.digest(n) for n in nans}) == 1
    assert len({bits.digest(torch.complex(n, zero[0])) for n in nans}) == 1
    assert bits.digest(nans[0]) != bits.digest(torch.tensor(torch.inf))
    image = torch.rand(2, 3, 4, 5)
    assert bits.digest(image) == bits.digest(image.to(memory_format=torch.channels_last))
    assert bits.digest(image) != bits.digest(image.double())
    assert bits.digest(image) != bits.digest(image.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_difference_in_ulp(dtype):
    ones = torch.ones(5, dtype=dtype)
    step = torch.finfo(dtype).eps
    larger = ones + step * torch.tensor([0, 1, 1, 3, 0])
    found = bits.difference(ones, larger.to(dtype))
    assert found == Difference(5, 3, pytest.approx(3 * step), 3, 0)
    assert bits.difference(ones, ones) == Difference(5, 0, 0.0, 0, 0)
    if dtype in (torch.float32, torch.float64):
        found = bits.difference(torch.complex(ones, ones), torch.complex(ones, larger))
        assert found == Difference(10, 3, pytest.approx(3 * step), 3, 0)


def test_difference_of_signs_and_numbers_that_are_none():
    largest = torch.finfo(torch.float64).max
    found = bits.difference(
        torch.tensor([-largest, 0.0, 1.0, torch.nan], dtype=torch.float64),
        torch.tensor([largest, -0.0, torch.inf, torch.nan], dtype=torch.float64),
    )
    assert found.differing == 3
    assert found.not_finite == 1
    assert found.largest_ulp > 2**63
    assert bits.difference(torch.tensor([0.0]), torch.tensor([-0.0])).largest_ulp == 1
    assert bits.difference(torch.tensor([3, 5]), torch.tensor([3, 1])) == Difference(
        2, 1, 4.0, None, 0
    )


@pytest.mark.parametrize(
    ("fold", "shape"),
    [
        (lambda x: x.reshape(-1, 4, 3), (6, 4, 3)),
        (lambda x: x.transpose(0, 1).reshape(-1, 4, 3), (6, 4, 3)),
        (lambda x: x.permute(2, 1, 0, 3).reshape(4, -1, 3), (4, 6, 3)),
        (lambda x: x.permute(1, 0, 2, 3).reshape(2, -1, 2, 3), (2, 6, 2, 3)),
    ],
)
def test_the_examples_part_of_a_folded_batch(fold, shape):
    example = torch.rand(1, 6, 4, 3)
    alone = leaves.print_of(fold(example))
    for batch, place in ((2, 0), (3, 1), (4, 3)):
        others = torch.rand(batch, 6, 4, 3)
        others[place] = example[0]
        # Rounded otherwise, so that no digest helps.
        for noise in (0.0, 1e-6):
            _, part = leaves.find_example(fold(others) + noise, alone, batch, place)
            torch.testing.assert_close(part, fold(example), rtol=0, atol=1e-5)


def test_an_example_that_cannot_be_told():
    alone = leaves.print_of(torch.rand(6, 3))
    assert leaves.find_example(torch.rand(12, 3), alone, 2, 0) is None
    assert leaves.find_example(torch.rand(7, 3), alone, 2, 0) is None
    assert leaves.find_example(torch.rand(12, 6), alone, 2, 0) is None


# ---- what is left behind


class _Raises(nn.Module):
    """Spoils what it can, then raises in a batch of more than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.layer = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.layer(x) * self.scale
        self.eval()
        torch.rand(3)
        random.random()
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        if x.shape[0] > self.most:
            raise KeyError("too many")
        return y


@pytest.mark.parametrize("most", [0, 1, 2, 100])
def test_state_is_as_it_was(most):
    model = _Raises(most).train()
    grad = torch.full((), 3.0)
    model.scale.grad = grad
    image = rows(3, 2, 2).requires_grad_()
    torch.manual_seed(5)
    random.seed(5)
    torch.set_num_threads(2)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    kept = image.detach().clone()
    try:
        if most < 100:
            with pytest.raises(RuntimeError, match="raised KeyError") as raised:
                certify(model, image)
            assert isinstance(raised.value.__cause__, KeyError)
        else:
            certify(model, image)
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.training
    assert model.layer.training
    assert model.scale.grad is grad
    assert grad == 3
    assert image.grad is None
    assert torch.equal(image, kept)
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(torch.equal(v, before[2][k]) for k, v in model.state_dict().items())
    modules = nn.modules.module
    assert not modules._global_forward_hooks
    assert not modules._global_forward_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inside_inference_mode_and_without_gradients():
    with torch.inference_mode():
        assert certify(models.Steady()).passed
    with torch.no_grad():
        certificate = certify(models.Steady())
    assert axes(certificate)["batch"].gradients.status == "equal"


def test_a_model_that_writes_to_its_input():
    class InPlace(nn.Module):
        def forward(self, x):
            x *= 2
            return x.add_(1)

    assert certify(InPlace()).passed


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3,), {}, TypeError, "model: wanted a module or a function, got int"),
        ((nn.ReLU,), {}, TypeError, "model: .* the class ReLU"),
        ((nn.ReLU(),), {}, TypeError, "inputs: wanted at least one"),
        ((nn.ReLU(), [1.0]), {}, TypeError, r"inputs\[0\]: wanted a tensor, got list"),
        ((nn.ReLU(), torch.tensor(1.0)), {}, ValueError, r"inputs\[0\]: wanted \(N, ...\)"),
        ((nn.ReLU(), torch.rand(0, 2)), {}, ValueError, r"inputs\[0\]: .* shape \(0, 2\)"),
        ((nn.ReLU(), rows(2), torch.rand(2, 2)), {}, ValueError, r"inputs\[1\]: wanted N = 1"),
        ((nn.ReLU(), rows(2).to_sparse()), {}, TypeError, r"inputs\[0\]: wanted a strided"),
        ((nn.LazyLinear(2), rows(2)), {}, ValueError, "uninitialized"),
        ((nn.ReLU(), rows(2)), {"batch_sizes": (1,)}, ValueError, "batch_sizes: .* 2 or more"),
        ((nn.ReLU(), rows(2)), {"batch_sizes": "12"}, TypeError, "batch_sizes: wanted several"),
        ((nn.ReLU(), rows(2)), {"batch_sizes": (2.0,)}, TypeError, "wanted an int, got float"),
        ((nn.ReLU(), rows(2)), {"threads": (0,)}, ValueError, "threads: wanted 1 or more, got 0"),
        ((nn.ReLU(), rows(2)), {"threads": ()}, ValueError, "threads: wanted at least one"),
        ((nn.ReLU(), rows(2)), {"places": (3,)}, ValueError, "places: wanted 0 to 2"),
        ((nn.ReLU(), rows(2)), {"runs": 0}, ValueError, "runs: wanted 1 or more"),
        ((nn.ReLU(), rows(2)), {"seed": "x"}, TypeError, "seed: wanted an int"),
        ((nn.ReLU(), rows(2)), {"gradients": "x"}, TypeError, "gradients: wanted a bool, got str"),
        ((nn.ReLU(), rows(2)), {"progress": 1}, TypeError, "progress: wanted a bool or None"),
        ((nn.ReLU(), rows(2)), {"modes": ("fast",)}, ValueError, "modes: wanted"),
        ((nn.ReLU(), rows(2)), {"require": "speed"}, ValueError, "require: wanted some of"),
        ((nn.ReLU(), rows(2)), {"require": "format"}, ValueError, "require=.*memory formats"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        conv2d_ext.certify(*arguments, **{**SMALL, **options})


# ---- certificates as files


def test_json_and_markdown():
    certificate = certify(models.TwoLayers(models.BatchMean()))
    document = json.loads(certificate.to_json())
    assert document["schema"] == 1
    assert document["passed"] is False
    assert document["machine"]["numerics"] == conv2d_ext.build_config()["numerics"]
    first = document["modes"]["F.*"]["axes"]["batch"]["outputs"]["first"]
    assert first["call"]["module"] == "1"
    page = certificate.to_markdown()
    assert page.startswith("# TwoLayers\n")
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 * 5
    assert all(line.count("|") == 5 for line in table)
    assert "aten::mean" in page


def test_against_another_machine(tmp_path):
    file = tmp_path / "certificate.json"
    x = rows(models.FEATURES)
    file.write_text(certify(models.Steady(), x).to_json())
    held = certify(models.Steady(), x, against=file).against
    assert held.same
    assert held.compared > 10
    document = json.loads(file.read_text())
    assert read_certificate(file) == document

    run, digests = next(iter(document["modes"]["F.*"]["digests"].items()))
    digests["output"] = "0" * 64
    document["machine"]["isa"] = "another"
    file.write_text(json.dumps(document))
    certificate = certify(models.Steady(), x, against=file)
    assert not certificate.against.same
    assert certificate.against.differing == (f"{run}: output",)
    assert "isa: another there" in certificate.against.notes[0]
    assert "NOT THE SAME" in str(certificate)

    held = certify(models.Steady(), x + 1, against=file).against
    assert not held.same
    assert "inputs are not the same" in held.differing[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "wanted an object, got list"),
        (b"{}", "wanted schema 1, got None"),
        (b'{"schema": 1}', "inputs: wanted list, got nothing"),
        (
            b'{"schema":1,"inputs":[],"parameters":"","settings":{},"machine":{},"modes":{"F.*":3}}',
            "modes: F..: wanted digests",
        ),
    ],
)
def test_files_that_are_no_certificates(tmp_path, content, message):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.json is not a certificate: .*{message}"):
        certify(models.Steady(), against=file)


# ---- under batch_invariant


def test_the_mode_makes_a_small_net_pass():
    torch.manual_seed(0)
    certificate = certify(models.SmallNet().eval(), rows(3, 6, 6), modes=("F.*", "batch_invariant"))
    assert certificate.mode == "batch_invariant"
    assert certificate.passed, str(certificate)
    table = certificate.modes["batch_invariant"].calls
    assert any(row.covered for row in table)
    assert not any(row.varied for row in table)
    assert not any(row.covered for row in certificate.modes["F.*"].calls)


def test_the_mode_does_not_hide_what_it_does_not_cover():
    certificate = certify(models.TwoLayers(models.BatchMean()), modes="batch_invariant")
    assert not certificate.passed
    # The mean is computed by the library, of the whole batch.
    assert axes(certificate)["batch"].outputs.first.call.op == "conv2d_ext::mean"


# ---- the command line

COMMAND = ("-m", "conv2d_ext", "certify")
ENV = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(conv2d_ext.__file__).parents[1]), str(Path(__file__).parent)]
    )
}
QUICK = ("--input", "3,6,6", "--batch", "2,3", "--threads", "1", "--runs", "1")


def test_command_line(tmp_path):
    file, page = tmp_path / "certificate.json", tmp_path / "certificate.md"
    model = ("--model", "certify_models:SmallNet", "--kwargs", '{"classes": 2}')
    finished = run_python(
        *COMMAND, *model, *QUICK, "--json", str(file), "--markdown", str(page), env=ENV
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    assert finished.stdout.rstrip().splitlines()[-1].startswith("PASSED")
    assert page.read_text().startswith("# SmallNet")
    again = run_python(*COMMAND, *model, *QUICK, "--against", str(file), env=ENV)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the same bits" in again.stdout
    other = run_python(
        *COMMAND, *model, *QUICK, "--seed", "1", "--no-gradients", "--against", str(file), env=ENV
    )
    assert other.returncode == 1, other.stdout + other.stderr
    assert "inputs are not the same" in other.stdout


def test_command_line_fails():
    model = ("--model", "certify_models:SmallNet", "--kwargs", '{"fails": true}')
    finished = run_python(*COMMAND, *model, *QUICK, "--no-gradients", env=ENV)
    assert finished.returncode == 1, finished.stderr
    assert "conv2d_ext::mean" in finished.stdout
    assert "FAILED" in finished.stdout


def _refused(capsys, *arguments: str) -> str:
    """What the command line says in this process, which needs no other one to refuse."""
    from conv2d_ext.__main__ import main

    with pytest.raises(SystemExit) as left:
        main(["certify", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: --model, --input"),
        (("--model", "nothing", "--input", "3"), "wanted MODULE:CALLABLE"),
        (("--model", "no_such_module:x", "--input", "3"), "ModuleNotFoundError"),
        (("--model", "torch.nn:NoSuchLayer", "--input", "3"), "AttributeError"),
        (("--model", "torch:tensor", "--kwargs", '{"data": 1}', "--input", "3"), "got Tensor"),
        (("--model", "torch.nn:ReLU", "--input", "3,x"), "wanted numbers"),
        (("--model", "torch.nn:ReLU", "--input", "0"), "sizes of 1 or more"),
        (("--model", "torch.nn:ReLU", "--input", "3:int7"), "wanted a dtype"),
        (("--model", "torch.nn:ReLU", "--input", "3", "--kwargs", "["), "wanted JSON"),
        (("--model", "torch.nn:ReLU", "--input", "3", "--batch", "1"), "batch_sizes"),
        (("--model", "torch.nn:ReLU", "--input", "3", "--json", "/no/such/file"), "cannot write"),
        (("--model", "torch.nn:ReLU", "--input", "3", "--against", "/no/file"), "No such file"),
    ],
)
def test_command_line_refuses(capsys, arguments, message):
    assert message in _refused(capsys, *arguments)


def test_command_line_against_a_file_that_is_none(tmp_path):
    file = tmp_path / "bad.json"
    file.write_text("{")
    finished = run_python(
        *COMMAND, "--model", "torch.nn:ReLU", "--input", "3", "--against", str(file), env=ENV
    )
    assert finished.returncode == 2
    assert "bad.json is not a certificate" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_inputs_of_eight_bits():
    x = torch.randn(2, 5).to(torch.float8_e4m3fn)
    rows = filler_rows(x, 4, torch.Generator().manual_seed(0))
    assert (rows.dtype, rows.shape) == (x.dtype, (4, 5))
    assert conv2d_ext.certify(lambda x: x.float() * 2, x).passed
