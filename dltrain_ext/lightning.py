"""For PyTorch Lightning's Trainer: a strategy with the DDP comm hook, a precision plugin with the loss scaler, and a
callback with the outer optimizer of several sites."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dltrain_ext import ddp, local_sgd
from dltrain_ext.amp import GradStats, LossScaler
from dltrain_ext.compress.checkpoint import gather_feedback

try:
    from lightning.pytorch import Callback, LightningModule, Trainer, plugins, strategies
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.utilities import GradClipAlgorithmType
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError("dltrain_ext.lightning: expected PyTorch Lightning; pip install lightning") from None

__all__ = ["DDPStrategy", "DiLoCo", "MixedPrecision"]

_KEY = "dltrain_ext.hook"  # the key in Lightning's checkpoints
_GIVEN = {"process_group", "named_parameters", "scaler", "timeout"}  # options that Lightning determines
_OPTIONS = inspect.signature(ddp.AllReduceState).parameters.keys() - _GIVEN


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's ``DDPStrategy`` whose gradients are reduced by :func:`dltrain_ext.ddp.allreduce_hook`, on any device.

    Its checkpoints contain the residuals of all ranks, gathered on rank 0. A run that continues from one has the same
    bits as a run that never stopped, and may have another world size. While batches are accumulated nothing is sent.

    Args:
        codec, algorithm, error_feedback, options: those of :class:`dltrain_ext.ddp.AllReduceState`, except for the
            group, timeout and scaler, which are those of Lightning's group and precision plugin; other options are
            Lightning's.

    Attributes:
        hook_state: the :class:`dltrain_ext.ddp.AllReduceState` of the latest ``fit``; None before.

    Raises:
        ValueError: the options contain another comm hook.
    """

    hook_state: ddp.AllReduceState | None = None

    def __init__(
        self, codec: str = "int8", algorithm: str = "auto", error_feedback: bool = True, **options: Any
    ) -> None:
        for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name}: expected None, since this strategy has its own hook, got {options[name]!r}; "
                    "lightning.pytorch.strategies.DDPStrategy takes one"
                )
        self._hook: dict[str, Any] = {"codec": codec, "algorithm": algorithm, "error_feedback": error_feedback}
        self._hook.update({name: options.pop(name) for name in _OPTIONS & options.keys()})
        super().__init__(**options)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        self.hook_state = ddp.register(self.model, scaler=scaler, **self._hook)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.hook_state is not None and "optimizer_states" in checkpoint:  # not in one of weights only
            checkpoint[_KEY] = gather_feedback(self.hook_state.state_dict(), self.root_device)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Also loads the hook's state, which exists by now: Lightning reads the file before the model is wrapped."""
        super().load_optimizer_state_dict(checkpoint)
        if self.hook_state is not None and _KEY in checkpoint:
            self.hook_state.load_state_dict(checkpoint[_KEY])


class _Scaler(LossScaler):
    """Clips in its step the gradients that Lightning asks to clip before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_norms: dict[Optimizer, float] = {}

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales once: Lightning does not know that clipping by value may have unscaled already."""
        if self._enabled and self._state_of(optimizer)["stage"] is OptState.READY:
            super().unscale_(optimizer)

    def step(
        self,
        optimizer: Optimizer,
        max_norm: float | None = None,
        grad_stats: GradStats | None = None,
        **kwargs: Any,
    ) -> Any:
        return super().step(optimizer, self.max_norms.pop(optimizer, max_norm), grad_stats, **kwargs)


class MixedPrecision(plugins.MixedPrecision):
    """Lightning's ``MixedPrecision`` with a :class:`dltrain_ext.amp.LossScaler`, for ``Trainer(plugins=[...])``.

    With the optimizers of ``dltrain_ext.optim``, unscaling and ``Trainer(gradient_clip_val=...)`` are part of the
    step's one pass, so hooks like ``on_before_optimizer_step`` see gradients that are still scaled and not clipped.
    Clipping by value is a separate pass. Checkpoints can be exchanged with Lightning's plugin in both directions.

    Args:
        precision: ``"16-mixed"``, also on the CPU, or ``"bf16-mixed"``, which scales nothing and skips no step, but
            clips in the same pass.
        device: the type of the accelerator, ``"cpu"`` or ``"cuda"``.
        options: arguments of the ``LossScaler``; there must be none with ``"bf16-mixed"``.

    Raises:
        TypeError, ValueError: ``precision`` is another one, or options are given that have no effect.
    """

    def __init__(self, precision: Literal["16-mixed", "bf16-mixed"], device: str, **options: Any) -> None:
        if not isinstance(precision, str):
            raise TypeError(f"precision: expected '16-mixed' or 'bf16-mixed', got {precision!r}")
        is_scaled = precision == "16-mixed"
        if options and not is_scaled:
            raise ValueError(f"{', '.join(options)}: expected none with {precision!r}, whose loss is not scaled")
        self._scaler = _Scaler(device, enabled=is_scaled, **options)
        super().__init__(precision, device, self._scaler if is_scaled else None)
        self.scaler = self._scaler

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self._scaler.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self._scaler.max_norms[optimizer] = clip_val


class DiLoCo(Callback):
    """Averages the models of several sites, each of which trains with its own ``Trainer``, by
    :class:`dltrain_ext.local_sgd.DiLoCo`.

    Join the sites by ``torch.distributed.init_process_group``, or pass their group. The Trainer of a site of one rank
    has ``strategy="auto"`` and ``devices=1``; that of a site of several ranks has a strategy for the group of these.
    Its checkpoints contain the outer optimizer's state of this rank, and a run that continues from one has the same
    bits as a run that never stopped, if all sites saved after the same step.

    Args:
        options: those of :class:`dltrain_ext.local_sgd.DiLoCo`, except for the model and the inner optimizer, which are
            the Trainer's.

    Attributes:
        outer: the outer optimizer of the latest ``fit``; None before.

    Raises:
        ValueError: the module has not one optimizer, when ``fit`` begins.
    """

    outer: local_sgd.DiLoCo | None = None

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loaded: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"configure_optimizers: expected one optimizer, got {len(trainer.optimizers)}")
        model = trainer.model
        assert model is not None
        self.outer = local_sgd.DiLoCo(model, trainer.optimizers[0], **self._options)
        if self._loaded:
            self.outer.load_state_dict(self._loaded)
            self._loaded = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.outer is not None:
            self.outer.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.outer is not None:
            self.outer.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.outer is None else self.outer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
