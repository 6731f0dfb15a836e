"""The setting `allow_winograd`."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from conv2d_ext import _C

_VARIABLE = "CONV2D_EXT_ALLOW_WINOGRAD"


def _environment_allows() -> bool:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_VARIABLE}={value}: expected 0 or 1")
    return value == "1"


_FIRST = _environment_allows()


# A thread's setting: `allowed`, which begins as the environment says. torch.compile guards what it
# reads of Python's attributes: a function is compiled anew where this one has changed. The compiled
# module reads it, too. (No class of our own: torch 2.15 loses what a compiled function writes to an
# object of a class that is made from threading.local.)
_setting = threading.local()
# Else the first call that is not compiled would set it, and what was compiled before see a change.
_setting.allowed = _FIRST
_C.use_winograd_setting(_setting, _FIRST)


def is_allowed() -> bool:
    """Whether this thread's calls may take Winograd's."""
    return getattr(_setting, "allowed", _FIRST)


class allow_winograd:
    """Whether `conv2d` may take Winograd's F(2x2, 3x3), from here on or in a `with` block.

    >>> conv2d_ext.allow_winograd(True)  # from here on
    >>> with conv2d_ext.allow_winograd(True):
    ...     output = model(input)

    Like torch.set_grad_enabled it sets the calling thread alone. Threads begin with it off, or as
    the environment variable CONV2D_EXT_ALLOW_WINOGRAD says (0 or 1, read once). A gradient follows
    the setting of its forward, whenever and in whichever thread it runs, and its own sizes; a
    function under torch.compile follows the setting of each call, and an exported program keeps
    that of its export.

    It applies to `conv2d`, `Conv2d` and `forward` on the CPU, forward and input gradient, where
    the kernel is 3x3, stride and dilation are 1, a group has at least 16 channels on both sides
    and at most 2048 on the side that is summed, the dtype is float32, bfloat16 or float16 and the
    result has at least 7x7 pixels. All else is computed directly: other functions' convolutions,
    and calls that `batch_invariant` covers. `explain` says what takes a call, and why not this.
    Which it is follows from the image's geometry, the dtype and the instruction set.

    It multiplies 2.25 times less, in another order: results are as reproducible as without it, but
    other bits. If all values of an image have one magnitude, errors are 0.8 to 1.4 times those of
    F.conv2d. Otherwise a result may take a rounding error from a large value of its 4x4
    neighbourhood that its own kernel doesn't meet, or that its weights nearly cancel. Where a 2x2
    square of a channel of the result is not finite, it is computed again directly.

    Raises TypeError where `mode` is no bool.
    """

    def __init__(self, mode: bool = True) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"allow_winograd(): mode must be bool, not {type(mode).__name__}")
        self.mode = mode
        self._before = is_allowed()
        _setting.allowed = mode

    def __enter__(self) -> allow_winograd:
        _setting.allowed = self.mode
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _setting.allowed = self._before
