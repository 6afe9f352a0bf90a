"""Options of first-order steps: the optimizer, and checks of the options that have no effect with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from zo2adapters.trainers.adapter_options import AdapterOptions
from zo2core import OptionError
from zo2core.optimizers import OPTIMIZERS, OptimizerName
from zo2core.ranges import require_number, require_whole

_OPTIMIZER_OPTIONS = {option: name for name, entry in OPTIMIZERS.items() for option in entry.options}
_OPTIMIZATION = ("lr", "weight_decay", "decay", "warmup_steps")  # options that first-order steps use, too


class CheckedOptions(Protocol):
    """The options of a run that have to go with those of its method."""

    @property
    def model_options(self) -> AdapterOptions:
        """The adapter."""

    @property
    def optimization(self) -> Any:
        """Rates, and the options of zeroth-order steps."""

    @property
    def storage(self) -> Any:
        """Memory, device, and what is written."""

    @property
    def keep_best(self) -> bool:
        """Whether the best evaluation's model is kept."""


@dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Training by gradients."""

    method: OptimizerName | None = None
    """Train by gradients, with this optimizer and an --lr of its scale. adamw and sgd train the adapter of --lora-rank or
    --adapter, or without one all parameters, as lomo, adalomo and badam do. Without --method steps are zeroth-order."""
    max_grad_norm: float | None = None
    """With --method: largest 2-norm of all gradients together; larger ones are scaled down to it. Where all parameters are
    trained, it takes a second backward pass, except with badam."""
    max_grad_value: float | None = None
    """With --method, for all parameters: largest absolute value of a gradient's elements; larger ones are cut to it."""
    switch_every: int | None = None
    """With --method badam: steps for which one block is trained before the next one's turn. By default 50."""
    stream_blocks: bool = False
    """With --method badam: stream blocks from disk, for a model that is larger than memory. A block is written once, when
    its turn ends, and from there a run resumes."""
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

    def require_valid(self, options: CheckedOptions) -> None:
        """Refuse options that cannot be combined with the method.

        Args:
            options: Options of the run.

        Raises:
            OptionError: naming the option.
        """
        self._require_optimizer_options()
        if self.method is None:
            expected = "--method beside it; the steps without it have --clip-grad"
            for option in ("max_grad_norm", "max_grad_value", "switch_every", "stream_blocks"):
                if (value := getattr(self, option)) not in (None, False):
                    raise OptionError(option, found=f"{value:g}", expected=expected, remedy="leave one of the two out")
            return
        require_method(self.method, options.model_options)
        if self.max_grad_value is not None:
            if options.model_options.trains_adapter:
                found, expected = f"{self.max_grad_value:g} with an adapter", "no adapter, or --max-grad-norm"
                raise OptionError("max_grad_value", found=found, expected=expected, remedy="leave one of the two out")
            require_number("max_grad_value", self.max_grad_value, above=0)
        if self.switch_every is not None:
            if self.method != "badam":
                found, expected = f"{self.switch_every} with --method {self.method}", "--method badam"
                raise OptionError("switch_every", found=found, expected=expected, remedy="leave it out")
            require_whole("switch_every", self.switch_every, 1)
        if self.stream_blocks:
            self._require_streamable(options)
        optimization, storage = options.optimization, options.storage
        unused = [name.name for name in fields(optimization) if name.name not in _OPTIMIZATION]
        self._refuse(optimization, unused)
        self._refuse(storage, ["write_back_every"])  # no block is written back
        if options.model_options.trains_adapter:
            self._refuse(storage, ["write_limit_tb"])  # a snapshot of an adapter is small
        elif storage.write_limit_tb is not None:
            require_number("write_limit_tb", storage.write_limit_tb, above=0)
        self._require_lr(optimization)
        require_number("weight_decay", optimization.weight_decay, least=0)
        if self.max_grad_norm is not None:
            require_number("max_grad_norm", self.max_grad_norm, above=0)
        if storage.snapshot_every is not None:
            require_whole("snapshot_every", storage.snapshot_every, 1)

    def _require_streamable(self, options: CheckedOptions) -> None:
        """Refuse what does not go with blocks that stream and change."""
        if self.method != "badam":
            found, expected = f"it with --method {self.method}", "--method badam, which changes one block at a time"
            raise OptionError("stream_blocks", found=found, expected=expected, remedy="leave it out, or pass --method badam")
        for option, value, default in (
            ("keep_best", options.keep_best, False),
            ("snapshot_every", options.storage.snapshot_every, None),
            ("device", options.storage.device, "cpu"),
        ):
            if value != default:
                raise OptionError(
                    option,
                    found=f"{value} with --stream-blocks",
                    expected=f"{default}: only weights at the end of a turn are kept, and blocks are computed on in memory",
                    remedy="leave one of the two out",
                )

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
            require_number(name, rate, least=0, below=1)
        if self.eps is not None:
            require_number("eps", self.eps, above=0)
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
        """Refuse invalid rates, and the default of zeroth-order steps, which is far too small for an optimizer."""
        if optimization.lr == "auto":
            return
        require_number("lr", optimization.lr, above=0)
        if optimization.lr == type(optimization).lr:
            raise OptionError(
                "lr",
                found=f"{optimization.lr:g}, the default of zeroth-order steps",
                expected=f"a learning rate for {self.method}",
                remedy="pass one, such as 2e-4 for adamw, or auto",
            )


def require_method(method: OptimizerName, adapter: AdapterOptions) -> None:
    """Refuse a method that does not train adapters beside one."""
    of_adapters = [name for name, entry in OPTIMIZERS.items() if entry.of_adapter is not None]
    if method not in of_adapters and adapter.trains_adapter:
        raise OptionError(
            "method",
            found=f"{method} with {adapter.adapter_name}",
            expected=f"{' or '.join(of_adapters)} for an adapter; {method} trains all parameters",
            remedy=f"leave the adapter out, or pass --method {of_adapters[0]}",
        )
