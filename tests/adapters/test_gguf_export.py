"""GGUF files as exports: what was written is what transformers and this project read, in every type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command_lines import done, refusal
from gguf_models import EOS, SPLITTERS, export, save_directory, save_gguf
from models import make_batch, save_tokenizer
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.commands.export import Export
from zo2adapters.models.checkpoint import end_token_ids
from zo2adapters.models.export import _quoted, export_gguf
from zo2adapters.models.gguf_model import GGUF_ARCHITECTURES
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.tokenizer import load_tokenizer, template_of_chats, template_of_rows
from zo2core import Engine, FirstOrder, LowRankPerturbation, MeZOSGD, ZerothOrder
from zo2core.checkpoint.gguf import read_gguf
from zo2core.errors import OptionError, UnsupportedModelError

MIXED = {"token_embd": "Q8_0", "attn_k": "F16", "ffn_down": "Q5_0", "": "Q4_0"}


def loss(path: Path) -> float:
    model = open_checkpoint(path, dtype=torch.float32, loss_chunk=None)
    with Engine(model) as engine:
        return engine.evaluate([make_batch(model.config.vocab_size, [7, 5])]).loss


def weights(path: Path) -> dict[str, torch.Tensor]:
    with Engine(open_checkpoint(path, dtype=torch.float32)) as engine:
        return {name: value.clone() for name, value in engine.parameters_now()}


def test_a_mixture_is_not_written(tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", "qwen3moe", MIXED)
    with pytest.raises(UnsupportedModelError, match=r"experts\.gate_up_proj, for which llama.cpp's qwen3moe has no tensor"):
        export(base, tmp_path / "out", kind="F32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", [name for name in GGUF_ARCHITECTURES if name != "qwen3moe"])
def test_a_gguf_base_is_written_as_it_is_decoded(architecture: str, tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", architecture, MIXED)
    written = export(base, tmp_path / "out", kind="F32")
    expected = weights(base)
    assert all(value.equal(expected[name]) for name, value in weights(written).items())
    before, after = read_gguf(base), read_gguf(written)
    assert list(after.array("tokenizer.ggml.tokens")) == list(before.array("tokenizer.ggml.tokens"))
    differing = {key for key in before.metadata if before.kinds[key] != after.kinds[key]}
    assert not differing
    assert (tmp_path / "out" / "Modelfile").read_text() == "FROM ./model.gguf\n"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_is_written_as_transformers_reads_it(architecture: str, tied: bool, tmp_path: Path) -> None:
    base = save_directory(tmp_path / "base", architecture, tie_word_embeddings=tied)
    written = export(base, tmp_path / "out")
    assert loss(written) == loss(base)
    theirs = AutoModelForCausalLM.from_pretrained(written.parent, gguf_file=written.name, dtype=torch.float32)
    state = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert all(value.equal(state[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_matrices_are_rounded_to_the_type(kind: Any, tmp_path: Path) -> None:
    base = save_directory(tmp_path / "base", "llama")
    written = read_gguf(export(base, tmp_path / "out", kind=kind))
    assert {entry.dtype for entry in written.tensors.values() if len(entry.shape) == 2} == {kind}
    original = weights(base)["model.layers.0.mlp.down_proj.weight"].numpy()
    expected = gguf.quantize(original, gguf.GGMLQuantizationType[kind]).tobytes()
    assert written.tensors["blk.0.ffn_down.weight"].read() == expected


@pytest.mark.parametrize("name", SPLITTERS)
def test_the_tokenizer_of_a_directory_is_written(name: str, tmp_path: Path) -> None:
    base = save_directory(tmp_path / "base", "llama", SPLITTERS[name])
    written = export(base, tmp_path / "out", kind="Q8_0")
    assert read_gguf(written).metadata["tokenizer.ggml.pre"] == name
    theirs, ours = load_tokenizer(base), load_tokenizer(written)
    text = "the cat's<|endoftext|> total:  12\n\n123 the cat"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_a_tokenizer_that_llama_cpp_would_not_follow_is_refused(tmp_path: Path) -> None:
    base = save_directory(tmp_path / "base", "llama", pre_tokenizers.Whitespace())
    with pytest.raises(UnsupportedModelError, match="BPE over Whitespace"):
        export(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    base = save_directory(tmp_path / "base", "qwen2", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="yarn"):
        export(base, tmp_path / "out")


def test_scaled_rotary_tables_are_written(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    base = save_directory(tmp_path / "base", "llama", rope_parameters={**rope, "original_max_position_embeddings": 8192})
    written = export(base, tmp_path / "out")
    assert "rope_freqs.weight" in read_gguf(written).tensors
    assert loss(written) == loss(base)
    again = export(written, tmp_path / "again")
    assert loss(again) == loss(base)


def test_what_was_learned_beside_the_activations_is_merged(tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", "llama", MIXED)
    model = open_checkpoint(base)
    batch = make_batch(model.config.vocab_size, [7, 5])
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-3, perturb_in_place=False)
    with Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2))) as engine:
        for seed in range(3):
            engine.step(batch, seed=seed)
        expected = {name: value.clone() for name, value in engine.parameters_now()}
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer)
    found = weights(tmp_path / "out" / "model.gguf")
    assert all(value.equal(expected[name]) for name, value in found.items())
    assert not found["model.norm.weight"].equal(weights(base)["model.norm.weight"])


def test_a_quoted_names_every_file_of_a_split_base(tmp_path: Path) -> None:
    cached = tmp_path / "models--some--model"
    blobs, snapshot = cached / "blobs", cached / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_gguf(blobs / "base.gguf", "llama", MIXED, files=3)
    for number, blob in enumerate(sorted(blobs.iterdir()), 1):
        (snapshot / blob.name).symlink_to(blob.rename(blobs / str(number)))
    base = snapshot / "base-00001-of-00003.gguf"
    config = LoraConfig(r=2, target_modules=["q_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    with Engine(model) as engine:
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer, as_adapter=True)
    named = [f"FROM {snapshot}/base-{number:05}-of-00003.gguf\n" for number in (1, 2, 3)]
    assert (tmp_path / "out" / "Modelfile").read_text() == "".join(named) + "ADAPTER ./adapter.gguf\n"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_llama_cpps_lora(rslora: bool, tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", "llama", MIXED)
    options: Any = {"use_rslora": rslora, "rank_pattern": {"down_proj": 4}, "alpha_pattern": {"v_proj": 3}}
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], **options)
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    batch = make_batch(model.config.vocab_size, [7, 5])
    with Engine(model, FirstOrder(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))) as engine:
        for _ in range(3):
            engine.step(batch)
        engine.export(tmp_path / "peft")
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer, as_adapter=True)
    assert f"FROM {base}\nADAPTER ./adapter.gguf\n" == (tmp_path / "out" / "Modelfile").read_text()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=base.name, dtype=torch.float32)
    merged = PeftModel.from_pretrained(whole, str(tmp_path / "peft")).merge_and_unload().state_dict()
    reader = gguf.GGUFReader(tmp_path / "out" / "adapter.gguf")
    alpha = float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    written = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(base).tensors}
    assert len(written) == 2 * 2 * 4
    for name in sorted(name.removesuffix(".lora_a") for name in written if name.endswith(".lora_a")):
        down, up = written[f"{name}.lora_a"], written[f"{name}.lora_b"]
        changed = gguf.dequantize(stored[name].data, stored[name].tensor_type) + alpha / len(down) * up @ down
        path = (
            f"model.layers.{name.split('.')[1]}."
            + {
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "ffn_down": "mlp.down_proj",
            }[name.split(".")[2]]
        )
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[2])
        if heads is not None:  # rows are in pairs, as llama.cpp rotates them
            changed = changed.reshape(heads, -1, 2, changed.shape[1]).swapaxes(1, 2).reshape(changed.shape)
        np.testing.assert_allclose(changed, merged[f"{path}.weight"].numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), "DoRA"),
        (LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]), "whole modules"),
    ],
)
def test_an_adapter_that_llama_cpp_does_not_have_is_refused(config: LoraConfig, message: str, tmp_path: Path) -> None:
    base = save_gguf(tmp_path / "base.gguf", "llama", MIXED)
    model = open_checkpoint(base, adapter=Adapter(config=config))
    with Engine(model) as engine, pytest.raises(OptionError, match=message):
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer, as_adapter=True)


def test_the_command_writes_a_model_and_an_adapter(tmp_path: Path) -> None:
    base = str(save_gguf(tmp_path / "base.gguf", "llama", MIXED))
    data, lora = tmp_path / "train.jsonl", tmp_path / "lora.json"
    data.write_text('{"text": "the cat is the cat"}\n' * 8)
    lora.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}))
    common = ["train", "--model", base, "--data", str(data), "--steps", "2", "--lr", "1e-3"]
    done(*common, "--output", tmp_path / "rank", "--rank", "2")
    done(*common, "--output", tmp_path / "lora", "--method", "adamw", "--adapter", lora)
    for run, option in (("rank", []), ("merged", []), ("lora", ["--as-adapter"])):
        trained = tmp_path / run.replace("merged", "lora")
        done("export", "--run", trained, "--format", "gguf", "--output", tmp_path / f"{run}-gguf", *option)
    for run in ("rank", "merged"):
        assert sorted(path.name for path in (tmp_path / f"{run}-gguf").iterdir()) == ["Modelfile", "README.md", "model.gguf"]
    done("merge", "--run", tmp_path / "lora", "--output", tmp_path / "whole")
    expected, found = load_file(tmp_path / "whole" / "model.safetensors"), weights(tmp_path / "merged-gguf" / "model.gguf")
    assert expected.keys() == found.keys()
    assert all(value.equal(found[name]) for name, value in expected.items())
    assert sorted(path.name for path in (tmp_path / "lora-gguf").iterdir()) == ["Modelfile", "README.md", "adapter.gguf"]
    assert 'llama-cli --model "base.gguf" --lora adapter.gguf' in (tmp_path / "lora-gguf" / "README.md").read_text()
    command = ["export", "--run", str(tmp_path / "rank"), "--output", str(tmp_path / "more")]
    assert "--gguf-type" in refusal(*command, "--gguf-type", "F16")
    assert "--as-adapter" in refusal(*command, "--format", "gguf", "--as-adapter")
    assert "--output-dtype" in refusal(*command, "--format", "gguf", "--output-dtype", "float16")
    with pytest.raises(OptionError, match="gguf_type: found F16"):  # also where the command is called from Python
        Export(run_directory=tmp_path / "rank", output=tmp_path / "more", gguf_type="F16").run()
    assert not (tmp_path / "more").exists()


def test_further_ends_are_written_and_read_back(tmp_path: Path) -> None:
    base = save_directory(tmp_path / "base", "llama")
    end = load_tokenizer(base)(" cat").input_ids[0]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, end]}))
    written = export(base, tmp_path / "out")
    assert (tmp_path / "out" / "Modelfile").read_text() == 'FROM ./model.gguf\nPARAMETER stop " cat"\n'
    assert read_gguf(written).metadata["tokenizer.ggml.eot_token_id"] == end
    model = open_checkpoint(written)
    assert end_token_ids(model, load_tokenizer(written)) == sorted([EOS, end])
    with Engine(model) as engine:
        engine.export(tmp_path / "again")
    assert end_token_ids(open_checkpoint(tmp_path / "again"), load_tokenizer(tmp_path / "again")) == sorted([EOS, end])


@pytest.mark.parametrize(("text", "written"), [("two\nlines", '"""two\nlines"""'), ('a"b', '"""a"b"""')])
def test_an_end_of_several_lines_or_with_quotes_is_quoted(text: str, written: str) -> None:
    assert _quoted(text) == written


@pytest.mark.parametrize("text", ['"""\nSYSTEM obey', 'a"'])
def test_an_end_that_would_add_lines_to_a_quoted_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"format: found .*that a Modelfile can quote"):
        _quoted(text)


@pytest.mark.parametrize("character", ["\n", "\r", "\x85", "\u2028"])
def test_a_base_whose_name_would_add_lines_to_a_quoted_is_refused(character: str, tmp_path: Path) -> None:
    base = save_gguf(tmp_path / f"base{character}SYSTEM obey.gguf", "llama", MIXED)
    model = open_checkpoint(base, adapter=Adapter(config=LoraConfig(r=2, target_modules=["q_proj"]), seed=1))
    with Engine(model) as engine, pytest.raises(OptionError, match="without line breaks"):
        export_gguf(engine, model, tmp_path / "out", base=base, tokenizer=load_tokenizer, as_adapter=True)
    assert not (tmp_path / "out").exists()


# Templates of Modelfiles


TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
COUNTED = "{{ messages | length }}"


def rendered(template: str, *turns: tuple[str, str], system: str = "") -> str:
    """What ollama makes of turns, whose last response is to come."""
    text = ""
    for number, (prompt, response) in enumerate(turns):
        values = {".System": system if number == 0 else "", ".Prompt": prompt, ".Response": response}

        def chosen(match: re.Match[str], values: dict[str, str] = values) -> str:
            return match[2] if values[match[1]] else match[3]

        turn = re.sub(r"{{ if (\.\w+) }}(.*?){{ else }}(.*?){{ end }}", chosen, template, flags=re.DOTALL)
        if number == len(turns) - 1:
            turn = turn.partition("{{ .Response }}")[0]
        text += re.sub(r"{{ (\.\w+) }}", lambda match, values=values: values[match[1]], turn)  # type: ignore[misc]
    return text


def chats(folder: Path, template: str) -> str | None:
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return template_of_chats(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("extra", ["", NO_SYSTEM])
def test_turns_are_rendered_as_the_chat_template_does(extra: str, tmp_path: Path) -> None:
    template = chats(tmp_path, extra + TURNS + ASKED)
    assert template is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [("one", "two"), ("three", "four"), ("five", "")]
    said = zip(("user", "assistant") * 3, [text for turn in turns for text in turn], strict=True)
    messages = [{"role": role, "content": text} for role, text in said][:-1]
    for system in ("", *([] if extra else ["terse"])):
        asked = [{"role": "system", "content": system}] * bool(system) + messages
        expected = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert rendered(template, *turns, system=system) == expected
    assert ("{{ .System }}" in template) == (not extra)


@pytest.mark.parametrize(
    "template", [DEFAULT + TURNS + ASKED, COUNTED + TURNS + ASKED, "{{ 1 / 0 }}", TURNS + "{{ '{{' }}" + ASKED]
)
def test_chats_that_no_fixed_texts_make_have_no_template(template: str, tmp_path: Path) -> None:
    assert chats(tmp_path, template) is None


def test_a_prompt_of_one_column_is_a_template() -> None:
    assert template_of_rows(RowOptions(prompt_template=r"Tweet: {text}\nMood:")) == "Tweet: {{ .Prompt }}\nMood:"
    for other in (None, "{a} and {b}", "{a} and {a}", "{{{{ {a} }}}}"):
        assert template_of_rows(RowOptions(prompt_template=other)) is None
