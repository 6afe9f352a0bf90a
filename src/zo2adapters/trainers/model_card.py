"""The model card of an export: ``README.md`` with the header that the Hugging Face hub reads.

It is written from the journal, which has no paths of this machine; local files are called by their
names alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from huggingface_hub import ModelCardData

from zo2adapters.models.checkpoint import PROMPT, json_object
from zo2adapters.models.model_files import ADAPTER_FOLDER, BASE_FOLDER, is_gguf
from zo2adapters.tasks.row_options import RowOptions, with_line_breaks
from zo2adapters.tasks.rows import with_labels
from zo2adapters.trainers.metrics import best_step, losses_of
from zo2adapters.trainers.optimization import with_peak_rates
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import name_of
from zo2core import Journal
from zo2core.errors import CheckpointError, ZO2Error
from zo2core.types import Commit

CARD = "README.md"
_HOW = ("## How to load it", "")
_MOST_EVALUATIONS = 20  # rows of the table of evaluations
_PROVENANCE = (
    "batch size",
    "micro-batch size",
    "sequence length",
    "dtype",
    "device",
    "objective",
    "packed",
    "schedule",
)


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """What is written of a run."""

    version: int  # steps taken
    head: str = "causal-lm"
    is_adapter: bool = False
    has_both: bool = False  # whether it is an adapter, and its base, which was trained, too
    is_merged: bool = False  # whether the run's adapter is merged into the weights
    is_gguf_file: bool = False


def model_card(
    journal: Journal,
    exported: ExportedModel,
    *,
    base: str,
    data: str | None = None,
    prompt: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Write the card of a model that a run has trained."""
    header = {} if journal.header is None else journal.header
    version = exported.version
    is_adapter = exported.is_adapter
    name = _called(base)
    causal = exported.head == "causal-lm"
    first_order = any(isinstance(step, Commit) for step in journal.steps)
    lines = [*_summary(header, version, name, is_adapter=is_adapter, first_order=first_order)]
    if exported.is_merged and version:
        lines += ["", "The steps trained an adapter, which is merged into these weights."]
    if exported.has_both:
        lines += [
            "",
            "The steps trained an adapter and the base under it: "
            f"`{ADAPTER_FOLDER}` is of use with the weights in `{BASE_FOLDER}` only, and not with "
            "the base model.",
        ]
    is_described = bool(version or journal.evaluations)
    if is_described:
        lines += ["", "## Data", "", *_data(header, data)]
        lines += ["", "## Results", "", *_results(journal, version)]
    if prompt:
        lines += ["", "## Prompts", "", f"As in `{PROMPT}`:", "", "```json", _json(prompt), "```"]
    lines += ["", *_HOW]
    if exported.is_gguf_file:
        lines += _llama_cpp(base, name, is_adapter=is_adapter)
    else:
        lines += _loading(name, causal=causal, is_adapter=is_adapter, has_both=exported.has_both)
    if is_described:
        lines += ["", "## Options", "", "```json", json.dumps(_options(header), indent=2), "```"]
    return _card(
        f"{name}, fine-tuned" if version else name,
        lines,
        base=base,
        causal=causal,
        relation=_relation(exported),
        tags=_tags(exported, first_order=first_order),
        library_name="peft" if is_adapter or exported.has_both else "transformers",
        datasets=_datasets(data) if version else None,
    )


def _relation(exported: ExportedModel) -> str | None:
    """What the model is to its base, in the hub's words; None: the base itself."""
    if exported.is_adapter:
        return "adapter"
    return "finetune" if exported.version else None


def _tags(exported: ExportedModel, *, first_order: bool) -> list[str]:
    tags = list[str]()
    if exported.version:
        tags.append("first-order" if first_order else "zeroth-order")
    if exported.is_adapter or exported.has_both or exported.is_merged:
        tags.append("lora")
    return tags


def _datasets(data: str | None) -> list[str] | None:
    """The data's id on the hub; None for local files."""
    if data is None or Path(data).exists():
        return None
    on_hub = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?):.*", data)
    return None if on_hub is None else [on_hub[1]]


def merged_card(*, base: str, adapter: Path, digest: str, head: str = "causal-lm") -> bytes:
    """Write the card of a model into whose weights a saved adapter was merged."""
    name = _called(base)
    causal = head == "causal-lm"
    lines = [
        f"The weights of `{name}` with the adapter `{_plain(name_of(adapter))}` merged into them "
        "by zo2core.",
        "",
        f"SHA-256 of the adapter's weights: `{digest}`.",
        "",
        *_HOW,
        *_loading(name, causal=causal, is_adapter=False),
    ]
    return _card(
        f"{name} with a merged adapter",
        lines,
        base=base,
        causal=causal,
        relation="finetune",
        tags=["lora"],
    )


def _card(
    title: str,
    lines: Sequence[str],
    *,
    base: str,
    causal: bool,
    relation: str | None,
    tags: Sequence[str],
    **entries: Any,
) -> bytes:
    """A card with the header that the hub reads; entries of None are left out."""
    hub_id = _hub_id(base)
    task = "text-generation" if causal else "text-classification"
    related = {"base_model": hub_id, "base_model_relation": None if hub_id is None else relation}
    header = {"library_name": "transformers", "pipeline_tag": task, **related, **entries}
    yaml = ModelCardData(**header, tags=["zo2core", *tags]).to_yaml()
    return ("\n".join(["---", yaml.strip(), "---", "", f"# {title}", "", *lines]) + "\n").encode()


def files_of_run(
    journal: Journal,
    exported: ExportedModel,
    *,
    base: str,
    options: TrainOptions | None,
    rows: RowOptions | None,
) -> dict[str, bytes]:
    """The files beside a model or an adapter that a run has made: its card, and the prompts that it
    was trained on.
    """
    prompt = prompt_of(rows)
    data = None if options is None else str(options.data)
    files = {CARD: model_card(journal, exported, base=base, data=data, prompt=prompt)}
    return files | ({PROMPT: _json(prompt).encode() + b"\n"} if prompt else {})


def rows_of_run(options: TrainOptions | None) -> RowOptions | None:
    """How the rows of a run are read, with the labels of its data; None for no run, or for labels
    of the model's config.
    """
    if options is None or options.takes_labels:
        return None
    with suppress(ZO2Error):  # data that has moved; then the run has labels only if it names them
        return with_labels(options.rows, options.data)
    return options.rows


def prompt_of(rows: RowOptions | None) -> dict[str, Any]:
    """The template of a run's prompts and the labels among which it chooses; empty if it has
    none.
    """
    if rows is None:
        return {}
    template = None if rows.prompt_template is None else with_line_breaks(rows.prompt_template)
    return {
        key: value
        for key, value in (("prompt_template", template), ("labels", rows.labels))
        if value
    }


def rows_of_export(directory: Path) -> RowOptions | None:
    """How the rows of the run were read that has made a model or an adapter; None if its directory
    does not say.
    """
    path = directory / PROMPT
    if not path.is_file():
        return None
    values = json_object(path)
    template = values.get("prompt_template")
    labels = values.get("labels", [])
    is_list = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not isinstance(template, str | None) or not is_list:
        found = f"prompt_template {str(template)[:40]!r}, labels {str(labels)[:40]}"
        remedy = "export the model again, or remove the file"
        raise CheckpointError(path, found, "a text, and a list of texts", remedy)
    rows = RowOptions(prompt_template=template, labels=tuple(labels))
    rows.require_valid()
    return rows


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _hub_id(base: str) -> str | None:
    """The id of a base of the hub; None for a local one."""
    return None if Path(base).exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", base) is None else base


def _called(base: str) -> str:
    """What a base is called: its hub id, or the name of its directory."""
    return _hub_id(base) or _plain(Path(base).resolve().name)


def _plain(name: str) -> str:
    """The name of a file without characters that mean something in Markdown or Python."""
    return re.sub(r"[^\w ./:+-]", "_", name)


def _summary(
    header: Mapping[str, Any], version: int, name: str, *, is_adapter: bool, first_order: bool
) -> Iterator[str]:
    kind = "An adapter for" if is_adapter else "The weights of"
    method = (
        "first-order steps, block by block"
        if first_order
        else "zeroth-order steps, which take forward passes only"
    )
    options = header.get("method") or header.get("estimator") or {}
    called = f" ({options['name']})" if "name" in options else ""
    steps = (
        f"after {version} {method}{called}. They were trained with zo2core."
        if version
        else "without a step of training."
    )
    yield f"{kind} `{name}` {steps}"
    if "base" in header:
        yield ""
        yield f"Fingerprint of the base model: `{header['base']}`."


def _data(header: Mapping[str, Any], data: str | None) -> Iterator[str]:
    provenance = header.get("provenance", {})
    tokens = provenance.get("tokens", {})
    if data is not None:
        yield f"- data: `{_plain(Path(data).name if Path(data).exists() else data)}`"
    yield f"- SHA-256 of the data: `{provenance.get('data sha256', 'not recorded')}`"
    if "data tokens" in tokens:
        yield f"- tokens: {tokens['data tokens']:,}, with SHA-256 `{tokens.get('data sha256')}`"
    yield f"- SHA-256 of the tokenizer: `{provenance.get('tokenizer sha256', 'not recorded')}`"


def _results(journal: Journal, version: int) -> Iterator[str]:
    losses = losses_of(journal)[:version]
    if losses:
        few = max(len(losses) // 20, 1)
        first = fmean(losses[:few])
        last = fmean(losses[-few:])
        yield (
            f"Training loss, mean of the first and of the last 5 % of the steps: {first:.4f} and "
            f"{last:.4f}."
        )
    evaluations = {
        step: results for step, results in sorted(journal.evaluations.items()) if step <= version
    }
    if not evaluations:
        yield "The run recorded no evaluation."
        return
    best = best_step(evaluations)
    shown = {
        *list(evaluations)[: _MOST_EVALUATIONS // 2],
        *list(evaluations)[-_MOST_EVALUATIONS // 2 :],
        best,
    }
    names = list(dict.fromkeys(name for results in evaluations.values() for name in results))
    yield ""
    yield f"| step | {' | '.join(name.replace('_', ' ') for name in names)} |"
    yield "|---|" + "---|" * len(names)
    for step, results in evaluations.items():
        if step in shown:
            cells = " | ".join(f"{results[name]:.4f}" if name in results else "" for name in names)
            yield f"| {step} | {cells} |"
    if len(shown) < len(evaluations):
        yield ""
        yield f"{len(shown)} of {len(evaluations)} evaluations."


def _loading(name: str, *, causal: bool, is_adapter: bool, has_both: bool = False) -> list[str]:
    loader = "AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification"
    place = "PATH_OR_NAME_OF_THIS_ADAPTER" if is_adapter else "PATH_OR_NAME_OF_THIS_MODEL"
    code = [f"from transformers import {loader}, AutoTokenizer", ""]
    if is_adapter:
        named = f'"DIRECTORY_OF_THE_FILE", gguf_file="{name}"' if is_gguf(name) else f'"{name}"'
        code = ["from peft import PeftModel", *code, f"base = {loader}.from_pretrained({named})"]
        code.append(f'model = PeftModel.from_pretrained(base, "{place}")')
    elif has_both:
        code = ["from peft import PeftModel", *code]
        code.append(f'base = {loader}.from_pretrained("{place}/{BASE_FOLDER}")')
        code.append(f'model = PeftModel.from_pretrained(base, "{place}/{ADAPTER_FOLDER}")')
        place = f"{place}/{BASE_FOLDER}"
    else:
        code.append(f'model = {loader}.from_pretrained("{place}")')
    return ["```python", *code, f'tokenizer = AutoTokenizer.from_pretrained("{place}")', "```"]


def _llama_cpp(base: str, name: str, *, is_adapter: bool) -> Iterator[str]:
    model = f'"{name}"' if is_gguf(base) else "BASE.gguf"
    if is_adapter and not is_gguf(base):
        yield (
            f"`BASE.gguf` is the base model `{name}` as a GGUF file, which llama.cpp's "
            "convert_hf_to_gguf.py writes."
        )
        yield ""
    yield "```sh"
    yield (
        f"llama-cli --model {model} --lora adapter.gguf"
        if is_adapter
        else "llama-cli --model model.gguf"
    )
    yield "ollama create NAME --file Modelfile"
    yield "```"


def _options(header: Mapping[str, Any]) -> dict[str, Any]:
    provenance = header.get("provenance", {})
    kept = {name: provenance[name] for name in _PROVENANCE if provenance.get(name) is not None}
    names = ("method", "estimator", "noise", "perturbation", "seed")
    shared = {name: header[name] for name in names if header.get(name) is not None}
    for name in shared.keys() & {"method", "estimator"}:
        shared[name] = with_peak_rates(shared[name])
    return {**shared, **kept}
