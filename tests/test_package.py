"""The package: what is built and from which sources; and the version, which stands in one place."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from command_lines import done

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_BYTES = 1_500_000  # of a wheel


def test_the_version_stands_in_one_place() -> None:
    assert importlib.metadata.version("zo2core") == PROJECT["version"]
    assert done("--version").out == f"zo2core {PROJECT['version']}\n"
    others = [
        path.name
        for path in (ROOT / "src").rglob("*.py")
        if f'"{PROJECT["version"]}"' in path.read_text()
    ]
    assert not others


@pytest.mark.long_profile
def test_one_wheel_serves_every_python_and_the_sdist_needs_no_compiler(tmp_path: Path) -> None:
    """Builds both, which takes a minute and downloads the tools."""
    sources = tmp_path / "sources"
    ignored = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "*.so", "*.egg-info")
    shutil.copytree(ROOT, sources, ignore=ignored)
    made = ["make", "wheel", f"PYTHON={sys.executable}"]
    subprocess.run(made, cwd=sources, check=True, capture_output=True)
    [wheel] = (sources / "dist").glob("*.whl")
    [sdist] = (sources / "dist").glob("*.tar.gz")
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("zo2core", PROJECT["version"], "py3", "none")
    assert "linux" not in platform or "manylinux_2_17" in platform
    assert wheel.stat().st_size <= MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert "zo2core/kernels/_native.so" in names
    assert not [path for path in names if path.startswith("tests")]

    bare = tmp_path / "bare"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", f"--target={bare}", str(sdist)]
    subprocess.run(install, env={**os.environ, "CC": "/bin/false"}, check=True, capture_output=True)
    code = "import zo2core.kernels.dispatch as it; print(it.__file__); assert not it.library()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(bare)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.startswith(str(tmp_path))
    assert "compiled kernels are not used (no compiler built them" in ended.stderr
