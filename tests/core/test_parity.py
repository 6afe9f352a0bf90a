"""Every adapter's trajectory is the monolithic loop's, bit for bit."""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, DTYPES, batches, make_batch, save_model, small_config
from parity import (
    Plan,
    Storage,
    assert_parity,
    assert_same_bits,
    assert_same_parameters,
    fzoo_plans,
    plans,
    storages,
)
from profiles import examples
from toy import ToyBlockModel, make_toy
from transformers import AutoModelForCausalLM, PreTrainedModel

import zo2core.estimators.noise
import zo2core.sweep.perturbers
from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2core import Distribution, Engine, MeZOSGD, ZerothOrder
from zo2core.kernels import parallel
from zo2core.sources.slot_file import Scratch

# elements: all segments, some, none
THREADS_FROM = st.sampled_from([0, 200, zo2core.sweep.perturbers.PARALLEL_FROM])


@pytest.fixture(autouse=True, scope="module")
def busy_disk() -> Iterator[None]:
    """Some writes take a while: several wait for their turn, and reading goes on meanwhile."""
    rng, write = random.Random(0), Scratch.write

    def slow(self: Scratch, segment: int, data: torch.Tensor, version: int) -> None:
        time.sleep(rng.choice([0.0, 0.0, 0.0, 0.002]))
        write(self, segment, data, version)

    with patch.object(Scratch, "write", slow):
        yield


def load_whole(directory: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["exact", "mixed", "fzoo"])
@pytest.mark.parametrize("model_type", CONFIGS)
@examples(short=5, long=100)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), storage=storages, threads_from=THREADS_FROM)
def test_trajectory_is_the_monolithic_loops(
    model_type: str,
    kind: str,
    data: st.DataObject,
    dtype: torch.dtype,
    storage: Storage,
    threads_from: int,
) -> None:
    config = data.draw(CONFIGS[model_type])
    batch, plan = (
        data.draw(batches(config.vocab_size)),
        data.draw(fzoo_plans() if kind == "fzoo" else plans()),
    )
    autocast = (
        data.draw(st.sampled_from([torch.bfloat16, torch.float16])) if kind == "mixed" else None
    )
    options: Any = (
        {} if autocast is None else {"precision": "mixed", "dtype": autocast, "loss_chunk": None}
    )
    plan = plan._replace(autocast=autocast)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(zo2core.sweep.perturbers, "PARALLEL_FROM", threads_from),
        patch.object(parallel, "thread_count", lambda: 2),
    ):
        base = save_model(
            Path(folder, "base"),
            config,
            dtype,
            max_shard_size=data.draw(st.sampled_from(["5GB", "2KB"])),
        )
        whole, run = (
            load_whole(base, "auto" if autocast is None else torch.float32),
            Path(folder, "run"),
        )

        def make() -> Engine:
            return storage.engine(open_checkpoint(base, **options), plan, run)

        with assert_parity(make, whole, plan, batch) as engine:
            if kind == "mixed":
                return
            exported = Path(folder, "exported")
            engine.export(exported)
            loss = engine.evaluate([batch]).losses[0]
        reloaded = load_whole(exported)
        for (name, ours), theirs in zip(
            reloaded.named_parameters(), whole.parameters(), strict=True
        ):
            assert_same_bits(name, ours.data, theirs.data)
        if dtype is torch.float32 and loss == loss:
            with torch.inference_mode():
                assert reloaded(**batch).loss.item() == loss


def test_fzoo_resumed_after_every_step_is_its_papers_loop(base: Path, tmp_path: Path) -> None:
    noise = Distribution.RADEMACHER
    plan = Plan(1e-3, 1e-3, 0.1, False, list(range(9)), ["reopen"] * 9, 2, noise, "fzoo")
    storage = Storage(buckets=2, write_back_every=3, keep_noise=False)
    whole = load_whole(base)
    batch = make_batch(40, [12, 7])
    assert_parity(
        lambda: storage.engine(open_checkpoint(base), plan, tmp_path / "run"), whole, plan, batch
    ).close()


@given(
    # of the vocabulary, a layer, all layers
    sizes=st.tuples(st.integers(5, 40), st.integers(1, 9), st.integers(1, 3)),
    options=st.fixed_dictionaries(
        {"tied": st.booleans(), "dtype": st.sampled_from([*DTYPES, torch.float64])}
    ),
    plan=plans(),
    storage=storages,
    lengths=st.lists(st.integers(2, 6), min_size=1, max_size=3),
    threads_from=THREADS_FROM,
)
def test_toy_of_plain_modules_has_parity(
    sizes: tuple[int, int, int],
    options: Any,
    plan: Plan,
    storage: Storage,
    lengths: list[int],
    threads_from: int,
) -> None:
    batch = make_batch(sizes[0], lengths)
    del batch["attention_mask"]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(zo2core.sweep.perturbers, "PARALLEL_FROM", threads_from),
        patch.object(parallel, "thread_count", lambda: 2),
    ):
        file, run = Path(folder, "toy.safetensors"), Path(folder, "run")
        whole = make_toy(*sizes, **options)

        def make() -> Engine:
            return storage.engine(ToyBlockModel(*sizes, **options, file=file), plan, run)

        assert_parity(make, whole, plan, batch).close()


def test_parameters_larger_than_a_chunk_of_noise_keep_parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Embedding: 32768 + 8 elements, two whole chunks and a rest shorter than 16, which has to join
    # the last.
    monkeypatch.setattr(zo2core.estimators.noise, "CHUNK", 16384)
    config = small_config(
        "opt", vocab_size=8194, hidden_size=4, word_embed_proj_dim=4, num_attention_heads=1
    )
    base = save_model(tmp_path / "base", config)
    batch = make_batch(8194, [5])
    plan = Plan(1e-2, 1e-3, 0.1, True, [0, 0, 1, 2], ["nothing", "nothing", "flush", "nothing"], 2)
    assert_parity(
        lambda: Engine(open_checkpoint(base), ZerothOrder(plan.estimator())),
        load_whole(base),
        plan,
        batch,
    ).close()


def test_converted_dtype_is_what_from_pretrained_gives(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    with Engine(
        open_checkpoint(base, dtype="bfloat16"), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))
    ) as engine:
        assert_same_parameters(engine, whole)


def test_monolithic_mezo_draws_what_the_global_generator_gives(tmp_path: Path) -> None:
    """MeZO's authors reseed the process's generator; the reference's own generator gives the same
    numbers.
    """
    whole = load_whole(save_model(tmp_path / "base", small_config("opt")))
    mono = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = [
            torch.normal(mean=0, std=1, size=p.size(), dtype=p.dtype) for p in whole.parameters()
        ]
    for ours, theirs in zip(mono._noise(5), expected, strict=True):
        assert_same_bits("z", ours, theirs)
    module = sys.modules[MonolithicMeZO.__module__]
    assert "zo2core" not in Path(str(module.__file__)).read_text(), (
        "it shares no code with the engine"
    )
