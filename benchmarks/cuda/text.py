"""Tables in plain text: these programs need nothing that PyTorch's own environment may lack."""

from __future__ import annotations


class Table:
    """Headings that begin with '>' stand over columns that are aligned on the right."""

    def __init__(self, title: str, *headings: str) -> None:
        self._title = title
        self._right = [heading.startswith(">") for heading in headings]
        self._rows: list[tuple[str, ...] | None] = [
            tuple(heading.removeprefix(">") for heading in headings)
        ]

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self._right)
        self._rows.append(cells)

    def add_gap(self) -> None:
        self._rows.append(None)

    def __str__(self) -> str:
        rows = [row for row in self._rows if row is not None]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

        def line(cells: tuple[str, ...] | None) -> str:
            if cells is None:
                return ""
            aligned = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(cells, widths, self._right, strict=True)
            )
            return ("  " + "  ".join(aligned)).rstrip()

        heading, *others = map(line, self._rows)
        rule = "  " + "-" * (sum(widths) + 2 * len(widths) - 2)
        return "\n".join(["", self._title, heading, rule, *others])
