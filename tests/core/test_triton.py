"""The Triton kernel without a GPU: interpreted, and compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(program: str, cache: Path, **environment: str) -> None:
    code = [sys.executable, str(Path(__file__).parents[1] / "support" / "triton_programs.py"), program]
    paths = os.pathsep.join(sys.path)  # those of pytest, too
    subprocess.run(code, check=True, env=os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths} | environment)


def test_the_interpreted_kernel_gives_the_references_bits(tmp_path: Path) -> None:
    run("interpret", tmp_path, TRITON_INTERPRET="1")


def test_an_engine_changes_a_segment_in_one_launch_with_the_same_bits(tmp_path: Path) -> None:
    run("engines", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.long_profile
def test_the_kernel_compiles_for_a_gpu_without_fused_or_approximate_operations(tmp_path: Path) -> None:
    run("compile", tmp_path)
