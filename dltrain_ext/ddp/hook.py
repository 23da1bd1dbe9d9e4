"""The hook, and what it needs."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext._arguments import check_number
from dltrain_ext.amp import GradStats
from dltrain_ext.comm import Communicator, Tuning
from dltrain_ext.comm.groups import group_of
from dltrain_ext.compress import checkpoint
from dltrain_ext.compress.arguments import check_options
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.parameters import Parameters
from dltrain_ext.compress.scaling import is_scaling, loss_scale_of
from dltrain_ext.ddp.buckets import Buckets
from dltrain_ext.ddp.selection import Reduction, choose, usual_codec
from dltrain_ext.ddp.statistics import stats_of


class AllReduceState:
    """What :func:`allreduce_hook` needs: ``model.register_comm_hook(AllReduceState(...), allreduce_hook)``.

    Each parameter's gradient is cut and encoded by itself, so what becomes of it does not depend on DDP's buckets, and
    a run that goes on from a checkpoint has the bits of one that never stopped. Making a state is a collective call
    over the group.

    Args:
        process_group: the model's group; the default group where None.
        codec: one of ``codecs.CODECS``: what gradients travel as. None: ``"int8"`` on the CPU and ``"auto"`` on CUDA,
            where links may be too fast to compress. Measured, int8 and int4 learn as fp32 does, and sign
            does not with AdamW, least of all with feedback (docs/learning.md). Parameters of one dimension or
            none, and small ones, travel as fp32 in the same messages. ``"auto"``: the most accurate one that takes at
            most 10 % longer than the fastest on this group, or none and the backend's own all-reduce, where compressing
            would lose against that in the gradients' own dtype. Without a ``tuning`` codecs and plans are timed, for
            about a second, with buckets of 25 MiB or of the whole model where that is smaller. This is decided here,
            once: ``choice`` has it, the logger ``dltrain_ext`` tells it on rank 0, and a run that goes on from a
            checkpoint of as many ranks takes that of the run before.
        algorithm: as for :func:`dltrain_ext.comm.all_reduce`, but one for buckets of any size. ``"auto"``: that of the
            tuning; without one ``"ring"`` for up to 8 ranks on the CPU and where hosts have different numbers of
            ranks, else ``"direct"``, so that runs have the same bits; with the codec ``"auto"`` the fastest, or the one
            that encodes least often where it takes at most 10 % longer.
        error_feedback: what encoding loses of a gradient is added to that of the next step (Seide et al. 2014;
            Karimireddy et al. 2019), on the rank that lost it. Costs an element of ``feedback_dtype`` for each of the
            gradients', two with a ``scaler``. Where all ranks' gradients are zero, as of unused parameters, what has
            been lost waits; so it does on ranks that have joined, which with a ``scaler`` also lose what they encode.
        feedback_dtype: ``"fp32"``, or ``"bf16"`` for half the memory and less exact feedback.
        scaler: the ``LossScaler``, or any ``torch.amp.GradScaler``, that scales the loss. Feedback is kept in unscaled
            units, and is left as it was by a step whose gradients are not finite, since that one is skipped. Without
            it gradients are taken to be unscaled, no step to be skipped, and there are no ``grad_stats``. One with
            ``enabled=False`` is given for these.
        named_parameters: ``model.named_parameters()``, of the model without DDP; needed for checkpoints.
        min_compress_numel: parameters of fewer elements than that are small.
        warmup_steps: so many backward passes go uncompressed at first.
        rounding, seed: as for :func:`dltrain_ext.codecs.encode`. Stochastic rounding draws for each element of each
            step numbers of its own.
        timeout, transport, ranks_per_host, tuning: as for :class:`dltrain_ext.comm.Communicator`; each bucket has the
            whole timeout. In two levels a
            host's ranks share each bucket out, so there what becomes of a gradient does depend on its bucket; and of
            what is lost in the first step, before DDP lays its buckets anew, a part stays where it is.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: str | None = None,
        algorithm: str = "auto",
        error_feedback: bool = True,
        feedback_dtype: str = "fp32",
        scaler: torch.amp.GradScaler | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        min_compress_numel: int = 1024,
        warmup_steps: int = 0,
        rounding: str = "nearest",
        seed: int = 0,
        timeout: timedelta | None = None,
        transport: str = "auto",
        ranks_per_host: int | None = None,
        tuning: Tuning | str | os.PathLike[str] | None = None,
    ):
        parameters = Parameters(named_parameters)
        if codec is None:
            codec = usual_codec(process_group, (parameters.names or {}).values())
        self._stochastic, self._feedback_dtype = check_options(
            algorithm,
            "raw" if isinstance(codec, str) and codec == "auto" else codec,
            error_feedback=error_feedback,
            feedback_dtype=feedback_dtype,
            scaler=scaler,
            min_compress_numel=min_compress_numel,
            rounding=rounding,
            seed=seed,
        )
        check_number(warmup_steps, "warmup_steps", 2**63)
        self._communicator_of = partial(
            Communicator, timeout=timeout, transport=transport, ranks_per_host=ranks_per_host, tuning=tuning
        )
        self._asked, self._parameters = Reduction(codec, algorithm), parameters
        self._use(process_group)
        self.scaler = scaler
        self.min_compress_numel, self.warmup_steps, self.seed = min_compress_numel, warmup_steps, seed
        self.steps = 0  # backward passes so far
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._forget()

    def _use(self, group: dist.ProcessGroup | None) -> None:
        self._group = group = group_of(group)
        self.communicator = self._communicator_of(group)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self.choice = choose(self.communicator, group, self._asked, (self._parameters.names or {}).values())

    def _watch(self, model: DistributedDataParallel) -> None:
        """Goes by what DDP does not tell a hook: whether buckets are skipped, and that the model has another group."""
        self._model = weakref.ref(model)

    def _follow(self) -> None:
        """Into the model's group, where that has been exchanged. Raises ValueError for a join() that cannot be."""
        model = self._model()
        if model is None:
            return
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise ValueError(
                "divide_by_initial_world_size: expected True in model.join(), got False; averages are over all ranks "
                "of the group"
            )
        if model.process_group is not self._group:
            self._use(model.process_group)

    @property
    def codec(self) -> str:
        """What gradients travel as, by its name, also where ``"auto"`` was asked for."""
        return self.choice.codec

    @property
    def algorithm(self) -> str:
        """The plan, likewise."""
        return self.choice.algorithm

    @property
    def _is_scaled(self) -> bool:
        return is_scaling(self.scaler)

    def _forget(self) -> None:
        """Begins anew, with nothing lost."""
        dtype = self._feedback_dtype
        self._feedback = None if dtype is None else Feedback[Tensor](dtype, double_buffered=self._is_scaled)
        self._buckets = Buckets(
            self._parameters,
            self._feedback,
            min_compress_numel=self.min_compress_numel,
            with_squares=self.scaler is not None,
        )

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"bucket: expected a GradBucket, got {type(bucket).__name__}; where that comes from torch.compile, "
                "leave torch._dynamo.config.optimize_ddp at its default; where it comes from FSDP, use fully_shard "
                "and dltrain_ext.fsdp.register"
            )
        if self._buckets.begins(bucket, skips=getattr(self._model(), "skip_all_reduce_unused_params", False)):
            self._buckets.begin()
            self._follow()
            self.steps += 1
        codec = "raw" if self._world_size == 1 or self.steps <= self.warmup_steps else self.codec
        layout = self._buckets.find(bucket, codec, self.choice.is_by_parameter(codec, self._world_size)).layout
        # A rank that has joined is called outside of backward. Its scaler stands still, so what is lost now it cannot
        # put in units that will fit later.
        feeds = layout.has_feedback and not (self._is_scaled and torch._C._current_graph_task_id() == -1)
        buffer = bucket.buffer()
        work = self.communicator.reduce_bucket(
            buffer,
            layout.handle,
            average=True,
            feeds=feeds,
            algorithm=self.algorithm,
            segments=self.choice.segments or 0,
            codec=codec,
            loss_scale=loss_scale_of(self.scaler, buffer.device) if feeds else None,
            stochastic=self._stochastic,
            seed=self.seed,
            step=self.steps % 2**32,
        )
        self._buckets.submitted(work.get_future(), feeds)
        if bucket.is_last() and buffer.device.type == "cpu" and torch._C._current_graph_task_id() != -1:
            # Before DDP waits itself, where Ctrl-C is not heard.
            Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]
        return work.get_future()

    def _check_scaler(self) -> None:
        if self.scaler is None:
            raise RuntimeError("grad_stats: expected a state that was given the scaler, whose step these are for")

    @property
    def grad_stats(self) -> GradStats:
        """The sum of squares of all averaged gradients of the latest backward pass, found while they were reduced:
        what ``LossScaler.step`` takes, to spare a pass over them. Where DDP has skipped unused parameters, gradients
        that these still have count too.

        It holds for gradients as DDP left them: who changes ``.grad`` since, by clipping or unscaling, say, or whose
        optimizer has other parameters than the DDP model, must not hand it over. A float64 number on the device of the
        first bucket; no host waits for it.

        Raises:
            RuntimeError: there is no scaler, has been no backward pass yet, or a parameter is in no bucket.
        """
        self._check_scaler()
        return self._buckets.grad_stats()

    def stats(self) -> dict[str, Any]:
        """What has been sent, and where the time went.

        Returns:
            ``buckets`` averaged, ``wire_bytes`` and ``inside_bytes`` sent by this rank, as its communicator counts
            them; ``steps``, backward passes; ``ratio``, what fp32 messages would have, over what those of the latest
            pass have; ``hidden``, the share of the time of communication that backward goes on beside it: what is left
            is from the moment that the last bucket is ready until it has been reduced; and ``per_bucket``, for each
            since it was laid out: ``numel``, ``wire_bytes``, ``ratio``; ``codec_error``, the 2-norm of what this rank
            has lost and not yet fed back, over that of the averaged gradient; and seconds a pass: ``queued`` behind
            other buckets, ``busy``, of that ``encoding`` (and decoding), ``sending`` and ``waiting`` for peers; and
            ``late``, from when it was ready until it was reduced. None for what is not known: errors without feedback,
            and times on CUDA, where calls only enqueue and ``torch.profiler`` shows them. Waits for the device.
        """
        counted = self.communicator.stats()
        self._buckets.settle_after_backward()
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return {
            "buckets": counted.pop("calls"),
            **counted,
            "steps": self.steps,
            **self.choice.to_dict(),
            **stats_of(self._buckets.reduced, self._feedback, scale),
        }

    def state_dict(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """Plain tensors and numbers, for ``torch.save`` on every rank or ``torch.distributed.checkpoint``.

        Args:
            saved_by: where a checkpoint of another world size is to be read in place, as torch.distributed.checkpoint
                does: that world size. The tensors are then empty places for what this rank takes of it.

        Returns:
            ``version``, ``steps``, ``world_size``, ``choice``, of codec and plan, and ``feedback``, by rank
            (``"rank 0 of 4"``), then by parameter, in its shape, in units of the unscaled, averaged gradient.

        Raises:
            ValueError: the parameters' names are not known.
        """
        named = self._parameters.named()
        self._buckets.settle_after_backward()
        saved = checkpoint.save(self._feedback, named, self.steps, self._rank, self._world_size, saved_by)
        return {**saved, "choice": self.choice.to_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a checkpoint: of this rank, where the world size is the same; else of several ranks, as a list.

        ``choice`` becomes what it was then, where ``"auto"`` was asked for, so that the bits are those of a run that
        never stopped. With another world size it stays as it is, and each rank adds up what it takes over, so that the
        sum over all ranks stays: of N saved states rank r of M takes those of r, r + M, ... Without ``error_feedback``
        what they hold is let go.

        Raises:
            TypeError, ValueError: naming what was expected and what came; then nothing has changed.
        """
        states: Any = state_dict if isinstance(state_dict, list | tuple) else [state_dict]
        named = self._parameters.named()
        steps, residuals = checkpoint.merge(states, self._rank, self._world_size, named, of="an AllReduceState")
        self.choice = self.choice.or_saved(states, self._asked, self._world_size)
        self.steps = steps
        self._forget()
        if self._feedback is not None:
            for name, residual in residuals.items():
                self._feedback.initial[named[name]] = residual.flatten().to(self._feedback.dtype)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "AllReduceState: expected not to be pickled or copied, with its model or alone, since its connections are "
            "this process's and DDP would not call it; copy model.module, or save state_dict() and register anew"
        )


def allreduce_hook(state: AllReduceState, bucket: dist.GradBucket, *_: Tensor) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over the ranks, in place. Returns at once; on CUDA nothing waits on the host.

    FSDP gives more than a bucket, and is told so.
    """
    return state._reduce(bucket)
