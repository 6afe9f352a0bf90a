"""What a journal says of its run: the model's config, the caller's provenance, and how a difference is spelled out."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CONFIGS, make_batch, save_model, small_config

from zo2adapters import open_checkpoint
from zo2core import Engine, HostDevice, Journal, MeZOSGD, ParameterSpec, PhiloxNoise, SegmentStore, ZerothOrder, build
from zo2core.encodings import Int8Rows, NF4Blocks
from zo2core.errors import JournalError, OptionError
from zo2core.journal import digest
from zo2core.noise import TorchGenerator, numbers_drawn

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)
BATCH = make_batch(40, [7, 5])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama"))


def engine_of(base: Path, journal: Path, provenance: Mapping[str, Any] | None = None) -> Engine:
    return Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=PhiloxNoise()), journal=journal, provenance=provenance)


def weights_after(engine: Engine, steps: int) -> dict[str, torch.Tensor]:
    with engine:
        while engine.version < steps:
            engine.step(BATCH)
        return {name: tensor.clone() for name, tensor in engine.parameters_now()}


def change_config(base: Path, **changes: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def in_the_earlier_format(path: Path, *, without: tuple[str, ...]) -> None:
    """Rewrite a journal as earlier versions wrote it: other lines, no digests, and a header without these keys."""
    lines = []
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        if "base_digests" in record:
            continue
        kept = {key: value for key, value in record.items() if key not in ("crc32", *without)}
        raw = json.dumps(kept, separators=(",", ":"))
        lines.append(b"%08x %s\n" % (zlib.crc32(raw.encode()), raw.encode()))
    path.write_bytes(b"".join(lines))


DECISIVE: dict[str, tuple[dict[str, Any], str, str]] = {
    "norm epsilon": ({"rms_norm_eps": 1e-5}, "model.rms_norm_eps 1e-06", "model.rms_norm_eps 1e-05"),
    "rope": (
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        "model.rope_parameters.rope_theta 10000.0",
        "model.rope_parameters.rope_theta 500.0",
    ),
    "activation": ({"hidden_act": "gelu"}, "model.hidden_act 'silu'", "model.hidden_act 'gelu'"),
    "heads": (
        {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 2},
        "model.head_dim 4; model.num_attention_heads 3; model.num_key_value_heads 3",
        "model.head_dim 2; model.num_attention_heads 6; model.num_key_value_heads 6",
    ),
}


@pytest.mark.parametrize("name", DECISIVE)
def test_a_config_that_decides_another_forward_is_refused_leaf_by_leaf(name: str, base: Path, tmp_path: Path) -> None:
    changes, theirs, ours = DECISIVE[name]
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path), 1)
    change_config(base, **changes)
    with pytest.raises(JournalError) as refused:
        engine_of(base, path)
    assert (refused.value.found, refused.value.expected) == (theirs, ours)
    with pytest.raises(JournalError) as refused:
        Engine(open_checkpoint(base), journal=path)
    assert refused.value.found == theirs


def test_what_decides_nothing_of_a_config_may_change(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected = weights_after(engine_of(base, tmp_path / "other.jsonl"), 2)
    weights_after(engine_of(base, path), 1)
    change_config(
        base, transformers_version="4.0.0", _name_or_path="x", use_cache=False, architectures=None, rms_norm_eps=1e-6
    )
    weights = weights_after(engine_of(base, path), 2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_description_is_json_says_which_attention_runs_and_is_the_same_when_opened_again(
    model_type: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config(model_type))
    description = open_checkpoint(base).description
    assert json.loads(json.dumps(description, allow_nan=False)) == description == open_checkpoint(base).description
    assert description["attention"] == "sdpa"
    assert description["num_attention_heads"] == 3
    assert not {"transformers_version", "_name_or_path", "dtype", "use_cache", "architectures"} & {*description}


@pytest.mark.parametrize("differs", ["torch", "crc32"])
def test_another_torch_may_go_on_only_if_it_draws_the_same_numbers(
    differs: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path), 1)
    drawn = Journal(path).header["drawn"]  # type: ignore[index]
    assert drawn["torch"] == torch.__version__
    monkeypatch.setattr(build, "numbers_drawn", lambda device: {**drawn, differs: "other"})
    for method in (ZerothOrder(MEZO), None):
        if differs == "torch":
            Engine(open_checkpoint(base), method, journal=path).close()
            continue
        with pytest.raises(
            JournalError, match=r"noise that torch '[^']*' drew, of checksum '[0-9a-f]{8}'; expected that which"
        ):
            Engine(open_checkpoint(base), method, journal=path)


def test_the_checksum_is_of_what_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = numbers_drawn.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(TorchGenerator, "fill", lambda self, out: out.normal_(generator=self._generator).mul_(1 + 2**-7))
    other = numbers_drawn.__wrapped__(torch.device("cpu"))
    assert (drawn["torch"], len(drawn["crc32"])) == (other["torch"], 8)
    assert drawn["crc32"] != other["crc32"]


PROVENANCE = {"data": {"sha256": "aa", "rows": 7}, "tokenizer": "bb", "options": {"batch_size": 2, "sizes": [1, 2.0]}}


def test_other_provenance_is_refused_leaf_by_leaf(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path, PROVENANCE), 1)
    assert Journal(path).header["provenance"] == PROVENANCE  # type: ignore[index]
    other = {"data": {"sha256": "cc", "rows": 7.0}, "tokenizer": "bb", "options": {"batch_size": True, "sizes": [1, 3]}}
    with pytest.raises(JournalError) as refused:
        engine_of(base, path, {**other, "more": 1})
    assert refused.value.found == (
        "provenance.data.sha256 'aa'; no provenance.more; provenance.options.batch_size 2; provenance.options.sizes.1 2.0"
    )
    assert refused.value.expected == (
        "provenance.data.sha256 'cc'; provenance.more 1; provenance.options.batch_size True; provenance.options.sizes.1 3"
    )
    engine_of(base, path, PROVENANCE).close()
    engine_of(base, path).close()  # a caller that says nothing
    Engine(open_checkpoint(base), journal=path).close()


def test_a_difference_in_everything_stays_short(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path, {str(i): "x" * 10_000 for i in range(100)}), 1)
    with pytest.raises(JournalError, match="and 94 more") as refused:
        engine_of(base, path, {str(i): "y\n" * 10_000 for i in range(100)})
    assert len(str(refused.value)) < 2000
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "provenance",
    [{"x": float("nan")}, {"x": {1, 2}}, {"x": object()}, {"x": [[]] * 2, "y": b"raw"}],
    ids=["nan", "set", "object", "bytes"],
)
def test_provenance_that_is_not_json_is_refused(provenance: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="provenance: "):
        engine_of(base, tmp_path / "journal.jsonl", provenance)
    assert not (tmp_path / "journal.jsonl").exists()
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(OptionError, match="provenance: "):
        engine_of(base, tmp_path / "journal.jsonl", endless)


def test_an_engine_of_parts_keeps_provenance_too(base: Path, tmp_path: Path) -> None:
    model, device = open_checkpoint(base), HostDevice()
    with contextlib.closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source:
        parts: dict[str, Any] = {"source": source, "device": device, "journal": tmp_path / "journal.jsonl"}
        Engine(model, ZerothOrder(MEZO), provenance={"data": 1}, **parts).close()
        with pytest.raises(JournalError, match=r"provenance\.data 1"):
            Engine(model, ZerothOrder(MEZO), provenance={"data": 2}, **parts)


def test_a_run_with_a_journal_of_an_earlier_version_goes_on(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected = weights_after(engine_of(base, tmp_path / "whole.jsonl", PROVENANCE), 4)
    weights_after(engine_of(base, path, PROVENANCE), 2)
    in_the_earlier_format(path, without=("model", "provenance"))
    weights = weights_after(engine_of(base, path, PROVENANCE), 4)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    earlier, later = path.read_bytes().splitlines()[:3], path.read_bytes().splitlines()[3:]
    assert not any(line.startswith(b"{") for line in earlier)
    assert len(later) >= 2
    assert all(line.startswith(b"{") for line in later)
    assert list(Journal(path).updates) == list(Journal(tmp_path / "whole.jsonl").updates)


@pytest.mark.parametrize("key", ["noise", "base", "parameters"])
def test_a_header_that_lacks_a_key_of_every_version_is_refused(key: str, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path), 1)
    in_the_earlier_format(path, without=(key,))
    with pytest.raises(JournalError, match=f"(no|without) {key}"):
        Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path)
    with pytest.raises(JournalError, match=f"(no|without) {key}"):
        Engine(open_checkpoint(base), journal=path)


def test_what_is_frozen_or_encoded_identifies_the_parameters() -> None:
    spec = ParameterSpec("weight", (4, 8), torch.float32, 0, decays=True)
    others = [replace(spec, frozen=True), replace(spec, encoding=Int8Rows()), replace(spec, encoding=NF4Blocks(block=64))]
    digests = [digest([own]) for own in (spec, *others)]
    assert len(set(digests)) == len(digests)
