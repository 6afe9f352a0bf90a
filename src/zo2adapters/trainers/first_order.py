"""Options of first-order steps: the optimizer, and checks of the options that have no effect with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zo2adapters.optional_package import optional_package
from zo2adapters.trainers.adapter_options import AdapterOptions
from zo2adapters.trainers.option_table import ROWS, require_effect
from zo2core import BlockUpdate, Delayed, TorchOptimizer
from zo2core.errors import OptionError
from zo2core.optimizers import OPTIMIZERS, OptimizerName, make_block_update
from zo2core.ranges import require_number, require_whole

if TYPE_CHECKING:
    from zo2adapters.trainers.options import RunOptions  # it has these options


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
    """With --method and no adapter: stream blocks from disk, for a model that is larger than memory. With badam a block is
    written once, when its turn ends; with other methods each step writes all changed blocks and their optimizer states, and
    --snapshot-every says how often they are committed, by default at each step. More than 1.2 TB in 1,000 steps have to be
    allowed by --write-limit-tb."""
    loss_scaling: bool = False
    """With --method and no adapter: scale the loss, so that small gradients do not vanish in float16, by the rules of
    torch.amp.GradScaler. Steps whose gradients overflow are skipped. It takes a second backward pass."""
    delayed_update: bool = False
    """With --method adamw and no adapter: change the weights one step late, so that the host updates while the device
    computes the next step, as ZeRO-Offload does. This is another run: gradients are those of weights one step older."""
    state_bits: int = 32
    """With --method adamw and no adapter: 8 keeps the moments in 8 bits, by bitsandbytes' AdamW8bit, in a quarter of the
    memory."""
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
        given = {name: getattr(self, name) for entry in OPTIMIZERS.values() for name in entry.options}
        return {name: value for name, value in given.items() if value is not None and value is not False}

    @property
    def measures_gradients(self) -> bool:
        """Whether a step of all parameters sweeps twice: first to measure the gradients of more than one segment."""
        return (self.max_grad_norm is not None and self.method != "badam") or self.loss_scaling

    def block_update(self, *, weight_decay: float, seed: int = 0) -> BlockUpdate:
        """The optimizer of all parameters.

        Args:
            weight_decay: Its weight decay.
            seed: Seed of the order in which badam trains blocks.

        Raises:
            MissingPackageError: if the states have 8 bits, and bitsandbytes is not installed.
        """
        assert self.method is not None, "zeroth-order steps have no optimizer"
        options = self.optimizer_options
        update = make_block_update(
            self.method, weight_decay=weight_decay, switch_every=self.switch_every, seed=seed, options=options
        )
        if self.state_bits == 8:
            optimizers = optional_package("bitsandbytes", install="bitsandbytes").optim
            factory = partial(optimizers.AdamW8bit, weight_decay=weight_decay, **options)
            update = TorchOptimizer(factory, options={**update.options, "state_bits": 8})
        return Delayed(update) if self.delayed_update else update

    def require_valid(self, options: RunOptions) -> None:
        """Refuse options that cannot be combined with the method.

        Args:
            options: Options of the run.

        Raises:
            OptionError: naming the option.
        """
        if self.method is not None:
            require_method(self.method, options.model_options)
        require_effect(options, self.method, trains_adapter=options.model_options.trains_adapter)
        if self.method is None:
            return
        self._require_optimizer_options()
        if self.max_grad_value is not None:
            require_number("max_grad_value", self.max_grad_value, above=0)
        if self.switch_every is not None:
            require_whole("switch_every", self.switch_every, 1)
        if self.stream_blocks:
            self._require_streamable(options)
        require_state_bits(self.state_bits)
        optimization, storage = options.optimization, options.storage
        if storage.write_limit_tb is not None:
            require_number("write_limit_tb", storage.write_limit_tb, above=0)
        self._require_lr(optimization)
        require_number("weight_decay", optimization.weight_decay, least=0)
        if self.max_grad_norm is not None:
            require_number("max_grad_norm", self.max_grad_norm, above=0)
        if storage.snapshot_every is not None:
            require_whole("snapshot_every", storage.snapshot_every, 1)

    def _require_streamable(self, options: RunOptions) -> None:
        """Refuse what does not go with blocks that stream and change."""
        refused: list[tuple[str, object, object, str]] = [
            ("delayed_update", self.delayed_update, False, "the host computes all of a step"),
            ("keep_best", options.keep_best, False, "only the last committed weights are kept"),
            ("device", options.storage.device, "cpu", "blocks are computed on in host memory"),
        ]
        if self.method == "badam":
            refused.append(("snapshot_every", options.storage.snapshot_every, None, "the end of a turn is committed"))
        for option, value, default, why in refused:
            if value != default:
                raise OptionError(
                    option,
                    found=f"{value} with --stream-blocks",
                    expected=f"{default}: {why}",
                    remedy="leave one of the two out",
                )

    def _require_optimizer_options(self) -> None:
        """Refuse numbers out of range."""
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


def require_state_bits(bits: int) -> None:
    """Refuse a number of bits that no optimizer's states have.

    Raises:
        OptionError: naming it.
    """
    if bits not in (8, 32):
        raise OptionError("state_bits", found=repr(bits), expected="8 or 32", remedy="pass one of them")


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


def used_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the options that a run's method does not read.

    Args:
        options: All options of the run as JSON values, in their groups, also of a file that somebody has changed.
    """
    used = dict(options)
    group, optimization = used.get("first_order"), used.get("optimization")
    if isinstance(group, dict) and group.get("method") is None:
        del used["first_order"]
    elif isinstance(group, dict) and isinstance(optimization, dict):
        used["optimization"] = {
            name: value for name, value in optimization.items() if name in ROWS and len(ROWS[name].effect.methods) > 1
        }
    return used
