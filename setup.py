"""Builds the C kernels: pyproject.toml says what they are, and this how their file is named.

They use nothing of Python, and are loaded by ctypes. So one wheel serves every Python 3, and the
library's name holds neither a version nor an ABI.
"""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Builds a shared library that does not link Python's."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's file, without Python's suffix."""
        return fullname.replace(".", "/") + ".so"

    def get_libraries(self, ext: Extension) -> list[str]:
        """The libraries to link: not Python's, which a build of Python may ask for."""
        return ext.libraries


class WheelOfEveryPython(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """What pip compares with the interpreter: Python, ABI and platform."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_ext": BuildKernels, "bdist_wheel": WheelOfEveryPython})
