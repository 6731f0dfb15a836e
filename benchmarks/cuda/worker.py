"""A program: does what it is asked for on the GPU, and answers. See children.py, which starts it.

Requests come on standard input, answers go to the file descriptor that the argument names; a line
of JSON each. {"do": "smoke", ...} is answered by {"answer": ...}, or by {"error": text}, with
"ends" where the GPU can't be used by this process any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable

import torch

from benchmarks.cuda import device

PR_SET_PDEATHSIG = 1


def handler(what: str) -> Callable[..., object]:
    """Imported when it is asked for: a fault in one is no other's."""
    if what == "smoke":
        from benchmarks.cuda.smoke import check

        return check
    if what == "benchmark":
        from benchmarks.cuda.run import measure_case

        return measure_case
    if what == "describe":
        from benchmarks.cuda.describe import describe_gpu

        return describe_gpu
    if what == "sweep":
        from benchmarks.cuda.sweep import measure_variants

        return measure_variants
    raise ValueError(f"nobody does {what!r}")


def answer(request: dict) -> dict:
    try:
        found = handler(request.pop("do"))(**request)
        device.synchronize()
    except Exception as problem:
        text = str(problem).strip().splitlines()
        error = f"{type(problem).__name__}: {text[0] if text else ''}"
        try:
            device.synchronize()
        except Exception:  # the context is lost
            return {"error": error, "ends": True}
        return {"error": error}
    return {"answer": found}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when this ends
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def send(message: dict) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        torch.zeros(1, device=device.NAME)
        device.synchronize()
        send({"ready": True})
        for line in sys.stdin:
            message = answer(json.loads(line))
            send(message)
            if message.get("ends"):
                os._exit(1)  # without what the driver would do at an ordinary end


if __name__ == "__main__":
    main()
