"""LoRA in peft's modules: monolithic MeZO's bits on the adapter, peft's files, and a base that is only read."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal
from engines import zeroth_order
from models import make_batch, save_model, small_config
from peft_models import lora, monolithic, steps, values_of
from runs import small_run
from safetensors.torch import load_file
from stacked_loop import StackedLoop
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import PreTrainedModel

from zo2adapters import Adapter, MonolithicMeZO, Precision, open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.peft_adapter import peft_config
from zo2core import (
    Distribution,
    Engine,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import OptionError, ZO2Warning
from zo2core.planning.memory import DevicePlan
from zo2core.types import Lane

peft: Any = pytest.importorskip("peft")
FA = ("lora_A",)  # LoRA-FA


class LoRALoop(StackedLoop):
    """The stacked loop over an adapter's parameters alone."""

    def __init__(self, whole: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        super().__init__(whole, *arguments, **options)
        trained = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
        self.base = {name: value for name, value in self.base.items() if name in trained}


@pytest.mark.few(3)
@pytest.mark.parametrize("frozen", [(), FA])
@pytest.mark.parametrize(("family", "buckets"), [("llama", None), ("llama", 2), ("gpt2", 2)])
def test_lora_beside_the_activations_is_the_stacked_loop(
    frozen: tuple[str, ...], family: str, buckets: int | None, tmp_path: Path
) -> None:
    config = small_config(family, tie_word_embeddings=False)  # as the loop wants it
    base = save_model(tmp_path / "base", config, torch.bfloat16)
    turned = {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True} if family == "gpt2" else {}
    adapter = Adapter(config=lora(init_lora_weights=False, **turned), frozen=frozen)
    batch = make_batch(40, [7, 5])
    model = open_checkpoint(base, adapter=adapter)
    loop = LoRALoop(monolithic(base, adapter.config, values_of(model), frozen), 2, 2, Distribution.GAUSSIAN, run_seed=5)
    with Engine(
        model,
        ZerothOrder(
            MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False), seed=5, perturbation=LowRankPerturbation(rank=2, period=2)
        ),
        memory=MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False)),
    ) as engine:
        for _ in range(5):
            [seed] = {evaluation.seed for evaluation in engine.ask()}
            assert list(engine.step(batch).losses) == loop.step(batch, seed)


def test_nothing_is_written_back(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    run = tmp_path / "run"
    run.mkdir()
    model, policy = open_checkpoint(base, adapter=Adapter(config=lora())), WriteBackPolicy(directory=run)
    steps(model, journal=run / "journal.jsonl", write_back=policy)
    assert {path.name.partition(".")[0] for path in run.iterdir()} == {"journal"}


def test_blocks_are_brought_and_never_taken_back(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4))
    policy = MemoryPolicy(device=DevicePlan((), 1 << 40, kept=0, activation_bytes=1 << 28))
    with closing(ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 1e-4))) as device:
        model = open_checkpoint(base, adapter=Adapter(config=lora()))
        with Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), device=device, memory=policy) as engine:
            # What comes ahead of the second step may count for the first one.
            lanes = [engine.step(make_batch(40, [7, 5])).lanes for _ in range(2)]
    uploaded = sum(own[Lane.UPLOAD].nbytes for own in lanes)
    assert uploaded >= 2 * sum(layout.nbytes for layout in model.layouts if not layout.resident)
    assert all(own[lane].nbytes == 0 for own in lanes for lane in (Lane.OFFLOAD, Lane.WRITE))


@pytest.mark.parametrize(
    ("adapter", "option"),
    [
        ({"config": lora(target_modules=["query"])}, "adapter.target_modules"),
        ({"config": lora(lora_dropout=0.1)}, "adapter.lora_dropout"),
        ({"config": lora(bias="lora_only")}, "adapter.bias"),
        ({"config": lora(modules_to_save=["lm_head"])}, "adapter.modules_to_save"),
        ({"config": lora(init_lora_weights="olora")}, "adapter.init_lora_weights"),
        ({"config": peft.VeraConfig(target_modules=["q_proj"])}, "adapter: found VERA; expected one of LORA, "),
        ({"config": peft.PromptTuningConfig(num_virtual_tokens=3)}, "adapter: found PROMPT_TUNING"),
        ({"config": {"r": 3}}, "adapter: found dict"),
        ({"config": lora(), "frozen": ("lora_",)}, "adapter.frozen"),
        ({"config": lora(), "frozen": ("lora_C",)}, "adapter.frozen"),
        ({"config": lora(), "frozen": ("lora_A", "v_porj")}, "adapter.frozen: found .'v_porj'"),
        ({"config": lora(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")}, "adapter.alora_invocation_tokens"),
        ({"config": lora(target_modules=["embed_tokens"])}, "adapter.target_modules: found model.embed_tokens"),
        ({"config": lora(target_modules=["lm_head"])}, "adapter.target_modules: found lm_head"),
        ({"config": lora(target_modules="(")}, "adapter: found"),
        ({"config": lora(r="8")}, "adapter.r"),
        ({"config": lora(r=10**10)}, "adapter.r"),
        ({"config": lora(lora_alpha="x")}, "adapter: found"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(adapter: dict[str, Any], option: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    with pytest.raises(OptionError, match=f"^{option}"):
        open_checkpoint(base, adapter=Adapter(**adapter))


@pytest.mark.parametrize("seed", [-1, 2**64, None, 0.5, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(OptionError, match=r"adapter\.seed"):
        Adapter(config=lora(), seed=seed)


@pytest.mark.parametrize("start", [True, False, "gaussian"])
def test_first_values_are_pefts(start: bool | str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    config = lora(init_lora_weights=start, target_modules=["q_proj"])
    values = values_of(open_checkpoint(base, adapter=Adapter(config=config, seed=7)))
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    linears = [torch.nn.Linear(*sizes, bias=False) for _ in range(2) for sizes in ((12, 3), (3, 12))]
    torch.random.set_rng_state(state)
    for number, (name, value) in enumerate(values.items()):
        if start is False:
            assert torch.equal(value, linears[number].weight), name
        else:
            assert bool(value.any()) == ("lora_A" in name)
    assert values_of(open_checkpoint(base, adapter=Adapter(config=config, seed=7))).keys() == values.keys()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": Precision(stored=torch.float32, transfer_dtype=torch.bfloat16)},
        {"transfer_dtype": "bfloat16"},
        {"export_dtype": "bfloat16"},
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    with pytest.raises(OptionError, match="with an adapter"):
        open_checkpoint(base, adapter=Adapter(config=lora()), **options)


def test_directions_beside_the_activations_of_a_mixed_adapter_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    model = open_checkpoint(base, adapter=Adapter(config=lora()), precision="mixed")
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False)
    with pytest.raises(OptionError, match="exact precision beside the activations"):
        Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2)))


@pytest.mark.parametrize("buckets", [None, 1])
def test_lora_in_mixed_precision_is_mezo_under_autocast(buckets: int | None, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=True), torch.bfloat16)
    adapter = Adapter(config=lora(init_lora_weights=False), seed=1)
    model = open_checkpoint(base, adapter=adapter, precision="mixed", dtype="bfloat16", loss_chunk=None)
    whole: Any = monolithic(base, adapter.config, values_of(model), ())
    whole.float()
    loop = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-2, autocast=torch.bfloat16)
    memory, batch = MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False)), make_batch(40, [7, 5])
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), memory=memory) as engine:
        for _ in range(3):
            [seed] = {evaluation.seed for evaluation in engine.ask()}
            assert engine.step(batch).losses == loop.step(batch, seed).losses
        trained = dict(whole.named_parameters())
        for name, value in engine.parameters_now():
            if "lora" in name:
                assert torch.equal(value, trained[name]), name


@pytest.mark.parametrize("option", ["replay", "write_back.every", "write_back.snapshot_every"])
def test_what_would_write_a_frozen_base_is_refused(option: str, tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("llama")), adapter=Adapter(config=lora()))
    policy = {option.removeprefix("write_back."): 2}
    asked: Any = {"replay": "host"} if option == "replay" else {"write_back": WriteBackPolicy(directory=tmp_path, **policy)}
    with pytest.raises(OptionError, match=f"^{option}.*frozen"):
        zeroth_order(model, MeZOSGD(lr=1e-2, zo_eps=1e-2), noise=PhiloxNoise(Distribution.RADEMACHER), **asked)


def test_a_config_is_read_from_a_file(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    path = tmp_path / "lora.json"
    path.write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]}))
    assert steps(open_checkpoint(base, adapter=Adapter(config=path))) == steps(
        open_checkpoint(base, adapter=Adapter(config=lora()))
    )


def test_an_adapter_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = small_run(tmp_path)
    config, run = tmp_path / "lora.json", tmp_path / "run"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    train = ["train", "--model", options.model, "--data", str(options.data), "--lr", "1e-2"]
    adapter = ["--adapter", str(config), "--adapter-frozen", "lora_A"]
    main([*train, "--output", str(run), "--steps", "2", *adapter])
    assert (run / "model" / "adapter_model.safetensors").exists()
    config.write_text("{}")  # a resumed run reads it again
    assert refusal("train", "--resume", run, "--steps", 4).startswith("zo2: --adapter: found None; expected one of LORA")
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    main(["train", "--resume", str(run), "--steps", "4"])
    main([*train, "--output", str(tmp_path / "whole"), "--steps", "4", *adapter])
    resumed, whole = (load_file(path / "model" / "adapter_model.safetensors") for path in (run, tmp_path / "whole"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    main(["export", "--run", str(run), "--output", str(tmp_path / "adapter"), "--at", "2"])
    branch = ["train", "--resume", str(run), "--from-step", "2", "--output", str(tmp_path / "branch"), "--steps", "4"]
    main([*branch, "--lr", "1e-2", *adapter])
    again = load_file(tmp_path / "branch" / "model" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    capsys.readouterr()
    main(["evaluate", "--run", str(run), "--data", str(options.data), "--no-base"])
    of_run = capsys.readouterr().out
    main(["evaluate", "--model", options.model, "--adapter", str(run / "model"), "--data", str(options.data), "--no-base"])
    assert capsys.readouterr().out == of_run


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--adapter", "missing.json"], "missing.json"),
        (["--adapter", "CONFIG", "--precision", "auto:transfer=bfloat16"], "transfer of --precision"),
        (["--adapter", "CONFIG", "--snapshot-every", "2"], "--adapter"),
        (["--adapter", "CONFIG", "--write-back-every", "2"], "--write-back-every"),
        (["--adapter", "CONFIG", "--adapter-frozen", "lora_C"], "--adapter-frozen"),
    ],
)
def test_an_adapter_that_cannot_be_heeded_is_one_line(more: list[str], said: str, tmp_path: Path) -> None:
    options = small_run(tmp_path)
    config = tmp_path / "lora.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    more = [str(config) if word == "CONFIG" else word for word in more]
    train = "train", "--model", options.model, "--data", options.data, "--output", tmp_path / "run"
    assert refusal(*train, *more).startswith(f"zo2: {said}")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kept", [0, 2])
def test_lora_on_a_gpu_is_monolithic_mezo(kept: int, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    adapter = Adapter(config=lora(init_lora_weights=False))
    model = open_checkpoint(base, adapter=adapter)
    whole: Any = monolithic(base, adapter.config, values_of(model), ())
    mono = MonolithicMeZO(whole.to("cuda"), lr=1e-3, zo_eps=1e-2)
    batch = make_batch(40, [7, 5])
    policy = MemoryPolicy(device=DevicePlan((), 1 << 40, kept=kept, activation_bytes=1 << 28))
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2)), device="cuda", memory=policy) as engine:
        for seed in range(3):
            theirs = mono.step({key: value.to("cuda") for key, value in batch.items()}, seed)
            assert engine.step(batch, seed=seed).losses == theirs.losses


def test_keys_of_a_later_peft_are_ignored_by_name(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "r": 3, "target_modules": ["q_proj"], "of_tomorrow": None}))
    with pytest.warns(ZO2Warning, match="of_tomorrow ignored, which the installed peft"):
        assert peft_config(Adapter(config=path)).config.r == 3
