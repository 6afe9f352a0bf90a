"""Options that say which adapter a run trains: one of peft's from a file, or a new LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zo2adapters.trainers.option_table import require_valid
from zo2core.errors import OptionError

if TYPE_CHECKING:
    from zo2adapters.models.peft_adapter import Adapter  # a command line is read without transformers

AUTO, EXPERTS = "auto", "experts"  # every linear layer before the head and outside experts, and a mixture's experts
ALL_LINEAR = "all-linear"  # what peft makes of this name


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The adapter that is trained instead of the weights."""

    adapter: Path | None = None
    """peft adapter (LoRA, DoRA, prefix tuning) to train instead of the weights, which are then only read. Pass a directory
    with a saved adapter, or an adapter_config.json as peft writes it to start a new one. Exports are adapters."""
    adapter_frozen: tuple[str, ...] = ()
    """With an adapter: parameters whose names contain one of these parts are not trained, such as lora_A for LoRA-FA."""
    lora_rank: int | None = None
    """Train a new LoRA adapter of this rank, such as 8, and only read the weights: peft's LoraConfig(r=8), with initial
    values from --seed. --adapter takes other configs."""
    lora_targets: tuple[str, ...] = ()
    """With --lora-rank: names of the layers that get an adapter, such as q_proj v_proj. By default auto, which is every
    linear layer but the output layer of a language model, and of a mixture those outside its experts and routers. auto
    experts is these and the experts. all-linear is what peft makes of it: of some mixtures the experts, too."""
    lora_alpha: int | None = None
    """With --lora-rank: peft's lora_alpha, which scales the adapter by alpha / rank. By default twice the rank."""

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained instead of the weights."""
        return self.adapter is not None or self.lora_rank is not None

    @property
    def adapter_option(self) -> str:
        """The option that asks for the adapter."""
        return "adapter" if self.lora_rank is None else "lora_rank"

    @property
    def adapter_name(self) -> str | None:
        """The adapter as text, for messages; None: there is none."""
        return str(self.adapter or f"LoRA of rank {self.lora_rank}") if self.trains_adapter else None

    def require_valid(self) -> None:
        """Refuse what the table refuses, and names of layers that are no list."""
        require_valid(self)
        names = " ".join(self.lora_targets)
        if "," in names or (ALL_LINEAR in self.lora_targets and len(self.lora_targets) > 1):
            expected = f"{ALL_LINEAR} alone, or names with spaces between them"
            remedy = f"write {' '.join(names.replace(',', ' ').replace(ALL_LINEAR, ' ').split())}"
            raise OptionError("lora_targets", found=names, expected=expected, remedy=remedy)
        if AUTO in self.lora_targets and not {*self.lora_targets} <= {AUTO, EXPERTS}:
            expected = f"{AUTO}, {AUTO} {EXPERTS}, or names of layers"
            remedy = f"write {' '.join(name for name in self.lora_targets if name != AUTO)}"
            raise OptionError("lora_targets", found=names, expected=expected, remedy=remedy)

    def with_lora_defaults(self) -> Self:
        """The options with the values that stand for those that were left out."""
        if self.lora_rank is None:
            return self
        return replace(self, lora_targets=self.lora_targets or (AUTO,), lora_alpha=self.lora_alpha or 2 * self.lora_rank)

    def adapter_of(self, head: str, *, seed: int = 0, base: str | None = None, is_trained: bool = True) -> Adapter | None:
        """The adapter to open the model with; None: the weights are trained."""
        if not self.trains_adapter:
            return None
        from zo2adapters.models.peft_adapter import Adapter

        config = self.adapter if self.lora_rank is None else self._lora_config(head)
        if base is not None and Path(base).is_dir():
            base = str(Path(base).resolve())
        return Adapter(config=config, frozen=self.adapter_frozen, seed=seed, base=base, is_trained=is_trained)

    def _lora_config(self, head: str) -> Any:
        """Peft's config of the new adapter."""
        from zo2adapters.optional_package import optional_package

        filled = self.with_lora_defaults()
        peft: Any = optional_package("peft", install="zo2core[peft]")
        return peft.LoraConfig(
            r=filled.lora_rank,
            lora_alpha=filled.lora_alpha,
            target_modules=ALL_LINEAR if filled.lora_targets == (ALL_LINEAR,) else list(filled.lora_targets),
            task_type="CAUSAL_LM" if head == "causal-lm" else None,  # peft's own for others add a head of theirs
        )
