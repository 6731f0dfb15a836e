"""Guarantee 4: on CUDA float32 is multiplied in TF32 where F.conv2d may do so, and nowhere else.

What F.conv2d was told is an argument of aten::_convolution, which the profiler shows on any device.
So no GPU is needed to compare the setting that this library reads, under every combination of
PyTorch's flags, old and new, with F.conv2d's. test_cuda.py has what then is computed.

Seen to fail: with the setting of RNNs read in place of the convolutions'.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from conv2d_ext import _C

pytestmark = pytest.mark.needs_cuda_build

HAS_NEW_FLAGS = hasattr(torch.backends, "fp32_precision")
UNSET = None
OLD = (UNSET, True, False)
NEW = (UNSET, "none", "ieee", "tf32")


# What the properties of torch.backends call. PyTorch's test modules, which another test imports,
# freeze the properties.


def _set_old(allow: bool | None) -> None:
    """torch.backends.cudnn.allow_tf32 = allow"""
    if allow is not UNSET:
        torch._C._set_cudnn_allow_tf32(allow)


def _set_new(convolution: str | None, cudnn: str | None, everything: str | None) -> None:
    """torch.backends.cudnn.conv.fp32_precision, ....cudnn.fp32_precision and ....fp32_precision"""
    settings = {
        ("generic", "all"): everything,
        ("cuda", "all"): cudnn,
        ("cuda", "conv"): convolution,
    }
    for (backend, operation), precision in settings.items():
        if precision is not UNSET:
            torch._C._set_fp32_precision_setter(backend, operation, precision)


def _set_defaults() -> None:
    if HAS_NEW_FLAGS:
        _set_new(UNSET, "none", "none")
    _set_old(True)


@pytest.fixture(autouse=True)
def _defaults():
    _set_defaults()
    yield
    _set_defaults()
    torch.set_float32_matmul_precision("highest")


def conv2d_allows_tf32() -> bool:
    """What a call of F.conv2d is told, on the CPU as on CUDA."""
    input, weight = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            F.conv2d(input, weight)
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        if event.name == "aten::_convolution":
            return event.extra_fields.inputs[-1]
        events += event.children
    raise AssertionError("F.conv2d no longer calls aten::_convolution")


def assert_same_setting() -> None:
    assert _C.float32_math_on_cuda() == ("tf32" if conv2d_allows_tf32() else "ieee")


def test_the_profiler_shows_the_setting():
    """Else all else here would compare nothing with nothing."""
    assert conv2d_allows_tf32() is True
    _set_old(False)
    assert conv2d_allows_tf32() is False


@pytest.mark.parametrize("allow", OLD, ids=str)
def test_old_flag(allow):
    _set_old(allow)
    assert_same_setting()


@pytest.mark.skipif(not HAS_NEW_FLAGS, reason="this torch has the old flag alone")
@pytest.mark.parametrize("everything", [*NEW, "bf16"], ids=str)
@pytest.mark.parametrize("convolution", NEW, ids=str)
@pytest.mark.parametrize("old_first", [True, False], ids=["old flag first", "new flags first"])
def test_old_and_new_flags(old_first, convolution, everything):
    """Mixed flags, too, whose common reader PyTorch lets raise, must not disturb a convolution."""
    found = set()
    for allow, cudnn in itertools.product(OLD, NEW):
        _set_defaults()
        if old_first:
            _set_old(allow)
        _set_new(convolution, cudnn, everything)
        if not old_first:
            _set_old(allow)
        assert_same_setting()
        found.add(_C.float32_math_on_cuda())
    if not old_first or convolution in (UNSET, "none"):
        assert found == {"tf32", "ieee"}, "the combinations should meet both"


@pytest.mark.skipif(not HAS_NEW_FLAGS, reason="this torch has the old flag alone")
def test_the_setting_of_rnns_is_another():
    torch._C._set_fp32_precision_setter("cuda", "rnn", "ieee")
    assert_same_setting()
    assert _C.float32_math_on_cuda() == "tf32"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_setting_of_matrix_products_is_another(precision):
    torch.set_float32_matmul_precision(precision)
    for allow in (True, False):
        _set_old(allow)
        assert_same_setting()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_old_setting_of_matrix_products(precision):
    torch.set_float32_matmul_precision(precision)
    expected = "ieee" if precision == "highest" else "tf32"
    assert _C.float32_matmul_math_on_cuda() == expected


@pytest.mark.skipif(not HAS_NEW_FLAGS, reason="this torch has the old flag alone")
@pytest.mark.parametrize("old", ["highest", "high"])
@pytest.mark.parametrize("everything", [*NEW, "bf16"], ids=str)
@pytest.mark.parametrize("matmul", NEW, ids=str)
def test_the_new_settings_of_matrix_products(matmul, everything, old):
    """What cuBLAS's handles ask for: the operation's setting, else CUDA's, else everything's. The
    old setting's reader raises where it differs from the new one; torch.mm does not."""
    torch.set_float32_matmul_precision(old)
    _set_new(UNSET, UNSET, everything)
    if matmul is not UNSET:
        torch._C._set_fp32_precision_setter("cuda", "matmul", matmul)
    found = torch._C._get_fp32_precision_getter("cuda", "matmul")
    assert _C.float32_matmul_math_on_cuda() == ("tf32" if found == "tf32" else "ieee")
    torch._C._set_fp32_precision_setter("cuda", "matmul", "none")


@pytest.mark.parametrize("allow", [True, False])
def test_within_flags(allow):
    with torch.backends.cudnn.flags(allow_tf32=allow):
        assert_same_setting()
        assert _C.float32_math_on_cuda() == ("tf32" if allow else "ieee")
    assert_same_setting()
