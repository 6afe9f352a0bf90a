"""Generation: token for token what Hugging Face generates from the whole model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from command_lines import run_here
from models import CONFIGS, WORDS, save_model, save_tokenizer, small_config
from runs import finish, small_run
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.footprint import cache_bytes
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.tasks.generation import STREAM, NextToken, Sampling, generate
from zo2adapters.tasks.rewards import RewardOptions
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.task import RewardTask, TaskOptions
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Engine, MeZOSGD, ZerothOrder
from zo2core.errors import BatchError, CheckpointError, OptionError, UnsupportedModelError
from zo2core.sweep.activations import storage_bytes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


def columns(steps: Iterable[tuple[int | None, ...]]) -> list[list[int]]:
    """Each prompt's continuation."""
    return [[token for token in tokens if token is not None] for tokens in zip(*steps, strict=True)]


def by_hugging_face(base: Path, prompt: list[int], new: int, eos: int | None) -> list[int]:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    ids = torch.tensor([prompt])
    found = whole.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return [int(token) for token in found[0, len(prompt) :]]


@pytest.mark.few(4)
@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("sliding", [False, True])
def test_greedy_tokens_are_hugging_faces(model_type: str, sliding: bool, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    changes = window if sliding and model_type == "qwen2" else {"num_hidden_layers": 3} if sliding else {}
    base = save_model(tmp_path / "base", small_config(model_type, **changes))
    model = open_checkpoint(base)
    expected = [by_hugging_face(base, prompt, 6, None) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    with Engine(model) as engine:
        assert columns(generate(engine, model, PROMPTS, max_new_tokens=6)) == expected
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert columns(generate(engine, model, [prompt], max_new_tokens=6)) == [tokens]


def test_a_forward_without_a_cache_is_refused_by_name(tmp_path: Path) -> None:
    families.small_model(families.small_config("openai-gpt")).save_pretrained(tmp_path)
    model = open_checkpoint(tmp_path)
    with Engine(model) as replayer, pytest.raises(UnsupportedModelError, match="past_key_values"):
        list(generate(replayer, model, [[3, 4]], max_new_tokens=2))


def test_a_continuation_ends_with_eos_while_others_go_on(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    model = open_checkpoint(base)
    eos = by_hugging_face(base, PROMPTS[0], 6, None)[2]
    expected = [by_hugging_face(base, prompt, 6, eos) for prompt in PROMPTS]
    with Engine(model) as engine:
        steps = list(generate(engine, model, PROMPTS, max_new_tokens=6, eos_token_ids=[eos]))
        alone = list(generate(engine, model, PROMPTS[:1], max_new_tokens=6, eos_token_ids=[eos]))
    assert columns(steps) == expected
    assert len(expected[0]) == len(alone) == 3


def test_each_token_is_one_sweep_that_runs_the_newest_token_only(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("qwen3")))
    widths: list[int] = []
    model._layers[0].register_forward_hook(lambda _, inputs, out: widths.append(inputs[0].shape[1]))
    with Engine(model) as engine:
        list(generate(engine, model, PROMPTS, max_new_tokens=4))
    assert widths == [6, 1, 1, 1]


def test_generation_is_of_the_present_weights_and_changes_none(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("opt"))
    model = open_checkpoint(base)
    ids = torch.tensor([PROMPTS[1]])
    with Engine(model, ZerothOrder(MeZOSGD(lr=0.5, zo_eps=1e-3))) as engine:
        before = columns(generate(engine, model, PROMPTS, max_new_tokens=5))
        engine.step({"input_ids": ids, "labels": ids}, seed=1)
        after = columns(generate(engine, model, PROMPTS, max_new_tokens=5))
        engine.export(tmp_path / "out")
        assert engine.version == 1
    assert before != after == [by_hugging_face(tmp_path / "out", prompt, 5, None) for prompt in PROMPTS]


def test_draws_depend_on_their_seed_and_on_no_global_generator(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("llama")))
    state = torch.random.get_rng_state()
    with Engine(model) as engine:

        def drawn(**options: float) -> list[list[int]]:
            return columns(generate(engine, model, PROMPTS, max_new_tokens=5, sampling=Sampling(**options)))  # type: ignore[arg-type]

        assert drawn(seed=0) == drawn(seed=0) != drawn(seed=1)
        greedy = columns(generate(engine, model, PROMPTS, max_new_tokens=5))
        assert drawn(temperature=1e-4) == drawn(top_p=1e-6) == greedy != drawn(seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)


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


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_samplings_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(changes))):
        Sampling(**changes)  # type: ignore[arg-type]


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    with Engine(model) as engine:
        bad: list[list[list[int]]] = [[], [[]], [[1], []], [[40]], [[-1]]]
        for prompts in bad:
            with pytest.raises(BatchError, match="prompts"):
                next(generate(engine, model, prompts, max_new_tokens=2))
        with pytest.raises(BatchError, match=r"prompts\[1\]: found 12 tokens; expected at most 11, one less"):
            next(generate(engine, model, [[3], [3] * 12], max_new_tokens=1))
        for new in (0, -1, 7):
            with pytest.raises(OptionError, match="max_new_tokens"):
                next(generate(engine, model, PROMPTS, max_new_tokens=new))


def test_the_command_prints_prompts_with_their_continuations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)
    prompts = ["the cat", "the dog ran is"]
    main(["generate", "--model", str(base), "--prompt", *prompts, "--max-new-tokens", "4"])
    greedy = capsys.readouterr().out.splitlines()
    assert all(line.startswith(prompt) for line, prompt in zip(greedy, prompts, strict=True))
    for prompt, line in zip(([3, 4], [3, 5, 7, 8]), greedy, strict=True):
        tokens = by_hugging_face(base, prompt, 4, 1)
        assert [WORDS.index(word) for word in line.split()][len(prompt) :] == [token for token in tokens if token > 1]
    main(["generate", "--model", str(base), "--prompt", r"the\ncat", "--max-new-tokens", "4"])
    assert capsys.readouterr().out.startswith("the\ncat"), "as in --prompt-template"
    main(["generate", "--model", str(base), "--prompt", *prompts, "--max-new-tokens", "4", "--temperature", "5"])
    assert capsys.readouterr().out.splitlines() != greedy


def test_every_command_stops_at_the_ends_of_the_generation_config(tmp_path: Path) -> None:
    options = small_run(tmp_path, samples=1)
    base, tokenizer = Path(options.model), load_tokenizer(Path(options.model))
    for first in (f"the {word} {other}" for word in WORDS[3:] for other in WORDS[3:]):
        prompt = list(tokenizer(first)["input_ids"])
        start, end, *_ = by_hugging_face(base, prompt, 6, None)
        if min(start, end) > 2 and start != end:
            break
    expected = [start, end]
    options.data.write_text(4 * (json.dumps({"prompt": first, "completion": " yes"}) + "\n"))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    model = open_checkpoint(base)
    assert end_token_ids(model, tokenizer) == sorted([1, end])
    written = run_here("generate", "--model", base, "--prompt", first, "--max-new-tokens", 6).out.split()
    assert written == [WORDS[token] for token in [*prompt, *expected]]
    finish(options)
    sample = json.loads((options.output / "samples.jsonl").read_text().splitlines()[0])
    assert sample["generated"].split() == [WORDS[token] for token in expected]
    rows = RowReader(tokenizer, 32, keeps_sources=True).read(options.data)
    rewards = RewardOptions(reward=("length",), max_new_tokens=6)
    task = RewardTask(
        model, rows, TaskOptions(objective="reward", pad=0, batch_size=1, rewards=rewards, tokenizer=tokenizer)
    )
    with contextlib.closing(task), Engine(model) as engine:
        assert [list(made.tokens) for made in task._continued(engine, rows.rows[:1], [None], None)[0]] == [expected]
        assert task.provenance["generation"]["further end tokens"] == [end]


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[1]]}'])
def test_a_damaged_generation_config_is_refused_by_name(content: str, tmp_path: Path) -> None:
    base = Path(small_run(tmp_path).model)
    (base / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        end_token_ids(open_checkpoint(base), load_tokenizer(base))
