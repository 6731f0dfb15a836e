"""README.md and the pages of docs/: their code runs, their links lead somewhere, and their figures
are those of the files in benchmarks/results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from child import run_forked

import conv2d_ext

ROOT = Path(__file__).resolve().parent.parent


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_docs = load("build_docs", ROOT / "tools" / "build_docs.py")
PAGES = sorted(build_docs.pages(), key=str)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def each_page(function):
    return pytest.mark.parametrize("page", PAGES, ids=relative)(function)


# ---- code

# What a page takes for granted.
PREAMBLES = {
    "docs/models.md": """
import torch, torchvision, conv2d_ext
torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10).eval()
images, labels = torch.rand(3, 3, 64, 64), torch.tensor([0, 1, 2])
""",
    "docs/certify.md": """
import torch, conv2d_ext
torch.manual_seed(0)
model, images = conv2d_ext.Conv2d(8, 8, 3), torch.rand(1, 8, 12, 12)
""",
}
# Their tests run their code, in several processes.
RUN_ELSEWHERE = {"docs/beyond_one_process.md"}
# A block after such a comment is compiled and not run: <!-- not run: why -->
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")


def python_blocks(page: Path) -> list[tuple[int, str, bool]]:
    """Of each block of Python: its line, its code, and whether it is run."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(1)) + 1
        blocks.append((line, match[1], not NOT_RUN.search(text[: match.start()])))
    return blocks


def claimed_outputs(code: str) -> list[str]:
    """What `print(...)  # True` says it prints."""
    return re.findall(r"^print\(.*\) +# (True|False)$", code, re.MULTILINE)


WITH_CODE = [page for page in PAGES if python_blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=relative)
def test_code_runs_and_prints_what_it_says(page, tmp_path):
    program = [PREAMBLES.get(relative(page), "")]
    claims = []
    for line, code, is_run in python_blocks(page):
        compiled = compile("\n" * (line - 1) + code, relative(page), "exec")
        assert compiled
        if is_run and relative(page) not in RUN_ELSEWHERE:
            program.append(f"# {relative(page)}, line {line}\n{code}")
            claims += claimed_outputs(code)
    file = tmp_path / "page.py"
    file.write_text("\n".join(program), encoding="utf-8")
    process = run_forked(str(file))
    assert process.returncode == 0, process.stderr
    printed = [text for text in process.stdout.splitlines() if text in ("True", "False")]
    assert printed == claims


def test_a_claim_that_is_wrong_is_seen():
    assert claimed_outputs("x = 1\nprint(x == 1)  # True\nprint(x == 2)    # False\n") == [
        "True",
        "False",
    ]


@each_page
def test_make_has_the_verbs_that_are_named(page):
    verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE) + re.findall(
        r"`make ([a-z-]+)", text
    )
    assert set(named) <= set(verbs)


# ---- links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    found = set()
    text = build_docs.FENCE.sub("", page.read_text(encoding="utf-8"))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return found


@each_page
def test_links_lead_somewhere(page):
    text = build_docs.FENCE.sub("", page.read_text(encoding="utf-8"))
    for _, label, target, anchor in build_docs.LINK.findall(text):
        path = page.parent / target
        assert path.exists(), f"[{label}]({target})"
        if anchor and path.suffix == ".md":
            assert anchor[1:] in anchors(path), f"[{label}]({target}{anchor})"
    for label, anchor in re.findall(r"\[([^\]]*)\]\(#([^)]*)\)", text):
        assert anchor in anchors(page), f"[{label}](#{anchor})"


def test_the_index_lists_every_page():
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / match[3]).resolve()
        for match in build_docs.LINK.finditer(index.read_text(encoding="utf-8"))
    }
    assert {page for page in PAGES if page not in (index, ROOT / "README.md")} == linked


def test_links_of_the_site(tmp_path):
    names = {ROOT / "README.md": "readme.md", ROOT / "docs" / "api.md": "api.md"}
    names[ROOT / "CONTRIBUTING.md"] = "contributing.md"

    def rewritten(text):
        return build_docs.rewrite_links(text, ROOT / "docs" / "page.md", names)

    assert rewritten("[a](api.md#layers), [b](../README.md)") == "[a](api.md#layers), [b](index.md)"
    assert rewritten("[c](../CONTRIBUTING.md)") == "[c](contributing.md)"
    assert rewritten("[licence](../LICENSE)") == "licence (`LICENSE`)"
    assert rewritten("[`LICENSE`](../LICENSE)") == "`LICENSE`"
    assert rewritten("[x](https://pytorch.org)") == "[x](https://pytorch.org)"
    assert rewritten("```\n[a](nowhere.md)\n```") == "```\n[a](nowhere.md)\n```"
    with pytest.raises(ValueError, match="no such file: nowhere"):
        rewritten("[a](nowhere.md)")


# ---- what the pages say


def test_the_readme_is_short_and_in_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Install", "Use", "Speed and memory", "Guarantees", "Limits", "More"]
    assert text.index("```python") < text.index("<!-- bits:") < text.index("## Install")
    for command in ("make demo", "make test", "pip install ."):
        assert re.search(rf"^{re.escape(command)}( |$)", text, re.MULTILINE)


def test_every_promise_of_the_readme_has_its_wording():
    def promises(name):
        text = (ROOT / name).read_text(encoding="utf-8")
        return re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE)

    readme = promises("README.md")
    assert len(readme) >= 9
    assert readme == promises("docs/guarantees.md")


def test_the_tests_of_the_guarantees_exist():
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py)`", text))
    assert len(named) > 10
    assert {name for name in named if not (ROOT / "tests" / name).exists()} == set()


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(
        re.findall(r"auto(?:function|class|module|data):: (?:conv2d_ext\.)?(\w+)", text)
    )
    documented |= set(re.findall(r"`conv2d_ext\.(\w+)`", text))
    assert set(conv2d_ext.__all__) - documented == set()


def test_figures_are_those_of_the_files():
    """Seen to fail with a figure changed in README.md, in docs/results.md or in layers.json."""
    from benchmarks import figures

    text = figures.README.read_text(encoding="utf-8")
    assert figures.readme_text(text) == text, f"run {figures.COMMAND} --only"
    page = figures.PAGE.read_text(encoding="utf-8")
    assert figures.page_text() == page, f"run {figures.COMMAND} --only"


def test_no_result_is_left_of_another_measurement():
    from benchmarks import figures

    files = {path.name for path in figures.RESULTS.iterdir() if path.is_file()}
    assert files == {f"{name}.json" for name in figures.MEASUREMENTS}
    # gpu_check.sh's; the archives are not committed.
    files = {path.name for path in (figures.RESULTS / "cuda").iterdir()}
    written = {"benchmark.json", "checks.json", "smoke.jsonl", "sweep.jsonl"}
    assert files - {"module.tar.gz", "logs.tar.gz"} == written


# ---- packaging


def test_the_workflow_runs_ci_and_can_do_nothing_else():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"- run: (.+)", text) == ["bash .ci/run"]
    assert re.search(r"^permissions:\n  contents: read\n\n", text, re.MULTILINE)
    assert text.count("permissions:") == 1
    actions = re.findall(r"uses: (\S+)(.*)", text)
    assert actions
    for action, comment in actions:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" +# v\d+\.\d+\.\d+", comment)


def test_one_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[
        1
    ]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == version
    assert conv2d_ext.__version__.split("+")[0] == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
