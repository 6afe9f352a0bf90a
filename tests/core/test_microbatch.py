"""Micro-batches: cutting a batch changes what a step takes, not what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, make_batch, save_model, small_config
from profiles import each_choice
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2core import Engine, MeZOSGD, MultiQueryRGE, SegmentStore, ZerothOrder
from zo2core.errors import NonFiniteLossError
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, split_rows

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("opt"), torch.float64)


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    rows=st.integers(1, 6),
    left=st.booleans(),
    unlabelled=st.sets(st.integers(0, 5)),
)
def test_pieces_hold_every_labelled_row_once_and_no_empty_column(
    lengths: list[int], rows: int, left: bool, unlabelled: set[int]
) -> None:
    batch = make_batch(40, lengths, left=left)
    for row in unlabelled & set(range(len(lengths))):
        batch["labels"][row] = -100
    pieces = split_rows(batch, rows)
    if len(lengths) <= rows or labelled_tokens(batch) == 0:
        assert pieces == [batch]
        return
    assert sum(labelled_tokens(piece) for piece in pieces) == labelled_tokens(batch)
    assert all(labelled_tokens(piece) for piece in pieces)
    for piece in pieces:
        assert len({value.shape for value in piece.values()}) == 1
        assert len(piece["labels"]) <= rows
        assert piece["attention_mask"][:, -1].any()
    kept = [row[mask == 1].tolist() for p in pieces for row, mask in zip(p["input_ids"], p["attention_mask"], strict=True)]
    whole = [row[mask == 1].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert kept == [
        row
        for i, row in enumerate(whole)
        if not set(range(i - i % rows, i - i % rows + rows)) <= (unlabelled | set(range(len(lengths), 99)))
    ]


def test_what_has_other_rows_keeps_its_columns() -> None:
    """Patches of images have as many values as it happens, and positions that all rows share have columns."""
    batch = {
        "input_ids": torch.ones(4, 5, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * 4),
        "labels": torch.tensor([[1, 1, 1, -100, -100]] * 4),
        "pixel_values": torch.ones(32, 5),
        "position_ids": torch.arange(5)[None],
    }
    for micro_batch in split_rows(batch, 2):
        assert micro_batch["input_ids"].shape == (2, 3)
        assert micro_batch["pixel_values"].shape == (32, 5)
        assert micro_batch["position_ids"].shape == (1, 3)


def test_a_label_on_padding_keeps_its_column() -> None:
    batch = make_batch(40, [5, 2, 2])
    batch["labels"][2, 3] = 7
    assert [tuple(piece["labels"].shape) for piece in split_rows(batch, 1)] == [(1, 5), (1, 2), (1, 4)]


def test_what_all_rows_share_goes_with_every_piece() -> None:
    batch = {**make_batch(40, [5, 5, 2]), "position_ids": torch.arange(5)[None]}
    assert [tuple(piece["position_ids"].shape) for piece in split_rows(batch, 1)] == [(1, 5), (1, 5), (1, 2)]


def test_losses_count_by_their_labelled_tokens() -> None:
    losses = [torch.tensor(value) for value in (1.0, 2.0, 4.0)]
    joined = combined_loss(losses, [1, 2, 5])
    assert joined.item() == 25 / 8
    assert joined.dtype is torch.float32
    assert combined_loss(losses[:1], [3]) is losses[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(("model_type", "left"), each_choice(list(CONFIGS), [False, True]))
def test_the_loss_does_not_depend_on_the_cutting(model_type: str, left: bool, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config(model_type), torch.float64)
    batch = make_batch(40, [9, 3, 12, 2, 7], left=left)
    batch["labels"][1] = -100
    found = []
    for rows in (None, 1, 2, 3, 4, 5, 99):
        with Engine(
            open_checkpoint(base), ZerothOrder(MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2)), micro_batch_size=rows
        ) as engine:
            steps = [engine.step(batch, seed=seed) for seed in range(2)]
            result = engine.evaluate([batch, batch])
            found.append([*steps[0].losses, *steps[1].losses, *result.losses, result.loss])
            assert result.tokens == 2 * labelled_tokens(batch)
    assert found[5] == found[6] == found[0]  # one piece is the plain step, bit for bit
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=3e-6)  # Hugging Face takes the loss in float32


def test_the_trainers_own_way_of_counting_gives_the_same_loss(base: Path) -> None:
    batch = make_batch(40, [9, 3, 12])
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    count = labelled_tokens(batch)
    with torch.inference_mode():
        rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
        expected = sum(whole(**row, num_items_in_batch=count).loss.item() for row in rows)
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), micro_batch_size=1) as engine:
        assert engine.evaluate([batch]).loss == pytest.approx(expected, rel=1e-6)


def test_every_segment_is_visited_once_a_step(base: Path) -> None:
    model = open_checkpoint(base)
    with Engine(model, ZerothOrder(MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3)), micro_batch_size=1) as engine:
        engine.step(make_batch(40, [9, 3]))
        acquired: list[int] = []
        source = engine._runner.source
        assert isinstance(source, SegmentStore)
        acquire = source.acquire
        source.acquire = lambda index: (acquired.append(index), acquire(index))[1]  # type: ignore[method-assign,func-returns-value]
        engine.step(make_batch(40, [9, 3]))
    assert acquired == list(range(len(model.layouts)))


def test_a_piece_whose_loss_is_not_finite_stops_the_step(base: Path) -> None:
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e306)), micro_batch_size=1) as engine:
        with pytest.raises(NonFiniteLossError):
            engine.step(make_batch(40, [9, 3]))
        assert engine.version == 0
