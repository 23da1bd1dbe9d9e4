"""Loads the compiled part. No other file names the compiled module or torch.ops."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, library

from dltrain_ext._build_info import TORCH

if torch.__version__ != TORCH:
    raise ImportError(
        f"dltrain_ext was built against torch {TORCH}, and this is torch {torch.__version__}. Build it again, "
        "in its checkout: pip install --force-reinstall --no-deps --no-cache-dir ."
    )

from dltrain_ext._C import (
    BucketState,
    ClientBlock,
    Codec,
    Communicator,
    Estimate,
    FusedGroup,
    Handled,
    Level,
    Mailbox,
    Plan,
    Ranks,
    ServerBlock,
    ServerRule,
    ServerSettings,
    SharedMemory,
    Step,
    StepArguments,
    StoreNode,
    StoreTicket,
    algorithms,
    built_with_cuda,
    check_feedback,
    check_names,
    codecs,
    collectives,
    decode_master,
    decode_state,
    encode_master,
    encode_state,
    find_codec,
    in_process_mailboxes,
    instruction_set,
    instruction_sets,
    is_supported,
    make_group,
    make_plan,
    message_bytes,
    nccl_unique_id,
    nccl_version,
    optimizers,
    outer_step,
    segments_of,
    simulate,
    simulate_servers,
    state_bytes,
    sum_squares_of,
    supported_devices,
    timeout_of,
    two_level_pieces,
    verify,
)

__all__ = [
    "BucketState",
    "ClientBlock",
    "Codec",
    "Communicator",
    "Estimate",
    "FusedGroup",
    "Handled",
    "Level",
    "Mailbox",
    "Plan",
    "Ranks",
    "ServerBlock",
    "ServerRule",
    "ServerSettings",
    "SharedMemory",
    "Step",
    "StepArguments",
    "StoreNode",
    "StoreTicket",
    "algorithms",
    "built_with_cuda",
    "check_feedback",
    "check_names",
    "codecs",
    "collectives",
    "decode_",
    "decode_master",
    "decode_state",
    "encode_master",
    "encode_state",
    "encode_sum_",
    "find_codec",
    "in_process_mailboxes",
    "instruction_set",
    "instruction_sets",
    "is_supported",
    "make_group",
    "make_plan",
    "message_bytes",
    "nccl_unique_id",
    "nccl_version",
    "optimizers",
    "outer_step",
    "segments_of",
    "simulate",
    "simulate_servers",
    "state_bytes",
    "sum_squares",
    "sum_squares_of",
    "supported_devices",
    "timeout_of",
    "two_level_pieces",
    "unscale_and_clip",
    "verify",
]


# The functions of the same names in reference define these ops and their arguments, and sum_squares.
decode_: Callable[..., None] = torch.ops.dltrain_ext.decode_
encode_sum_: Callable[..., None] = torch.ops.dltrain_ext.encode_sum_
sum_squares: Callable[[Sequence[Tensor]], Tensor] = torch.ops.dltrain_ext.sum_squares
unscale_and_clip: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.dltrain_ext.unscale_and_clip


def _changes_its_arguments(*given: object, **options: object) -> None:
    """Is the fake implementation of ops that write to their arguments and return nothing."""


for _name in ("decode_", "encode_sum_", *(f"{name}_" for name, *_ in optimizers())):
    library.register_fake(f"dltrain_ext::{_name}", _changes_its_arguments)


def _sum_squares(grads: Sequence[Tensor]) -> Tensor:
    return grads[0].new_empty((), dtype=torch.float64)


def _unscale_and_clip(sum_squares: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(sum_squares, Tensor):
        raise TypeError(f"sum_squares: expected a tensor, got {sum_squares!r}")
    number = sum_squares.new_empty(())
    return number, torch.empty_like(number, dtype=torch.float32), torch.empty_like(number, dtype=torch.float32)


library.register_fake("dltrain_ext::sum_squares", _sum_squares)
library.register_fake("dltrain_ext::unscale_and_clip", _unscale_and_clip)
