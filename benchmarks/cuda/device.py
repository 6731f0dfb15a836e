"""The device that these programs run on: the GPU, or with DEVICE=cpu the CPU in its place.

The CPU shows a slip in a program where there is no GPU. What it measures means nothing, and every
file that is written then says so.
"""

from __future__ import annotations

import os

import torch

import conv2d_ext

NAME = os.environ.get("DEVICE", "cuda")
IS_GPU = NAME != "cpu"
# An H200's SMs and shared memory, of which plans are made where there is no GPU.
STAND_IN = (132, 232448)


def why_not() -> str | None:
    """Why nothing can be done here, or None."""
    if not IS_GPU:
        return None
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU on this machine"
    if not conv2d_ext.build_config()["cuda_architectures"]:
        return "this build of conv2d_ext has no CUDA code"
    return None


def current() -> torch.device:
    return torch.device(NAME, torch.cuda.current_device()) if IS_GPU else torch.device(NAME)


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def free_bytes() -> int:
    """What can still be allocated, with what PyTorch keeps."""
    if not IS_GPU:
        return 2**31
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept
