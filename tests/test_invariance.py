"""The mode batch_invariant: which threads are in it, what it covers, what leaves it keeps.

Seen to fail: without the mode, every test of TestModels and of TestCalls.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import py_compile
import random
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from child import run_forked
from observing import Recorder, assert_as_pytorch, same_bits
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch_versions import not_in_older

import conv2d_ext
from conv2d_ext import _C

BATCH = 9
# In the names of the autograd nodes of what the mode computes.
OURS = ("Conv2dBackward", "Conv2dExt", "conv2d_ext.")


def invariant(function, *inputs: torch.Tensor, gradients: bool = True) -> bool:
    """Whether examples of a batch have their bits alone, elsewhere, and on other threads."""

    def results(part: slice) -> list[torch.Tensor]:
        leaves = [x[part].clone().requires_grad_(gradients) for x in inputs]
        output = function(*leaves)
        if not gradients:
            return [output]
        weight = torch.arange(output[0].numel(), dtype=output.dtype).reshape(output[0].shape)
        (output * weight.cos()).sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    torch.set_num_threads(2)
    whole = results(slice(None))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for part in (slice(0, 1), slice(4, 5), slice(2, 7), slice(BATCH - 1, BATCH)):
            for ours, theirs in zip(results(part), whole, strict=True):
                if not same_bits(ours, theirs[part]):
                    return False
    return True


def dispatched(function) -> list[str]:
    """The ops that a call comes down to."""
    with Recorder() as recorder:
        function()
    return recorder.names


class TestCalls:
    """Each goes to this library's op, whoever makes it, and holds."""

    mat = torch.randn(BATCH, 33, generator=torch.Generator().manual_seed(0))
    mats = torch.randn(BATCH, 7, 33, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(20, 33, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(20, generator=torch.Generator().manual_seed(3))

    @pytest.mark.parametrize(
        "call",
        [
            lambda s, x: F.linear(x, s.weight, s.bias),
            lambda s, x: F.linear(x, s.weight),
            lambda s, x: x @ s.weight.t(),
            lambda s, x: torch.mm(x, s.weight.t()),
            lambda s, x: torch.addmm(s.bias, x, s.weight.t()),
            lambda s, x: torch.addmm(s.bias, x, s.weight.t(), beta=0.5, alpha=2),
            lambda s, x: s.bias.expand(len(x), -1).clone().addmm_(x, s.weight.t()),
            lambda s, x: torch.mv(x, s.weight[0]),
            lambda s, x: torch.addmv(x[:, 0], x, s.weight[0]),
            lambda s, x: torch.einsum("bk,nk->bn", x, s.weight),
            lambda s, x: torch.tensordot(x, s.weight, dims=([1], [1])),
            lambda s, x: torch.tensordot(x, s.weight.t()[:, 0], dims=1),
            lambda s, x: torch.stack([torch.dot(row, s.weight[0]) for row in x]),
        ],
    )
    def test_products_of_rows(self, call):
        expected = call(self, self.mat)
        with conv2d_ext.batch_invariant():
            assert any(
                "conv2d_ext::matmul" in op for op in dispatched(lambda: call(self, self.mat))
            )
            torch.testing.assert_close(call(self, self.mat), expected)
            assert invariant(lambda x: call(self, x), self.mat)

    @pytest.mark.parametrize(
        "call",
        [
            lambda s, x: F.linear(x, s.weight, s.bias),
            lambda s, x: x @ s.weight.t(),
            lambda s, x: x @ x.mT,
            lambda s, x: torch.bmm(x, x.mT),
            lambda s, x: torch.baddbmm(s.mats[:1, :, :7], x, x.mT, beta=0.3),
            lambda s, x: torch.einsum("bik,bjk->bij", x, x),
            lambda s, x: torch.einsum("bik,nk->bni", x, s.weight),
        ],
    )
    def test_products_of_batches(self, call):
        expected = call(self, self.mats)
        with conv2d_ext.batch_invariant():
            ops = dispatched(lambda: call(self, self.mats))
            assert "conv2d_ext::matmul" in ops
            torch.testing.assert_close(call(self, self.mats), expected)
            assert invariant(lambda x: call(self, x), self.mats)

    @pytest.mark.parametrize(
        "dims",
        [
            1,
            0,
            2,
            ((2, 1, 0), (0, 1, 2)),
            ((0,), (2,)),
            ((-1, 0), (1, -1)),
            ((2, 1), (0, 0)),
            ((3,), (0,)),
            ((1,), (1,)),
        ],
        ids=str,
    )
    def test_tensordot_is_pytorchs(self, dims):
        first, second = torch.randn(5, 3, 4), torch.randn(4, 3, 5)

        assert_as_pytorch(lambda: torch.tensordot(first, second, dims=dims))
        with torch.autocast("cpu", torch.bfloat16):
            if dims == ((2, 1, 0), (0, 1, 2)):
                assert_as_pytorch(lambda: torch.tensordot(first, second, dims=dims))

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: F.pairwise_distance(x, x.flip(1)),
            lambda x: torch.norm(x, 2, 1),
            lambda x: torch._VF.norm(x, 3, dim=(1,), keepdim=True),
            lambda x: torch._VF.norm(x, dim=(1,), dtype=torch.float64, p=1, keepdim=False),
        ],
    )
    def test_norms_of_any_layout(self, call):
        def of_columns(x):
            return call(x.t().contiguous().t())

        expected = call(self.mat.double())
        with conv2d_ext.batch_invariant():
            torch.testing.assert_close(of_columns(self.mat), expected, check_dtype=False)
            assert invariant(of_columns, self.mat)

    def test_out_and_in_place_forms(self):
        other = self.weight.t()
        expected = self.mat @ other
        with conv2d_ext.batch_invariant(), torch.no_grad():
            out = torch.empty(0)
            assert torch.mm(self.mat, other, out=out) is out
            torch.testing.assert_close(out, expected)
            sliced = torch.zeros(BATCH, 40)[:, ::2]
            torch.mm(self.mat, other, out=sliced)
            torch.testing.assert_close(sliced, expected)
            added = torch.ones(BATCH, 20)
            torch.addmm(added, self.mat, other, out=added)
            torch.testing.assert_close(added, expected + 1)
            batch = torch.ones(BATCH, 7, 7)
            torch.testing.assert_close(
                batch.baddbmm_(self.mats, self.mats.mT), self.mats @ self.mats.mT + 1
            )

    def test_errors_are_pytorch_s(self):
        for call in (
            lambda: torch.mm(self.mat, self.mat),
            lambda: F.linear(self.mat, self.weight.double()),
            lambda: torch.bmm(self.mats, self.mats),
            lambda: torch.mm(self.mat, self.weight.t(), out=torch.empty(0, dtype=torch.float64)),
            lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(2, 4, 3, 3)),
        ):
            with pytest.raises(RuntimeError) as alone:
                call()
            with conv2d_ext.batch_invariant(), pytest.raises(RuntimeError) as covered:
                call()
            assert str(covered.value) == str(alone.value)

    def test_integers_and_sparse_matrices_stay_pytorch_s(self):
        integers = torch.ones(3, 3, dtype=torch.int64)
        sparse = torch.eye(33).to_sparse()
        with conv2d_ext.batch_invariant():
            assert not any("conv2d_ext" in op for op in dispatched(lambda: integers @ integers))
            torch.testing.assert_close(torch.mm(self.mat, sparse), self.mat)

    def test_autocast_casts_first(self):
        with conv2d_ext.batch_invariant(), torch.autocast("cpu", torch.bfloat16):
            assert F.linear(self.mat, self.weight, self.bias).dtype == torch.bfloat16
            assert torch.mm(self.mat, self.weight.t()).dtype == torch.bfloat16
            assert invariant(lambda x: F.linear(x, self.weight, self.bias).float(), self.mat)


class TestScope:
    mat = torch.randn(5, 8)

    def is_on(self) -> bool:
        return any(
            "conv2d_ext" in op for op in dispatched(lambda: torch.mm(self.mat, self.mat.t()))
        )

    def test_nests_and_ends(self):
        assert not self.is_on()
        with conv2d_ext.batch_invariant():
            assert self.is_on()
            with conv2d_ext.batch_invariant():
                assert self.is_on()
            assert self.is_on()
        assert not self.is_on()

    def test_ends_with_an_exception(self):
        with contextlib.suppress(ValueError), conv2d_ext.batch_invariant():
            raise ValueError
        assert not self.is_on()

    def test_decorates_a_function(self):
        x = torch.randn(3, 40)

        @conv2d_ext.batch_invariant()
        def silu(x: torch.Tensor, scale: float = 1) -> torch.Tensor:
            """Documented."""
            assert conv2d_ext.invariance._is_inside()
            return scale * F.silu(x)

        assert silu.__name__ == "silu"
        assert silu.__doc__ == "Documented."
        with conv2d_ext.batch_invariant():
            expected = 2 * F.silu(x)
        assert torch.equal(silu(x, scale=2), expected)
        assert not conv2d_ext.invariance._is_inside()
        with pytest.raises(TypeError):
            silu("two")
        assert not conv2d_ext.invariance._is_inside()

    @pytest.mark.parametrize(
        "kind", ["generator", "coroutine", "class", "module", "staticmethod", "number"]
    )
    def test_decorates_nothing_that_runs_later(self, kind):
        def generator():
            yield 1

        async def coroutine():
            return 1

        refused = {
            "generator": generator,
            "coroutine": coroutine,
            "class": nn.ReLU,
            "module": nn.ReLU(),
            "staticmethod": staticmethod(F.relu),
            "number": 3,
        }
        with pytest.raises(TypeError, match="expected a function that has run when it returns"):
            conv2d_ext.batch_invariant()(refused[kind])

    def test_decorated_functions_return_nothing_that_runs_later(self):
        with pytest.raises(TypeError, match="returned a generator"):
            conv2d_ext.batch_invariant()(lambda: (i for i in range(3)))()

    def test_torchscript_does_not_compile_what_is_decorated(self):
        """It would compile the function without the context."""

        def silu(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return scale * F.silu(x)

        decorated = conv2d_ext.batch_invariant()(silu)
        assert inspect.signature(decorated) == inspect.signature(silu)
        unsupported = torch.jit.frontend.NotSupportedError
        with pytest.raises(unsupported, match="variable number of arguments"):
            torch.jit.script(decorated)

    def test_is_of_one_thread(self):
        seen = []
        with conv2d_ext.batch_invariant():
            thread = threading.Thread(target=lambda: seen.append(self.is_on()))
            thread.start()
            thread.join()
        assert seen == [False]

    def test_leaving_what_was_not_entered(self):
        with pytest.raises(RuntimeError, match="has not entered"):
            conv2d_ext.batch_invariant().__exit__(None, None, None)
        assert conv2d_ext.invariance._compiler_settings._users == 0

    def test_a_backward_outside_keeps_the_bits(self):
        weight = torch.randn(20, 8, requires_grad=True)

        def gradient(rows: slice, backward_in_thread: bool) -> torch.Tensor:
            leaf = self.mat[rows].clone().requires_grad_()
            with conv2d_ext.batch_invariant():
                loss = (F.linear(leaf, weight) ** 2).sum()
            if backward_in_thread:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
            return leaf.grad

        whole = gradient(slice(None), backward_in_thread=False)
        for part in (slice(0, 1), slice(2, 4)):
            for in_thread in (False, True):
                assert same_bits(gradient(part, in_thread), whole[part])

    def test_enable_reaches_other_threads(self):
        started, go, seen = threading.Event(), threading.Event(), []

        def running_before() -> None:
            seen.append(self.is_on())
            started.set()
            go.wait()
            torch.mm(self.mat, self.mat.t())
            seen.append(self.is_on())

        thread = threading.Thread(target=running_before)
        thread.start()
        started.wait()
        try:
            conv2d_ext.enable()
            conv2d_ext.enable()
            assert _C.is_enabled_in_process()
            assert self.is_on()
            go.set()
            thread.join()
            assert seen == [False, True]
            with torch.inference_mode():
                assert self.is_on()
        finally:
            conv2d_ext.disable()
        conv2d_ext.disable()
        assert not self.is_on()
        assert not _C.is_batch_invariant()

    def test_a_thread_leaves_after_disable(self):
        joined, go, seen = threading.Event(), threading.Event(), []

        def work() -> None:
            torch.mm(self.mat, self.mat.t())
            seen.append(self.is_on())
            joined.set()
            go.wait()
            torch.mm(self.mat, self.mat.t())
            seen.append(self.is_on())

        conv2d_ext.enable()
        thread = threading.Thread(target=work)
        thread.start()
        joined.wait()
        conv2d_ext.disable()
        go.set()
        thread.join()
        assert seen == [True, False]

    def after_disable(self, call):
        """What `call` gives as this thread's first one after another thread's disable."""
        conv2d_ext.enable()
        assert self.is_on()
        thread = threading.Thread(target=conv2d_ext.disable)
        thread.start()
        thread.join()
        return call()

    @pytest.mark.parametrize(
        ("function", "recorded"),
        [
            (lambda x: x.exp(), "aten.exp.default"),
            (lambda x: x.clone().exp_(), "aten.exp_.default"),
            (lambda x: torch.rsub(x, 2), "aten.rsub.Scalar"),
        ],
        ids=["exp", "exp_", "rsub"],
    )
    def test_a_thread_traces_as_pytorch_does_after_disable(self, function, recorded):
        """Seen to fail: calls that are recorded or taken apart did not ask whether it has left."""
        code = self.after_disable(lambda: make_fx(function)(torch.ones(3)).code)
        assert recorded in code
        assert "conv2d_ext" not in code

    def test_recorded_calls_of_a_thread_that_leaves(self):
        """Seen to fail: the first one's sum was PyTorch's, since the thread left inside of it."""
        x = torch.randn(64, 5001)
        with conv2d_ext.batch_invariant():
            expected = torch.logsumexp(x, [1])
        recorded = torch.ops.conv2d_ext.eager_logsumexp
        assert same_bits(self.after_disable(lambda: recorded(x, [1], False)), expected)

    def test_every_first_call_of_a_running_thread_joins(self):
        """Its backward, too, is this library's; whatever the covered op."""
        conv, gate = nn.Conv2d(3, 4, 3), torch.randn(4)
        q, x = torch.randn(1, 2, 5, 8), torch.randn(2, 4, 6, 6)
        last = x.contiguous(memory_format=torch.channels_last)
        lstm = nn.LSTM(8, 4)
        first_calls = {
            "conv": lambda: conv(torch.ones(1, 3, 5, 5, requires_grad=True)),
            "linear": lambda: F.linear(x.flatten(2), torch.ones(5, 36, requires_grad=True)),
            "matmul": lambda: x.requires_grad_().flatten(2) @ x.flatten(2).mT,
            "attention": lambda: F.scaled_dot_product_attention(q.requires_grad_(), q, q),
            "group_norm": lambda: F.group_norm(last.detach().requires_grad_(), 2),
            "silu": lambda: F.silu(gate.requires_grad_()),
            "gelu_": lambda: F.gelu(gate.requires_grad_()),
            "softmax": lambda: gate.requires_grad_().softmax(0),
            "prod": lambda: gate.requires_grad_().prod(),
            "lstm": lambda: lstm(torch.ones(3, 2, 8))[0],
            "mean": lambda: gate.requires_grad_().mean(),
            "in inference mode": lambda: torch.inference_mode()(F.silu)(gate.detach()),
        }
        seen: dict[str, str] = {}

        def work(name: str, ready: threading.Barrier) -> None:
            torch.ones(2).add(1)
            ready.wait()
            ready.wait()
            if "inference" in name:
                first_calls[name]()
                seen[name] = "Conv2dExt" * self.is_on()
                return
            node, names = first_calls[name]().grad_fn, []
            while node is not None and len(names) < 9:
                names.append(node.name())
                node = node.next_functions[0][0] if node.next_functions else None
            seen[name] = " ".join(names)

        ready = threading.Barrier(len(first_calls) + 1)
        threads = [threading.Thread(target=work, args=(name, ready)) for name in first_calls]
        for thread in threads:
            thread.start()
        ready.wait()
        conv2d_ext.enable()
        try:
            ready.wait()
            for thread in threads:
                thread.join()
        finally:
            conv2d_ext.disable()
        mine = {name for name, found in seen.items() if any(word in found for word in OURS)}
        assert mine >= set(first_calls) - {"prod", "lstm"}, seen
        assert "Prod" not in seen["prod"]
        assert "Mkldnn" not in seen["lstm"]

    def test_gates_hand_on_what_is_not_covered(self):
        """After disable they stand as they did: results, gradients and errors are PyTorch's."""
        conv2d_ext.enable()
        conv2d_ext.disable()
        assert not self.is_on()
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        functions = (
            lambda x: F.group_norm(x, 2),
            lambda x: F.scaled_dot_product_attention(x, x, x),
            lambda x: F.linear(x, x.new_ones(3, 6)),
            lambda x: F.conv2d(x, x.new_ones(2, 4, 3, 3)),
            lambda x: F.gelu(x).mean((2, 3)).softmax(1),
            lambda x: x.flatten(1) @ x.flatten(1).t(),
            lambda x: torch.sigmoid_(x * 1),
        )
        for function in functions:
            output = function(x)
            assert not any(word in output.grad_fn.name() for word in OURS)
            (grad,) = torch.autograd.grad(output.square().sum(), x)
            (again,) = torch.autograd.grad(function(x.double()).square().sum(), x)
            torch.testing.assert_close(grad, again, rtol=1e-3, atol=1e-4)
            torch.func.vmap(torch.func.grad(lambda x, f=function: f(x[None]).sum()))(x.detach())
        sparse = torch.eye(3).to_sparse()
        torch.testing.assert_close(torch.mm(sparse, torch.ones(3, 3)), torch.ones(3, 3))
        assert (
            torch.mm(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)).sum()
            == 8
        )
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))

    def test_gates_hand_on_where_python_dispatches(self):
        conv2d_ext.enable()
        conv2d_ext.disable()

        def function(x: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, torch.ones(3, 6)).softmax(-1) @ torch.ones(3, 6)
            return F.group_norm(F.scaled_dot_product_attention(y, x, x), 2).mean()

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        (grad,), (expected,) = (torch.autograd.grad(f(x), x) for f in (compiled, function))
        torch.testing.assert_close(grad, expected)

    @pytest.mark.parametrize("leave_inside", [False, True])
    @pytest.mark.parametrize("process", [False, True])
    def test_inference_mode_brings_no_mode_back(self, leave_inside, process):
        """It sets a thread's keys back to what they were when it began."""
        context = conv2d_ext.batch_invariant()

        def enter() -> None:
            conv2d_ext.enable() if process else context.__enter__()

        def leave() -> None:
            conv2d_ext.disable() if process else context.__exit__(None, None, None)

        def work(found: list[bool]) -> None:
            enter()
            inference = torch.inference_mode()
            inference.__enter__()
            if leave_inside:
                leave()
                found.append(self.is_on())
            inference.__exit__(None, None, None)
            if not leave_inside:
                found.append(not self.is_on())
                leave()
            found.append(self.is_on())
            found.append(_C.is_batch_invariant())
            enter()
            found.append(not self.is_on())
            leave()

        found: list[bool] = []
        thread = threading.Thread(target=work, args=(found,))
        thread.start()
        thread.join()
        assert found == [False] * 4

    def test_disable_reaches_a_thread_in_inference_mode(self):
        joined, disabled, found = threading.Event(), threading.Event(), []

        def work() -> None:
            self.is_on()
            with torch.inference_mode():
                found.append(self.is_on())
                joined.set()
                disabled.wait()
                found.append(self.is_on())
            found.append(self.is_on())

        conv2d_ext.enable()
        thread = threading.Thread(target=work)
        thread.start()
        joined.wait()
        conv2d_ext.disable()
        disabled.set()
        thread.join()
        assert found == [True, False, False]

    def test_enable_in_inference_mode_lasts(self):
        try:
            with torch.inference_mode():
                conv2d_ext.enable()
                assert self.is_on()
            assert self.is_on()
        finally:
            conv2d_ext.disable()
        assert not self.is_on()

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("forward_inside", [False, True])
    @pytest.mark.parametrize("process", [False, True])
    def test_a_checkpoint_recomputes_in_the_mode_of_its_forward(
        self, reentrant, forward_inside, process
    ):
        from torch.utils.checkpoint import checkpoint

        with conv2d_ext.batch_invariant():
            pass
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 5))
        x = torch.randn(BATCH, 3, 4, 4)
        seen: list[bool] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            seen.append(_C.is_batch_invariant())
            return layers(x).relu()

        @contextlib.contextmanager
        def mode(on: bool):
            if not on:
                yield
            elif process:
                conv2d_ext.enable()
                try:
                    yield
                finally:
                    conv2d_ext.disable()
            else:
                with conv2d_ext.batch_invariant():
                    yield

        def gradient(rows: slice, function) -> torch.Tensor:
            leaf = x[rows].clone().requires_grad_()
            with mode(forward_inside):
                output = function(leaf)
            with mode(not forward_inside):
                output.square().sum().backward()
                after = _C.is_batch_invariant()
            assert after != forward_inside
            return leaf.grad

        def checkpointed(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, x, use_reentrant=reentrant)

        whole = gradient(slice(None), checkpointed)
        assert seen == [forward_inside] * 2
        if forward_inside:
            assert same_bits(whole, gradient(slice(None), block))
            assert same_bits(gradient(slice(2, 3), checkpointed), whole[2:3])
        assert not _C.is_batch_invariant()

    def test_run_runs_a_script_under_it(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import sys, conv2d_ext\n"
            "from conv2d_ext import _C\n"
            "print(__name__, sys.argv[1:], _C.is_enabled_in_process())\n"
            "sys.exit(3)\n"
        )
        done = run_forked("-m", "conv2d_ext", "run", script, "--flag", "x")
        assert done.returncode == 3, done.stderr
        assert done.stdout == "__main__ ['--flag', 'x'] True\n"
        missing = run_forked("-m", "conv2d_ext", "run", tmp_path / "missing.py", "--flag", "x")
        assert missing.returncode == 2

    @pytest.mark.parametrize("how", ["file", "module", "package", "folder"])
    def test_run_runs_a_program_as_python_does(self, how, tmp_path):
        """What it prints of itself, in a thread and at exit too, and its exceptions."""
        program = (
            "import atexit, os, pickle, sys, threading\n"
            "class A: pass\n"
            "def show(x: int = 0): print(len(pickle.dumps(A())), sys.modules['__main__'].A is A)\n"
            "print(__name__, __file__, os.path.isabs(__file__), __package__)\n"
            "print(sys.argv, sys.path[0])\n"
            "print(getattr(__spec__, 'name', None), show.__annotations__)\n"
            "atexit.register(show)\n"
            "threading.Timer(0.2, show).start()\n"
            "raise KeyboardInterrupt if sys.argv[1:] else SystemExit(5)\n"
        )
        folder = tmp_path / "program"
        folder.mkdir()
        (folder / "__main__.py").write_text(program)
        (folder / "__init__.py").write_text("")
        (tmp_path / "alone.py").write_text(program)
        target = {
            "file": ["alone.py"],
            "module": ["-m", "alone"],
            "package": ["-m", "program"],
            "folder": ["program"],
        }[how]
        for arguments in ([], ["x"]) if how != "folder" else ([],):
            ours, pythons = (
                subprocess.run(
                    [sys.executable, *before, *target, *arguments],
                    capture_output=True,
                    text=True,
                    check=False,
                    cwd=tmp_path,
                )
                for before in (["-m", "conv2d_ext", "run"], [])
            )
            assert ours.returncode == pythons.returncode, ours.stderr
            if how == "folder":  # run by runpy, which knows its name
                continue
            assert ours.stdout == pythons.stdout
            assert ("KeyboardInterrupt" in ours.stderr) == bool(arguments)

    def test_run_of_no_module(self):
        done = run_forked("-m", "conv2d_ext", "run", "-m", "no_such_module")
        assert done.returncode == 1
        assert "no module named no_such_module" in done.stderr
        assert "Traceback" not in done.stderr

    def test_run_of_a_module_that_lacks_another(self, tmp_path):
        (tmp_path / "lacking.py").write_text("import no_such_module_at_all\n")
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__init__.py").write_text("import no_such_module_at_all\n")
        for name in ("lacking", "package", "package.part"):
            done = run_forked("-m", "conv2d_ext", "run", "-m", name, cwd=tmp_path)
            assert done.returncode == 1
            assert "No module named 'no_such_module_at_all'" in done.stderr

    def test_run_of_bytecode(self, tmp_path):
        (tmp_path / "program.py").write_text("print(__name__)\n")
        compiled = py_compile.compile(str(tmp_path / "program.py"), str(tmp_path / "program.pyc"))
        done = run_forked("-m", "conv2d_ext", "run", compiled)
        assert done.stdout == "__main__\n", done.stderr


class TestCompile:
    x = torch.randn(6, 3, 12, 12)
    conv = nn.Conv2d(3, 8, 3)
    weight = torch.randn(5, 8)

    def model(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.conv(x).flatten(2).mean(2), self.weight)

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_the_first_call_has_the_bits_of_the_next(self, inside, backend):
        """AOTAutograd runs it in a TorchDispatchMode. And PyTorch's kernels of these functions call
        others that the mode covers.

        Seen to fail: logsumexp and norm, of which a TorchDispatchMode sees PyTorch's name;
        _foreach_ functions, dist and rsub that are not taken apart.
        """
        x = torch.randn(8, 1003)

        def functions(x: torch.Tensor) -> list[torch.Tensor]:
            return [
                x.logsumexp(1),
                F.pairwise_distance(x, x.flip(0)),
                torch._foreach_sigmoid([x])[0],
                torch._foreach_pow([x.abs()], 1.7)[0],
                torch._foreach_add([x], [x.flip(0)], alpha=0.3)[0],
                torch.rsub(x, x.flip(0), alpha=0.3),
                torch.rsub(x, 1.7, alpha=0.3),
                torch.dist(x[0], x[1]),
            ]

        def in_context(x: torch.Tensor) -> list[torch.Tensor]:
            with conv2d_ext.batch_invariant():
                return functions(x)

        torch._dynamo.reset()
        compiled = torch.compile(in_context if inside else functions, backend=backend)
        with contextlib.nullcontext() if inside else conv2d_ext.batch_invariant():
            first, second = compiled(x), compiled(x)
        for ours, again, eager in zip(first, second, in_context(x), strict=True):
            assert same_bits(ours, eager)
            assert same_bits(again, eager)

    def test_sums_at_indices_have_one_order(self):
        """One thread adds what PyTorch's formulas of these gradients add. (Of a batch of one
        Inductor's threads would each take a part of the image.)

        Seen to fail: where all three were left to Inductor.
        """

        def functions(x: torch.Tensor) -> torch.Tensor:
            bilinear = F.interpolate(x, scale_factor=3, mode="bilinear")
            patches = F.unfold(F.interpolate(bilinear, scale_factor=1.5), 3, padding=1)
            return patches.sum(1) + x.take(torch.arange(patches.shape[2]) % 50)

        x, grad = torch.randn(1, 1, 37, 37), torch.randn(1, 166 * 166)
        torch._dynamo.reset()
        compiled = torch.compile(functions, dynamic=False)
        torch.set_num_threads(2)
        with conv2d_ext.batch_invariant():

            def gradient(call) -> torch.Tensor:
                leaf = x.clone().requires_grad_()
                call(leaf).backward(grad)
                return leaf.grad

            first = gradient(compiled)
            torch.testing.assert_close(first, gradient(functions), atol=1e-3, rtol=1e-4)
            assert all(same_bits(gradient(compiled), first) for _ in range(20))

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_function_compiled_before_notices(self, backend):
        compiled = torch.compile(self.model, fullgraph=True, backend=backend)
        for _ in range(2):
            outside = compiled(self.x)
            with conv2d_ext.batch_invariant():
                assert same_bits(compiled(self.x), self.model(self.x))
            assert same_bits(compiled(self.x), outside)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
    @pytest.mark.parametrize("first", ["outside", "inside"])
    def test_a_function_without_a_tensor_argument_notices(self, first, backend):
        """Guards of torch.compile look at the keys of arguments, not of a module's tensors."""

        class Generator(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.latents = nn.Parameter(torch.randn(4, 3, 16, 16))
                self.conv = nn.Conv2d(3, 8, 3)

            def forward(self, factor: int) -> torch.Tensor:
                return F.silu(self.conv(self.latents * factor))

        torch._dynamo.reset()
        model, graphs = Generator(), CompileCounterWithBackend(backend)
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        contexts = [contextlib.nullcontext, conv2d_ext.batch_invariant]
        with torch.no_grad():
            with conv2d_ext.batch_invariant():
                invariant = model(1)
            for context in (contexts if first == "outside" else contexts[::-1]) * 2:
                with context():
                    output = compiled(1)
                if context is conv2d_ext.batch_invariant:
                    assert same_bits(output, invariant)
            assert graphs.frame_count == 2
            conv2d_ext.enable()
            try:
                assert same_bits(compiled(1), invariant)
            finally:
                conv2d_ext.disable()

    @not_in_older  # whose C++ does not compile, in the mode or out of it
    @pytest.mark.parametrize("name", ["softcap", "sigmoid", "exp2"])
    def test_flex_attention(self, name):
        """Its functions of scores lie in Inductor's kernel, which has no place for a call."""
        from torch.nn.attention.flex_attention import flex_attention

        scores = {
            "softcap": lambda score, b, h, i, j: torch.tanh(score / 20) * 20,
            "sigmoid": lambda score, b, h, i, j: torch.sigmoid(score),
            "exp2": lambda score, b, h, i, j: torch.exp2(score),
        }
        # Of 40 tokens PyTorch's code for AVX2 computes NaN, outside of the mode, too (2.11).
        q, k, v = (torch.randn(3, 2, 48, 16) for _ in range(3))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flex_attention(q, k, v, score_mod=scores[name])

        compiled = torch.compile(attend, fullgraph=True)
        with torch.no_grad(), conv2d_ext.batch_invariant():
            whole = compiled(q, k, v)
            torch.testing.assert_close(whole, attend(q, k, v))
            for image in range(3):
                part = slice(image, image + 1)
                assert same_bits(compiled(q[part], k[part], v[part]), whole[part])

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_the_context_inside(self, backend):
        def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with conv2d_ext.batch_invariant():
                first = self.model(x)
            return first, self.model(x)

        compiled = torch.compile(inside, fullgraph=True, backend=backend)
        for ours, theirs in zip(compiled(self.x), inside(self.x), strict=True):
            assert same_bits(ours, theirs)
        assert not _C.is_batch_invariant()

    def test_inductor_does_not_take_another_mode_s_code(self):
        compiled = torch.compile(self.model, fullgraph=True)
        compiled(self.x)
        with conv2d_ext.batch_invariant(), torch.no_grad():
            whole = compiled(self.x)
            for part in (slice(0, 1), slice(2, 5)):
                assert same_bits(compiled(self.x[part]), whole[part])


def test_an_exported_program_keeps_the_bits(tmp_path):
    """The context lies in what is exported; the program runs in it, saved and loaded, outside."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 16, 3), nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with conv2d_ext.batch_invariant():
                q = F.gelu(self.conv(x)).flatten(2).mT.unflatten(-1, (2, 8)).transpose(1, 2)
                y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
                return torch.sigmoid(self.last(y.mean(1)))

    model, x = Model().eval(), torch.randn(6, 3, 9, 9)
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        expected = model(x)
        assert same_bits(loaded(x), expected)
        assert same_bits(loaded(x[2:5]), expected[2:5])
    assert not _C.is_batch_invariant()


class TestAsPyTorch:
    """What a call gives and refuses is PyTorch's, but for the bits."""

    def test_a_product_of_one_element_is_no_view_of_its_input(self):
        with conv2d_ext.batch_invariant():
            x = torch.ones(3, 1)
            x.prod(1).mul_(5)
            torch.ones(1).prod().mul_(2)
        assert torch.equal(x, torch.ones(3, 1))

    def test_requests_in_inference_mode_stay_in_the_mode(self):
        rows, matrix = torch.randn(64, 300), torch.randn(300, 77)
        held = []

        def serve() -> None:
            for _ in range(3):
                with torch.inference_mode():
                    held.append(torch.equal((rows @ matrix)[:1], rows[:1] @ matrix))

        conv2d_ext.enable()
        try:
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join()
        finally:
            conv2d_ext.disable()
        assert held == [True] * 3

    def test_autocast_leaves_what_it_does_not_know(self):
        matrix, vector = torch.randn(4, 4), torch.randn(4)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.mv(matrix, vector)
            with conv2d_ext.batch_invariant():
                found = torch.mv(matrix, vector)
                out = torch.mm(matrix, matrix, out=torch.empty(4, 4))
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(out, matrix @ matrix)

    @pytest.mark.parametrize("proj_size", [0, 2])
    def test_autocast_casts_lstms(self, proj_size):
        lstm, x = nn.LSTM(3, 4, batch_first=True, proj_size=proj_size), torch.randn(2, 5, 3)
        with torch.autocast("cpu", torch.bfloat16):
            with conv2d_ext.batch_invariant():
                found = lstm(x)
            try:
                expected = lstm(x)
            except RuntimeError:  # oneDNN has no LSTM of bfloat16 for CPUs without AVX-512
                expected = None
        if expected is None:
            assert found[0].dtype == torch.bfloat16
            torch.testing.assert_close(found, lstm(x), atol=4e-3, rtol=0.02, check_dtype=False)
        else:
            torch.testing.assert_close(found, expected, atol=4e-3, rtol=0.02)  # dtypes as well

    @pytest.mark.parametrize(
        "call",
        [
            lambda: F.linear(torch.ones(5), torch.ones(4, 5), torch.ones(1, 4)),
            lambda: F.linear(torch.ones(2, 3, 5), torch.ones(4, 5), torch.ones(3, 1)),
            lambda: F.linear(torch.ones(2, 3, 5), torch.ones(5), torch.ones(3)),
            lambda: torch.linalg.vector_norm(torch.ones(3).double(), dtype=torch.float32),
            lambda: torch.linalg.vector_norm(torch.ones(3), dtype=torch.float64),
            lambda: torch.norm(torch.ones(3), dtype=torch.int32),
            lambda: torch._VF.norm(torch.empty(0), -1, dim=(0, 0), keepdim=False),
        ],
    )
    def test_takes_and_refuses_what_pytorch_does(self, call):
        assert_as_pytorch(call)

    def test_celu(self):
        x = torch.randn(BATCH, 38, 14)
        with conv2d_ext.batch_invariant():
            torch.testing.assert_close(
                F.celu(x, 1.3), torch.nn.functional.celu(x.double(), 1.3).float()
            )
            assert invariant(lambda x: F.celu(x, 1.3), x)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.ones(2).pow(float("inf")),
            lambda: torch.ones(2).pow(float("nan")),
            lambda: torch.pow(float("inf"), torch.zeros(2)),
            lambda: (-torch.ones(2)).pow(16777217),
            lambda: torch.baddbmm(torch.ones(5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
            lambda: torch.addmm(
                torch.ones(3), torch.full((2, 2), torch.nan), torch.ones(2, 3), alpha=0
            ),
        ],
    )
    def test_values(self, call):
        expected = call()
        with conv2d_ext.batch_invariant():
            torch.testing.assert_close(call(), expected, equal_nan=True)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.addmm(torch.ones(3), torch.ones(2, 2), torch.ones(2, 3), alpha=1j),
            lambda: torch.addmv(torch.ones(3, 5), torch.ones(3, 4), torch.ones(4, 5)),
        ],
    )
    def test_errors(self, call):
        with pytest.raises(RuntimeError):
            call()
        assert_as_pytorch(call)

    def test_compiled_functions_in_place(self):
        def function(x: torch.Tensor) -> torch.Tensor:
            return (x * 1).sin_().exp_().sum()

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        x = torch.randn(5, requires_grad=True)
        with conv2d_ext.batch_invariant():
            (ours,) = torch.autograd.grad(compiled(x), x)
            norm = torch.compile(nn.RMSNorm(8), fullgraph=True, backend="aot_eager")
            norm(torch.randn(2, 8, requires_grad=True)).sum().backward()
        (expected,) = torch.autograd.grad(function(x), x)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (nn.LayerNorm(96), (8, 50, 96)),
        (nn.LayerNorm((7, 7)), (16, 24, 7, 7)),
        (nn.BatchNorm2d(24), (8, 24, 17, 19)),
        (nn.BatchNorm2d(24).eval(), (8, 24, 17, 19)),
        (nn.BatchNorm2d(96), (64, 96, 1, 1)),
        (nn.BatchNorm1d(96), (64, 96)),
        (nn.BatchNorm1d(96).eval(), (64, 96)),
        (nn.BatchNorm3d(24), (4, 24, 5, 6, 7)),
        (nn.GroupNorm(4, 24), (8, 24, 17, 19)),
        (nn.InstanceNorm2d(24, affine=True), (8, 24, 17, 19)),
        (nn.RMSNorm(96), (8, 50, 96)),
        (nn.PReLU(24), (8, 24, 17, 19)),
        (nn.Linear(96, 30), (8, 50, 96)),
        (nn.TransformerEncoderLayer(96, 4, 64, batch_first=True, dropout=0), (8, 50, 96)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_weight_gradients_follow_no_thread_count(norm, size, dtype):
    norm = copy.deepcopy(norm).to(dtype)
    formats = [torch.contiguous_format]
    if len(size) > 3:
        formats.append(torch.channels_last if len(size) == 4 else torch.channels_last_3d)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = copy.deepcopy(norm.state_dict())

    def results(count, memory_format):
        torch.set_num_threads(count)
        norm.load_state_dict(state)
        leaf = x.to(memory_format=memory_format, copy=True).requires_grad_()
        with conv2d_ext.batch_invariant():
            output = norm(leaf)
            grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            gradients = torch.autograd.grad(output, (leaf, *norm.parameters()), grad)
        return [output.detach(), *gradients, *norm.buffers()]

    for memory_format in formats:
        expected = results(1, memory_format)
        for count in (2, 3):
            found = results(count, memory_format)
            for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                assert same_bits(ours, theirs), (memory_format, count, i)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("odd", ["gradient", "input"])
@pytest.mark.parametrize(
    "sizes", [(1, 8, 3, 3), (1, 8, 3, 2, 3), (2, 8, 3, 1), (2, 8, 1, 3), (2, 8, 1, 3, 2)], ids=str
)
def test_batch_norm_whatever_the_strides_of_single_elements(sizes, odd, evaluated):
    """PyTorch mistakes the format of some such gradients (at 2.11), which linear gives the pixels
    of an image."""
    norm = (nn.BatchNorm2d if len(sizes) == 4 else nn.BatchNorm3d)(8).train(not evaluated)
    nn.init.uniform_(norm.weight, 0.5, 2)

    def mistaken(tensor):
        last = tensor.movedim(1, -1).contiguous().movedim(-1, 1)
        strides = [
            1 if d and n == 1 else s
            for d, (n, s) in enumerate(zip(sizes, last.stride(), strict=True))
        ]
        odd = last.as_strided(sizes, [8 if sizes[0] == 1 else strides[0], *strides[1:]])
        assert torch.equal(odd, tensor)
        return odd

    def results(norm, x, grad):
        x = x.detach().requires_grad_()
        output = norm(x)
        return output.detach(), *torch.autograd.grad(output, (x, *norm.parameters()), grad)

    x, grad = torch.randn(sizes), torch.randn(sizes)
    exact = results(copy.deepcopy(norm).double(), x.double(), grad.double())
    if odd == "gradient":
        grad = mistaken(grad)
    else:
        x = mistaken(x)
    with conv2d_ext.batch_invariant():
        for result, wanted in zip(results(norm, x, grad), exact, strict=True):
            torch.testing.assert_close(result, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("norm", "dims"),
    [
        (nn.BatchNorm2d(6).eval(), 4),
        (nn.BatchNorm2d(1).eval(), 4),
        (nn.BatchNorm3d(6).eval(), 5),
        (nn.GroupNorm(3, 6), 4),
        (nn.GroupNorm(3, 6), 5),
        (nn.InstanceNorm2d(6), 4),
        (nn.InstanceNorm3d(6), 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_norms_of_examples_that_lie_in_any_order(norm, dims, dtype):
    """The batch may lie between an example's dimensions; a batch of one has no place among them."""
    norm, exact = copy.deepcopy(norm).to(dtype), copy.deepcopy(norm).double()
    evaluated = isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d)
    if evaluated:
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
    exact.load_state_dict(norm.state_dict())
    channels = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    generator = torch.Generator().manual_seed(dims)

    def lying_in_an_order(sizes):
        order = torch.randperm(dims, generator=generator)
        larger = sizes.clone()
        larger[2:] += torch.rand(dims - 2, generator=generator) < 0.2  # a slice, not dense
        memory = torch.randn(larger[order].tolist(), generator=generator).to(dtype)
        to_logical = order.argsort().tolist()

        def examples(which):
            """As a batch of them lies when it is made in this order."""
            part = memory.index_select(to_logical[0], torch.arange(3)[which]).permute(to_logical)
            return part[(slice(None), *(slice(size) for size in sizes[1:].tolist()))]

        return examples

    def results(norm, x, grad):
        leaf = x.detach().requires_grad_()
        output = norm(leaf)
        return output.detach(), *torch.autograd.grad(output, (leaf, *norm.parameters()), grad)

    for _ in range(60):
        sizes = torch.randint(1, 4, (dims,), generator=generator)
        sizes[:2] = torch.tensor([3, channels])
        if not evaluated:
            sizes[-1] += 6  # the statistics of few pixels are ill-conditioned
        inputs, gradients = lying_in_an_order(sizes), lying_in_an_order(sizes)
        x, grad = inputs(slice(None)), gradients(slice(None))
        with conv2d_ext.batch_invariant():
            together = results(norm, x, grad)
            for n in range(3):
                one = slice(n, n + 1)
                for alone in ((inputs(one), gradients(one)), (x[one], grad[one])):
                    for ours, theirs in zip(together[:2], results(norm, *alone), strict=False):
                        assert same_bits(ours[one], theirs), (x.stride(), grad.stride(), n)
        # PyTorch's own gradients of tensors in such orders can be wrong.
        dense = [t.double().clone(memory_format=torch.contiguous_format) for t in (x, grad)]
        for ours, theirs in zip(together, results(exact, *dense), strict=True):
            bound = 12 * torch.finfo(dtype).eps * max(1, theirs.abs().max())
            assert (ours.double() - theirs).abs().max() <= bound, (x.stride(), grad.stride())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3,), (4, 5)], ids=str)
@pytest.mark.parametrize("rows", [(), (7,), (50, 4), (0,)], ids=str)
def test_gradients_of_layer_norm(rows, shape, dtype):
    """As float64's, no further off than PyTorch's; second derivatives too."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((*rows, *shape), shape, shape)]
    grad = torch.randn((*rows, *shape), generator=generator).to(dtype)

    def gradients(to, mode):
        leaves = [t.to(dtype).to(to).requires_grad_() for t in tensors]
        with mode():
            output = F.layer_norm(leaves[0], shape, *leaves[1:])
            return torch.autograd.grad(output, leaves, grad.to(to))

    exact = gradients(torch.float64, contextlib.nullcontext)
    theirs = gradients(dtype, contextlib.nullcontext)
    ours = gradients(dtype, conv2d_ext.batch_invariant)
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        # float64's own is PyTorch's.
        eps = torch.finfo(dtype).eps * (4 if dtype == torch.float64 else 1)
        assert (mine - right).norm() <= 1.5 * (other - right).norm() + eps * (right.norm() + 1)
    if dtype == torch.float64:
        # Of some of many rows, from the first to the last: every element takes half a minute.
        x, weight, bias = (t.to(dtype) for t in tensors)
        x = x.reshape(-1, *shape)
        index = torch.linspace(0, len(x) - 1, min(len(x), 140 // weight.numel())).long()

        def some_rows(some, weight, bias):
            every = x.index_copy(0, index, some).reshape(*rows, *shape)
            return F.layer_norm(every, shape, weight, bias).reshape(-1, *shape)[index]

        leaves = [t.requires_grad_() for t in (x[index], weight, bias)]
        with conv2d_ext.batch_invariant():
            torch.autograd.gradgradcheck(some_rows, leaves)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.layer_norm(torch.nested.as_nested_tensor([x, x]), (4,), w, b).sum(),
        # A mean and a reciprocal deviation for each row, in one dimension.
        lambda x, w, b: torch.ops.aten.native_layer_norm_backward(
            x, x, (4,), x.mean(1), x.var(1), w, b, (True, True, True)
        ),
    ],
    ids=["nested", "flat statistics"],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_layer_norms_of_other_forms(call):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def results():
        leaves = [x.clone(), torch.ones(4), torch.zeros(4)]
        with torch.no_grad():
            found = call(*leaves)
        if isinstance(found, tuple):
            return found
        leaves = [leaf.requires_grad_() for leaf in leaves]
        call(*leaves).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    assert_as_pytorch(results)


def test_gradients_of_layer_norm_have_their_own_memory():
    x = torch.randn(4, 5)
    with conv2d_ext.batch_invariant():
        _, mean, rstd = torch.native_layer_norm(x, (4, 5), None, torch.ones(4, 5), 1e-5)
        grad = torch.randn(4, 5)
        bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, (4, 5), mean, rstd, None, torch.ones(4, 5), (False, False, True)
        )[2]
    assert torch.equal(bias, grad)
    assert bias.data_ptr() != grad.data_ptr()


def test_a_penalty_of_a_gradient_that_is_constant():
    """Of a norm of which the bias alone is trained, as PyTorch's."""
    bias = torch.zeros(6, requires_grad=True)
    with conv2d_ext.batch_invariant():
        output = F.layer_norm(torch.randn(3, 6), (6,), torch.ones(6), bias)
        (grad,) = torch.autograd.grad(output.sum(), bias, create_graph=True)
    assert grad.requires_grad


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.linalg.vector_norm(x, out=out),
        lambda x, out: torch.linalg.vector_norm(x, 3, dim=0, out=out),
        lambda x, out: torch._VF.norm(x, 3, dim=(0,), keepdim=False, out=out),
        lambda x, out: torch.prod(x / 300 + 1, 0, out=out),
        lambda x, out: torch.sum(x, 0, out=out),
        lambda x, out: torch.mean(x, 0, out=out),
    ],
)
def test_reductions_written_to_out(call):
    x = torch.randn(70001, generator=torch.Generator().manual_seed(0))
    expected = call(x.double(), torch.empty(0, dtype=torch.float64))
    found = torch.empty(0)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out = torch.empty(0)
        with conv2d_ext.batch_invariant():
            assert call(x, out) is out
        torch.testing.assert_close(out, expected, check_dtype=False)
        assert count == 1 or same_bits(out, found)
        found = out


class TestConvolutionBackward:
    """aten::convolution_backward, which torch.nn.grad and autograd's nodes call."""

    @staticmethod
    def problem(seed: int):
        """(x, w, b, its other arguments) of a random convolution, transposed or not."""
        draw = random.Random(seed)
        dims, transposed = draw.choice((1, 2)), draw.random() < 0.5

        def of_each(low: int, high: int) -> list[int]:
            return [draw.randint(low, high) for _ in range(dims)]

        kernel, stride, dilation, padding = (
            of_each(1, 4), of_each(1, 3), of_each(1, 3), of_each(0, 2),
        )  # fmt: skip
        extra = [
            draw.randrange(max(a, b)) if transposed else 0
            for a, b in zip(stride, dilation, strict=True)
        ]
        groups = draw.choice((1, 1, 2))
        inner, outer = groups * draw.randint(1, 3), groups * draw.randint(1, 3)
        dtype = draw.choice((torch.float32, torch.float64, torch.complex64, torch.bfloat16))
        generator = torch.Generator().manual_seed(seed)
        size = [draw.randrange(4), inner, *of_each(10, 13)]
        weight = (inner, outer // groups) if transposed else (outer, inner // groups)
        tensors = [
            torch.randn(s, dtype=dtype, generator=generator).requires_grad_()
            for s in (size, [*weight, *kernel], [outer])
        ]
        return tensors, (stride, padding, dilation, transposed, extra, groups)

    @pytest.mark.parametrize("seed", range(60))
    def test_has_the_bits_of_autograd(self, seed):
        (x, w, b), arguments = self.problem(seed)
        with conv2d_ext.batch_invariant():
            output = torch.convolution(x, w, b, *arguments)
            grad = torch.randn_like(output)
            expected = torch.autograd.grad(output, (x, w, b), grad)
            for mask in ([True] * 3, [False, True, False], [True, False, True]):
                found = torch.ops.aten.convolution_backward(
                    grad, x.detach(), w.detach(), b.shape, *arguments, mask
                )
                for ours, theirs, wanted in zip(found, expected, mask, strict=True):
                    assert same_bits(ours, theirs) if wanted else ours is None

    def test_of_a_graph_from_before_the_mode(self):
        x, w = torch.randn(BATCH, 16, 19, 19), torch.randn(32, 16, 3, 3)

        def gradient(outside: bool) -> torch.Tensor:
            leaf = x.clone().requires_grad_()
            with contextlib.nullcontext() if outside else conv2d_ext.batch_invariant():
                output = F.conv2d(leaf, w)
            with conv2d_ext.batch_invariant():
                return torch.autograd.grad(output, leaf, torch.ones_like(output))[0]

        assert same_bits(gradient(True), gradient(False))

    def test_functions_hold(self):
        w, grad = torch.randn(32, 16, 3, 3), torch.randn(BATCH, 32, 32, 32)

        def image(grad):
            return torch.nn.grad.conv2d_input((len(grad), 16, 32, 32), w, grad, padding=1)

        def row(grad):
            return torch.nn.grad.conv1d_input(
                (len(grad), 16, 32), w[..., 0], grad[..., 0], padding=1
            )

        with conv2d_ext.batch_invariant():
            assert invariant(image, grad)
            assert invariant(row, grad)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_derivatives(self, transposed):
        def draw(*size):
            return torch.randn(*size, dtype=torch.double).requires_grad_()

        x, w = draw(2, 4, 5, 4), draw(4, 4, 3, 2)
        arguments = ([2, 1], [1, 0], [1, 1], transposed, [1, 0] if transposed else [0, 0], 1)

        def backward(grad, x, w):
            return torch.ops.aten.convolution_backward(grad, x, w, [4], *arguments, [True] * 3)

        with conv2d_ext.batch_invariant():
            grad = draw(*torch.convolution(x, w, None, *arguments).shape)
            assert torch.autograd.gradcheck(backward, (grad, x, w))
            assert torch.autograd.gradgradcheck(backward, (grad, x, w))

    def test_three_dimensions_stay_pytorchs(self):
        w, grad = torch.randn(4, 3, 2, 2, 2), torch.randn(2, 4, 4, 4, 4)

        def backward():
            return torch.nn.grad.conv3d_input((2, 3, 5, 5, 5), w, grad)

        expected = backward()
        with conv2d_ext.batch_invariant():
            torch.testing.assert_close(backward(), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("model", "size"),
    [
        (nn.Conv1d(3, 4, 3), (3, 9)),
        (nn.Conv2d(3, 4, 3), (3, 9, 9)),
        (nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), (3, 9)),
        (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (3, 9, 7)),
        (nn.Linear(9, 5), (9,)),
        (nn.LSTM(9, 5, batch_first=True), (4, 9)),
        (nn.GRU(9, 5, batch_first=True), (4, 9)),
        (nn.LSTMCell(9, 5), (9,)),
        (nn.GRUCell(9, 5), (9,)),
        (nn.BatchNorm2d(3).eval(), (3, 5, 5)),
        (nn.InstanceNorm2d(3, affine=True), (3, 5, 5)),
        (nn.GroupNorm(1, 3), (3, 5, 5)),
        (nn.LayerNorm(9), (9,)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(inplace=True), nn.Softmax(1)), (3, 9, 9)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_traces_hold_for_other_batches(model, size, gradients):
    """torch.jit.trace checks them, too: it traces once more, without gradients, and compares."""
    batch = torch.randn(BATCH, *size)

    def first(output):
        return output if isinstance(output, torch.Tensor) else output[0]

    with conv2d_ext.batch_invariant(), torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, batch[:1])
        assert same_bits(first(traced(batch)), first(model(batch)))
