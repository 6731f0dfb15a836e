"""A certificate in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conv2d_ext._certify.result import (
    LIBRARY,
    TORCH,
    Axis,
    Call,
    Certificate,
    Difference,
    Finding,
    Location,
    Mode,
    OpCalls,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_TITLES = {
    TORCH: "PyTorch alone (F.*)",
    LIBRARY: "Under conv2d_ext.batch_invariant()",
}


def text(certificate: Certificate) -> str:
    return "\n".join(_text_lines(certificate))


def _text_lines(certificate: Certificate) -> Iterator[str]:
    yield f"{certificate.model}, {_inputs(certificate)}"
    yield _machine(certificate)
    for name, mode in certificate.modes.items():
        yield ""
        yield _TITLES[name]
        for axis, found in mode.axes.items():
            for what, finding in (("outputs", found.outputs), ("gradients", found.gradients)):
                label = axis if what == "outputs" else ""
                yield f"  {label:<8} {what:<10} {verdict(finding)}"
                if finding.first:
                    yield from (f"{'':22}{line}" for line in location(finding.first))
        yield from (f"  {line}" for line in _calls(name, mode))
    yield ""
    yield from (f"Note: {note}" for note in certificate.notes)
    if certificate.against:
        yield from _against(certificate)
    yield summary(certificate)


def verdict(finding: Finding) -> str:
    """One finding in a line."""
    if finding.status == "equal":
        return f"equal to the bit in {_plural(finding.runs, 'run')}"
    if finding.status != "differs":
        return f"{finding.status}: {finding.reason}"
    shown = ", ".join(finding.differing[:4]) + (", ..." if len(finding.differing) > 4 else "")
    where = f"DIFFERS in {len(finding.differing)} of {_plural(finding.runs, 'run')} ({shown})"
    return f"{where}: {_difference(finding.difference)}"


def location(first: Location) -> list[str]:
    """The first call, in lines."""
    if first.call is None:
        return [f"first call not found: {first.note}"]
    lines = [f"first call: {call_name(first.call)}"]
    if first.call.where:
        lines.append(f"  at {first.call.where}")
    if first.inputs_equal:
        lines.append(
            "  its inputs are equal to the bit" + (f"; {first.note}" if first.note else "")
        )
    else:
        lines.append(f"  {first.note}")
    if first.couples:
        lines.append(f"  it couples examples by definition: {first.couples}")
    if first.not_comparable:
        lines.append(f"  {_plural(first.not_comparable, 'call')} before it could not be compared")
    return lines


def call_name(call: Call) -> str:
    """Module, call, function and op."""
    module = call.module or "the model itself"
    name = f"{module} ({call.module_class}), call {call.module_call}: "
    if call.backward:
        function = f"{call.function}, " if call.function else ""
        return f"{name}backward of {function}{call.node} ({call.op}, call {call.op_call})"
    if call.function:
        return f"{name}{call.function}, call {call.function_call} ({call.op})"
    return f"{name}{call.op}, call {call.op_call}"


def summary(certificate: Certificate) -> str:
    """The last line."""
    mode = certificate.modes[certificate.mode]
    failed = [axis for axis in certificate.require if not mode.axes[axis].passed]
    title = _TITLES[certificate.mode]
    title = title[0].lower() + title[1:] if title.startswith("Under") else title
    if differing := [axis for axis in failed if _differs(mode.axes[axis])]:
        return f"FAILED, {title}: bits depend on {', '.join(differing)}"
    if failed:
        return f"FAILED, {title}: not known of {', '.join(failed)}"
    coupled = [a for a in certificate.require if mode.axes[a].is_coupled]
    skipped = [a for a in certificate.require if mode.axes[a].outputs.status == "skipped"]
    ran = [a for a in certificate.require if a not in coupled + skipped]
    apart = [("examples are coupled by definition, see above", coupled), ("not run", skipped)]
    left = "".join(f" ({why}: {', '.join(which)})" for why, which in apart if which)
    return (
        f"PASSED, {title}: bits do not depend on {', '.join(ran) or 'anything that was run'}{left}"
    )


def _differs(axis: Axis) -> bool:
    return "differs" in (axis.outputs.status, axis.gradients.status)


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return "shapes or dtypes differ"
    share = 100 * difference.differing / difference.elements
    parts = [f"{share:.0f} % of the elements" if share >= 1 else f"{difference.differing} elements"]
    ulp = "" if difference.largest_ulp is None else f" ({difference.largest_ulp} ulp)"
    parts.append(f"by at most {difference.largest:.3g}{ulp}")
    if difference.not_finite:
        parts.append(f"{difference.not_finite} of them infinite or NaN on one side")
    return ", ".join(parts)


def _calls(name: str, mode: Mode) -> Iterator[str]:
    """What couples examples, and the calls that varied or are not covered."""
    for call in mode.couples:
        yield f"couples examples by definition: {call}"
    varied = [row for row in mode.calls if row.varied]
    if varied:
        yield "calls that gave other bits for equal inputs, in the recorded runs:"
        for row in varied:
            own = " (this library's)" if row.covered else ""
            yield f"  {row.op}{own}: {row.varied} of {row.calls}, in {', '.join(row.modules)}"
    if name != LIBRARY:
        return
    own = [row for row in mode.calls if not row.covered]
    covered = sum(row.calls for row in mode.calls if row.covered)
    yield f"calls covered by this library: {covered}; PyTorch's own: {sum(r.calls for r in own)}"
    if held := [row.op for row in own if not row.varied and not row.unknown]:
        yield f"  held: {', '.join(held)}"
    if some := [_partly(row) for row in own if not row.varied and row.unknown]:
        yield f"  not known of all: {', '.join(some)}"


def _partly(row: OpCalls) -> str:
    return f"{row.op} ({row.unknown} of {row.calls})"


def _against(certificate: Certificate) -> Iterator[str]:
    found = certificate.against
    if found is None:
        return
    if found.same:
        yield f"Against {found.file}: the same bits in {_plural(found.compared, 'digest')}"
    else:
        yield f"Against {found.file}: NOT THE SAME"
        yield from (f"  {line}" for line in found.differing)
    yield from (f"  {line}" for line in found.notes)


def _inputs(certificate: Certificate) -> str:
    parts = [" × ".join(map(str, i["shape"])) + " " + i["dtype"] for i in certificate.inputs]
    mode = "training" if certificate.settings["training"] else "evaluation"
    return f"example of {', '.join(parts)}; {mode} mode"


def _machine(certificate: Certificate) -> str:
    m = certificate.machine
    return (
        f"conv2d_ext {m['conv2d_ext']} (numerics {m['numerics']}, {m['isa']}), "
        f"torch {m['torch']} ({m['cpu_capability']}), {m['cpu']}"
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def markdown(certificate: Certificate) -> str:
    lines = [f"# {certificate.model}", "", f"**{summary(certificate)}**", ""]
    lines += [f"{_inputs(certificate)}. {_machine(certificate)}.", ""]
    for name, mode in certificate.modes.items():
        lines += [
            f"## {_TITLES[name]}",
            "",
            "| axis | | result | first call |",
            "|---|---|---|---|",
        ]
        for axis, found in mode.axes.items():
            for what, finding in (("outputs", found.outputs), ("gradients", found.gradients)):
                first = " ".join(location(finding.first)) if finding.first else ""
                cells = (axis, what, verdict(finding), " ".join(first.split()))
                lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
        lines.append("")
        lines += [f"- {_cell(' '.join(line.split()))}" for line in _calls(name, mode)]
        lines.append("")
    lines += [f"- {_cell(note)}" for note in certificate.notes]
    lines += [f"- {_cell(' '.join(line.split()))}" for line in _against(certificate)]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
