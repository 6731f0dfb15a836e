"""Checkpoints (torch.utils.checkpoint) compute a forward once more in the mode that it ran in.

A recomputation runs when gradients are computed, which may be outside of the context, or inside of
one that the forward was not in. PyTorch restores autocast and the state of random numbers for it,
and has nothing in which a library could say what else to restore; so the function that it computes
again is handed to it with the thread's state of the mode. Both kinds of checkpoint take it from the
module when they are called, whoever imported `checkpoint` before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as module

from conv2d_ext import _C

_lock = threading.Lock()
_installed = False


def _in_this_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    is_on = _C.is_batch_invariant()

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if _C.is_batch_invariant() == is_on:
            return function(*args, **kwargs)
        before = _C.swap_invariance_state(int(is_on), 0, False, not is_on)
        try:
            return function(*args, **kwargs)
        finally:
            _C.swap_invariance_state(*before)

    return run


def _keeping_the_mode(without_reentry: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(without_reentry)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            fn = _in_this_mode(fn)
        return without_reentry(fn, *args, **kwargs)

    return generator


def install() -> None:
    """Once, when the mode is entered for the first time."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
        # The second is torch 2.15's. Either takes the function first, and is a generator.
        for name in (
            "_checkpoint_without_reentrant_generator",
            "_checkpoint_without_reentrant_generator_impl",
        ):
            if hasattr(module, name):
                setattr(module, name, _keeping_the_mode(getattr(module, name)))
        forward = module.CheckpointFunction.forward

        @functools.wraps(forward)
        def wrapped(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, _in_this_mode(run_function), *args)

        module.CheckpointFunction.forward = staticmethod(wrapped)
