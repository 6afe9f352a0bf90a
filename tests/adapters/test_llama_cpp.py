"""What is exported as GGUF, run by llama.cpp itself: the text and the probabilities of transformers.

With --long, where llama-cpp-python is installed.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import export, save_directory, save_gguf
from models import make_batch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.export import export_gguf
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Engine, FirstOrder, LowRankPerturbation, MeZOSGD, ZerothOrder

TEXT = "the cat is that cat<|endoftext|> 12"
F32 = 0  # ggml's number, for keys and values in float32
K_TYPES = {"token_embd": "Q6_K", "attn_q": "Q3_K", "attn_k": "Q2_K", "ffn_down": "Q5_K", "": "Q4_K"}
LARGER: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture(autouse=True)
def _only_long(pytestconfig: pytest.Config) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if not pytestconfig.getoption("--long"):
        pytest.skip("with --long")


def opened(path: Path, adapter: Path | None = None) -> Any:
    llama_cpp: Any = importlib.import_module("llama_cpp")
    return llama_cpp.Llama(
        str(path),
        lora_path=None if adapter is None else str(adapter),
        n_ctx=64,
        n_threads=1,
        logits_all=True,
        verbose=False,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
    )


def log_probabilities(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """llama.cpp's, (tokens, vocabulary)."""
    model.reset()
    model.eval(ids)
    return torch.log_softmax(torch.tensor(model.scores[: len(ids)]), dim=-1)


def transformers_log_probabilities(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], dim=-1)


def greedy(step: Any, ids: Sequence[int], count: int) -> list[int]:
    grown = list(ids)
    for _ in range(count):
        grown.append(int(step(grown)[-1].argmax()))
    return grown


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_an_exported_directory_gives_the_text_of_transformers(architecture: str, tmp_path: Path) -> None:
    base = save_directory(tmp_path / "base", architecture)
    theirs, ids = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(base)(TEXT).input_ids
    model = opened(export(base, tmp_path / "out", kind="F32"))
    assert model.tokenize(TEXT.encode(), add_bos=False, special=True) == ids
    expected = transformers_log_probabilities(theirs, ids)
    torch.testing.assert_close(log_probabilities(model, ids), expected, atol=1e-3, rtol=0)
    by_transformers = greedy(lambda grown: transformers_log_probabilities(theirs, grown), ids, 20)
    assert greedy(lambda grown: log_probabilities(model, grown), ids, 20) == by_transformers


def test_a_trained_gguf_base_gives_the_text_of_transformers(tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", "llama", K_TYPES, **LARGER)
    model = open_checkpoint(base)
    batch = make_batch(model.config.vocab_size, [9, 9])
    estimator = MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False)
    with Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2))) as engine:
        engine.step(batch, seed=0)
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer, kind="F32")
        engine.export(tmp_path / "directory")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "directory")
    ids = load_tokenizer(base)(TEXT).input_ids
    ours = opened(tmp_path / "out" / "model.gguf")
    torch.testing.assert_close(log_probabilities(ours, ids), transformers_log_probabilities(theirs, ids), atol=1e-3, rtol=0)
    by_transformers = greedy(lambda grown: transformers_log_probabilities(theirs, grown), ids, 20)
    assert greedy(lambda grown: log_probabilities(ours, grown), ids, 20) == by_transformers


def test_an_adapter_has_the_effect_that_it_has_in_peft(tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", "llama", "F32")
    config = LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], alpha_pattern={"v_proj": 3}
    )
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    batch = make_batch(model.config.vocab_size, [9, 9])
    with Engine(model, FirstOrder(lambda parameters: torch.optim.AdamW(parameters, lr=3e-2))) as engine:
        for _ in range(10):
            engine.step(batch)
        engine.export(tmp_path / "peft")
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer, as_adapter=True)
        export_gguf(engine, model, tmp_path / "merged", base=base, tokenizer=load_tokenizer)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=base.name, dtype=torch.float32)
    ids = batch["input_ids"][0].tolist()
    before = transformers_log_probabilities(whole, ids)
    after = transformers_log_probabilities(PeftModel.from_pretrained(whole, str(tmp_path / "peft")), ids)
    ours_before = log_probabilities(opened(base), ids)
    ours_after = log_probabilities(opened(base, tmp_path / "out" / "adapter.gguf"), ids)
    assert (after - before).abs().max() > 0.5
    torch.testing.assert_close(ours_after - ours_before, after - before, atol=1e-3, rtol=0)
    merged = log_probabilities(opened(tmp_path / "merged" / "model.gguf"), ids)
    torch.testing.assert_close(merged, after, atol=1e-3, rtol=0)
