"""The machine: what it is, and what is set alike for all contestants."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import conv2d_ext

# What makes every library of the process use one instruction set. MKL's is honoured by Intel CPUs.
ISA_ENVIRONMENT = {
    "avx2": {
        "CONV2D_EXT_CPU_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "CONV2D_EXT_CPU_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_bf16": {
        "CONV2D_EXT_CPU_ISA": "avx512_bf16",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "amx": {
        "CONV2D_EXT_CPU_ISA": "amx",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
_RECORDED_PREFIXES = (
    "ATEN_", "CONV2D_EXT_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_",
    "MKL_", "OMP_", "ONEDNN_",
)  # fmt: skip
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")


def force_isa(isa: str) -> None:
    """Starts this program anew under the instruction set, unless it runs so already: the libraries
    read these variables once, when they are loaded or first used."""
    wanted = ISA_ENVIRONMENT[isa]
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks", *sys.argv[1:]],
            {**os.environ, **wanted},
        )


def keep_freed_memory() -> bool:
    """Makes glibc keep what is freed instead of returning it to the system; False elsewhere.

    Otherwise a large output is mapped anew in each call, and its thousands of page faults are
    timed; which contestant meets them depends on the history of the process. After this, blocks of
    a new size still cost page faults in the first few calls, until they fit what was freed.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))


def describe(freed_memory_is_kept: bool) -> dict[str, object]:
    """What a reader on another machine needs to know; all of it can be written as JSON."""
    return {
        "cpu": cpu_name(),
        "microarchitecture": microarchitecture(),
        "isa_flags": sorted(cpu_flags().intersection(_ISA_FLAGS)),
        "logical_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "freed_memory": "kept by malloc" if freed_memory_is_kept else "malloc's defaults",
        "versions": {
            "conv2d_ext": conv2d_ext.__version__,
            "revision": revision(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "libc": " ".join(platform.libc_ver()),
        },
        "isa": conv2d_ext.build_config()["isa"],
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "build": conv2d_ext.build_config(),
        "openmp": _openmp_libraries(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_RECORDED_PREFIXES)
        },
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
    }


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def microarchitecture() -> str:
    """Of AMD's CPUs, whose names do not say it; empty for others."""
    if _cpuinfo("vendor_id") != "AuthenticAMD":
        return ""
    family, model = int(_cpuinfo("cpu family") or 0), int(_cpuinfo("model") or 0)
    if family == 25:
        return "Zen 4" if model // 16 in (1, 6, 7, 10) else "Zen 3"
    return {23: "Zen 1 or 2", 26: "Zen 5"}.get(family, f"family {family}")


def cpu_flags() -> set[str]:
    return set(_cpuinfo("flags").split())


def available_bytes() -> int:
    """Memory that may be used without swapping; of all memory where Linux doesn't tell."""
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _cpuinfo(field: str) -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _caches() -> dict[str, str]:
    """Those of the first CPU: {"L1 Data": "32K", ...}."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return {
        f"L{_read(folder / 'level')} {_read(folder / 'type')}": _read(folder / "size") or "?"
        for folder in folders
    }


def _openmp_libraries() -> list[str]:
    """Two would be two pools of threads, each waiting busily while the other works."""
    paths = {
        line.split()[-1] for line in (_read("/proc/self/maps") or "").splitlines() if "/" in line
    }
    return sorted({Path(p).name for p in paths if "omp" in Path(p).name and ".so" in Path(p).name})


def revision() -> str | None:
    """The commit of the tree these benchmarks are in, with + where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        # Files that earlier measurements wrote change nothing that is measured.
        written = [f":(top,exclude){path}" for path in ("benchmarks/results", "docs", "README.md")]
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *written)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
