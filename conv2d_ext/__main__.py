"""python -m conv2d_ext: the demonstration, and the commands `certify` and `run`."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Each command has its own arguments and exit statuses; the demonstration's are in _demo.py."""
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv[:1] in (["certify"], ["run"]) else ("", argv)
    if command == "certify":
        from conv2d_ext._certify.command import main as run_command
    elif command == "run":
        from conv2d_ext._run import main as run_command
    else:
        try:
            from conv2d_ext._demo import main as run_command
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            print(
                "python -m conv2d_ext: the demonstration needs rich, which is not installed: "
                "pip install rich",
                file=sys.stderr,
            )
            return 2
    return run_command(rest)


if __name__ == "__main__":
    runs_a_program = sys.argv[1:2] == ["run"]
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        if runs_a_program:  # its exception
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
