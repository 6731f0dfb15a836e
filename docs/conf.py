"""Sphinx's settings. tools/build_docs.py builds the site: it lays the pages out first."""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "conv2d_ext"
author = "conv2d_ext contributors"
project_copyright = "2026, conv2d_ext contributors"
version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
release = version

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "conv2d_ext"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
pygments_style = "friendly"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# `conv2d` in a docstring is a link where it names something.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
linkcheck_timeout = 10

# ---- names of other projects, without a download: what the docstrings and pages mention

_PYTHON = {
    "py:exception": [
        "ImportError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError",
    ],
}  # fmt: skip
_TORCH = {
    "py:class": [
        "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.ConvTranspose1d",
        "torch.nn.ConvTranspose2d", "torch.nn.Linear", "torch.nn.Module",
        "torch.nn.MultiheadAttention",
    ],
    "py:function": [
        "torch.log_softmax", "torch.nn.functional.conv1d", "torch.nn.functional.conv2d",
        "torch.nn.functional.conv_transpose1d", "torch.nn.functional.conv_transpose2d",
        "torch.nn.functional.linear", "torch.softmax", "torch.use_deterministic_algorithms",
    ],
}  # fmt: skip


def _inventory(name: str, entries: dict[str, list[str]], page: str) -> str:
    """Writes an inventory of these names for intersphinx; returns its path."""
    lines = [f"{n} {role} 1 {page.format(n)}#$ -" for role, names in entries.items() for n in names]
    path = Path(__file__).resolve().parent / "_inventories" / f"{name}.inv"
    path.parent.mkdir(exist_ok=True)
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    path.write_bytes(head.encode() + zlib.compress("\n".join([*lines, ""]).encode()))
    return str(path)


intersphinx_mapping = {
    "python": (
        "https://docs.python.org/3",
        _inventory("python", _PYTHON, "library/exceptions.html"),
    ),
    "torch": (
        "https://docs.pytorch.org/docs/stable",
        _inventory("torch", _TORCH, "generated/{}.html"),
    ),
}

# ---- docstrings are plain text


_ENTRY = re.compile(r"((?:\w+|`\w+`)(?:, \w+)*): (.*)")
_NO_ENTRY = re.compile(r"(Returns|Raises|Takes)\b")


def _escaped(line: str) -> str:
    line = re.sub(r"`s\b", r"`\\ s", line)
    line = re.sub(r"(?<!\w)([*|])|(?<=\w)(_)(?=\W|$)", r"\\\1\2", line)
    return re.sub(r"docs/(\w+)\.md", r":doc:`\1`", line)


def _plain_text(app, what, name, obj, options, lines: list[str]) -> None:
    """Arguments, `name: what it is`, become a list; what is indented is shown as it is; asterisks
    and bars are characters."""
    text: list[str] = []
    state = "paragraph"  # or list, or block
    # Several in a line: "input: (N, C). weight: (OC, C)."
    lines[:] = [
        part for line in lines for part in re.split(r"(?<=[.)]) (?=\w+: \(|Returns \()", line)
    ]
    for line in lines:
        entry = None if _NO_ENTRY.match(line) else _ENTRY.match(line)
        indented = line.startswith("    ")
        if not line.strip():
            text.append("")
            state = "block" if state == "block" else "paragraph"
        elif line.startswith((">>>", "...")):
            text.append(line)
        elif entry:
            text += [""] if state != "list" else []
            text.append(f"- **{entry[1]}**: {_escaped(entry[2])}")
            state = "list"
        elif state == "list" and (indented or not line[0].isupper()):
            text.append("  " + _escaped(line.strip()))
        elif indented:
            text += [] if state == "block" else ["", "::", ""]
            text.append(line)
            state = "block"
        else:
            text += [""] if state != "paragraph" else []
            text.append(_escaped(line))
            state = "paragraph"
    lines[:] = text


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _plain_text)
