"""Where PyTorch itself does otherwise than the version that the tests are written against, 2.11."""

from __future__ import annotations

import pytest
import torch

IS_OLDER = torch.__version__ < (2, 11)
IS_NEWER = torch.__version__ >= (2, 12)
# On tests of what 2.8 refuses, or gives other values of.
not_in_older = pytest.mark.skipif(IS_OLDER, reason="older versions of PyTorch do otherwise here")
