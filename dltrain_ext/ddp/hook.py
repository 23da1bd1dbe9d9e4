"""The hook and its state."""

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
from dltrain_ext.comm import Communicator, Tuning, Work
from dltrain_ext.comm.groups import group_of
from dltrain_ext.compress import checkpoint
from dltrain_ext.compress.arguments import check_options
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, is_small
from dltrain_ext.compress.parameters import Parameters
from dltrain_ext.compress.scaling import is_scaling, loss_scale_of
from dltrain_ext.compress.watch import Watch
from dltrain_ext.ddp.buckets import Buckets
from dltrain_ext.ddp.budget import Budget, check_budget
from dltrain_ext.ddp.reports import Reports
from dltrain_ext.ddp.selection import Reduction, choose, choose_plan, usual_codec
from dltrain_ext.ddp.statistics import Passes


class AllReduceState(Reports):
    """The state of :func:`allreduce_hook`: ``model.register_comm_hook(AllReduceState(...), allreduce_hook)``.

    Each parameter's gradient is divided and encoded on its own, so its result does not depend on DDP's buckets, and a
    run that continues from a checkpoint has the same bits as one that never stopped. Making a state is a collective
    call over the group.

    Args:
        process_group: the model's group; the default group if None.
        codec: one of ``codecs.CODECS``, in which gradients are sent, or ``"auto"``. None is ``"int8"`` on the CPU and
            ``"auto"`` on CUDA, where links may be too fast to compress. In measurements int8 and int4 learn as fp32
            does, and sign does not with AdamW, least of all with feedback (docs/learning.md). Parameters of at most one
            dimension, and small ones, are sent as fp32 in the same messages. ``"auto"`` is the most accurate codec that
            takes at most 10 % longer than the fastest on this group, or the backend's own all-reduce if compression is
            slower than that in the gradients' own dtype. Without a ``tuning``, codecs and plans are timed for about a
            second, with buckets of 25 MiB, or of the whole model if it is smaller. This is selected once, when the
            state is made: ``choice`` has the result, the logger ``dltrain_ext`` writes it on rank 0, and a run that
            continues from a checkpoint of as many ranks uses that of the checkpoint. With ``max_error`` a codec is
            selected for each bucket.
        algorithm: as for :func:`dltrain_ext.comm.all_reduce`, but one for buckets of any size. ``"auto"`` is that of
            the tuning. Without one it is ``"ring"`` for up to 8 ranks over Gloo, else ``"direct"``, so that runs have
            the same bits; with the codec ``"auto"`` it is the fastest plan, or ``"direct"``, which encodes least often,
            if that takes at most 10 % longer.
        error_feedback: add the encoding error of a gradient to that of the next step (Seide et al. 2014; Karimireddy et
            al. 2019), on the rank where it occurred. This takes one element of ``feedback_dtype`` per element of the
            gradients, two with a ``scaler``. Residuals are kept while the gradients of all ranks are zero, as those of
            unused parameters are, and on ranks that have joined. With a ``scaler`` the latter lose the errors of what
            they encode.
        feedback_dtype: ``"fp32"``, or ``"bf16"`` for half the memory and less exact feedback.
        scaler: the ``LossScaler``, or any ``torch.amp.GradScaler``, that scales the loss. Residuals are in unscaled
            units, and do not change in a step whose gradients are not finite, since the scaler skips it. Without a
            scaler, gradients are taken to be unscaled and no step to be skipped, and there are no ``grad_stats``. To
            have these without scaling, pass a scaler with ``enabled=False``.
        named_parameters: ``model.named_parameters()`` of the model without DDP; needed for checkpoints.
        min_compress_numel: parameters of fewer elements are small.
        warmup_steps: the number of backward passes at the beginning that are not compressed.
        rounding, seed: as for :func:`dltrain_ext.codecs.encode`. Stochastic rounding draws different random numbers for
            each element of each step.
        max_error: with the codec ``"auto"``, the largest relative error of a bucket's average that a codec may cause,
            above 0 and below 1. Each bucket is sent in the fastest codec of at most that error, and plain where none of
            them is at least 10 % faster. The error is the 2-norm of what the average differs from the exact one, over
            the norm of the latter, without feedback. In some passes, the 4th, 11th, 19th, 35th, 67th, 131th, and then
            every 256 passes, all buckets are sent plain, and a copy of each in a codec; the next passes try the next
            codec of those that lose too much. Gradients may change in between, so a codec must have lost at most 0.8
            times ``max_error``. These passes wait for the device, and cannot be captured. A bucket whose gradients are
            zero then is sent plain. Residuals of buckets that become plain are discarded.
        timeout, transport, ranks_per_host, tuning: as for :class:`dltrain_ext.comm.Communicator`; the timeout is that
            of each bucket. In two levels the ranks of a host divide each bucket, so the result of a gradient does
            depend on its bucket there, and a part of the residuals of the first step, before DDP rebuilds its buckets,
            is not fed back.
        watch: look at each gradient before it is averaged, so that :meth:`findings` knows the first overflow. This
            reads the gradients, and the residuals, once more; no host waits for it.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """

    _collective = "all_reduce"

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
        watch: bool = False,
        max_error: float | None = None,
    ):
        parameters = Parameters(named_parameters)
        if codec is None:
            codec = usual_codec(process_group, (parameters.names or {}).values())
        self._max_error = check_budget(max_error, codec)
        self._stochastic, self._feedback_dtype = check_options(
            algorithm,
            "raw" if codec == "auto" else codec,
            error_feedback=error_feedback,
            feedback_dtype=feedback_dtype,
            scaler=scaler,
            min_compress_numel=min_compress_numel,
            rounding=rounding,
            seed=seed,
        )
        check_number(warmup_steps, "warmup_steps", 2**63)
        if not isinstance(watch, bool):
            raise TypeError(f"watch: expected a bool, got {watch!r}")
        self._watch = Watch() if watch else None
        self._names = {parameter: name for name, parameter in (parameters.names or {}).items()}
        self._communicator_of = partial(
            Communicator, timeout=timeout, transport=transport, ranks_per_host=ranks_per_host, tuning=tuning
        )
        self._asked, self._parameters = Reduction(codec, algorithm), parameters
        self.min_compress_numel, self.warmup_steps, self.seed = min_compress_numel, warmup_steps, seed
        self._use(process_group)
        self.scaler = scaler
        self.steps = 0  # backward passes so far
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._forget()

    def _use(self, group: dist.ProcessGroup | None) -> None:
        group = group_of(group)
        self.communicator = self._communicator_of(group)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self.choice = self._choose(group)
        self._budget = None
        if self._max_error is not None:
            self._budget = Budget(
                self._max_error, self.communicator, self.algorithm, self._is_small, tells=self._rank == 0
            )
        self._group = group  # at last, so that what has failed is tried again

    def _choose(self, group: dist.ProcessGroup) -> Reduction:
        parameters = (self._parameters.names or {}).values()
        if self._max_error is not None:
            return choose_plan(self.communicator, self._asked, parameters)
        return choose(self.communicator, group, self._asked, parameters)

    def _is_small(self, parameter: Tensor) -> bool:
        return is_small(parameter.shape, self.min_compress_numel)

    def _attach(self, model: DistributedDataParallel) -> None:
        """Keeps the model, which shows what DDP does not pass to a hook: skipped buckets, and a group that was
        replaced."""
        self._model = weakref.ref(model)

    def _follow(self) -> None:
        """Changes to the model's group if that was replaced. Raises ValueError for a join() that is not supported."""
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
        """The name of the codec in which gradients are sent, also if ``"auto"`` was asked for; ``"auto"`` with
        ``max_error``."""
        return self.choice.codec

    @property
    def algorithm(self) -> str:
        """The name of the plan, also if ``"auto"`` was asked for."""
        return self.choice.algorithm

    @property
    def _is_scaled(self) -> bool:
        return is_scaling(self.scaler)

    def _forget(self) -> None:
        """Begins anew, without residuals."""
        dtype = self._feedback_dtype
        self._feedback = None if dtype is None else Feedback[Tensor](dtype, double_buffered=self._is_scaled)
        options = self._options_of_buckets()
        self._buckets = Buckets(self._parameters, self._feedback, min_compress_numel=self.min_compress_numel, **options)
        self._passes = Passes()

    def _options_of_buckets(self) -> dict[str, Any]:
        return {"with_squares": self.scaler is not None}

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
            self._begin_pass()
        codecs = self._codecs_for(bucket)
        reduction = self.choice.of_bucket(codecs)
        layout = self._buckets.find(bucket, codecs, self._is_by_parameter(reduction)).layout
        if self._watch is not None:
            self._look(self._watch, layout, bucket)
        # A rank that has joined is called outside of backward. Its scaler is not updated, so it cannot convert the
        # errors of this call to units that will be right later.
        feeds = layout.has_feedback and not (self._is_scaled and torch._C._current_graph_task_id() == -1)
        buffer = bucket.buffer()
        tried = None if self._budget is None else self._try(bucket, self._budget.tries(bucket.index()))
        work = self._submit(buffer, layout, reduction, feeds)
        if self._budget is not None and tried is not None:
            self._budget.compare(bucket.index(), tried, (buffer, work))
        self._buckets.submitted(work.get_future(), feeds)
        if bucket.is_last() and buffer.device.type == "cpu" and torch._C._current_graph_task_id() != -1:
            # This waits before DDP itself waits, which Ctrl-C cannot interrupt.
            Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]
        return work.get_future()

    def _codecs_for(self, bucket: dist.GradBucket) -> tuple[str, ...]:
        """Returns the codec of each parameter of a bucket; ``"native"`` for the backend's own all-reduce."""
        parameters = bucket.parameters()
        if self._world_size == 1 or self.steps <= self.warmup_steps:
            return ("raw",) * len(parameters)
        if self._budget is None:
            return (self.codec,) * len(parameters)
        return self._budget.codecs_for(bucket.index(), parameters, bucket.buffer().numel())

    def _try(self, bucket: dist.GradBucket, codec: str | None) -> tuple[Tensor, Work] | None:
        """Averages a copy of a bucket in a codec, if there is one."""
        if codec is None:
            return None
        copy, reduction = bucket.buffer().clone(), self.choice.of_bucket([codec])
        layout = self._buckets.lay_copy(bucket, copy, codec, self._is_by_parameter(reduction))
        return copy, self._submit(copy, layout, reduction, feeds=False)

    def _submit(self, buffer: Tensor, layout: Layout[Tensor], reduction: Reduction, feeds: bool) -> Work:
        return self.communicator.submit_bucket(
            buffer,
            layout.handle,
            collective=self._collective,
            average=True,
            feeds=feeds,
            algorithm=reduction.algorithm,
            segments=reduction.segments or 0,
            codec=reduction.codec,
            loss_scale=loss_scale_of(self.scaler, buffer.device) if feeds else None,
            stochastic=self._stochastic,
            seed=self.seed,
            step=self.steps % 2**32,
        )

    def _begin_pass(self) -> None:
        """Is called in the backward pass before its first bucket is reduced."""
        if self._budget is not None:
            plain = self._budget.begin(self.steps - self.warmup_steps, self._buckets.laid())
            if self._feedback is not None:
                self._feedback.discard(plain)

    def _is_by_parameter(self, reduction: Reduction) -> bool:
        return reduction.is_by_parameter(self._world_size)

    def _check_scaler(self) -> None:
        if self.scaler is None:
            raise RuntimeError("grad_stats: expected a state that was given the scaler, since its step takes them")

    @property
    def grad_stats(self) -> GradStats:
        """The sum of squares of all averaged gradients of the latest backward pass, found while they were reduced.
        ``LossScaler.step`` takes it, and saves a pass over them. If DDP has skipped unused parameters, the gradients
        that these still have are included.

        It is valid for gradients as DDP left them. Do not pass it if ``.grad`` has changed since, for example by
        clipping or unscaling, or if the optimizer has other parameters than the DDP model. It is a float64 number on
        the device of the first bucket; the host does not wait for it.

        Raises:
            RuntimeError: there is no scaler, there was no backward pass yet, or a parameter is in no bucket.
        """
        self._check_scaler()
        return self._buckets.grad_stats()

    def state_dict(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """Returns plain tensors and numbers, for ``torch.save`` on every rank or ``torch.distributed.checkpoint``.

        Args:
            saved_by: the world size of a checkpoint that is to be read in place, as torch.distributed.checkpoint does,
                if it differs from this one; else None. The tensors are then zeros, to be overwritten with what this
                rank takes.

        Returns:
            A dict of ``version``, ``steps``, ``world_size``, ``choice`` (codec and plan), ``feedback``, the residuals
            by rank (``"rank 0 of 4"``) and by parameter, in its shape and in units of the unscaled, averaged gradient;
            and with ``max_error`` ``budget``, with the codec of each parameter.

        Raises:
            ValueError: the names of the parameters are not known.
        """
        named = self._parameters.named()
        self._buckets.settle_after_backward()
        residuals = partial(checkpoint.residuals_of, self._feedback, named)
        saved = checkpoint.save(residuals, self.steps, self._rank, self._world_size, saved_by)
        budget = {} if self._budget is None else {"budget": self._budget.to_dict(named)}
        return {**saved, "choice": self.choice.to_dict(), **budget}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a checkpoint: that of this rank if the world size is the same, else a list of several ranks'
        states.

        Where ``"auto"`` was asked for, ``choice`` becomes that of the checkpoint, so that the bits are those of a run
        that never stopped. So do the codecs of the same ``max_error``, and a search that was under way is left until
        the next one. With another world size it does not change, and each rank adds up the residuals that it
        takes over, so that their sum over all ranks is preserved: of N saved states rank r of M takes those of r, r +
        M, ... Without ``error_feedback`` the saved residuals are discarded.

        Raises:
            TypeError, ValueError: the state is invalid; the message has the expected and the actual value. Nothing has
                changed.
        """
        states: Any = state_dict if isinstance(state_dict, list | tuple) else [state_dict]
        named = self._parameters.named()
        steps, residuals = checkpoint.merge(states, self._rank, self._world_size, named, of="an AllReduceState")
        choice = self.choice.or_saved(states, self._asked, self._world_size)
        if self._budget is not None:
            self._budget.load(states, named, self._world_size)
            self._budget.algorithm = choice.algorithm
        self.choice = choice
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
    """Averages a bucket's gradients over the ranks, in place. Returns immediately, on CUDA without any wait on the
    host.

    Raises TypeError if ``state`` is not an AllReduceState, or ``bucket`` not a GradBucket, as with FSDP, which passes
    more than one argument. Returns a future.
    """
    if not isinstance(state, AllReduceState):
        raise TypeError(f"state: expected an AllReduceState, got {type(state).__name__}")
    return state._reduce(bucket)
