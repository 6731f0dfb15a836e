"""Convolutions in C++ for PyTorch: the same bits in every batch, memory within bounds.

>>> import conv2d_ext
>>> output = conv2d_ext.conv2d(input, weight, bias, padding="same")  # torch.nn.functional.conv2d
>>> layer = conv2d_ext.Conv2d(3, 16, kernel_size=3)  # torch.nn.Conv2d
>>> with conv2d_ext.batch_invariant():  # a model as it is: the same bits in every batch
...     output = model(input)
>>> model = conv2d_ext.convert(model)  # its convolutions and linear layers, replaced
>>> print(conv2d_ext.explain(input, weight))  # what a call will do
>>> print(conv2d_ext.certify(model, images))  # do a model's bits depend on its batch?
"""

from pathlib import Path

import torch

try:
    from conv2d_ext import _build_info
except ImportError:
    from importlib import metadata

    folder = Path(__file__).resolve().parent
    installed = [d.locate_file("conv2d_ext") for d in metadata.distributions(name="conv2d_ext")]
    found = [Path(path, "__init__.py").resolve() for path in installed]
    if any(path.exists() and path.parent != folder for path in found):
        message = (
            f"{folder} has not been built, and hides the conv2d_ext that is installed: "
            "run from another folder"
        )
    else:
        message = "conv2d_ext has not been built: run 'pip install .' in its tree and leave it"
    raise ImportError(f"{message}, or run 'pip install --editable .' there") from None


def _check_torch_version(built_with: str, running: str) -> None:
    """Raises ImportError where torch's C++ interface may differ from the one built against."""
    if built_with.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"conv2d_ext was built with torch {built_with} and can't run with torch {running}: "
            "rebuild it: 'pip install --force-reinstall --no-deps --no-cache-dir .' in its tree"
        )


_check_torch_version(_build_info.TORCH_VERSION, torch.__version__)

# What loads _C comes after the check: under another torch it would end in an undefined symbol.
from conv2d_ext import ops, reference  # noqa: E402
from conv2d_ext._winograd import allow_winograd  # noqa: E402
from conv2d_ext.certify import Certificate, certify  # noqa: E402
from conv2d_ext.functional import (  # noqa: E402
    CudaDirectionExplanation,
    DirectionExplanation,
    Explanation,
    build_config,
    conv1d,
    conv2d,
    conv_transpose1d,
    conv_transpose2d,
    explain,
    explain_matmul,
    forward,
    forward_unfold,
    linear,
)
from conv2d_ext.invariance import batch_invariant, disable, enable  # noqa: E402
from conv2d_ext.modules import (  # noqa: E402
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
    convert,
    revert,
)

__version__ = _build_info.VERSION
# For CMake's CMAKE_PREFIX_PATH, as torch.utils.cmake_prefix_path is: find_package(conv2d_ext)
cmake_prefix_path = str(Path(__file__).parent / "share" / "cmake")
__all__ = [
    "Certificate",
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "CudaDirectionExplanation",
    "DirectionExplanation",
    "Explanation",
    "Linear",
    "allow_winograd",
    "batch_invariant",
    "build_config",
    "certify",
    "cmake_prefix_path",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "convert",
    "disable",
    "enable",
    "explain",
    "explain_matmul",
    "forward",
    "forward_unfold",
    "linear",
    "ops",
    "reference",
    "revert",
]
