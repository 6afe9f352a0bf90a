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

_OPTIMIZER_OPTIONS: Mapping[str, MethodName] = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}
_OPTIMIZATION = ("lr", "weight_decay", "decay", "warmup_steps")  # options of a zeroth-order step that these steps take, too
_STORAGE_WITHOUT_EFFECT = ("write_back_every", "write_limit_tb")  # no block is ever written


@dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Training by gradients."""

    method: MethodName | None = None
    """Train an adapter by gradients, with this optimizer; a block is read at most twice a step, and never written. Needs
    --adapter and an --lr of its scale, such as 2e-4. Without it steps are zeroth-order."""
    max_grad_norm: float | None = None
    """With --method: largest 2-norm of all gradients together; larger ones are scaled down to it."""
    betas: tuple[float, float] | None = None
    """With --method adamw: decay rates of the running means of gradients and of their squares; by default 0.9 and 0.999."""
    eps: float | None = None
    """With --method adamw: term added to the denominator; by default 1e-8."""
    momentum: float | None = None
    """With --method sgd: factor by which the previous change is repeated; by default 0."""
    nesterov: bool = False
    """With --method sgd and --momentum: use Nesterov momentum."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FirstOrder:
        """The options from JSON values, in which ``betas`` is a list.

        Raises:
            TypeError, ValueError: if the values are not such options.
        """
        values = dict(values)
        if values.get("betas") is not None:
            first, second = values["betas"]
            values["betas"] = (first, second)
        return cls(**values)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The options of the method's optimizer that were given, under the names that torch.optim has."""
        given = {name: getattr(self, name) for name in _OPTIMIZER_OPTIONS}
        return {name: value for name, value in given.items() if value is not None and value is not False}

    def require_valid(self, options: RunOptions) -> None:
        """Refuse options that do not go with the method.

        Args:
            options: Options of the run that these are part of.

        Raises:
            OptionError: naming the option.
        """
        self._require_optimizer_options()
        if self.method is None:
            if self.max_grad_norm is not None:
                expected = "--method beside it; the steps without it have --clip-grad"
                raise OptionError(
                    "max_grad_norm", found=f"{self.max_grad_norm:g}", expected=expected, remedy="leave one of the two out"
                )
            return
        if options.model_options.adapter is None:
            raise OptionError(
                "method",
                found=f"{self.method} without an adapter",
                expected="--adapter beside it: gradients train adapters, on weights that are only read",
                remedy="name an adapter_config.json as peft writes it, or leave --method out",
            )
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

    def _require_optimizer_options(self) -> None:
        """Refuse options of another optimizer than the method's, and numbers out of range."""
        for name, value in self.optimizer_options.items():
            method = _OPTIMIZER_OPTIONS[name]
            if method != self.method:
                raise OptionError(
                    name,
                    found=" ".join(map(str, value)) if isinstance(value, tuple) else str(value),
                    expected=f"no such option without --method {method}, which has it",
                    remedy=f"pass --method {method}, or leave it out",
                )
        rates = [("betas", beta) for beta in self.betas or ()]
        rates += [] if self.momentum is None else [("momentum", self.momentum)]
        for name, rate in rates:
            if not 0 <= rate < 1:
                expected = "a number of at least 0 and below 1"
                raise OptionError(name, found=repr(rate), expected=expected, remedy="pass one in this range")
        if self.eps is not None:
            require_positive("eps", self.eps)
        if self.nesterov and not self.momentum:
            raise OptionError(
                "nesterov", found="it without momentum", expected="--momentum beside it", remedy="pass --momentum 0.9"
            )

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
        require_positive("lr", optimization.lr)
        if optimization.lr == type(optimization).lr:
            raise OptionError(
                "lr",
                found=f"{optimization.lr:g}, the default of zeroth-order steps",
                expected=f"a learning rate for {self.method}",
                remedy="pass one, such as 2e-4 for adamw",
            )
