"""The types of the compiled module, which csrc/bindings defines. Only _ops imports it."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Backend
from torch.futures import Future

built_with_cuda: bool
supported_devices: str

def is_supported(device: torch.device, /) -> bool: ...
def instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...

class StepArguments:
    def __init__(
        self,
        *,
        lr: float,
        maximize: bool,
        tensor_lr: Tensor | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        seed: int,
        rounding_step: Tensor | None,
    ) -> None: ...

class FusedGroup:
    """A parameter group whose tensors have been read for one step."""

    def gather(
        self,
        state: dict[Any, Any],
        params: list[Tensor],
        *,
        masters: bool,
        optional: list[str],
        flagged: list[Tensor],
        flagged_from: int,
        runs: Sequence[Tensor | None],
        numbers: Sequence[int],
    ) -> list[Tensor]: ...
    def take_norms(self, arguments: StepArguments, hyper: dict[str, float | bool], sums: Tensor) -> None: ...
    def release(self) -> None: ...
    def step(self, arguments: StepArguments, hyper: dict[str, float | bool]) -> None: ...

def make_group(name: str) -> FusedGroup: ...
def optimizers() -> list[
    tuple[
        str,
        dict[str, float | bool],
        list[tuple[str, bool, float, bool, bool]],
        list[tuple[str, float]],
        str | None,
        int,
        bool,
    ]
]:
    """Returns for each optimizer its name, hyper-parameters with their defaults, states (key, optional, initial,
    nonnegative, coded), counters (key, initial), flag, and the number of norms of a tensor that it needs."""

def state_bytes(numel: int) -> int: ...
def encode_state(state: Tensor, *, nonnegative: bool) -> Tensor: ...
def decode_state(codes: Tensor, shape: Sequence[int], *, nonnegative: bool) -> Tensor: ...
def encode_master(master: Tensor, param: Tensor) -> Tensor: ...
def decode_master(master: Tensor, param: Tensor) -> Tensor: ...
def sum_squares_of(groups: Sequence[FusedGroup]) -> list[Tensor]:
    """Returns for each device the sum of squares of all gradients that the groups have read there, as float64."""

class Codec:
    @property
    def name(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def scaled(self) -> bool: ...
    @property
    def bits(self) -> int: ...
    def bytes(self, numel: int, /) -> int: ...
    def error(self, stochastic: bool, /) -> tuple[float, float]: ...

class Step:
    """One message or one local action of a plan."""

    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __init__(self, op: str, peer: int, chunks: tuple[int, int]) -> None: ...
    @property
    def op(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def chunks(self) -> tuple[int, int]: ...
    def __eq__(self, other: object, /) -> bool: ...

class Plan:
    """What one rank does in a collective: rounds of steps over abstract chunks. ``print()`` draws the plan."""

    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __init__(
        self,
        algorithm: str,
        rank: int,
        world_size: int,
        chunks: int,
        rounds: Sequence[Sequence[Step]],
        exact: bool = False,
        collective: str = "all_reduce",
        root: int = 0,
    ) -> None: ...
    @property
    def collective(self) -> str: ...
    @property
    def root(self) -> int: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def rounds(self) -> list[list[Step]]: ...
    @property
    def exact(self) -> bool: ...
    def to_json(self) -> str:
        """Returns the plan as JSON text."""
    def __eq__(self, other: object, /) -> bool: ...

class Estimate:
    @property
    def seconds(self) -> float: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def segments(self) -> int: ...
    @property
    def algorithm(self) -> str: ...

def simulate(
    collective: str,
    algorithm: str,
    world_size: int,
    numel: int,
    *,
    codec: str,
    segments: int,
    latency: float,
    bandwidth: float,
    ranks_per_host: int,
    inside_latency: float,
    inside_bandwidth: float,
    burst: float,
    overhead: float,
    copy: float,
    cores: int,
    encode: float,
    decode: float,
    late: Sequence[float],
) -> Estimate:
    """Does what sim.simulate does. ``encode`` and ``decode`` are seconds per element."""

def segments_of(wire_bytes: int, segment_bytes: int) -> int:
    """The number of segments of a message if segments of this size suit the transport."""

def simulate_servers(
    world_size: int,
    servers: int,
    numel: int,
    *,
    codec: str,
    segments: int,
    latency: float,
    bandwidth: float,
    ranks_per_host: int,
    inside_latency: float,
    inside_bandwidth: float,
    burst: float,
    overhead: float,
    copy: float,
    cores: int,
    encode: float,
    decode: float,
) -> Estimate:
    """Does what sim.parameter_server does with servers, in one level."""

class SharedMemory:
    """Memory of the first rank of a group, or the same memory in other processes of its host."""

    @staticmethod
    def make(world_size: int) -> SharedMemory: ...
    @staticmethod
    def open(address: str, world_size: int) -> SharedMemory:
        """Raises RuntimeError, as ``make`` does."""

    @property
    def address(self) -> str: ...

class Level:
    """Ranks that are connected to each other."""

    @staticmethod
    def over_backend(backend: Backend, device: torch.device, global_ranks: Sequence[int]) -> Level: ...
    @staticmethod
    def over_shared_memory(
        memory: SharedMemory, rank: int, processes: Sequence[int], gloo: Backend, global_ranks: Sequence[int]
    ) -> Level:
        """``gloo`` is for native all-reduces."""

    @staticmethod
    def over_nccl(
        unique_id: bytes, rank: int, device: torch.device, global_ranks: Sequence[int], timeout: float
    ) -> Level:
        """Is a collective call; ``timeout`` is in seconds."""

class BucketState:
    """The state of a flat tensor. A parameter, or a part of one, is its first element, number of elements, codec, first
    random number, and the rank to which it belongs in a reduce-scatter or an all-gather, else -1."""

    def __init__(
        self,
        parameters: Sequence[tuple[int, int, str, int, int]],
        *,
        by_parameter: bool,
        squares: Tensor | None = None,
        residual: Tensor | None = None,
        spare: Tensor | None = None,
        swapped: Tensor | None = None,
    ) -> None: ...
    def stats(self) -> dict[str, float]: ...

class Ranks:
    """The global ranks of a communicator, and the index of this rank among them."""

    def __init__(self, name: str, description: str, ranks: Sequence[int], rank: int) -> None: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...

class Communicator:
    def __init__(
        self,
        across: Level,
        inside: Level | None,
        hosts: tuple[int, int],
        control: Backend | None,
        members: Ranks,
        device: torch.device,
        timeout: float,
        answer_timeout: float,
        round_trip: float,
        measures: bool,
    ) -> None: ...
    def run(
        self,
        tensor: Tensor,
        *,
        collective: str = "all_reduce",
        algorithm: str = "auto",
        codec: str = "raw",
        average: bool = False,
        root: int = 0,
        segments: int = 0,
        residual: Tensor | None = None,
        stochastic: bool = False,
        seed: int = 0,
        step: int | None = None,
        bucket: BucketState | None = None,
        feeds: bool = False,
        loss_scale: Tensor | None = None,
        shard: Tensor | None = None,
        sizes: Sequence[int] = (),
        minus: Sequence[Tensor] = (),
        message: Tensor | None = None,
        agreement: int = 0,
    ) -> None: ...
    # Returns a torch._C.Future, which has the same methods, and which torch's own stubs declare as this type.
    def submit(
        self,
        tensor: Tensor,
        *,
        collective: str = "all_reduce",
        algorithm: str = "auto",
        codec: str = "raw",
        average: bool = False,
        root: int = 0,
        segments: int = 0,
        residual: Tensor | None = None,
        stochastic: bool = False,
        seed: int = 0,
        step: int | None = None,
        bucket: BucketState | None = None,
        feeds: bool = False,
        loss_scale: Tensor | None = None,
        shard: Tensor | None = None,
        sizes: Sequence[int] = (),
        minus: Sequence[Tensor] = (),
        message: Tensor | None = None,
        agreement: int = 0,
    ) -> Future[Any]: ...
    def wait(self, future: Future[Any], timeout: float | None = None) -> None: ...
    def close(self) -> None: ...
    def drain(self) -> str:
        """Returns when what was enqueued on a CUDA device is done, or has failed, and why calls fail, or nothing."""
    def culprit(self) -> int | None: ...
    @property
    def segment_bytes(self) -> int: ...
    def stats(self) -> dict[str, float]: ...

def message_bytes(bucket: BucketState, numel: int, *, algorithm: str, codec: str, world_size: int) -> int:
    """The size of the message that an all-reduce of the bucket leaves instead of values."""

def outer_step(
    bucket: BucketState,
    message: Tensor,
    *,
    backup: Tensor,
    momentum_buffer: Tensor | None,
    parameters: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    algorithm: str,
    codec: str,
    world_size: int,
    lr: float,
    momentum: float,
    nesterov: bool,
    mix: float,
) -> bool:
    """Takes the outer step of DiLoCo with the mean in such a message. False: an element of it was not finite."""

class SessionEnd:
    """The end of the session with a peer. In good order: the peer has closed its mailbox, and all that it sent has been
    received. Else the connection is lost, and the reason says how that was seen."""

    @property
    def in_good_order(self) -> bool: ...
    @property
    def reason(self) -> str: ...

class Mailbox:
    """Messages of any length between the ranks of a backend of Gloo that serves nobody else. The caller keeps no
    reference to the backend, because the connections are closed with the last one."""

    def __init__(self, backend: Backend, *, limit: int = 67108864) -> None:
        """limit: the bytes of messages that are held for each peer and direction, which one message may exceed."""
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def send(self, peer: int, tensors: Sequence[Tensor], *, copy: bool = True) -> bool:
        """Sends the bytes of contiguous CPU tensors, one after another, as one message, and returns at once. Without
        copy they must not change until the peer has the message. False: the message is not sent, because the peer has
        not taken what was sent before. Raises DistBackendError when the session has ended or the mailbox is closed."""
    def receive(self, timeout: float | None = None) -> tuple[int, Tensor | SessionEnd] | None:
        """The next message from any peer, as bytes, or the end of a session, which comes once for each peer. None:
        nothing came in so many seconds. Raises DistBackendError when the mailbox is closed, which Ctrl-C does."""
    def close(self, grace: float = 1.0) -> None:
        """Returns when the peers have received all that was sent to them, or after so many seconds. To drop a mailbox
        without closing it looks to the peers as if the process had been killed."""

def in_process_mailboxes(world_size: int) -> list[Mailbox]:
    """The mailboxes of ranks that are all in this process."""

class ServerBlock:
    """A block of a store's server: its float32 values, the states and counters of its optimizer, the number of its
    group, and the flag of the optimizer's rule in the first step and in later ones."""

    def __init__(
        self,
        *,
        value: Tensor,
        group: int,
        states: Sequence[Tensor],
        counters: Sequence[Tensor],
        flag_at_first: bool,
        flag: bool,
        is_first: bool,
    ) -> None: ...

class ServerRule:
    """The optimizer of a group: its name, hyper-parameters, and the keys of the states that it has."""

    def __init__(self, *, name: str, hyper: dict[str, float], states: Sequence[str], maximize: bool) -> None: ...

class ServerSettings:
    def __init__(
        self,
        *,
        blocks: Sequence[ServerBlock],
        rules: Sequence[ServerRule],
        quorum: int,
        window: int,
        delay_compensation: float,
        lockstep: bool,
        records: bool,
        grace: float,
    ) -> None:
        """grace: in seconds; 0 for none."""

class ClientBlock:
    """A block as a worker has it: elements of one of its tensors, and its server. The residual is what encoding has
    lost of the gradient, and the base is what the worker holds, where pulls send differences."""

    def __init__(
        self,
        *,
        key: int,
        first: int,
        server: int,
        numel: int,
        residual: Tensor | None = None,
        base: Tensor | None = None,
    ) -> None: ...

class Handled:
    """What a server has handled. what: 0 for a push, 1 for a pull, 2 if the worker has left, 4 for a pull that waits
    until the worker's own pushes are applied; 3 for the end of a grace: the number -1, the version and the block."""

    def __init__(self, what: int, worker: int, clock: int, first_block: int) -> None: ...
    @property
    def what(self) -> int: ...
    @property
    def worker(self) -> int: ...
    @property
    def clock(self) -> int: ...
    @property
    def first_block(self) -> int: ...

class StoreTicket:
    """A push or a pull that is under way."""

    def wait(self, timeout: float | None = None) -> bool:
        """Returns whether it is complete in so many seconds. Raises DistBackendError where it has failed."""
    def is_done(self) -> bool: ...
    def versions(self) -> tuple[int, int, bool]:
        """Of a complete pull: the lowest and the highest version, and whether one was skipped."""
    def states(self) -> list[tuple[int, list[int], Tensor]]:
        """Of a complete save: the number of each server, the versions of its blocks, and its numbers."""

class StoreNode:
    """What one rank is in a store: a server, a worker, or both. It takes the mailbox."""

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        workers: Sequence[int],
        servers: Sequence[int],
        push_codec: str,
        pull_codec: str,
        server: ServerSettings | None,
        client: Sequence[ClientBlock] | None,
        together: bool,
        replayed: Sequence[Handled],
    ) -> None: ...
    def start(self, gives_up: Callable[[float], bool] | None = None) -> None:
        """From now on a thread handles messages; without it, poll() does. A call that waits for a server which takes no
        message asks gives_up now and then, with the seconds that it has waited, and fails if that returns True."""
    def poll(self) -> bool: ...
    def push(
        self,
        clock: int,
        keys: Sequence[int],
        values: Sequence[Tensor],
        *,
        factor: float,
        rates: Sequence[float],
        skips: bool = False,
        weight: float = 1.0,
    ) -> StoreTicket:
        """Sends factor times the values. weight: with a grace, the servers divide by the sum of those of a version."""
    def pull(
        self,
        clock: int,
        staleness: int | None,
        keys: Sequence[int],
        into: Sequence[Tensor],
        *,
        applied: bool = False,
    ) -> StoreTicket: ...
    def save(self, with_data: bool) -> StoreTicket:
        """Waits until all workers have called this. The ticket then has the states of the servers, if wanted."""
    def restore(self, server: int, updated: bool, numbers: Tensor) -> None:
        """Gives the server with this number the numbers of a state. updated: some step has been made with them."""
    def reasons(self, ticket: StoreTicket, patience: float) -> str:
        """What a ticket waits for, in words. The servers have so many seconds to say it."""
    def record(self) -> list[Handled]: ...
    def replayed(self) -> int:
        """How much of the record that it replays is done."""
    def applied(self) -> list[int]: ...
    def state(self) -> tuple[list[int], Tensor]:
        """The versions and the numbers of the blocks of this rank's server, at one moment."""
    def gone(self) -> list[int]:
        """The ranks of the workers that are done or lost, if this rank serves, and of the servers that are lost, if it
        is a worker."""
    def bytes(self) -> int: ...
    def finish(self, timeout: float | None = None) -> bool:
        """Tells the servers that this worker is done, and returns whether this rank's server has no worker left in so
        many seconds."""
    def close(self, grace: float = 1.0) -> None: ...

def algorithms(collective: str, /) -> list[str]: ...
def check_feedback(codec: str, stochastic: bool, expected: str, /) -> None: ...
def check_names(algorithm: str, codec: str, collective: str, /) -> None: ...
def codecs() -> list[Codec]: ...
def collectives() -> list[str]: ...
def find_codec(name: str, /) -> Codec: ...
def nccl_unique_id() -> bytes: ...
def nccl_version() -> str:
    """Returns the version of NCCL; raises RuntimeError that says why NCCL cannot be used."""

def make_plan(collective: str, algorithm: str, rank: int, world_size: int, root: int, /) -> Plan: ...
def timeout_of(group: ProcessGroup, /) -> float:
    """Returns the timeout of a group's own collectives in seconds."""

def two_level_pieces(numel: int, /) -> int:
    """Returns the number of pieces into which an all-reduce in two levels divides ``numel`` elements."""

def verify(plans: Sequence[Plan], /) -> None: ...
