"""Fuzzes the CPU engine: `python tests/fuzz --help`. Needs a C++ compiler, and neither torch nor
the built extension."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fuzz.main import main

sys.exit(main(sys.argv[1:]))
