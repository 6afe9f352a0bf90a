"""First-order steps as a user asks for them: which optimizer, and which other options then have no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from zo2adapters.ranges import require_at_least
from zo2core import OptionError
from zo2core.estimators.inputs import require_positive, require_weight_decay

if TYPE_CHECKING:
    from zo2adapters.trainers.options import RunOptions

MethodName: TypeAlias = Literal["adamw", "sgd"]

METHODS: Mapping[MethodName, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

_OPTIMIZATION = ("lr", "weight_decay", "decay", "warmup_steps")  # options of a zeroth-order step that these steps take, too
_STORAGE_WITHOUT_EFFECT = ("write_back_every", "write_limit_tb")  # no block is ever written


@dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Training by gradients."""

    method: MethodName | None = None
    """Train an adapter by gradients, with this optimizer; a block is read at most twice a step, and never written. Needs
    --lora-rank or --adapter, and an --lr of its scale, such as 2e-4. Without it steps are zeroth-order."""
    max_grad_norm: float | None = None
    """With --method: largest 2-norm of all gradients together; larger ones are scaled down to it."""

    def require_valid(self, options: RunOptions) -> None:
        """Refuse options that do not go with the method.

        Args:
            options: Options of the run that these are part of.

        Raises:
            OptionError: naming the option.
        """
        if self.method is None:
            if self.max_grad_norm is not None:
                expected = "--method beside it; the steps without it have --clip-grad"
                raise OptionError(
                    "max_grad_norm", found=f"{self.max_grad_norm:g}", expected=expected, remedy="leave one of the two out"
                )
            return
        options.model_options.require_adapter(self.method)
        optimization, storage = options.optimization, options.storage
        unused = [name.name for name in fields(optimization) if name.name not in _OPTIMIZATION]
        self._refuse(optimization, unused)
        self._refuse(storage, _STORAGE_WITHOUT_EFFECT)
        self._require_lr(optimization)
        require_weight_decay(optimization.weight_decay)
        if self.max_grad_norm is not None:
            require_positive("max_grad_norm", self.max_grad_norm)
        if storage.snapshot_every is not None:
            require_at_least("snapshot_every", storage.snapshot_every, 1)

    def _refuse(self, group: Any, names: list[str] | tuple[str, ...]) -> None:
        for name in names:
            value = getattr(group, name)
            if value != getattr(type(group), name):
                raise OptionError(
                    name,
                    found=str(getattr(value, "value", value)),
                    expected=f"no such option with --method {self.method}, on which it has no effect",
                    remedy="leave one of the two out",
                )

    def _require_lr(self, optimization: Any) -> None:
        """Refuse a rate that is none, and the default of zeroth-order steps, which changes next to nothing here."""
        if optimization.lr == "auto":
            return
        require_positive("lr", optimization.lr)
        if optimization.lr == type(optimization).lr:
            raise OptionError(
                "lr",
                found=f"{optimization.lr:g}, the default of zeroth-order steps",
                expected=f"a learning rate for {self.method}",
                remedy="pass one, such as 2e-4 for adamw, or auto",
            )
