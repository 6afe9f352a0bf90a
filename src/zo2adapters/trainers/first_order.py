"""Options of first-order steps: the optimizer, and checks of the options that have no effect with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zo2adapters.optional_package import optional_package
from zo2adapters.trainers.adapter_options import AdapterOptions
from zo2adapters.trainers.optimization import StepSize
from zo2core.errors import OptionError
from zo2core.names import OF_ADAPTERS, OptimizerName
from zo2core.ranges import require_number

if TYPE_CHECKING:
    from zo2core import BlockUpdate


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
    momentum: float | None = None
    """With --method sgd: factor by which the previous change is repeated; by default 0."""

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The options of the method's optimizer that were given, under the names that torch.optim has."""
        given = {"betas": self.betas, "momentum": self.momentum}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def measures_gradients(self) -> bool:
        """Whether a step of all parameters sweeps twice: first to measure the gradients of more than one segment."""
        return (self.max_grad_norm is not None and self.method != "badam") or self.loss_scaling

    def block_update(self, *, weight_decay: float, seed: int = 0) -> BlockUpdate:
        """The optimizer of all parameters."""
        from zo2core import Delayed, TorchOptimizer
        from zo2core.optimizers import make_block_update

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

    def require_valid(self, adapter: AdapterOptions, size: StepSize) -> None:
        """Refuse a method that does not train an adapter, and the rate of zeroth-order steps, which is far too small."""
        assert self.method is not None, "these are options of a method"
        require_method(self.method, adapter)
        require_number("weight_decay", size.weight_decay, least=0)
        if size.lr == StepSize.lr:
            found = f"{size.lr:g}, the default of zeroth-order steps"
            remedy = "pass one, such as 2e-4 for adamw, or auto"
            raise OptionError("lr", found=found, expected=f"a learning rate for {self.method}", remedy=remedy)
        if size.lr != "auto":
            require_number("lr", size.lr, above=0)


def require_method(method: OptimizerName, adapter: AdapterOptions) -> None:
    """Refuse a method that does not train adapters beside one."""
    if method not in OF_ADAPTERS and adapter.trains_adapter:
        found, remedy = f"{method} with {adapter.adapter_name}", f"leave the adapter out, or pass --method {OF_ADAPTERS[0]}"
        expected = f"{' or '.join(OF_ADAPTERS)} for an adapter; {method} trains all parameters"
        raise OptionError("method", found=found, expected=expected, remedy=remedy)
