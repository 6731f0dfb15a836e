"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import platform
import secrets
import shutil
import subprocess
import sys

from fuzz.build import (
    BUILD,
    DTYPES,
    HERE,
    ISAS,
    ROOT,
    BuildError,
    build,
    build_of_tests,
    find_clang,
    machine_isas,
)  # fmt: skip

CORPUS = HERE / "corpus"


def corpus_files() -> list[str]:
    return [str(file) for file in sorted(CORPUS.iterdir())]


def command(program: pathlib.Path, *arguments: str, sanitizer: str) -> list[str]:
    """How a program is started. ThreadSanitizer wants its address space where it expects it, which
    some kernels' randomization denies it."""
    start = ["setarch", platform.machine(), "-R"]
    without = start if sanitizer == "thread" and shutil.which("setarch") else []
    return [*without, str(program), *arguments]


def run(program: pathlib.Path, *arguments: str, sanitizer: str, env: dict | None = None) -> int:
    return subprocess.run(
        command(program, *arguments, sanitizer=sanitizer), cwd=ROOT, env=env, check=False
    ).returncode


def build_for(
    options: argparse.Namespace, compiler: list[str] | None, libfuzzer: bool = False
) -> pathlib.Path:
    return build(
        options.sanitizer,
        options.isa or machine_isas(),
        compiler,
        options.dtype or DTYPES,
        libfuzzer,
    )


def fuzz(options: argparse.Namespace) -> int:
    clang = None if options.driver == "seeds" else find_clang()
    if options.driver == "libfuzzer" and clang is None:
        print("No clang++ with libFuzzer was found.", file=sys.stderr)
        return 2
    if clang is None:
        seed = secrets.randbits(48) if options.seed is None else options.seed
        program = build_for(options, options.compiler)
        print(f"seed {seed}", flush=True)
        return run(
            program,
            "generate",
            str(seed),
            str(options.runs or 10**12),
            str(options.seconds or 10**9),
            *(["on"] if options.keep_going else []),
            sanitizer=options.sanitizer,
        )
    program = build_for(options, clang, libfuzzer=True)
    found, findings = BUILD / "corpus", BUILD / "findings"
    found.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    limits = []
    if options.runs:
        limits.append(f"-runs={options.runs}")
    if options.seconds:
        limits.append(f"-max_total_time={options.seconds}")
    if options.seed is not None:
        limits.append(f"-seed={options.seed % 2**32}")
    return run(
        program,
        *limits,
        "-max_len=1024",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        f"-artifact_prefix={findings}/",
        str(found),
        str(CORPUS),
        sanitizer=options.sanitizer,
    )


def replay(options: argparse.Namespace) -> int:
    program = build_for(options, options.compiler)
    files = options.what or corpus_files()
    return run(program, "replay", *files, sanitizer=options.sanitizer)


def case(options: argparse.Namespace) -> int:
    program = build_for(options, options.compiler)
    return max(run(program, "case", text, sanitizer=options.sanitizer) for text in options.what)


def reach(options: argparse.Namespace) -> int:
    program = build_for(options, options.compiler)
    arguments = (str(options.seed or 0), str(options.runs or 20000), *corpus_files())
    if not options.add:
        return run(program, "reach", *arguments, sanitizer=options.sanitizer)
    found = command(program, "collect", *arguments, sanitizer=options.sanitizer)
    lines = subprocess.run(found, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for line in lines.splitlines():
        reached, _, text = line.partition("\t")
        driver, _, op, format, _ = reached.split(" | ")
        stem = f"reach-{driver}-{op}-{format}".replace(", ", "-").replace(" ", "-")
        file = next(
            file
            for number in itertools.count(1)
            if not (file := CORPUS / f"{stem}-{number}.txt").exists()
        )
        why = "# A driver that no other file reaches."
        file.write_text(text.replace("conv2d ", f"conv2d {why}\n", 1) + "\n")
        print(file.relative_to(ROOT))
    return 0


def coverage(options: argparse.Namespace) -> int:
    """Which lines of csrc/cpu the corpus, and so many random inputs, run; by clang and llvm-cov."""
    clang = find_clang()
    if clang is None:
        print("Coverage needs clang++.", file=sys.stderr)
        return 2
    suffix = clang[0].partition("clang++")[2]
    profdata, cov = f"llvm-profdata{suffix}", f"llvm-cov{suffix}"
    options.sanitizer = "coverage"
    program = build_for(options, clang)
    folder = BUILD / "coverage"
    folder.mkdir(parents=True, exist_ok=True)
    runs = [["replay", *corpus_files()]]
    if options.runs:
        runs.append(["generate", str(options.seed or 0), str(options.runs), "1e9"])
    raw = []
    for number, arguments in enumerate(runs):
        raw.append(str(folder / f"{number}.profraw"))
        env = {"LLVM_PROFILE_FILE": raw[-1]}
        done = subprocess.run([program, *arguments], env=env, check=False)
        if done.returncode != 0:
            return done.returncode
    merged = str(folder / "merged.profdata")
    subprocess.run([profdata, "merge", "-sparse", *raw, "-o", merged], check=True)
    sources = str(ROOT / "csrc" / "cpu")
    profile = [str(program), f"-instr-profile={merged}"]
    report = [cov, "report", *profile, "-show-branch-summary=false", sources]
    shown = [cov, "show", *profile, "-show-instantiations=false", sources]
    subprocess.run(report, check=True)
    text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
    print("\nLines that were never run:")
    file = ""
    for line in text.splitlines():
        fields = line.split("|", 2)
        if len(fields) < 3:
            file = line.strip().rstrip(":") or file
        elif fields[1].strip() == "0":
            print(f"{pathlib.Path(file).name}:{fields[0].strip()}:{fields[2]}")
    return 0


def build_programs(options: argparse.Namespace) -> int:
    for program in build_of_tests(options.seconds).values():
        print(program)
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = {
        "fuzz": fuzz, "replay": replay, "case": case, "reach": reach, "coverage": coverage,
        "build": build_programs,
    }  # fmt: skip
    parser.add_argument(
        "verb",
        nargs="?",
        default="fuzz",
        choices=verbs,
        help="fuzz: random cases (the default); replay: the corpus, or the files named;\n"
        "case: cases given as text; reach: which drivers the corpus reaches\n"
        "coverage: which lines of csrc/cpu it reaches\n"
        "build: compile what test_fuzz.py runs in --seconds",
    )
    parser.add_argument("what", nargs="*", help="files of replay, or texts of case")
    parser.add_argument("--seconds", type=int, help="of fuzz; 60 where no --runs are given")
    parser.add_argument("--runs", type=int, help="so many inputs")
    parser.add_argument("--seed", type=int, help="as a run printed it; else another one every time")
    parser.add_argument("--sanitizer", default="address", choices=["address", "thread", "none"])
    parser.add_argument(
        "--driver",
        default="auto",
        choices=["auto", "libfuzzer", "seeds"],
        help="libFuzzer, which clang has, or inputs from a seed; by default the first where it is",
    )
    parser.add_argument("--isa", action="append", choices=ISAS, help="compile these alone")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="compile these alone")
    parser.add_argument("--compiler", type=str.split, help="of all but libFuzzer: by default $CXX")
    parser.add_argument("--add", action="store_true", help="of reach: files for what is missing")
    parser.add_argument("--keep-going", action="store_true", help="with seeds: after failures")
    options = parser.parse_args(arguments)
    if options.seconds is None and options.runs is None:
        options.seconds = 60
    options.isa = tuple(options.isa or ())
    options.dtype = tuple(options.dtype or ())
    try:
        return verbs[options.verb](options)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
