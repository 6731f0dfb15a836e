"""Builds the documentation site: `make docs`, or python tools/build_docs.py [--builder linkcheck].

The pages are Markdown that reads as well in a checkout: docs/, and some files of the root. Sphinx
wants all of them in one folder. So they are laid out in build/docs/source, where a link to a file
that is a page of the site leads to that page, and one to any other file becomes the file's name.
docs/index.md lists the pages; the table of contents follows from it. Warnings are errors.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTPUT = ROOT / "build" / "docs"
# Pages that lie elsewhere, and their names in the site.
OTHER_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
# ](target) or ](target#anchor), of links and pictures; not of other sites or within the page
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```+).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page's file, and its name in the site."""
    found = {path: path.name for path in sorted(DOCS.glob("*.md"))}
    return found | {ROOT / path: name for path, name in OTHER_PAGES.items()}


def outside_code(text: str, change) -> str:
    """The text with change(part) for each part that is no fenced block."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def rewrite_links(text: str, origin: Path, names: dict[Path, str]) -> str:
    """The page `origin` with the site's links. Raises ValueError for a dead one."""

    def replace(match: re.Match) -> str:
        picture, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = Path(os.path.normpath(origin.parent / target))
        if not path.exists():
            raise ValueError(f"{origin.relative_to(ROOT)}: no such file: {target}")
        if path in names:
            name = "index.md" if names[path] == "readme.md" else names[path]
            return f"{picture}[{label}]({name}{anchor})"
        if path.is_relative_to(DOCS):  # a picture
            return f"{picture}[{label}]({path.relative_to(DOCS).as_posix()})"
        shown = path.relative_to(ROOT).as_posix()
        return label if label.strip("`") == shown else f"{label} (`{shown}`)"

    return outside_code(text, lambda part: LINK.sub(replace, part))


def contents(index: str, names: dict[Path, str]) -> list[str]:
    """docs/index.md as tables of contents: a heading, and the pages that its list links to."""
    lines: list[str] = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        found = [
            f"{match[2]} <{names[Path(os.path.normpath(DOCS / match[3]))]}>"
            for match in LINK.finditer(body)
        ]
        lines += ["", "```{toctree}", ":hidden:", f":caption: {title.strip()}", "", *found, "```"]
    return lines


def lay_out(source: Path) -> None:
    shutil.rmtree(source, ignore_errors=True)
    ignore = shutil.ignore_patterns("*.md", "_inventories", "__pycache__")
    shutil.copytree(DOCS, source, ignore=ignore)
    names = pages()
    for path, name in names.items():
        if name == "readme.md":  # the site's front page is docs/index.md
            continue
        text = path.read_text(encoding="utf-8")
        if name == "index.md":
            text += "\n".join(contents(text, names)) + "\n"
        (source / name).write_text(rewrite_links(text, path, names), encoding="utf-8")


def main() -> int:
    """Exit status: Sphinx's; 1 for a dead link."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--builder", default="html", help="Sphinx's (%(default)s), or linkcheck")
    arguments = parser.parse_args()
    source = OUTPUT / "source"
    try:
        lay_out(source)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    # conf.py stays in docs/, from where it finds the package.
    command = [sys.executable, "-m", "sphinx", "--builder", arguments.builder]
    command += ["--fail-on-warning", "--keep-going", "--quiet", "--fresh-env"]
    command += ["--conf-dir", str(DOCS), str(source), str(OUTPUT / arguments.builder)]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 0 and arguments.builder == "html":
        print(f"Open {(OUTPUT / 'html' / 'index.html').relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
