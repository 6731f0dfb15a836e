"""Builds conv2d_ext._C. The metadata is in pyproject.toml, how to build in build_backend/."""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

from conv2d_ext_build import setup_arguments  # noqa: E402  (found through the line above)

setup(**setup_arguments(ROOT))
