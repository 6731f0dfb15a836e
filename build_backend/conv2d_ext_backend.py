"""PEP 517 backend: setuptools, building against the torch that the environment already has.

An extension works only with the torch minor it was compiled against. Build isolation hides the
environment's packages, so the usual `requires = ["torch"]` downloads a second torch, and not always
the same one. This backend looks for torch in the site-packages of the interpreter that runs it.
Where it is there, the build sees it; where it isn't, torch is one more build requirement.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import conv2d_ext_build
from conv2d_ext_build import OLDEST_TORCH, major_minor
from setuptools import build_meta


def environment_sites() -> list[str]:
    """This interpreter's site-packages folders, also those that isolation took off sys.path."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += site.getsitepackages()
    # The user's own folder counts outside virtual environments, and inside those that see the
    # system's packages.
    if sys.base_prefix in site.PREFIXES:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folders))


def find_torch(folders: list[str]) -> str | None:
    """The version of the torch that `folders` hold, or None where it is missing or too old."""
    torch = next(iter(importlib.metadata.distributions(name="torch", path=folders)), None)
    return torch.version if torch and major_minor(torch.version) >= OLDEST_TORCH else None


def build_requirements(folders: list[str]) -> list[str]:
    """What an isolated build must install beside setuptools, given what `folders` hold."""
    requirements = []
    if find_torch(folders) is None:
        requirements.append("torch>={}.{}".format(*OLDEST_TORCH))
        folders = []  # expose_torch() will not show them
    ninja = next(iter(importlib.metadata.distributions(name="ninja", path=folders)), None)
    if ninja is None and shutil.which("ninja") is None:
        requirements.append("ninja")
    return requirements


def expose_torch() -> None:
    """Makes the environment's torch importable, behind what the isolated build has installed."""
    folders = environment_sites()
    if find_torch(sys.path) is None and find_torch(folders) is not None:
        for folder in folders:
            site.addsitedir(folder)


@contextlib.contextmanager
def making_a_wheel() -> Iterator[None]:
    """setup.py, which setuptools runs in this process, then gives a wheel's metadata."""
    conv2d_ext_build.building_a_wheel = True
    try:
        yield
    finally:
        conv2d_ext_build.building_a_wheel = False


def get_requires_for_build_wheel(config_settings=None):
    return build_requirements([*environment_sites(), *sys.path])


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    expose_torch()
    with making_a_wheel():
        return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    expose_torch()
    # setuptools packs all that lies in build/lib*, also what an earlier version left there.
    for leftover in Path("build").glob("lib*"):
        shutil.rmtree(leftover)
    with making_a_wheel():
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_editable(config_settings=None):
    return get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    expose_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_sdist(sdist_directory, config_settings=None):
    return build_meta.build_sdist(sdist_directory, config_settings)
