"""`python -m conv2d_ext certify`: the command line of `conv2d_ext.certify`."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import conv2d_ext
from conv2d_ext._certify.against import read_certificate

_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32")
_TOKENS = 100
PASSED, FAILED, USAGE = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 passed, 1 failed or other bits than in the file of --against, 2 for bad
    arguments and models that can't be made."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check_files(parser, arguments)
    torch.manual_seed(arguments.seed)
    model = _model(parser, arguments)
    inputs = _inputs(arguments)
    try:
        certificate = conv2d_ext.certify(
            model,
            *inputs,
            batch_sizes=arguments.batch,
            threads=arguments.threads,
            runs=arguments.runs,
            gradients=not arguments.no_gradients,
            require=arguments.require,
            seed=arguments.seed,
            against=arguments.against,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        # What the model raised says more than where this program was.
        parser.error(f"--model {arguments.model}: {error}")
    print(certificate)
    if arguments.json:
        arguments.json.write_text(certificate.to_json(), encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(certificate.to_markdown(), encoding="utf-8")
    same = certificate.against is None or certificate.against.same
    return PASSED if certificate.passed and same else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conv2d_ext certify",
        description="Shows whether a model gives an example the same bits in every batch, at every "
        "place of it, on any number of threads and in every run: with PyTorch alone and under "
        "conv2d_ext.batch_invariant(), and which call is the first that does not.",
        epilog="Exit status: 0 passed; 1 failed, or other bits than in --against; 2 bad "
        "arguments, or a model that raises.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODULE:CALLABLE", help="what makes the model")
    add("--kwargs", type=_kwargs, default={}, metavar="JSON", help="arguments of the callable")
    add(
        "--weights",
        default="none",
        metavar="none|FILE|NAME",
        help="none: as the callable makes them, from --seed, and weights that are zero throughout, "
        "which hide what comes before them, drawn anew; a file of a state_dict; anything else is "
        "passed to the callable as weights=NAME",
    )
    add(
        "--input",
        type=_input,
        action="append",
        required=True,
        metavar="SHAPE[:DTYPE[:N]]",
        help="shape of one example, without the batch, such as 3,224,224; once for each input. "
        f"Integers are drawn from 0 to N - 1 (by default {_TOKENS})",
    )
    add("--dtype", choices=_DTYPES[:4], default="float32", help="of inputs and model")
    add("--batch", type=_ints, default=(1, 2, 3, 5, 8, 16), metavar="1,2,3", help="batch sizes")
    add("--threads", type=_ints, default=(1, 2, 3, 4), metavar="1,2", help="numbers of threads")
    add("--runs", type=int, default=3, metavar="N", help="runs of the same inputs, in all")
    add("--seed", type=int, default=0, metavar="N", help="of random weights and inputs")
    add("--json", type=Path, metavar="FILE", help="save the certificate, for --against")
    add("--markdown", type=Path, metavar="FILE", help="save the certificate as a page")
    add("--against", type=Path, metavar="FILE", help="compare with another machine's --json")
    add("--require", action="append", default=[], choices=["format"], help="the format decides too")
    add("--no-gradients", action="store_true", help="outputs only")
    return parser


def _ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted numbers as 1,2,3, got {text!r}") from None


def _kwargs(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"wanted JSON, got {text!r} ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"wanted a JSON object, got {text!r}")
    return found


def _input(text: str) -> tuple[tuple[int, ...], str, int]:
    """(shape, dtype or "", how many integers to draw from)"""
    sizes, _, rest = text.partition(":")
    dtype, _, count = rest.partition(":")
    shape = _ints(sizes) if sizes else ()
    if any(size < 1 for size in shape):
        raise argparse.ArgumentTypeError(f"wanted sizes of 1 or more, got {text!r}")
    if dtype and dtype not in _DTYPES:
        raise argparse.ArgumentTypeError(f"wanted a dtype of {', '.join(_DTYPES)}, got {text!r}")
    if count and (not count.isdecimal() or int(count) < 1):
        raise argparse.ArgumentTypeError(f"wanted a count of 1 or more, got {text!r}")
    return shape, dtype, int(count or _TOKENS)


def _check_files(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Whatever can be refused is refused before the model is made."""
    if arguments.against:
        try:
            read_certificate(arguments.against)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    for option in ("json", "markdown"):
        path = getattr(arguments, option)
        if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            parser.error(f"--{option} {path}: cannot write there")
    if arguments.json and arguments.json == arguments.markdown:
        parser.error(f"--json and --markdown name the same file, {arguments.json}")


def _model(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Callable[..., Any]:
    def refuse(problem: str) -> NoReturn:
        parser.error(f"--model {arguments.model}: {problem}")

    module_name, colon, name = arguments.model.partition(":")
    if not colon or not module_name or not name:
        refuse("wanted MODULE:CALLABLE, as torchvision.models:resnet18")
    # As `python script.py` does: modules beside the user are found.
    sys.path.insert(0, os.getcwd())
    weights = arguments.weights
    kwargs = dict(arguments.kwargs)
    is_file = Path(weights).is_file()
    if weights.lower() != "none" and not is_file:
        kwargs["weights"] = weights
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
        model = found if isinstance(found, nn.Module) else found(**kwargs)
        if not isinstance(model, nn.Module):
            refuse(f"wanted what it returns to be a torch.nn.Module, got {type(model).__name__}")
        if weights.lower() == "none":
            _draw_zero_weights(model)
        if is_file:
            model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    except Exception as error:
        refuse(f"{type(error).__name__}: {error}")
    return model.eval().to(getattr(torch, arguments.dtype))


def _draw_zero_weights(model: nn.Module) -> None:
    """New models often end in zeros, or each of their branches does: no bit would get through."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() and not name.endswith("bias") and not parameter.any():
                bound = math.sqrt(parameter.shape[0] / parameter.numel())
                parameter.uniform_(-bound, bound)


def _inputs(arguments: argparse.Namespace) -> list[Tensor]:
    """One example of each, in a batch of one."""
    generator = torch.Generator().manual_seed(arguments.seed)
    inputs = []
    for shape, dtype_name, count in arguments.input:
        dtype = getattr(torch, dtype_name or arguments.dtype)
        if dtype.is_floating_point:
            # Of unit variance, and uniform: unlike normal ones the same bits on every CPU.
            values = (torch.rand(1, *shape, generator=generator) - 0.5) * math.sqrt(12)
            inputs.append(values.to(dtype))
        else:
            inputs.append(torch.randint(count, (1, *shape), generator=generator).to(dtype))
    return inputs
