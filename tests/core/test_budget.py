"""Memory: what there is, what is needed, and what is said when it is not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import zo2core.planning.speeds
from zo2core import BlockLayout, MemoryPolicy, ParameterSpec, PhiloxNoise, SegmentKind
from zo2core.errors import MemoryBudgetError, OptionError
from zo2core.io.direct_file import STAGING
from zo2core.kernels import apply_drawing
from zo2core.noise import SequentialNoise
from zo2core.planning.memory import HostPlan, Machine, RunRequest, free_memory, plan_host
from zo2core.planning.speeds import evaluation_seconds
from zo2core.protocols import NoiseGenerator
from zo2core.ranges import parse_size
from zo2core.sources.segment_store import READERS
from zo2core.types import Program, shown_bytes

MiB = 2**20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("6GiB", 6 * 2**30), ("500MB", 500_000_000), ("1.5 GiB", 3 * 2**29), ("7K", 7 * 1024), ("64", 64), (4096, 4096)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0"),
        (0.4, "0.4 bytes"),
        (812, "812 bytes"),
        (999.6, "1.00 kB"),
        (1450, "1.45 kB"),
        (9_999_999, "10.0 MB"),
        (99_960_000, "100 MB"),
        (999_600_000, "1.00 GB"),
        (2**31, "2.15 GB"),
        (12_853_516_796_000, "12.9 TB"),
        (4e18, "4000 PB"),
    ],
)
def test_bytes_are_shown_in_the_decimal_unit_that_fits(nbytes: float, shown: str) -> None:
    assert shown_bytes(nbytes) == shown


@pytest.mark.parametrize("text", ["", "6 apples", "-1GB", "0", "GiB", "1e9", "6gib", 0])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(OptionError, match="6GiB"):
        parse_size(text)


def group(directory: Path, names: tuple[str, str], limit: str, usage: int, stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(limit)
    (directory / names[1]).write_text(str(usage))
    (directory / "memory.stat").write_text(stat)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_the_tightest_limit_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory,other:/a/b\n0::/x\n")
    top = tmp_path / "sys/fs/cgroup/memory"
    group(top, V1, str(2**62), 0, "")
    group(top / "a", V1, str(100 * MiB), 60 * MiB, f"total_inactive_file {5 * MiB}\ntotal_active_file {5 * MiB}\n")
    group(top / "a/b", V1, str(90 * MiB), 30 * MiB, "total_inactive_file 0\ntotal_active_file 0\n")
    assert free_memory(root=tmp_path) == 50 * MiB  # the group above: 100 - 60 + 10
    group(tmp_path / "sys/fs/cgroup/x", V2, str(64 * MiB), 60 * MiB, f"inactive_file {MiB}\nactive_file 0\n")
    assert free_memory(root=tmp_path) == 5 * MiB
    group(tmp_path / "sys/fs/cgroup/x", V2, "max", 60 * MiB, "inactive_file 0\n")
    assert free_memory(root=tmp_path) == 50 * MiB


def test_a_container_that_does_not_see_its_path_uses_the_top(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/not/mounted\n")
    group(tmp_path / "sys/fs/cgroup", V2, str(80 * MiB), 20 * MiB, "inactive_file 0\nactive_file 0\n")
    assert free_memory(root=tmp_path) == 60 * MiB


def test_without_control_groups_the_system_counts(tmp_path: Path) -> None:
    assert free_memory(root=tmp_path) <= psutil.virtual_memory().total


def layouts(blocks: int = 10) -> tuple[BlockLayout, ...]:
    """Embedding and head of 8 MiB each, blocks of 16 MiB."""
    sizes = [8, *[16] * blocks, 8]
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * blocks, SegmentKind.HEAD]
    specs = [ParameterSpec(f"p{i}", (size * MiB // 4,), torch.float32, i, True) for i, size in enumerate(sizes)]
    return tuple(BlockLayout(spec.name, kind, (spec,)) for spec, kind in zip(specs, kinds, strict=True))


def host_plan(memory: int | str, activation_bytes: int, noise: NoiseGenerator | None = None) -> HostPlan:
    request = RunRequest(
        layouts=layouts(),
        on_disk=layouts(),
        noise=SequentialNoise(layouts(), "cpu") if noise is None else noise,
        perturb_in_place=True,
        memory=MemoryPolicy(host=memory),
    )
    return plan_host(request, Machine(), activation_bytes)


@pytest.mark.parametrize(
    ("room", "buckets", "keep_noise"),
    [
        (16 + 160 + 16 + 16, None, True),  # resident segments, blocks, work, noise
        (16 + 160 + 16, None, False),
        (16 + 8 * 16 + 16 + 16 + 8, 8, True),
        (16 + 3 * 16 + 16 + 16, 3, True),
        (16 + 2 * 16 + 16 + 16, 2, True),
        (16 + 2 * 16 + 16 + 7, 2, False),
        (16 + 1 * 16 + 16, 1, False),
    ],
)
def test_the_fastest_arrangement_that_fits_is_taken(
    room: int, buckets: int | None, keep_noise: bool, process_memory: int
) -> None:
    reading = READERS * STAGING
    memory = process_memory + reading + 4 * MiB + room * MiB
    found = host_plan(memory, 2 * MiB)
    assert (found.buckets, found.keep_noise) == (buckets, keep_noise)
    assert found.nbytes <= found.budget


@pytest.mark.parametrize(("room", "buckets"), [(16 + 160 + 16, None), (16 + 9 * 16 + 16, 9), (16 + 2 * 16 + 16 + 7, 2)])
def test_counter_based_noise_takes_no_memory(room: int, buckets: int | None, process_memory: int) -> None:
    memory = process_memory + READERS * STAGING + 4 * MiB + room * MiB
    found = host_plan(memory, 2 * MiB, PhiloxNoise())
    assert (found.buckets, found.keep_noise) == (buckets, False)
    assert found.nbytes <= found.budget


def test_what_does_not_fit_is_added_up_part_by_part(process_memory: int) -> None:
    with pytest.raises(MemoryBudgetError) as info:
        host_plan(process_memory + 20 * MiB, 5 * MiB)
    for part in ("this process", "activations", "embedding and head 16.8 MB", "1 of 10 blocks", "work buffer 16.8 MB"):
        assert part in info.value.expected


def test_auto_takes_what_is_free() -> None:
    found = host_plan("auto", 0)
    assert found.buckets is None
    assert found.keep_noise


def test_a_first_evaluation_draws_the_updates_direction_and_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: set[int] = set()

    def recorded(theta: torch.Tensor, program: Program, *arguments: Any, **options: Any) -> None:
        moves = (*program.instructions, *([program.then] if program.then else []))
        passes.add(len({program.seeds[move.direction] for move in moves}))
        apply_drawing(theta, program, *arguments, **options)

    monkeypatch.setattr(zo2core.planning.speeds, "apply_drawing", recorded)
    first, other = evaluation_seconds(PhiloxNoise(), layouts())
    assert min(first, other) > 0
    assert passes == {1, 2}
