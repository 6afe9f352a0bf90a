"""The package: what is built and from which sources; and the version, which stands in one place."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from command_lines import done

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVELOPER = PROJECT["optional-dependencies"]["dev"]
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


def test_the_newest_changes_are_those_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == PROJECT["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["license"] == PROJECT["license"]
    assert "version" not in cited, "it stands in pyproject.toml"


def test_workflows_and_hooks_call_what_is_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = re.findall(r"make (\w+)", "\n".join(step.get("run", "") for step in steps))
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    assert {"test", "docs", "wheel"} == set(called) <= targets

    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {Path(hook["entry"].split()[0]).name for hook in local["hooks"]}
    assert tools == {"ruff", "mypy"}
    assert all(any(need.startswith(tool) for need in DEVELOPER) for tool in tools)


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda f: f.stem
)
def test_a_form_asks_for_what_an_answer_needs(form: Path) -> None:
    asked = yaml.safe_load(form.read_text())
    assert asked.keys() == {"name", "description", "body"}
    ids = [field["id"] for field in asked["body"]]
    assert len(set(ids)) == len(ids)
    assert "output" in ids
    assert all(field["type"] in {"input", "textarea"} for field in asked["body"])
    assert all(field["attributes"]["label"] for field in asked["body"])


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
    code = "import zo2core.kernels.native as it; print(it.__file__); assert not it.library()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(bare)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.startswith(str(tmp_path))
    assert "compiled kernels are not used (no compiler built them" in ended.stderr
