"""Head and loss over slices of tokens: the same loss, never all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import BLOOM, BLOOM_CONFIG, CONFIGS, batches, make_batch, save_model, small_config
from profiles import examples
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.models.footprint import activation_bytes, forward_bytes
from zo2core import Engine, MeZOSGD, MultiQueryRGE, ZerothOrder
from zo2core.errors import OptionError

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("model_type", CONFIGS)
@examples(short=10, long=100)
@given(data=st.data(), chunk=st.integers(1, 40), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_loss_is_hugging_faces_within_summation(
    model_type: str, data: st.DataObject, chunk: int, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = data.draw(CONFIGS[model_type])
    batch = data.draw(batches(config.vocab_size))
    base = save_model(tmp_path_factory.mktemp("base"), config, dtype)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with Engine(open_checkpoint(base, loss_chunk=chunk), ZerothOrder(MEZO)) as engine, torch.inference_mode():
        assert engine.evaluate([batch]).loss == pytest.approx(whole(**batch).loss.item(), rel=2e-6)


def test_no_forward_sees_more_tokens_than_a_chunk(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    model = open_checkpoint(base, loss_chunk=4)
    seen: list[int] = []
    model.skeleton.lm_head.register_forward_hook(lambda _, inputs, out: seen.append(out[..., 0].numel()))
    with Engine(model, ZerothOrder(MEZO)) as engine:
        engine.evaluate([make_batch(40, [9, 3])])
    assert seen == [4, 4, 2]  # 8 + 2 labelled tokens; the others' logits are not computed at all


def test_a_chunked_step_is_the_plain_one_within_summation(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("qwen2"), torch.float64)
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2)
    found = []
    for chunk, rows in ((None, None), (3, None), (3, 1)):
        with Engine(open_checkpoint(base, loss_chunk=chunk), ZerothOrder(estimator), micro_batch_size=rows) as engine:
            found.append([loss for seed in range(2) for loss in engine.step(make_batch(40, [9, 3]), seed=seed).losses])
    assert found[1] == pytest.approx(found[0], rel=3e-6)
    assert found[2] == pytest.approx(found[0], rel=3e-6)


def test_layers_that_return_tuples_are_chunked_too(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", BLOOM_CONFIG)
    losses = []
    for chunk in (None, 3):
        with Engine(open_checkpoint(base, architecture=BLOOM, loss_chunk=chunk), ZerothOrder(MEZO)) as engine:
            losses.append(engine.evaluate([make_batch(40, [7, 4])]).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_chunks_and_micro_batches_are_counted() -> None:
    config = small_config("llama", vocab_size=10_000)
    assert forward_bytes(config, 4, 100) == 400 * 10_000 * (4 + 4)  # logits, and what log-softmax makes of them
    assert forward_bytes(config, 4, 100, loss_chunk=50) == 50 * 10_000 * (4 + 4 + 4)  # converted to float32 in between
    assert forward_bytes(config, 4, 100, loss_chunk=999) == forward_bytes(config, 4, 100, loss_chunk=400)
    assert forward_bytes(config, 4, 100, loss_rows=1) == 400 * 10_000 * 4 + 100 * 10_000 * 4  # one loss after another
    held = activation_bytes(config, 4, 100, streams=2) - forward_bytes(config, 4, 100)
    assert activation_bytes(config, 4, 100, streams=6) - forward_bytes(config, 4, 100) == 3 * held
    alone = activation_bytes(config, 1, 100, streams=2) - forward_bytes(config, 1, 100)
    assert held < 4 * alone == activation_bytes(config, 4, 100, micro_rows=1) - forward_bytes(config, 1, 100)


@pytest.mark.parametrize("chunk", [0, -5, 2.5, "many"])
def test_a_chunk_out_of_range_is_refused(tmp_path: Path, chunk: Any) -> None:
    with pytest.raises(OptionError, match="loss_chunk"):
        open_checkpoint(tmp_path, loss_chunk=chunk)
