"""Models in GGUF files: the bits of transformers' own reading of them, for any architecture, type, source and method."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damages import damaged
from engines import memory
from gguf_files import Tensor, gguf_bytes
from gguf_models import BOS, EOS, MERGES, TOKENS, metadata, save_gguf, tensors, tiny_config
from models import make_batch, random_model
from peft import LoraConfig
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models import gguf_model
from zo2adapters.models.gguf_model import GGUF_ARCHITECTURES, GGUFModel
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Engine, FirstOrder, LowRankPerturbation, MeZOSGD, ZerothOrder, ZO2Error
from zo2core.errors import CheckpointError, UnsupportedModelError

MIXED = {
    "token_embd": "Q8_0",
    "attn_q": "Q5_1",
    "attn_k": "F16",
    "attn_v": "Q4_1",
    "ffn_down": "Q5_0",
    "output.": "BF16",
    "": "Q4_0",
}
K_TYPES = {"token_embd": "Q6_K", "attn_q": "Q3_K", "attn_k": "Q2_K", "attn_v": "Q6_K", "ffn_down": "Q5_K", "": "Q4_K"}
UNEVEN = {"token_embd": "Q6_K", "attn_q": "IQ4_NL", "attn_k": "TQ2_0", "attn_v": "MXFP4", "ffn_down": "TQ1_0", "": "IQ4_XS"}
GRIDS = {
    "token_embd": "Q6_K",
    "attn_q": "IQ1_S",
    "attn_k": "IQ2_XXS",
    "attn_v": "IQ2_S",
    "ffn_down": "IQ3_S",
    "ffn_up": "IQ2_XS",
    "": "IQ3_XXS",
}
LARGER: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}


def whole(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers reads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    model.train(mode=False)
    return model


def assert_equal_to_whole(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    model = open_checkpoint(path, dtype=dtype, loss_chunk=None)
    batch = make_batch(model.config.vocab_size, [7, 5])
    theirs = whole(path, dtype)
    with torch.inference_mode():
        expected = theirs(**batch, use_cache=False).loss.item()
    with Engine(model, **options) as engine:
        assert engine.evaluate([batch]).losses[0] == expected
        state = theirs.state_dict()
        for name, value in engine.parameters_now():
            assert value.equal(state[name]), name


@pytest.mark.few(4)
@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_architecture_has_the_bits_of_transformers(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_equal_to_whole(save_gguf(tmp_path / "model.gguf", architecture, MIXED), dtype)


@pytest.mark.parametrize("kinds", ["F32", "F16", "BF16", "Q8_0", MIXED], ids=str)
def test_every_type_has_the_bits_of_transformers(kinds: str | Mapping[str, str], tmp_path: Path) -> None:
    assert_equal_to_whole(save_gguf(tmp_path / "model.gguf", "llama", kinds))


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
@pytest.mark.parametrize("kinds", [K_TYPES, UNEVEN, GRIDS], ids=["K", "uneven", "grids"])
def test_blocks_of_256_have_the_bits_of_transformers(kinds: Any, architecture: str, tmp_path: Path) -> None:
    assert_equal_to_whole(save_gguf(tmp_path / "model.gguf", architecture, kinds, **LARGER))


def test_a_tied_table_in_codes_is_embedding_and_head(tmp_path: Path) -> None:
    assert_equal_to_whole(save_gguf(tmp_path / "model.gguf", "llama", MIXED, tie_word_embeddings=True))


def test_biases_of_rotated_heads_are_put_back(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", "llama", "Q8_0", attention_bias=True)
    with pytest.raises(CheckpointError, match=r"attn_q\.bias"):  # transformers' config cannot say that there are any
        open_checkpoint(path)


def test_blocks_from_disk_have_the_same_bits(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", "llama", MIXED, num_hidden_layers=6)
    assert_equal_to_whole(path, memory=memory(1))


def test_a_device_has_the_same_bits(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", "llama", MIXED, num_hidden_layers=3, tie_word_embeddings=True)
    with contextlib.closing(ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 1e-4, poison=True))) as device:
        policy = memory(kept=0)
        assert_equal_to_whole(path, device=device, memory=policy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kept", [0, 1])
def test_a_gpu_decodes_to_the_bits_of_the_cpu(kept: int, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", "llama", K_TYPES, **LARGER)
    policy = memory(kept=kept)
    trajectories = []
    for base in (path, decoded_twin(path, tmp_path / f"decoded {kept}")):
        model = open_checkpoint(base, dtype=torch.float32)
        batch = make_batch(model.config.vocab_size, [7, 5])
        estimator = MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False)
        with Engine(
            model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2)), device="cuda", memory=policy
        ) as engine:
            trajectories.append([engine.step(batch, seed=step).losses for step in range(3)])
    assert trajectories[0] == trajectories[1]


def test_a_split_model_is_the_whole_one(tmp_path: Path) -> None:
    one = open_checkpoint(save_gguf(tmp_path / "one.gguf", "llama", MIXED))
    several = open_checkpoint(save_gguf(tmp_path / "model.gguf", "llama", MIXED, files=3))
    assert one.config.to_dict() == several.config.to_dict()
    batch = make_batch(one.config.vocab_size, [7])
    with Engine(one) as first, Engine(several) as second:
        assert first.evaluate([batch]).loss == second.evaluate([batch]).loss


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_the_config_is_the_one_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", architecture, "Q8_0")
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    theirs.name_or_path = ""
    assert GGUFModel(path).config.to_dict() == theirs.to_dict()


def test_memory_holds_codes(tmp_path: Path) -> None:
    model = open_checkpoint(save_gguf(tmp_path / "model.gguf", "qwen2", "Q4_0"))
    layout = model.layouts[1]
    matrices = [spec for spec in layout.parameters if len(spec.shape) == 2]
    assert all(spec.nbytes == spec.numel // 32 * 18 for spec in matrices)
    assert layout.nbytes < sum(spec.numel for spec in layout.parameters) * 4 / 5


def decoded_twin(path: Path, directory: Path) -> Path:
    """The same model in the Hugging Face layout, decoded."""
    decoded = whole(path)
    model: Any = random_model(GGUFModel(path).config)
    model.load_state_dict(decoded.state_dict())
    model.save_pretrained(directory)
    return directory


def adapter(*targets: str) -> Adapter:
    names = list(targets) or ["q_proj", "down_proj"]
    return Adapter(config=LoraConfig(r=2, target_modules=names, init_lora_weights=True), seed=4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "targets"), [("llama", ()), ("qwen3moe", ("auto",)), ("qwen3moe", ("auto", "experts"))]
)
def test_gradients_of_an_adapter_are_those_on_the_decoded_model(
    architecture: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    path = save_gguf(tmp_path / "model.gguf", architecture, MIXED, num_hidden_layers=3)
    found = []
    for base in (path, decoded_twin(path, tmp_path / "decoded")):
        model = open_checkpoint(base, dtype=torch.float32, adapter=adapter(*targets))
        batch = make_batch(model.config.vocab_size, [7, 5])

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-2)

        with Engine(model, FirstOrder(optimizer)) as engine:
            losses = [engine.step(batch).loss for _ in range(4)]
            found.append((losses, {name: value.detach().clone() for name, value in engine.parameters.items()}))
    assert found[0][0] == found[1][0]
    assert found[0][0][0] > found[0][0][-1]
    assert all(value.equal(found[1][1][name]) for name, value in found[0][1].items())


@pytest.mark.parametrize(
    ("architecture", "kinds", "perturbation", "changes"),
    [
        ("llama", MIXED, LowRankPerturbation(rank=2, period=2), {"tie_word_embeddings": True}),
        ("llama", "F32", LowRankPerturbation(rank=2, period=2), {"tie_word_embeddings": True}),
        ("qwen2", MIXED, None, {}),
    ],
    ids=["low rank", "low rank on floats", "adapter"],
)
def test_zeroth_order_steps_are_those_on_the_decoded_model(
    architecture: str, kinds: Any, perturbation: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = save_gguf(tmp_path / "model.gguf", architecture, kinds, **changes)
    estimator = MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=perturbation is None)
    losses, weights = [], []
    for base in (path, decoded_twin(path, tmp_path / "decoded")):
        model = open_checkpoint(base, dtype=torch.float32, adapter=adapter() if perturbation is None else None)
        batch = make_batch(model.config.vocab_size, [7, 5])
        with Engine(model, ZerothOrder(estimator, perturbation=perturbation, seed=3)) as engine:
            losses.append([engine.step(batch).losses for _ in range(5)])
            weights.append({name: value.clone() for name, value in engine.parameters_now()})
    assert losses[0] == losses[1]
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
    with contextlib.closing(open_checkpoint(path).weights) as reader:
        assert reader.fingerprint == open_checkpoint(path).weights.fingerprint


def test_floats_in_the_models_order_train_by_dense_directions(tmp_path: Path) -> None:
    model = open_checkpoint(save_gguf(tmp_path / "model.gguf", "qwen2", "F32"), loss_chunk=None)
    twin = open_checkpoint(decoded_twin(tmp_path / "model.gguf", tmp_path / "decoded"), dtype="float32", loss_chunk=None)
    batch, losses = make_batch(model.config.vocab_size, [7, 5]), []
    for opened in (model, twin):
        with Engine(opened, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
            losses.append([engine.step(batch, seed=step).losses for step in range(3)])
            engine.export(tmp_path / f"exported {len(losses)}")
    assert losses[0] == losses[1]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported 1").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "exported 2").state_dict()
    assert all(value.equal(expected[name]) for name, value in exported.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported 1")
    assert tokenizer("the cat").input_ids == load_tokenizer(tmp_path / "model.gguf")("the cat").input_ids


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3"])
def test_the_tokenizer_is_the_one_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", architecture, "Q8_0")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = load_tokenizer(path)
    text = " the cat is<|endoftext|> ünïcode 12\n"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.decode(ours(text).input_ids) == text
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    messages = [{"role": "user", "content": "the cat"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


SPLIT_AS = {
    "gpt-2": "a| 1234|!?|b",
    "smollm": "a| |1|2|3|4|!?|b",
    "default": "a| |123|4|!?|b",
    "llama-bpe": "a| |123|4|!?|b",
    "glm4": "a| |123|4|!?|b",
    "qwen2": "a| |1|2|3|4|!?|b",
}


@pytest.mark.parametrize("name", SPLIT_AS)
def test_text_is_split_as_the_file_names(name: str, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(save_gguf(tmp_path / "model.gguf", further={"tokenizer.ggml.pre": name}))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1234!?b")
    assert "|".join(piece for piece, _ in pieces).replace("Ġ", " ") == SPLIT_AS[name]


@pytest.mark.parametrize("name", ["deepseek-llm", "of-tomorrow", ""])
def test_text_that_is_split_in_an_unknown_way_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", further={"tokenizer.ggml.pre": name})
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer.ggml.pre: found '{name}'"):
        load_tokenizer(path)


def test_whole_tokens_come_before_merges_where_llama_cpp_takes_them(tmp_path: Path) -> None:
    tokens = [*TOKENS[:-3], "Ġwhole", *TOKENS[-2:]]
    found = {}
    for name in ("llama-bpe", "qwen2"):
        further = {"tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": tokens}
        further["tokenizer.ggml.merges"] = [" ".join(pair) for pair in MERGES[:-1]]
        found[name] = load_tokenizer(save_gguf(tmp_path / "model.gguf", further=further))(" whole").input_ids
    assert found["llama-bpe"] == [tokens.index("Ġwhole")]
    assert len(found["qwen2"]) == len(" whole")


def test_special_tokens_in_other_characters_keep_their_ids(tmp_path: Path) -> None:
    further = {"tokenizer.ggml.tokens": [*TOKENS[:-2], "<|begin▁of|>", "<|end▁of|>"], "tokenizer.ggml.add_bos_token": True}
    tokenizer = load_tokenizer(save_gguf(tmp_path / "model.gguf", further=further))
    assert tokenizer("the<|end▁of|>cat").input_ids == [BOS, TOKENS.index("the"), EOS, TOKENS.index("cat")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_scaled_rotary_factors_are_those_of_the_original_model(tmp_path: Path) -> None:
    config = tiny_config("llama")
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
    original = LlamaConfig(**{**config.to_dict(), "rope_parameters": {**rope, "original_max_position_embeddings": 8192}})
    model = random_model(original)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)  # as llama.cpp's converter writes them
    written = [*tensors("llama", model, lambda name: "F32", np.random.default_rng(0))]
    written.append(Tensor("rope_freqs.weight", (8,), "F32", factors.tobytes()))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", config), written))
    model.train(mode=False)
    opened, batch = open_checkpoint(path, loss_chunk=None), make_batch(config.vocab_size, [30])
    with Engine(opened) as engine, torch.inference_mode():
        assert engine.evaluate([batch]).loss == model(**batch, use_cache=False).loss.item()
    written[-1] = Tensor("rope_freqs.weight", (8,), "F32", (factors * np.linspace(1, 2, 8, dtype=np.float32)).tobytes())
    path.write_bytes(gguf_bytes(metadata("llama", config), written))
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("architecture", "further", "message"),
    [
        ("llama", {"general.architecture": "mamba"}, "architecture 'mamba'"),
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope.scaling.type 'yarn'"),
        ("llama", {"llama.expert_count": 8}, "a mixture of experts"),
        ("qwen3moe", {"qwen3moe.expert_weights_norm": False}, "expert_weights_norm False"),
        ("qwen3moe", {"qwen3moe.expert_feed_forward_length": 0}, "expert_feed_forward_length"),
        ("phi3", {"phi3.rope.dimension_count": 12}, "rope.dimension_count 12"),
        ("gemma2", {"gemma2.block_count": 46}, "27 billion"),
        ("llama", {"llama.block_count": 3}, "no tensor"),
        ("llama", {"llama.block_count": 1}, "does not have"),
        ("llama", {"llama.embedding_length": 32}, "shape"),
        ("llama", {"llama.embedding_length": 2**31}, "What to do"),
        ("llama", {"llama.attention.head_count": 0}, "What to do"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": "small"}, "What to do"),
    ],
)
def test_what_transformers_would_pass_over_is_refused(
    architecture: str, further: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_gguf(tmp_path / "model.gguf", architecture, "Q8_0", further=further)
    with pytest.raises(ZO2Error, match=message):
        open_checkpoint(path)


def test_a_run_on_a_file_is_resumed_evaluated_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(save_gguf(tmp_path / "model.gguf", "llama", MIXED))
    data, run = tmp_path / "train.jsonl", str(tmp_path / "run")
    data.write_text('{"text": "the cat is the cat"}\n' * 8)
    main(["train", "--model", path, "--data", str(data), "--output", run, "--steps", "2", "--lr", "1e-4", "--rank", "2"])
    main(["train", "--resume", run, "--steps", "4"])
    main(["evaluate", "--run", run, "--data", str(data)])
    assert "8 rows" in capsys.readouterr().out
    main(["export", "--run", run, "--output", str(tmp_path / "exported")])
    merged = open_checkpoint(tmp_path / "exported")
    assert merged.weights.fingerprint != open_checkpoint(path).weights.fingerprint
    lora = tmp_path / "lora.json"
    lora.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}))
    main(["verify", "--model", path, "--adapter", str(lora), "--method", "adamw"])
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # transformers warns of much that it finds odd
def test_any_damaged_model_is_opened_or_refused(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    whole = save_gguf(tmp_path / "model.gguf", "llama", "Q8_0").read_bytes()
    start, end = whole.index(b"llama.block_count"), whole.index(b"tokenizer.ggml.tokens")
    rng, opened = random.Random(0), 0
    for number in range(600 if pytestconfig.getoption("--long") else 60):
        changed = damaged(whole[start:end], rng) if number % 2 else damaged(whole[: end + 200], rng) + whole[end + 200 :]
        (tmp_path / "model.gguf").write_bytes(whole[:start] + changed + whole[end:] if number % 2 else changed)
        with contextlib.suppress(ZO2Error):
            open_checkpoint(tmp_path / "model.gguf")
            opened += 1
    assert opened > 0


def test_text_is_split_as_transformers_splits_it_by_the_same_name() -> None:
    mapping: Any = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    theirs = getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})  # since transformers 5.2x
    assert {name: gguf_model._SPLITS[name] for name in theirs} == {name: (pattern,) for name, pattern in theirs.items()}
