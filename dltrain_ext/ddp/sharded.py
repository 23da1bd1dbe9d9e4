"""The hook whose optimizer is sharded: a reduce-scatter of gradients, and an all-gather of parameters (ZeRO-1)."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext.comm.arguments import check_names
from dltrain_ext.compress.scaling import StepOutcome
from dltrain_ext.ddp.hook import AllReduceState
from dltrain_ext.ddp.parameters import trained_parameters
from dltrain_ext.ddp.selection import Reduction
from dltrain_ext.ddp.shards import Shards, check_shardable


class ShardedOptimizerState(AllReduceState):
    """The state that :func:`dltrain_ext.ddp.register` returns for ``shard=optimizer``.

    Each rank gets the average of its rows of each gradient, updates these rows, and keeps optimizer state for them
    alone. After the step all ranks gather the parameters, bit for bit (stage 1 of ZeRO, arXiv:1910.02054).

    Args:
        model: the DDP model.
        optimizer: one of its trained parameters, with the same state on all ranks, or none yet. Its groups and its
            state get the shards.
        codec, algorithm, options: as for :class:`AllReduceState`, without ``"auto"`` codecs, ``tuning``, and
            ``ranks_per_host``; the algorithm is one for ``comm.reduce_scatter``.

    Attributes:
        shards: a module whose parameters are the shards, DTensors by the names of the model's parameters. Their
            gradients are there, too. Use it where a function takes a model and this optimizer, such as
            ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, or gradients, such as
            ``clip_grad_norm_(state.shards.parameters(), 1.0)``.
    """

    _collective = "reduce_scatter"

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        codec: str | None = None,
        algorithm: str = "auto",
        **options: Any,
    ):
        named = trained_parameters(model.module)
        if refused := options.keys() & {"tuning", "ranks_per_host"}:
            raise ValueError(f"{min(refused)}: expected none with shard, whose collectives have one level and one plan")
        if ignored := named.keys() & set(model.parameters_to_ignore):
            raise ValueError(f"shard: expected parameters that DDP reduces, got {min(ignored)}, which it ignores")
        codec = "int8" if codec is None else codec
        check_names(algorithm, codec, self._collective)
        check_shardable(named, optimizer)
        super().__init__(
            model.process_group,
            codec=codec,
            algorithm="direct" if algorithm == "auto" else algorithm,
            named_parameters=named.items(),
            ranks_per_host=1,
            **options,
        )
        self._optimizer = optimizer

    def _attach(self, model: DistributedDataParallel) -> None:
        super()._attach(model)
        self._shards = Shards(self._parameters.named(), self._optimizer, self._group, self.communicator)
        self.shards = self._shards.module

    def _choose(self, group: dist.ProcessGroup) -> Reduction:
        return self._asked

    def _follow(self) -> None:
        model = self._model()
        if model is not None and (model._join_config.enable or model.process_group is not self._group):
            raise ValueError("shard: expected the group that the model was registered with, and no model.join()")

    def _options_of_buckets(self) -> dict[str, Any]:
        scaler, options = self.scaler, {"with_squares": False, "owners": self._world_size}
        if scaler is None or not self._is_scaled:
            return options
        return {**options, "outcome": lambda: StepOutcome.of_scaler(scaler)}

    def _is_by_parameter(self, reduction: Reduction) -> bool:
        return True

    def _begin_pass(self) -> None:
        # DDP writes the gradients in a callback that it queues during the pass. One that is queued by another callback
        # runs after it.
        queue: Any = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._shards.take_gradients))

    @property
    def grad_stats(self) -> NoReturn:
        """Raises RuntimeError: no rank has the averages of all gradients. Call ``scaler.step`` without it, which adds
        up over the shards."""
        raise RuntimeError("grad_stats: expected a state without shard; call step without it")

    def stats(self) -> dict[str, Any]:
        """Returns the entries of :meth:`AllReduceState.stats`, and ``gather_bytes``, which this rank has sent for
        parameters; ``wire_bytes`` includes them."""
        return {**super().stats(), "gather_bytes": self._shards.wire_bytes}
