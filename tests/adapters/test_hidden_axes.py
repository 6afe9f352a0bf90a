"""Hidden states with an axis beside rows, tokens and hidden size: before them in Gemma 3n, behind tokens in DeepSeek-V4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_config, small_model, stock_scores, stock_tokens
from models import make_batch
from models import small_config as declared_config
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES
from zo2adapters.models.derivation import derive_architecture
from zo2adapters.models.skeleton import build_skeleton
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.objectives import score
from zo2core import Engine, LowRankPerturbation, MeZOSGD, MultiQueryRGE, PerRowRGE, ZerothOrder
from zo2core.errors import UnsupportedModelError

COPIES = 4  # vectors of the hidden size that each token has in both models
AXES = {"gemma3n_text": (1, 2), "deepseek_v4": (0, 1)}
MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2)
# As many rows as copies, and as many tokens: sizes alone do not tell the axes.
SQUARE = make_batch(40, [COPIES] * COPIES)


@pytest.fixture(params=AXES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each model."""
    small_model(small_config(request.param)).save_pretrained(tmp_path / request.param)
    return tmp_path / str(request.param)


def whole_model(base: Path) -> Any:
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole.config.use_cache = False
    return whole


@pytest.mark.parametrize("model_type", AXES)
def test_the_axes_of_rows_and_tokens_are_learned(model_type: str) -> None:
    assert derive_architecture(build_skeleton(small_config(model_type), torch.float32)).axes == AXES[model_type]


@pytest.mark.few(2)
@pytest.mark.parametrize("prompts", [[[7, 3, 11, 20]], [[7, 3, 11, 20], [5, 9]], [[3, 4, 5, 6]] * COPIES], ids=len)
def test_greedy_tokens_are_hugging_faces(base: Path, prompts: list[list[int]]) -> None:
    model = open_checkpoint(base)
    with Engine(model) as replayer:
        steps = list(generate(replayer, model, prompts, max_new_tokens=12))
    assert [list(row) for row in zip(*steps, strict=True)] == stock_tokens(whole_model(base), prompts)


@pytest.mark.parametrize("chunk", [None, 3])
def test_log_likelihoods_are_the_whole_models(base: Path, chunk: int | None) -> None:
    prompts, candidates = [[7, 3, 11, 20], [5, 9]], [[[4], [6, 8]], [[10, 12, 13], [14]]]
    model = open_checkpoint(base, loss_chunk=chunk)
    with Engine(model) as replayer:
        scored = score(replayer, model, prompts, candidates).log_likelihoods
    assert sum(scored, ()) == pytest.approx(stock_scores(whole_model(base)), rel=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [None, 1])
def test_losses_in_chunks_and_micro_batches_are_the_whole_models(base: Path, rows: int | None) -> None:
    whole = whole_model(base)
    for batch in (SQUARE, make_batch(40, [9, 4])):
        with torch.inference_mode():
            expected = float(whole(**batch).loss)
        with Engine(open_checkpoint(base, loss_chunk=3), micro_batch_size=rows) as replayer:
            assert replayer.evaluate([batch]).loss == pytest.approx(expected, rel=1e-5)


def test_mixed_precision_is_monolithic_mezo_under_autocast(base: Path) -> None:
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16", loss_chunk=None)
    literal = MonolithicMeZO(whole_model(base), lr=1e-2, zo_eps=1e-2, autocast=torch.bfloat16)
    with Engine(model, ZerothOrder(MEZO)) as engine:
        assert [engine.step(SQUARE, seed=seed).losses for seed in (0, 1)] == [
            literal.step(SQUARE, seed).losses for seed in (0, 1)
        ]
    with Engine(
        open_checkpoint(base, precision="mixed", dtype="bfloat16"), ZerothOrder(MEZO)
    ) as engine:  # in chunks, as a run has it
        assert engine.step(SQUARE, seed=0).losses == pytest.approx(literal_losses(base), rel=1e-2)


def literal_losses(base: Path) -> list[float]:
    """The losses of the first step, of monolithic MeZO under autocast."""
    literal = MonolithicMeZO(whole_model(base), lr=1e-2, zo_eps=1e-2, autocast=torch.bfloat16)
    return list(literal.step(SQUARE, 0).losses)


def test_a_direction_of_each_row_takes_them_along_their_axis(base: Path) -> None:
    estimator = PerRowRGE(lr=1e-2, zo_eps=1e-2, q=COPIES)
    losses = []
    for chunk in (None, 3):
        with Engine(open_checkpoint(base, loss_chunk=chunk), ZerothOrder(estimator)) as engine:
            losses.append(engine.step(SQUARE, seed=0).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_directions_of_low_rank_are_right_or_refused_by_name(tmp_path: Path) -> None:
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2, perturb_in_place=False)
    for name in AXES:
        small_model(small_config(name)).save_pretrained(tmp_path / name)

    def losses(name: str, chunk: int | None, stack: int | None) -> tuple[float, ...]:
        model = open_checkpoint(tmp_path / name, loss_chunk=chunk)
        with Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2, stack=stack))) as engine:
            return engine.step(SQUARE, seed=0).losses

    one_by_one = losses("gemma3n_text", None, 1)
    assert len(set(one_by_one)) == 4
    for chunk, stack in ((None, None), (3, None), (3, 1)):
        assert losses("gemma3n_text", chunk, stack) == pytest.approx(one_by_one, rel=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"^model\.layers\.0\..*beside the activations"):
        losses("deepseek_v4", None, None)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
def test_a_prefix_is_pefts_and_its_first_values_are_refused_where_layers_share_keys(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path / "base")
    options = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    zeros = peft.PrefixTuningConfig(**options, init_weights="zero")
    whole = peft.get_peft_model(whole_model(tmp_path / "base"), zeros).eval()
    with torch.inference_mode():
        expected = float(whole(**SQUARE).loss)
    for chunk in (None, 3):
        with Engine(open_checkpoint(tmp_path / "base", adapter=Adapter(config=zeros), loss_chunk=chunk)) as replayer:
            assert replayer.evaluate([SQUARE]).loss == pytest.approx(expected, rel=1e-5)
    real = open_checkpoint(tmp_path / "base", adapter=Adapter(config=peft.PrefixTuningConfig(**options)))
    with pytest.raises(UnsupportedModelError, match="keys and values of 2 layers"), Engine(real) as replayer:
        replayer.evaluate([SQUARE])


def test_a_declaration_with_the_wrong_axes_is_refused_by_name(tmp_path: Path) -> None:
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path / "base")
    learned = derive_architecture(build_skeleton(small_config("gemma3n_text"), torch.float32))
    wrong = open_checkpoint(tmp_path / "base", architecture=replace(learned, axes=(0, 1)))
    with Engine(wrong) as replayer, pytest.raises(UnsupportedModelError, match="gemma3n_text: found hidden states"):
        replayer.evaluate([make_batch(40, [9, 4])])


def test_declared_models_have_rows_and_tokens_first() -> None:
    assert (
        derive_architecture(build_skeleton(declared_config("llama"), torch.float32)).axes
        == ARCHITECTURES["llama"].axes
        == (0, 1)
    )
