"""Mixtures whose config asks for the loss of their routers: losses and gradients are transformers' on the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LR, small_config, small_model, trained_by_peft
from profiles import each_choice
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.models.called_forward import CalledForward
from zo2core import Engine, FirstOrder, HostPlan, LowRankPerturbation, MemoryPolicy, MeZOSGD, ZerothOrder
from zo2core.errors import OptionError, UnsupportedModelError

peft: Any = pytest.importorskip("peft")

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "minimax", "phimoe", "granitemoe", "qwen3_next", "jamba"]
DTYPES = [torch.float32, torch.bfloat16]
BUCKETS = [None, 2]


def batch() -> dict[str, torch.Tensor]:
    """Two rows, the second one padded."""
    ids = torch.tensor([[3, 9, 4, 11, 5, 6], [7, 8, 10, 12, 0, 0]])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def save(family: str, directory: Path, dtype: torch.dtype = torch.float32, *, asks: bool = True) -> Path:
    config = small_config(family)
    config.output_router_logits, config.router_aux_loss_coef = asks, 0.5
    model: Any = small_model(config)
    model.to(dtype).save_pretrained(directory)
    return directory


def whole_model(base: Path) -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()  # what is mapped from a file lies otherwise, and products round differently
    return whole.eval()


def memory(buckets: int | None) -> MemoryPolicy:
    return MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False))


@pytest.mark.few(4)
@pytest.mark.parametrize(("family", "dtype", "buckets"), each_choice(FAMILIES, DTYPES, BUCKETS))
def test_gradients_have_the_routers_share(family: str, dtype: torch.dtype, buckets: int | None, tmp_path: Path) -> None:
    base = save(family, tmp_path / "base", dtype)
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=LR)), memory=memory(buckets)) as engine:
        first = {name: value.detach().clone() for name, value in engine.parameters.items()}
        losses = [engine.step(batch()).loss for _ in range(2)]
        learned = {name: value.clone() for name, value in engine.parameters_now() if name in first}
    expected, trained = trained_by_peft(whole_model(base), config, first, batch(), steps=2)
    assert losses == expected
    assert [name for name, value in learned.items() if not torch.equal(value, trained[name])] == []


@pytest.mark.parametrize(("family", "dtype", "buckets"), each_choice(FAMILIES, DTYPES, BUCKETS))
@pytest.mark.few(2)
def test_zeroth_order_steps_are_monolithic_mezo(
    family: str, dtype: torch.dtype, buckets: int | None, tmp_path: Path
) -> None:
    base = save(family, tmp_path / "base", dtype)
    resident = MonolithicMeZO(whole_model(base), lr=1e-2, zo_eps=1e-2)
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), memory=memory(buckets)) as engine:
        for _ in range(2):
            [seed] = {evaluation.seed for evaluation in engine.ask()}
            assert list(engine.step(batch()).losses) == list(resident.step(batch(), seed).losses)


def test_a_loss_without_that_of_the_routers_is_never_taken_for_it(tmp_path: Path) -> None:
    asked, silent = (save("qwen3_moe", tmp_path / str(asks), asks=asks) for asks in (True, False))
    with Engine(open_checkpoint(asked)) as with_routers, Engine(open_checkpoint(silent)) as without:
        assert with_routers.evaluate([batch()]).loss > without.evaluate([batch()]).loss + 0.1
    assert open_checkpoint(asked).description != open_checkpoint(silent).description
    assert open_checkpoint(asked, precision="mixed").loss_chunk is None
    with pytest.raises(OptionError, match="output_router_logits is true"):
        open_checkpoint(asked, loss_chunk=4)
    low_rank = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2), perturbation=LowRankPerturbation(rank=2, period=2))
    adapter = Adapter(config=peft.LoraConfig(r=2, target_modules=["o_proj"]), seed=1)
    with pytest.raises(OptionError, match="output_router_logits is true"):
        Engine(open_checkpoint(asked, adapter=adapter), low_rank)


def test_a_called_model_has_the_routers_loss_or_is_refused(tmp_path: Path) -> None:
    asked, silent = (open_checkpoint(save("qwen3_moe", tmp_path / str(asks), asks=asks)) for asks in (True, False))

    def loss(called: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = called(**inputs, output_router_logits=True).loss
        return loss

    method, losses = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), []
    for forward in (None, CalledForward(asked, loss)):
        with Engine(asked, method) as engine:
            losses.append(engine.step(batch(), forward, seed=1).losses)
    assert losses[0] == losses[1]
    assert asked._recorder.at_end is None, "the logits would stay in memory"
    with Engine(silent, method) as engine, pytest.raises(UnsupportedModelError, match="output_router_logits"):
        engine.step(batch(), CalledForward(silent, loss))


def test_a_family_that_ignores_the_setting_ignores_it_here(tmp_path: Path) -> None:
    base = save("deepseek_v3", tmp_path / "base")
    with Engine(open_checkpoint(base)) as engine:
        assert engine.evaluate([batch()]).loss == whole_model(base)(**batch(), use_cache=False).loss.item()
