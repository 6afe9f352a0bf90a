"""Packed rows: the losses of padded ones, bit for bit a loop's over the whole model, and refused
where rows would mix.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done
from engines import zeroth_order
from models import make_batch, save_model, small_config
from parity import assert_steps_alike
from runs import finish, rows_of, small_run
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.models.batches import is_packed, pack, require_separating_masks
from zo2adapters.trainers.options import Batching
from zo2core import Engine, LowRankPerturbation, MeZOSGD, MultiQueryRGE, ZerothOrder
from zo2core.errors import BatchError, UnsupportedModelError

GROUPED: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "sliding_window": 3,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": small_config("llama"),
    "qwen2": small_config("qwen2"),
    "qwen3": small_config("qwen3"),
    "gpt2": GPT2Config(
        vocab_size=40,
        n_embd=12,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mistral": MistralConfig(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED),
}
NUMBERS: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2}


def load(base: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.config.use_cache = False
    return model


def test_rows_lie_one_behind_the_other() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[5, -100, 7], [8, 9, -100]]),
    }
    packed = pack(batch)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["labels"].tolist() == [[-100, -100, 7, -100, 9]]
    assert is_packed(packed)
    assert not is_packed(batch)
    with pytest.raises(BatchError, match="found attention_mask, input_ids, labels, token_type_ids"):
        pack({**batch, "token_type_ids": batch["labels"]})


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_rows_by_themselves_and_every_bit_that_of_the_whole_model(
    tmp_path: Path, name: str
) -> None:
    base = save_model(tmp_path / "base", CONFIGS[name])
    packed = pack(make_batch(40, [7, 4, 5]))
    literal = MonolithicMeZO(load(base), **NUMBERS)
    with zeroth_order(open_checkpoint(base), MeZOSGD(**NUMBERS)) as engine:
        parts, counts = [], []
        for start, end in ((0, 7), (7, 11), (11, 16)):
            row = {key: packed[key][:, start:end] for key in ("input_ids", "labels")}
            parts.append(engine.evaluate([row]).loss)
            counts.append(int((row["labels"] != -100).sum()))
        mean = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
        assert engine.evaluate([packed]).loss == pytest.approx(mean, rel=1e-5)
        assert_steps_alike(engine, literal, [packed] * 3)


def test_beside_the_activations_a_step_of_packed_rows_is_one_of_padded_ones(tmp_path: Path) -> None:
    base, padded = save_model(tmp_path / "base", CONFIGS["llama"]), make_batch(40, [7, 4, 5])
    losses = []
    for batch in (padded, pack(padded)):
        estimator = MultiQueryRGE(q=2, perturb_in_place=False, **NUMBERS)
        method = ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2), seed=1)
        with Engine(open_checkpoint(base), method) as engine:
            losses.append([loss for _ in range(3) for loss in engine.step(batch).losses])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    "config",
    [small_config("opt"), BloomConfig(vocab_size=40, hidden_size=12, n_layer=2, n_head=2)],
    ids=["opt", "bloom"],
)
def test_a_model_whose_rows_would_see_each_other_is_refused(
    tmp_path: Path, config: PretrainedConfig
) -> None:
    base, batch = save_model(tmp_path / "base", config), make_batch(40, [7, 4])
    with zeroth_order(open_checkpoint(base), MeZOSGD(**NUMBERS)) as engine:
        with pytest.raises(
            UnsupportedModelError,
            match=r"layer 0: found no attention mask that separates packed rows",
        ):
            engine.step(pack(batch))
        assert engine.version == 0
        engine.step(batch)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("place", [None, (2, 2), (300, 299), (600, 0), (0, 600)])
def test_a_mask_is_looked_at_in_all_its_places(
    dtype: torch.dtype, place: tuple[int, int] | None
) -> None:
    lengths = [300, 301]
    number = torch.tensor([0] * lengths[0] + [1] * lengths[1])
    mask = (number[:, None] == number[None]).tril()[None, None]
    is_hidden = place is None or bool(number[place[0]] == number[place[1]])
    if place is not None:
        mask[0, 0, place[0], place[1]] = True
    if dtype is torch.float32:
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with nullcontext() if is_hidden else pytest.raises(UnsupportedModelError, match="layer 0"):
        require_separating_masks(
            {"position_ids": positions}, lambda: [((), {"attention_mask": mask})] * 3
        )


def test_masks_that_layers_do_not_share_are_all_looked_at() -> None:
    def calls() -> Iterator[tuple[tuple[Any, ...], dict[str, torch.Tensor]]]:
        """Each layer's mask is gone when the next one's is made, and may lie where that one lay."""
        for layer in range(8):
            yield (), {"attention_mask": apart.clone() if layer < 7 else torch.ones_like(apart)}

    number = torch.tensor([0] * 3 + [1] * 4)
    apart = (number[:, None] == number[None])[None, None]
    with pytest.raises(UnsupportedModelError, match="layer 7"):
        require_separating_masks({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}, calls)


def test_a_packed_run_learns_as_a_padded_one_and_goes_on(tmp_path: Path) -> None:
    losses = {}
    for packed in (False, True):
        folder = tmp_path / str(packed)
        folder.mkdir()
        options = small_run(
            folder, batching=Batching(batch_size=3, pack=packed), evaluation=folder / "rows.jsonl"
        )
        finish(options)
        losses[packed] = [
            row["loss"] for row in rows_of(folder / "run" / "metrics.jsonl") if "loss" in row
        ]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    run = tmp_path / "True" / "run"
    assert "packed" in json.dumps(rows_of(run / "journal.jsonl")[0])
    done("train", "--resume", run, "--steps", 5)
    evaluate = ("evaluate", "--run", run, "--data", options.data, "--no-base")
    told = [float(done(*evaluate, *more).out.split()[1].strip(",")) for more in (["--pack"], [])]
    assert told[0] == pytest.approx(told[1], rel=1e-5)
