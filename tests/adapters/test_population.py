"""Generation for a population: all rows of all evaluations in one batch, token for token what each generates alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from continuations import by_hugging_face
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, save_model, small_config
from stacked_loop import StackedLoop
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.models.quantizer import quantize
from zo2adapters.tasks import generation
from zo2adapters.tasks.generation import Generation, GenerationPlan, Sampling, generate, plan_generation
from zo2core import Distribution, Engine, Evaluation, LowRankPerturbation, MeZOSGD, MultiQueryRGE, PhiloxNoise, ZerothOrder
from zo2core.errors import OptionError

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [30, 2], [7, 7]]
EPS = 0.1


def low_rank(base: Path, *, q: int = 2, stack: int | None = None, **options: Any) -> tuple[Any, Engine]:
    model = open_checkpoint(base, **options)
    estimator = MultiQueryRGE(lr=0.5, zo_eps=EPS, q=q, perturb_in_place=False)
    perturbation = LowRankPerturbation(rank=2, period=2, stack=stack)
    noise = PhiloxNoise(Distribution.RADEMACHER)
    return model, Engine(model, ZerothOrder(estimator, noise=noise, perturbation=perturbation))


def with_perturbed_weights(base: Path, loop: StackedLoop, at: Evaluation) -> Any:
    """The whole model with an evaluation's weights written out."""
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = loop.weights()
    for name, parameter in whole.named_parameters():
        if parameter.dim() == 1:
            parameter.data = weights[name] + at.shift * EPS * loop.draw(name, at.seed, parameter.numel())
        else:
            left, right = loop.draw(name, at.seed, len(parameter), loop.rank), loop.shared(name, len(loop.ends) // 2)
            parameter.data = weights[name] + at.shift * EPS * left @ right.T
    return whole


@pytest.mark.few(1)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("model_type", CONFIGS)
def test_tokens_are_transformers_own_with_the_perturbed_weights_written_out(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = save_model(tmp_path_factory.mktemp("base") / "base", data.draw(CONFIGS[model_type]))
    model, engine = low_rank(base, stack=data.draw(st.sampled_from([None, 3])))
    loop = StackedLoop(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), 2, 2, Distribution.RADEMACHER)
    vocabulary, longest = model.config.vocab_size, min(model.longest_row or 12, 12)
    token = st.integers(0, vocabulary - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=longest - 5), min_size=1, max_size=4))
    eos = data.draw(st.none() | token)
    with engine:
        for _ in range(data.draw(st.integers(0, 1))):  # a learned change beside the perturbations
            engine.ask()
            taken = engine.tell([0.3, -0.2, 0.1, 0.0])
            loop.updates += [(seed, grad, 0.25) for seed, grad in zip(taken.seeds, taken.projected_grads, strict=True)]
            loop.ends.append(len(loop.updates))
        evaluations = engine.ask()
        made = Generation(
            engine, model, max_new_tokens=5, evaluations=evaluations, eos_token_ids=() if eos is None else [eos]
        ).continuations(prompts)
    for at, tokens in zip(evaluations, made, strict=True):
        assert tokens == by_hugging_face(with_perturbed_weights(base, loop, at), prompts, 5, eos)


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=2.0, top_p=0.9, seed=5)])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_direction_alone_in_its_batch_generates_the_same(
    sampling: Sampling | None, is_quantised: bool, tmp_path: Path
) -> None:
    config = small_config("llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)
    base = save_model(tmp_path / "base", config)
    if is_quantised:
        quantize(base, tmp_path / "nf4", "nf4")
    model, engine = low_rank(tmp_path / "nf4" if is_quantised else base)
    given: dict[str, Any] = {"max_new_tokens": 6, "sampling": sampling, "eos_token_ids": [2]}
    with engine:
        evaluations = engine.ask()
        together = Generation(engine, model, evaluations=evaluations, **given).continuations(PROMPTS)
        alone = [Generation(engine, model, evaluations=[at], **given).continuations(PROMPTS)[0] for at in evaluations]
        assert together == alone
        assert len({str(tokens) for tokens in together}) > 1
        for row, prompt in enumerate(PROMPTS if sampling is None else []):
            one = Generation(engine, model, evaluations=evaluations, **given).continuations([prompt])
            assert [tokens[0] for tokens in one] == [tokens[row] for tokens in together]
        unperturbed = Generation(engine, model, evaluations=[None, *evaluations], **given).continuations(PROMPTS)
        columns = zip(*generate(engine, model, PROMPTS, **given), strict=True)
        assert unperturbed == [[[token for token in row if token is not None] for row in columns], *together]


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)])
def test_a_row_that_ended_leaves_its_place_to_the_next(sampling: Sampling | None, tmp_path: Path) -> None:
    model, engine = low_rank(save_model(tmp_path / "base", small_config("qwen3")))
    prompts = [[token, token + 1] for token in range(3, 12)]
    with engine:
        evaluations = engine.ask()
        given: dict[str, Any] = {"max_new_tokens": 8, "sampling": sampling, "evaluations": evaluations}
        freely = Generation(engine, model, **given).continuations(prompts)
        ends = {tokens[row][row // 2] for tokens in freely for row in range(4)}  # of four of nine rows at all evaluations
        rows: list[int] = []
        model._layers[0].register_forward_hook(lambda _, inputs, out: rows.append(len(inputs[0])))
        whole = Generation(engine, model, eos_token_ids=ends, **given)
        expected = whole.continuations(prompts)
        batches_of_all, rows[:] = list(rows), []
        with patch.object(generation, "plan_generation", lambda *_, **__: GenerationPlan(3, 2, 0)):
            made = list(Generation(engine, model, eos_token_ids=ends, **given).sweeps(prompts))
        batches_of_few = list(rows)
    continued: list[list[list[int]]] = [[[] for _ in prompts] for _ in evaluations]
    for token in (token for tokens in made for token in tokens):
        continued[token.evaluation][token.row].append(token.id)
    assert continued == expected
    assert {len(tokens) for of in expected for tokens in of} > {8}, "some rows end early, and some do not"
    assert max(batches_of_all) == len(prompts) * len(evaluations) > min(batches_of_all), "ended rows leave the batch"
    assert max(batches_of_few) <= 2 * len(evaluations)
    assert len(made) < 3 * 8, "places are taken before all of a group have ended"


def test_dense_directions_generate_in_one_sweep_a_token(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    for in_place in (True, False):
        with Engine(model, ZerothOrder(MeZOSGD(lr=0.1, zo_eps=0.1, perturb_in_place=in_place))) as engine:
            evaluations = engine.ask(seed=4)
            alone = []
            for at in evaluations:
                columns = zip(*generate(engine, model, PROMPTS, max_new_tokens=4, at=at), strict=True)
                alone.append([list(tokens) for tokens in columns])
            visits: list[int] = []
            engine.watch(lambda visited, _, visits=visits: visits.append(visited))  # type: ignore[misc]
            together = Generation(engine, model, max_new_tokens=4, evaluations=evaluations).continuations(PROMPTS)
        assert together == alone
        assert alone[0] != alone[1]
        assert len(visits) == 4 * len(model.layouts)


def test_the_plan_fills_the_memory_that_is_allowed() -> None:
    config = small_config("llama")
    shape = {"evaluations": 4, "rows": 10, "prompt_tokens": 8, "new_tokens": 4}
    free = plan_generation(config, **shape, allowed=None)
    assert free[:2] == (10, 10)
    earlier = free
    for allowed in range(free.nbytes, 0, -997):
        plan = plan_generation(config, **shape, allowed=allowed)
        assert plan.nbytes <= allowed or plan[:2] == (1, 1)
        assert plan.starting <= plan.places <= earlier.places
        earlier = plan
    assert earlier[:2] == (1, 1)


def test_evaluations_of_no_open_step_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    model, engine = low_rank(base)
    with engine:
        known = engine.ask()[0]
        with pytest.raises(OptionError, match="an evaluation that ask"):
            Generation(engine, model, max_new_tokens=1, evaluations=[known, Evaluation(5, 1.0)]).continuations(PROMPTS)
    with Engine(open_checkpoint(base)) as replayer, pytest.raises(OptionError, match="without zeroth-order steps"):
        Generation(replayer, model, max_new_tokens=1, evaluations=[known]).continuations(PROMPTS)


def test_a_rows_numbers_depend_on_seed_row_and_position_alone() -> None:
    numbers = {Sampling(seed=seed).number(row, position) for seed in (0, 1) for row in range(3) for position in range(3)}
    assert len(numbers) == 18
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = Sampling(temperature=0.7).tokens(logits, draws)
    sums = (logits / 0.7).softmax(dim=-1).cumsum(dim=-1)
    assert tokens.tolist() == [int((row <= draw).sum()) for row, draw in zip(sums, draws, strict=True)]
    assert Sampling(top_p=1e-6).tokens(logits, draws).equal(logits.argmax(dim=-1))
