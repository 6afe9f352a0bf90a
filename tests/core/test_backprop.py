"""First-order steps over the stream: the bits of the whole model under autograd, wherever inputs of
blocks are kept.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from engines import Proxy, assert_equal, behind_copies, fails_at, first_order, memory, outcome
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from peft_models import TARGETS, lora, monolithic, values_of
from profiles import each_choice, examples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DogeConfig,
    Gemma3nTextConfig,
)
from whole_loops import WholeModel

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.frameworks.trainer_mixins import TrainerLoss
from zo2core import (
    Engine,
    EngineOptions,
    FirstOrder,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    ZerothOrder,
)
from zo2core.errors import MemoryBudgetError, OptionError, ScratchError
from zo2core.io.direct_file import RangedFile
from zo2core.methods.first_order import TRAINED_COPIES
from zo2core.planning.memory import DevicePlan, Machine, RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.run import Run
from zo2core.schedulers.profiling import Timeline
from zo2core.sweep.activations import (
    USES_AHEAD,
    ActivationFile,
    ActivationOffload,
    KeptActivations,
    Use,
)
from zo2core.sweep.gradient_visitor import (
    GRAPH_FORWARDS,
    PASSING,
    BlockGraph,
    KeptSize,
    graph_memory,
)
from zo2core.types import Lane

peft: Any = pytest.importorskip("peft")
SIZES: Mapping[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIMIZERS: Mapping[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
}
ADAMW = OPTIMIZERS["adamw"]
BATCH = make_batch(40, [7, 5])


class Resident(WholeModel):
    """transformers, peft and torch.optim on the whole model: the oracle."""

    def __init__(
        self,
        base: Path,
        config: Any,
        model: Any,
        make: Any = ADAMW,
        auto_class: Any = AutoModelForCausalLM,
        autocast: torch.dtype | None = None,
    ) -> None:
        values = values_of(model)
        super().__init__(monolithic(base, config, values, auto_class=auto_class), autocast=autocast)
        self.trained = {
            name: parameter for name, parameter in self.parameters.items() if name in values
        }
        self.optimizer = make(list(self.trained.values()))

    def step(
        self, micro_batches: Sequence[Mapping[str, torch.Tensor]], clip: float | None
    ) -> float:
        loss = self.backward(micro_batches)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.trained.values()), clip)
        self.optimizer.step()
        return loss

    def assert_equals(self, engine: Engine) -> None:
        ours = {
            name: value.clone() for name, value in engine.parameters_now() if name in self.trained
        }
        assert_equal(ours, {name: value.detach() for name, value in self.trained.items()})


def assert_equal_steps(
    engine: Engine, resident: Resident, micro_batches: Any, clip: float | None = None
) -> None:
    """Three steps on both sides have the same losses and parameters."""
    for _ in range(3):
        expected = resident.step(micro_batches, clip)
        assert engine.step(micro_batches).loss == pytest.approx(
            expected, rel=1e-6 if len(micro_batches) > 1 else 0
        )
        resident.assert_equals(engine)


@pytest.mark.few(2)
@pytest.mark.parametrize("model_type", CONFIGS)
@examples(short=3, long=33)
@given(data=st.data())
def test_steps_are_the_whole_models(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp, draw = tmp_path_factory.mktemp("backprop"), data.draw
    config = draw(CONFIGS[model_type])
    micro_batches = [draw(batches(config.vocab_size)) for _ in range(draw(st.integers(1, 3)))]
    base = save_model(tmp / "base", config, draw(st.sampled_from([torch.float32, torch.bfloat16])))
    options = draw(
        st.sampled_from(
            [{}, {"use_rslora": True}, {"init_lora_weights": False}, {"use_dora": True}]
        )
    )
    config = lora(target_modules=TARGETS[model_type], **options)
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    make, clip = (
        draw(st.sampled_from(list(OPTIMIZERS.values()))),
        draw(st.sampled_from([None, 0.05])),
    )
    resident = Resident(base, config, model, make)
    policy = memory(
        draw(st.sampled_from([None, 1, 2])), draw(st.sampled_from([1, 30_000, 100_000, 1 << 28]))
    )
    with Engine(
        model,
        FirstOrder(make, clip=clip),
        memory=policy,
        options=EngineOptions(overlap=draw(st.booleans())),
    ) as engine:
        assert_equal_steps(engine, resident, micro_batches, clip)


KINDS: Mapping[str, Any] = {
    "lora": lambda targets: lora(target_modules=targets, init_lora_weights=False),
    "lora and modules": lambda targets: lora(
        target_modules=targets,
        modules_to_save=["final_layer_norm", "fc2"]
        if "fc1" in targets
        else ["input_layernorm", "norm", "v_proj"],
    ),
    "dora": lambda targets: lora(use_dora=True, target_modules=targets),
    "ia3": lambda targets: peft.IA3Config(
        target_modules=targets, feedforward_modules=targets[1:], init_ia3_weights=False
    ),
    "loha": lambda targets: peft.LoHaConfig(
        r=3, alpha=16, target_modules=targets, init_weights=False
    ),
    "lokr": lambda targets: peft.LoKrConfig(
        r=3, alpha=16, target_modules=targets, init_weights=False
    ),
    "hra": lambda targets: peft.HRAConfig(r=4, target_modules=targets, init_weights=False),
    "vera": lambda targets: peft.VeraConfig(r=5, target_modules=targets, init_weights=False),
    "miss": lambda targets: peft.MissConfig(r=4, target_modules=targets, init_weights=False),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "dtype", "room", "precision"),
    each_choice(list(KINDS), [torch.float32, torch.bfloat16], [1, 1 << 28], ["exact", "mixed"]),
)
def test_every_kind_of_adapter_is_that_of_peft_and_of_autocast(
    kind: str, dtype: torch.dtype, room: int, precision: str, tmp_path: Path
) -> None:
    is_mixed = precision == "mixed" and kind not in ("dora", "loha")  # whose bits differ
    for model_type in ("opt", "llama"):
        base = save_model(
            tmp_path / model_type, small_config(model_type, tie_word_embeddings=is_mixed), dtype
        )
        config = KINDS[kind](TARGETS[model_type])
        options: Any = (
            {"precision": "mixed", "dtype": "bfloat16", "loss_chunk": None} if is_mixed else {}
        )
        model = open_checkpoint(base, adapter=Adapter(config=config, seed=1), **options)
        frozen = [
            spec for layout in model.layouts[1:-1] for spec in layout.parameters if spec.frozen
        ]
        assert {spec.dtype for spec in frozen} == {dtype}, (
            "what is only read is stored as the checkpoint has it"
        )
        resident = Resident(base, config, model, autocast=torch.bfloat16 if is_mixed else None)
        if is_mixed:
            cast("Any", resident.model).float()
        with Engine(model, FirstOrder(ADAMW, clip=0.05), memory=memory(1, room)) as engine:
            assert_equal_steps(engine, resident, [BATCH, make_batch(40, [6])], 0.05)


@pytest.mark.few(2)
@pytest.mark.parametrize("targets", ["all-linear", ["c_attn", "mlp.c_proj"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_of_conv1d_layers_is_that_of_peft(
    dtype: torch.dtype, targets: str | list[str], tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("gpt2"), dtype)
    corrected = lora(target_modules=targets, fan_in_fan_out=True)  # without which peft warns
    model = open_checkpoint(base, adapter=Adapter(config=lora(target_modules=targets), seed=1))
    resident = Resident(base, corrected, model)
    with Engine(model, FirstOrder(ADAMW), memory=memory(2, 1)) as engine:
        assert_equal_steps(engine, resident, [make_batch(40, [9, 5])])
        engine.export(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["fan_in_fan_out"], "peft loads it without a warning"
    with pytest.raises(
        OptionError, match=r"^adapter.target_modules: found transformer.h.0.attn.c_attn, Conv1D"
    ):
        open_checkpoint(
            base, adapter=Adapter(config=lora(target_modules=["c_attn"], use_dora=True))
        )


def make(
    base: Path,
    buckets: int | None = None,
    room: int = 1 << 28,
    optimizer: Any = ADAMW,
    **options: Any,
) -> Engine:
    model = open_checkpoint(base, adapter=Adapter(config=lora(init_lora_weights=False), seed=1))
    return first_order(model, optimizer, **{"memory": memory(buckets, room), **options})


def trained(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.parameters_now() if "lora" in name}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama", num_hidden_layers=6), torch.bfloat16)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overlap", "rows", "buckets"), each_choice([False, True], [None, 1], [1, 2, 3, 5])
)
def test_blocks_without_a_bucket_are_read_at_most_twice(
    base: Path, overlap: bool, rows: int | None, buckets: int
) -> None:
    batch, steps = make_batch(40, [7, 5, 6, 4]), 4
    with make(base, buckets, overlap=overlap, micro_batch_size=rows) as engine:
        block = engine._run.model.layouts[1].nbytes
        blocks = sum(not layout.resident for layout in engine._run.model.layouts)
        engine.step(batch)
        reads = sum(engine.step(batch).lanes[Lane.READ].nbytes for _ in range(steps))
    # blocks: what a step has read may be noted in the one after it
    begun_before, read_for_the_next = 1, 1
    assert reads <= (steps * 2 * (blocks - buckets) + begun_before + read_for_the_next) * block


def test_small_activations_count_with_the_gaps_that_the_heap_leaves_between_them() -> None:
    values = torch.ones(1 << 20, requires_grad=True)
    graph = BlockGraph({}, [values])
    with graph.recorded(keep=True):
        values.exp()  # saves its result
    assert 1.5 * values.nbytes <= graph.memory() <= 2 * values.nbytes
    (size,) = graph.sizes()
    assert size == KeptSize(values.nbytes, on_host=True)
    larger = size._replace(nbytes=values.nbytes << 3)  # so large that it is not from the heap
    assert graph_memory([larger]) == larger.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize("buckets", [None, 1, 2])
def test_the_last_blocks_keep_their_graphs_as_far_as_there_is_room(
    base: Path, buckets: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, outcomes = make_batch(40, [7, 5, 6, 4]), {}
    for room in (1, 40_000, 80_000, 1 << 28):
        forwards = [0] * 6

        def counted(
            block: Any, index: int, activations: Any, forwards: list[int] = forwards
        ) -> Any:
            forwards[index] += 1
            return block(index, activations)

        with make(base, buckets, room=room, micro_batch_size=2) as engine:
            model: Any = engine._run.model
            monkeypatch.setattr(model, "block", partial(counted, model.block))
            losses = [engine.step(batch).loss for _ in range(3)]
            outcomes[room] = (
                forwards,
                losses,
                [value.tolist() for value in trained(engine).values()],
            )
    assert outcomes[1][0] == [12] * 6, "three steps, two micro-batches, forward and backward"
    assert outcomes[1 << 28][0] == [6] * 6
    fewer, more = outcomes[40_000][0], outcomes[80_000][0]
    for counts in (fewer, more):
        assert counts == sorted(counts, reverse=True), "the last ones keep theirs"
    assert 36 < sum(more) < sum(fewer) < 72
    assert all(outcome[1:] == outcomes[1][1:] for outcome in outcomes.values())


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "down_proj"]])
def test_a_forward_that_runs_again_ends_where_nothing_more_is_saved(
    base: Path, targets: list[str]
) -> None:
    """As in torch's checkpointing: behind the last tensor that a backward reads, a frozen
    projection is not repeated.
    """
    config = lora(target_modules=targets, init_lora_weights=False)
    model: Any = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    projection, calls = model._layers[0].mlp.down_proj, []
    getattr(projection, "base_layer", projection).register_forward_hook(lambda *_: calls.append(1))
    resident = Resident(base, config, model, OPTIMIZERS["sgd"])
    with Engine(model, FirstOrder(OPTIMIZERS["sgd"]), memory=memory(1, 1)) as engine:
        assert_equal_steps(engine, resident, [BATCH])
        calls.clear()  # the first step of a shape tries it out before
        engine.step(BATCH)
    is_last_projection_trained = "down_proj" in targets
    assert len(calls) == (2 if is_last_projection_trained else 1)


def test_a_block_that_saves_other_tensors_when_it_runs_again_is_refused(base: Path) -> None:
    with make(base, 1, room=1) as engine:
        shift = torch.nn.Parameter(torch.zeros(()))
        runs: list[int] = []

        def changed(module: torch.nn.Module, args: Any, output: Any) -> Any:
            runs.append(1)
            return output * (1 + shift) if len(runs) == 1 else output

        model: Any = engine._run.model
        model._layers[0].input_layernorm.register_forward_hook(changed)
        with pytest.raises(
            OptionError, match="saves other tensors for its backward when it runs again"
        ):
            engine.step(BATCH)
        assert engine.version == 0


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize("buckets", [None, 1])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_an_adapter_beside_a_classifier_is_trained(
    family: str, buckets: int | None, tmp_path: Path
) -> None:
    plain = (
        small_config("llama", pad_token_id=0, num_hidden_layers=3)
        if family == "llama"
        else BertConfig(**SIZES)
    )
    plain.num_labels = 3
    torch.manual_seed(0)
    auto_class: Any = AutoModelForSequenceClassification
    auto_class.from_config(plain).save_pretrained(tmp_path / "base")
    config = lora(
        target_modules=["q_proj"] if family == "llama" else ["query", "dense"],
        init_lora_weights=False,
    )
    model = open_checkpoint(
        tmp_path / "base", adapter=Adapter(config=config, seed=1), head="sequence-classification"
    )
    resident = Resident(tmp_path / "base", config, model, auto_class=auto_class)
    cast("Any", resident.model).eval()
    batch = {**make_batch(40, [7, 5, 6]), "labels": torch.tensor([0, 2, 1])}
    with Engine(model, FirstOrder(ADAMW), memory=memory(buckets)) as engine:
        for _ in range(3):
            resident.optimizer.zero_grad()
            loss = resident.model(**batch).loss
            loss.backward()
            resident.optimizer.step()
            assert engine.step(batch).loss == loss.item()
            resident.assert_equals(engine)
        engine.export(tmp_path / "adapter")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", dtype="auto")
    with torch.inference_mode():
        loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
        assert loaded(**batch).loss.item() == resident.model(**batch).loss.item()


@pytest.mark.few(2)
# modulo 16: where products of float32 vectors round otherwise
@pytest.mark.parametrize("data_begins_at", [0, 8])
@pytest.mark.parametrize("rank", [None, 2])
def test_weights_read_where_they_lie_have_the_same_bits(
    data_begins_at: int, rank: int | None, tmp_path: Path
) -> None:
    directory = save_model(
        tmp_path / "base",
        small_config("llama", hidden_size=60, intermediate_size=96),
        torch.float32,
    )
    begin_data_at(directory / "model.safetensors", data_begins_at)
    batch = {"input_ids": torch.tensor([[7]])}  # one token: matrices times a vector
    outcomes = []
    for buckets in (None, 1):
        adapter = Adapter(config=lora(init_lora_weights=False), seed=1) if rank is None else None
        model = open_checkpoint(directory, adapter=adapter)
        method: Any = FirstOrder(ADAMW)
        if rank is not None:
            method = ZerothOrder(
                MeZOSGD(lr=1e-3, zo_eps=1e-3), perturbation=LowRankPerturbation(rank=rank)
            )
        logits = TrainerLoss(
            model, lambda called, batch: called(**batch).logits[0, 0], adds_up=True
        )
        with Engine(model, method, memory=memory(buckets)) as engine:
            outcomes.append(
                [output for outputs in engine.forwards([batch], logits) for output in outputs]
            )
    assert torch.equal(torch.stack(outcomes[0]), torch.stack(outcomes[1]))


def begin_data_at(path: Path, offset: int) -> None:
    """Write a file of safetensors again, its data beginning so many bytes behind a multiple
    of 16.
    """
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length].rstrip(), content[8 + length :]
    header = header.ljust(-(-len(header) // 16) * 16 + (offset - 8) % 16)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_prefix_is_trained(base: Path) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    losses, _ = outcome(Engine(model, FirstOrder(ADAMW)), [BATCH] * 4)
    assert losses[-1] < losses[0]


def test_what_has_no_optimizer_no_gradient_or_other_bits_under_autocast_is_refused(
    base: Path,
) -> None:
    with pytest.raises(OptionError, match="a factory that is called with the parameters"):
        make(base, optimizer=3)
    with make(base) as engine, pytest.raises(OptionError, match="a loss that has no gradient"):
        engine.step(
            BATCH,
            forward=cast(
                "Any", Proxy(engine._run.model, head=lambda head, *given: head(*given).detach())
            ),
        )
    for name, config in (("LoHa", KINDS["loha"](["q_proj"])), ("DoRA", lora(use_dora=True))):
        with pytest.raises(OptionError, match=f"precision: found mixed with {name}"):
            open_checkpoint(base, adapter=Adapter(config=config), precision="mixed")


def smoothed(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """A loss that is no model's own: with a term for all logits."""
    outputs = model(**batch)
    loss: torch.Tensor = outputs.loss + 0.1 * outputs.logits.float().square().mean()
    return loss


def preferred(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """As DPO's: the log-probabilities of the first half of the rows against those of the second
    half.
    """
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    taken = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    chosen, rejected = (taken * batch["attention_mask"][:, 1:]).sum(1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


@pytest.mark.parametrize("loss", [smoothed, preferred])
def test_any_loss_with_a_gradient_trains_in_a_loop_of_the_callers(base: Path, loss: Any) -> None:
    config = lora(init_lora_weights=False)
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=4))
    resident = Resident(base, config, model)
    forward = TrainerLoss(model, lambda called, batch: loss(called, batch), adds_up=True)
    with Engine(model, FirstOrder(None), memory=memory(1)) as engine:
        optimizer = ADAMW(list(engine.parameters.values()))
        for step in range(3):
            batches = [make_batch(40, [7, 5], seed=2 * step + number) for number in range(2)]
            resident.optimizer.zero_grad()
            expected = []
            for batch in batches:  # gradients add up over calls, as over calls of backward
                expected.append(loss(resident.model, batch))
                expected[-1].backward()
            assert [engine.gradients(batch, forward) for batch in batches] == [
                value.item() for value in expected
            ]
            for name, parameter in engine.parameters.items():
                assert torch.equal(parameter.grad, resident.trained[name].grad), name  # type: ignore[arg-type]
            resident.optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
            resident.assert_equals(engine)
        together = engine.gradients(batches, forward)
        with torch.no_grad():
            apart = [loss(resident.model, batch).double() for batch in batches]
        assert together == pytest.approx(float(sum(apart)))
        with pytest.raises(OptionError, match="None, and a call of step"):
            engine.step(batches)


def test_an_attention_that_chooses_its_kernel_by_gradients_gets_the_same_bits(
    tmp_path: Path,
) -> None:
    """Doge's masks depend on trained parameters: without a graph torch takes another attention,
    which rounds otherwise.
    """
    directory = save_model(
        tmp_path / "doge", DogeConfig(**SIZES, keep_window_size=16), torch.float32
    )
    config = lora(target_modules=["dt_proj", "v_proj"], init_lora_weights=False)
    model = open_checkpoint(directory, adapter=Adapter(config=config, seed=1))
    resident = Resident(directory, config, model, OPTIMIZERS["sgd"])
    with Engine(model, FirstOrder(OPTIMIZERS["sgd"])) as engine:
        assert_equal_steps(engine, resident, [BATCH])


def test_blocks_that_share_keys_and_values_are_refused(tmp_path: Path) -> None:
    """Gemma 3n's last layers read what an earlier one computed: that path's gradient would be
    lost.
    """
    directory = tmp_path / "gemma3n"
    sizes = {**SIZES, "num_hidden_layers": 3, "head_dim": 8, "intermediate_size": 32}
    types = ["sliding_attention", "full_attention", "full_attention"]
    config = Gemma3nTextConfig(
        **sizes,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=8,
        layer_types=types,
        activation_sparsity_pattern=[0.5, 0.0, 0.0],
        num_kv_shared_layers=1,
        laurel_rank=4,
    )
    save_model(directory, config, torch.float32)
    model = open_checkpoint(
        directory, adapter=Adapter(config=lora(target_modules=["q_proj"]), seed=1)
    )
    with Engine(model, FirstOrder(OPTIMIZERS["sgd"])) as engine:
        with pytest.raises(
            OptionError, match=r"block \d, which passes tensors to later blocks besides its output"
        ):
            engine.step(BATCH)
        assert engine.version == 0


BLOCKS = 6
LENGTHS = [7, 5, 6, 4]

FIRST, SECOND = Use(-1, 0), Use(-2, 0)


class Departed:
    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def done(self) -> bool:
        return False

    def result(self) -> None:
        self._act()


class Memory:
    """A store that keeps bytes, and counts how many are in the storages of all inputs."""

    def __init__(self) -> None:
        self.away: dict[Use, list[tuple[torch.UntypedStorage, bytes]]] = {}
        self.sent: list[Use] = []

    def send(self, key: Use, storages: Sequence[torch.UntypedStorage]) -> Departed:
        self.sent.append(key)

        def leave() -> None:
            self.away[key] = [(storage, bytes(filled(storage).tolist())) for storage in storages]
            for storage in storages:
                storage.resize_(0)

        return Departed(leave)

    def bring(self, key: Use) -> Departed:
        left = self.away.pop(key)
        for storage, content in left:
            storage.resize_(len(content))

        def arrive() -> None:
            for storage, content in left:
                filled(storage).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

        return Departed(arrive)

    def clear(self) -> None:
        self.away.clear()

    def close(self) -> None:
        pass


def filled(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    blocks=st.integers(1, 6),
    room=st.integers(0, 400),
)
def test_the_first_blocks_inputs_leave_and_are_there_for_their_backward(
    sizes: list[int], blocks: int, room: int
) -> None:
    store, tensors = Memory(), {}
    inputs = KeptActivations(store)
    for _ in range(2):
        inputs.room = room
        store.sent.clear()
        most = max(room, (USES_AHEAD + 1) * max(sizes))
        for block in range(1, blocks + 1):
            for stream, size in enumerate(sizes):
                tensor = torch.full((size,), 10 * block + stream, dtype=torch.uint8)
                tensors[Use(-block, stream)] = tensor
                inputs.put(Use(-block, stream), [tensor.untyped_storage()] if size else [])
                assert sum(kept.untyped_storage().nbytes() for kept in tensors.values()) <= most
        order = [key for key in tensors if sizes[key.stream]]
        segments = [key.segment for key in order]
        assert [key.segment for key in store.sent] == segments[: len(store.sent)], (
            "the first blocks' inputs leave"
        )
        if blocks * sum(sizes) + USES_AHEAD * max(sizes) <= room:
            assert store.sent == []
        for block in range(blocks, 0, -1):
            for stream, size in enumerate(sizes):
                inputs.take(Use(-block, stream))
                present = sum(kept.untyped_storage().nbytes() for kept in tensors.values())
                assert present <= max(room, USES_AHEAD * max(sizes)) + max(sizes), (
                    "what is read ahead has room"
                )
                assert tensors.pop(Use(-block, stream)).tolist() == [10 * block + stream] * size
        inputs.clear()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ActivationFile]:
    with closing(ActivationFile(tmp_path, Timeline())) as made:
        yield made


def test_a_file_gives_back_what_it_was_sent(file: ActivationFile, tmp_path: Path) -> None:
    for _ in range(2):
        tensors = [
            torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 4096, (9 << 20) + 5, 77)
        ]
        expected = [tensor.clone() for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        file.send(FIRST, storages[:3]).result()
        file.send(SECOND, storages[3:]).result()
        assert [storage.nbytes() for storage in storages] == [0] * 4, "their memory is free"
        assert list(tmp_path.iterdir()) == [], "the file has no name"
        file.bring(SECOND).result()
        file.bring(FIRST).result()
        assert all(
            torch.equal(tensor, values) for tensor, values in zip(tensors, expected, strict=True)
        )
        file.clear()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    storages = [torch.zeros(5).untyped_storage()]
    with closing(ActivationFile(tmp_path / "missing", Timeline())) as file:
        with pytest.raises(
            ScratchError, match=r"missing: found No such file or directory.* inputs of blocks"
        ):
            file.send(FIRST, storages).result()
        file.clear()
        (tmp_path / "missing").mkdir()
        file.send(FIRST, storages).result()


def test_a_failed_write_frees_the_space_of_all_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: RangedFile, offset: int, data: memoryview) -> None:
        if offset == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, offset, data)

    written = RangedFile.write
    monkeypatch.setattr(RangedFile, "write", write)
    with closing(ActivationFile(tmp_path, Timeline())) as file:
        first, second = (
            file.send(use, [torch.zeros(5).untyped_storage()]) for use in (FIRST, SECOND)
        )
        second.result()
        with pytest.raises(ScratchError, match="No space left"):
            first.result()
        file.clear()
        links = Path("/proc/self/fd").iterdir()
        assert not [
            link
            for link in links
            if link.is_symlink() and os.readlink(link).startswith(str(tmp_path))
        ]


OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)


def spilling(
    base: Path, room: int, *, buckets: int | None = None, config: Any = None, **options: Any
) -> Engine:
    chosen = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = open_checkpoint(
        base, adapter=Adapter(config=chosen if config is None else config, seed=1)
    )
    return first_order(
        model, OPTIMIZER, **{"memory": memory(buckets, room), "micro_batch_size": 1, **options}
    )


def room_for(base: Path, blocks: int) -> int:
    """Memory in which the micro-batches of one row pass together, and so many blocks have room for
    their inputs.
    """
    model, rows = open_checkpoint(base), [make_batch(40, [length]) for length in LENGTHS]
    graph = GRAPH_FORWARDS * max(model.forward_bytes(row) for row in rows)
    return math.ceil(graph) + (PASSING + blocks) * sum(model.held_bytes(row) for row in rows)


def steps_and_values(engine: Engine, batch: Any, steps: int = 3) -> tuple[list[float], list[Any]]:
    losses = [engine.step(batch).loss for _ in range(steps)]
    return losses, [
        value.tolist() for name, value in engine.parameters_now() if name in engine.parameters
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("buckets", [None, 2])
def test_inputs_that_have_no_room_are_written_and_read_once_a_step(
    base: Path, buckets: int | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    batch = make_batch(40, LENGTHS)
    with spilling(base, 1 << 28) as engine:
        expected = steps_and_values(engine, batch)
        assert engine.step(batch).lanes[Lane.WRITE].nbytes == 0
        layout = engine._run.model.layouts[1]
    hidden = sum(LENGTHS) * small_config("llama").hidden_size * 2
    written = []
    for blocks in range(BLOCKS + 1) if request.config.getoption("--long") else (0, 1, 2, BLOCKS):
        spill = tmp_path / f"{blocks}"
        spill.mkdir()
        with spilling(base, room_for(base, blocks), buckets=buckets, spill=spill) as engine:
            assert steps_and_values(engine, batch) == expected
            lanes = engine.step(batch).lanes
            written.append(lanes[Lane.WRITE].nbytes)
            of_blocks = 0 if buckets is None else (2 * (BLOCKS - buckets) + 2) * layout.nbytes
            assert written[-1] <= lanes[Lane.READ].nbytes <= written[-1] + of_blocks
            assert list(spill.iterdir()) == []
    assert written[0] == (BLOCKS - 1) * hidden, (
        "all but the embedding's output, which has no gradient"
    )
    assert written == sorted(written, reverse=True)
    assert 0 < written[2] < written[1]
    assert written[-1] == 0


@pytest.mark.parametrize("is_first_order", [True, False])
def test_room_is_made_before_each_pass_of_a_micro_batch(base: Path, is_first_order: bool) -> None:
    """What a pass has freed lies with gaps, and the process would grow by what the next takes."""
    options: Any = {"micro_batch_size": 1, "memory": "100GB"}
    with patch("zo2core.run.make_room") as make_room:
        if is_first_order:
            engine = make(base, **options)
        else:
            estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2)
            engine = Engine(
                open_checkpoint(base, loss_chunk=None), ZerothOrder(estimator), **options
            )
        with engine:
            engine.step(BATCH)
    limits, sizes = zip(*(call.args for call in make_room.call_args_list), strict=True)
    assert {*limits} == {100 * 10**9}
    assert min(sizes) > 0
    blocks, rows, evaluations, end_of_sweep = 6, 2, 2, 1
    passes = (blocks + 2) + blocks if is_first_order else evaluations * (blocks + 2)
    assert len(sizes) == rows * passes + end_of_sweep * is_first_order


def test_micro_batches_pass_together_though_their_inputs_have_no_room(base: Path) -> None:
    for room, expected in ((room_for(base, 0), 1), (1, len(LENGTHS))):
        with (
            patch.object(Run, "sweep", autospec=True, side_effect=Run.sweep) as sweep,
            spilling(base, room) as engine,
        ):
            engine.step(make_batch(40, LENGTHS))
        assert sweep.call_count == expected


def assert_same_in_any_room(
    base: Path, prepare: Callable[[Any], object] = lambda model: None, **options: Any
) -> None:
    outcomes = []
    for room in (1 << 28, 1, room_for(base, 0)):
        with spilling(base, room, **options) as engine:
            prepare(engine._run.model)
            outcomes.append(steps_and_values(engine, make_batch(40, LENGTHS)))
    assert outcomes[1:] == outcomes[:1] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("view", [False, True])
def test_a_layer_that_hands_on_its_input_keeps_it_in_memory(view: bool, base: Path) -> None:
    def prepare(model: Any) -> None:
        for layer in (2, 3):
            model._layers[layer].register_forward_hook(
                lambda _, args, output: args[0].view(args[0].shape) if view else args[0]
            )

    assert_same_in_any_room(base, prepare)


def test_a_prefix_that_all_blocks_get_stays(base: Path) -> None:
    assert_same_in_any_room(
        base, config=peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )


def test_a_disk_that_refuses_ends_the_step_and_the_next_one_goes_on(base: Path) -> None:
    batch, small = make_batch(40, LENGTHS), make_batch(40, LENGTHS[:1])
    with spilling(base, room_for(base, 0)) as engine:
        expected = steps_and_values(engine, batch)
    refused = ScratchError("disk", found="a full disk", expected="space", remedy="free it")
    write = fails_at(ActivationFile._write, 4, refused)
    with spilling(base, room_for(base, 0)) as engine, patch.object(ActivationFile, "_write", write):
        with pytest.raises(ScratchError, match="a full disk"):
            engine.step(batch)
        assert engine.version == 0
        assert steps_and_values(engine, batch) == expected
        assert engine.step(small).loss > 0


@pytest.mark.long_profile
@pytest.mark.few(1)
@pytest.mark.parametrize("host_room", [None, 0])
def test_a_device_of_its_own_memory_keeps_inputs_on_host_or_disk_with_the_same_bits(
    host_room: int | None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LittleRoom(ActivationOffload):
        def __init__(self, device: Any, timeline: Timeline, file: Any, room: int) -> None:
            super().__init__(device, timeline, file, room if host_room is None else host_room)

    monkeypatch.setattr("zo2core.methods.gradient_steps.ActivationOffload", LittleRoom)
    batch = make_batch(40, LENGTHS)
    with spilling(base, 1 << 28) as engine:
        expected = steps_and_values(engine, batch)
    moved, written = [], []
    for blocks in (0, 1, 3, BLOCKS + 1):
        room = room_for(base, blocks)
        policy = replace(memory(2), device=DevicePlan((), 0, kept=0, activation_bytes=room))
        with (
            behind_copies(1e-4) as device,
            spilling(base, room, memory=policy, device=device, spill=tmp_path) as engine,
        ):
            assert steps_and_values(engine, batch) == expected
            lanes = engine.step(batch).lanes
        assert lanes[Lane.ACTIVATIONS_IN].nbytes == lanes[Lane.ACTIVATIONS_OUT].nbytes
        moved.append(lanes[Lane.ACTIVATIONS_OUT].nbytes)
        written.append(lanes[Lane.WRITE].nbytes)
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[1] > moved[-1] == 0
    assert all(0 <= out <= sent for out, sent in zip(written, moved, strict=True))
    assert (written[0] > 0) == (host_room is not None)


def test_a_plan_leaves_inputs_to_the_disk_if_host_memory_has_no_room_for_all(
    base: Path, process_memory: int
) -> None:
    model = open_checkpoint(base)
    free = 1 << 30  # of the device
    machine = Machine(on_host=False, in_place=False, device_free=lambda: free)
    layouts, least = model.layouts, 1 << 20

    def planned(host: int | str, activations: int, copies: int = 0) -> RunSpec:
        memory = MemoryPolicy(
            host=host, device="8MB", activations=activations, least_activations=least
        )
        request = RunRequest(layouts=layouts, on_disk=layouts, memory=memory, trained_copies=copies)
        return plan(request, machine, MeasuredSpeeds(model.weights))

    enough = planned("auto", 1 << 30, TRAINED_COPIES)
    assert enough.waiting_bytes == 1 << 30
    budget = process_memory + (64 << 20)
    little = planned(budget, 1 << 30, TRAINED_COPIES)
    assert little.waiting_bytes == least
    assert little.host_plan.nbytes <= budget
    with pytest.raises(MemoryBudgetError, match="memory"):
        planned(budget, 1 << 30)  # a zeroth-order run writes no activations to disk
