"""Generation: token for token what Hugging Face generates from the whole model."""

import contextlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import families
import pytest
import torch
import transformers
from command_lines import done, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, WORDS, continuations, save_model, save_tokenizer, small_config
from runs import finish, small_run
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from whole_loops import StackedLoop

from zo2adapters import open_checkpoint
from zo2adapters.models.checkpoint import end_token_ids
from zo2adapters.models.conversion import quantize
from zo2adapters.models.footprint import cache_bytes
from zo2adapters.models.library_names import cache_argument
from zo2adapters.tasks import generation
from zo2adapters.tasks.generation import (
    STREAM,
    Generation,
    GenerationPlan,
    NextToken,
    Sampling,
    generate,
    plan_generation,
)
from zo2adapters.tasks.rewards import RewardOptions
from zo2adapters.tasks.rows import RowReader
from zo2adapters.tasks.task import RewardTask, TaskOptions
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import (
    Distribution,
    Engine,
    Evaluation,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.errors import BatchError, CheckpointError, OptionError, UnsupportedModelError
from zo2core.sweep.activations import storage_bytes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


def columns(steps: Iterable[tuple[int | None, ...]]) -> list[list[int]]:
    return [[token for token in tokens if token is not None] for tokens in zip(*steps, strict=True)]


def stock_tokens(
    base: Path, prompts: list[list[int]], new: int, eos: int | None = None
) -> list[list[int]]:
    return continuations(
        AutoModelForCausalLM.from_pretrained(base, dtype="auto"), prompts, new, eos
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("sliding", [False, True])
def test_greedy_tokens_are_hugging_faces(model_type: str, sliding: bool, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    changes = (
        window if sliding and model_type == "qwen2" else {"num_hidden_layers": 3} if sliding else {}
    )
    base = save_model(tmp_path / "base", small_config(model_type, **changes))
    model = open_checkpoint(base)
    expected = stock_tokens(base, PROMPTS, 6)
    assert len({tuple(tokens) for tokens in expected}) > 1
    with Engine(model) as engine:
        assert columns(generate(engine, model, PROMPTS, max_new_tokens=6)) == expected
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert columns(generate(engine, model, [prompt], max_new_tokens=6)) == [tokens]


def test_a_continuation_ends_with_eos_while_others_go_on_and_sweeps_run_the_newest_token(
    base: Path, tmp_path: Path
) -> None:
    model, widths = open_checkpoint(base), list[int]()
    eos = stock_tokens(base, PROMPTS[:1], 6)[0][2]
    expected = stock_tokens(base, PROMPTS, 6, eos)
    ids = torch.tensor([PROMPTS[1]])
    with Engine(model, ZerothOrder(MeZOSGD(lr=0.5, zo_eps=1e-3))) as engine:
        steps = list(generate(engine, model, PROMPTS, max_new_tokens=6, eos_token_ids=[eos]))
        alone = list(generate(engine, model, PROMPTS[:1], max_new_tokens=6, eos_token_ids=[eos]))
        hook = model._layers[0].register_forward_hook(
            lambda _, inputs, out: widths.append(inputs[0].shape[1])
        )
        before = columns(generate(engine, model, PROMPTS, max_new_tokens=4))
        hook.remove()
        engine.step({"input_ids": ids, "labels": ids}, seed=1)
        after = columns(generate(engine, model, PROMPTS, max_new_tokens=4))
        engine.export(tmp_path / "out")
        assert engine.version == 1
    assert columns(steps) == expected
    assert len(expected[0]) == len(alone) == 3
    assert widths == [6, 1, 1, 1]
    assert before != after == stock_tokens(tmp_path / "out", PROMPTS, 4), (
        "of the present weights, which stay as they are"
    )


def test_draws_depend_on_their_seed_and_on_no_global_generator(base: Path) -> None:
    model = open_checkpoint(base)
    state = torch.random.get_rng_state()
    with Engine(model) as engine:

        def drawn(**options: float) -> list[list[int]]:
            sampling = Sampling(**options)  # type: ignore[arg-type]
            return columns(generate(engine, model, PROMPTS, max_new_tokens=5, sampling=sampling))

        assert drawn(seed=0) == drawn(seed=0) != drawn(seed=1)
        greedy = columns(generate(engine, model, PROMPTS, max_new_tokens=5))
        assert drawn(temperature=1e-4) == drawn(top_p=1e-6) == greedy != drawn(seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)


class _Declares(nn.Module):
    """Names the cache as no release of transformers does."""

    def forward(self, ids: torch.Tensor, kept: DynamicCache | None = None, cache: int = 0) -> None:
        """Unused."""


class _LeavesItToItsPart(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(
        self, ids: torch.Tensor, cache: int = 0, kept: tuple[int, ...] | None = None
    ) -> None:
        """Unused."""


def test_the_argument_of_the_cache_is_known_by_its_type() -> None:
    declaring, without = _Declares(), nn.Linear(1, 1)
    assert cache_argument(declaring) == cache_argument(_LeavesItToItsPart(declaring)) == "kept"
    assert cache_argument(without) is cache_argument(_LeavesItToItsPart(without)) is None


def test_the_cache_takes_what_is_counted(tmp_path: Path) -> None:
    for model_type in CONFIGS:
        model = open_checkpoint(save_model(tmp_path / model_type, small_config(model_type)))
        forward = NextToken(model)
        batch = {"input_ids": torch.tensor([[1, 2, 3]] * 2), STREAM: torch.tensor([5, 5])}
        with Engine(model) as engine:
            list(engine.forwards([batch], forward))
        cache: Any = forward.caches[5,]
        held = storage_bytes([[layer.keys, layer.values] for layer in cache.layers])
        assert cache_bytes(model.config, 2, 3) == held


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    wrong: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ]
    for changes in wrong:
        with pytest.raises(OptionError, match=next(iter(changes))):
            Sampling(**changes)  # type: ignore[arg-type]
    for model_type in ("openai-gpt", "mamba"):
        small = families.small_model(families.small_config(model_type))
        small.save_pretrained(tmp_path / model_type)
        model = open_checkpoint(tmp_path / model_type)
        found = f"without a cache of keys and values, in transformers {transformers.__version__}"
        with Engine(model) as replayer, pytest.raises(UnsupportedModelError, match=found):
            list(generate(replayer, model, [[3, 4]], max_new_tokens=2))
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    with Engine(model) as engine:
        bad: list[list[list[int]]] = [[], [[]], [[1], []], [[40]], [[-1]]]
        for prompts in bad:
            with pytest.raises(BatchError, match="prompts"):
                next(generate(engine, model, prompts, max_new_tokens=2))
        with pytest.raises(
            BatchError, match=r"prompts\[1\]: found 12 tokens; expected at most 11, one less"
        ):
            next(generate(engine, model, [[3], [3] * 12], max_new_tokens=1))
        for new in (0, -1, 7):
            with pytest.raises(OptionError, match="max_new_tokens"):
                next(generate(engine, model, PROMPTS, max_new_tokens=new))


def test_the_command_prints_prompts_with_their_continuations(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)

    def printed(*prompts: str, more: tuple[object, ...] = ()) -> str:
        return done(
            "generate", "--model", base, "--prompt", *prompts, "--max-new-tokens", "4", *more
        ).out

    prompts = ["the cat", "the dog ran is"]
    greedy = printed(*prompts).splitlines()
    assert all(line.startswith(prompt) for line, prompt in zip(greedy, prompts, strict=True))
    for prompt, line in zip(([3, 4], [3, 5, 7, 8]), greedy, strict=True):
        [tokens] = stock_tokens(base, [prompt], 4, 1)
        assert [WORDS.index(word) for word in line.split()][len(prompt) :] == [
            token for token in tokens if token > 1
        ]
    assert printed(r"the\ncat").startswith("the\ncat"), "as in --prompt-template"
    assert printed(*prompts, more=("--temperature", "5")).splitlines() != greedy


def test_every_command_stops_at_the_ends_of_the_generation_config(tmp_path: Path) -> None:
    options = small_run(tmp_path, samples=1)
    base, tokenizer = Path(options.model), load_tokenizer(Path(options.model))
    for first in (f"the {word} {other}" for word in WORDS[3:] for other in WORDS[3:]):
        prompt = list(tokenizer(first)["input_ids"])
        [[start, end, *_]] = stock_tokens(base, [prompt], 6)
        if min(start, end) > 2 and start != end:
            break
    expected = [start, end]
    options.data.write_text(4 * (json.dumps({"prompt": first, "completion": " yes"}) + "\n"))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    model = open_checkpoint(base)
    assert end_token_ids(model, tokenizer) == sorted([1, end])
    written = run_here(
        "generate", "--model", base, "--prompt", first, "--max-new-tokens", 6
    ).out.split()
    assert written == [WORDS[token] for token in [*prompt, *expected]]
    finish(options)
    sample = json.loads((options.output / "samples.jsonl").read_text().splitlines()[0])
    assert sample["generated"].split() == [WORDS[token] for token in expected]
    rows = RowReader(tokenizer, 32, keeps_sources=True).read(options.data)
    rewards = RewardOptions(reward=("length",), max_new_tokens=6)
    task = RewardTask(
        model,
        rows,
        TaskOptions(objective="reward", pad=0, batch_size=1, rewards=rewards, tokenizer=tokenizer),
    )
    with contextlib.closing(task), Engine(model) as engine:
        assert [
            list(tokens) for _, tokens in task._continued(engine, rows.rows[:1], [None], None)[0]
        ] == [expected]
        assert task.provenance["generation"]["further end tokens"] == [end]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[1]]}']
)
def test_a_damaged_generation_config_is_refused_by_name(content: str, tmp_path: Path) -> None:
    base = Path(small_run(tmp_path).model)
    (base / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        end_token_ids(open_checkpoint(base), load_tokenizer(base))


# For a population: all rows of all evaluations in one batch, token for token what each generates
# alone


MANY = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [30, 2], [7, 7]]
EPS = 0.1


def low_rank(
    base: Path, *, q: int = 2, stack: int | None = None, **options: Any
) -> tuple[Any, Engine]:
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
            parameter.data = weights[name] + at.shift * EPS * loop.draw(
                name, at.seed, parameter.numel()
            )
        else:
            left, right = (
                loop.draw(name, at.seed, len(parameter), loop.rank),
                loop.shared(name, len(loop.ends) // 2),
            )
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
    loop = StackedLoop(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        2,
        2,
        Distribution.RADEMACHER,
    )
    vocabulary, longest = model.config.vocab_size, min(model.longest_row or 12, 12)
    token = st.integers(0, vocabulary - 1)
    prompts = data.draw(
        st.lists(st.lists(token, min_size=1, max_size=longest - 5), min_size=1, max_size=4)
    )
    eos = data.draw(st.none() | token)
    with engine:
        for _ in range(data.draw(st.integers(0, 1))):  # a learned change beside the perturbations
            engine.ask()
            taken = engine.tell([0.3, -0.2, 0.1, 0.0])
            loop.updates += [
                (seed, grad, 0.25)
                for seed, grad in zip(taken.seeds, taken.projected_grads, strict=True)
            ]
            loop.ends.append(len(loop.updates))
        evaluations = engine.ask()
        made = Generation(
            engine,
            model,
            max_new_tokens=5,
            evaluations=evaluations,
            eos_token_ids=() if eos is None else [eos],
        ).continuations(prompts)
    for at, tokens in zip(evaluations, made, strict=True):
        assert tokens == continuations(with_perturbed_weights(base, loop, at), prompts, 5, eos)


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=2.0, top_p=0.9, seed=5)])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_direction_alone_generates_the_same(
    sampling: Sampling | None, is_quantised: bool, tmp_path: Path
) -> None:
    config = small_config(
        "llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128
    )
    base = save_model(tmp_path / "base", config)
    if is_quantised:
        quantize(base, tmp_path / "nf4", "nf4")
    model, engine = low_rank(tmp_path / "nf4" if is_quantised else base)
    given: dict[str, Any] = {"max_new_tokens": 6, "sampling": sampling, "eos_token_ids": [2]}
    with engine:
        evaluations = engine.ask()
        together = Generation(engine, model, evaluations=evaluations, **given).continuations(MANY)
        alone = [
            Generation(engine, model, evaluations=[at], **given).continuations(MANY)[0]
            for at in evaluations
        ]
        assert together == alone
        assert len({str(tokens) for tokens in together}) > 1
        for row, prompt in enumerate(MANY if sampling is None else []):
            one = Generation(engine, model, evaluations=evaluations, **given).continuations(
                [prompt]
            )
            assert [tokens[0] for tokens in one] == [tokens[row] for tokens in together]
        unperturbed = Generation(
            engine, model, evaluations=[None, *evaluations], **given
        ).continuations(MANY)
        columns = zip(*generate(engine, model, MANY, **given), strict=True)
        assert unperturbed == [
            [[token for token in row if token is not None] for row in columns],
            *together,
        ]


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)])
def test_a_row_that_ended_leaves_its_place_to_the_next(
    sampling: Sampling | None, tmp_path: Path
) -> None:
    model, engine = low_rank(save_model(tmp_path / "base", small_config("qwen3")))
    prompts = [[token, token + 1] for token in range(3, 12)]
    with engine:
        evaluations = engine.ask()
        given: dict[str, Any] = {
            "max_new_tokens": 8,
            "sampling": sampling,
            "evaluations": evaluations,
        }
        freely = Generation(engine, model, **given).continuations(prompts)
        # of four of nine rows at all evaluations
        ends = {tokens[row][row // 2] for tokens in freely for row in range(4)}
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
    assert {len(tokens) for of in expected for tokens in of} > {8}, (
        "some rows end early, and some do not"
    )
    assert max(batches_of_all) == len(prompts) * len(evaluations) > min(batches_of_all), (
        "ended rows leave the batch"
    )
    assert max(batches_of_few) <= 2 * len(evaluations)
    assert len(made) < 3 * 8, "places are taken before all of a group have ended"


def test_dense_directions_generate_in_one_sweep_a_token(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    for in_place in (True, False):
        with Engine(
            model, ZerothOrder(MeZOSGD(lr=0.1, zo_eps=0.1, perturb_in_place=in_place))
        ) as engine:
            evaluations = engine.ask(seed=4)
            alone = []
            for at in evaluations:
                columns = zip(*generate(engine, model, MANY, max_new_tokens=4, at=at), strict=True)
                alone.append([list(tokens) for tokens in columns])
            visits: list[int] = []
            engine.watch(lambda visited, _, visits=visits: visits.append(visited))  # type: ignore[misc]
            together = Generation(
                engine, model, max_new_tokens=4, evaluations=evaluations
            ).continuations(MANY)
        assert together == alone
        assert alone[0] != alone[1]
        assert len(visits) == 4 * len(model.layouts)


def test_the_plan_fills_the_memory_that_is_allowed() -> None:
    config = small_config("llama")
    planned = partial(
        plan_generation, config, evaluations=4, rows=10, prompt_tokens=8, new_tokens=4
    )
    free = planned(allowed=None)
    assert free[:2] == (10, 10)
    earlier = free
    for allowed in range(free.nbytes, 0, -997):
        plan = planned(allowed=allowed)
        assert plan.nbytes <= allowed or plan[:2] == (1, 1)
        assert plan.starting <= plan.places <= earlier.places
        earlier = plan
    assert earlier[:2] == (1, 1)


def test_evaluations_of_no_open_step_are_refused(base: Path) -> None:
    model, engine = low_rank(base)
    with engine:
        known = engine.ask()[0]
        with pytest.raises(OptionError, match="an evaluation that ask"):
            Generation(
                engine, model, max_new_tokens=1, evaluations=[known, Evaluation(5, 1.0)]
            ).continuations(MANY)
    with (
        Engine(open_checkpoint(base)) as replayer,
        pytest.raises(OptionError, match="without zeroth-order steps"),
    ):
        Generation(replayer, model, max_new_tokens=1, evaluations=[known]).continuations(MANY)


def test_a_rows_numbers_depend_on_seed_row_and_position_alone() -> None:
    numbers = {
        Sampling(seed=seed).number(row, position)
        for seed in (0, 1)
        for row in range(3)
        for position in range(3)
    }
    assert len(numbers) == 18
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = Sampling(temperature=0.7).tokens(logits, draws)
    sums = (logits / 0.7).softmax(dim=-1).cumsum(dim=-1)
    assert tokens.tolist() == [
        int((row <= draw).sum()) for row, draw in zip(sums, draws, strict=True)
    ]
    assert Sampling(top_p=1e-6).tokens(logits, draws).equal(logits.argmax(dim=-1))
