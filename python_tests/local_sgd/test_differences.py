"""All-reduces of what is left when something is subtracted, and their messages, for every algorithm and codec."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dltrain_ext import _ops, codecs, comm
from dltrain_ext.comm import Communicator
from dltrain_ext.comm.arguments import check_names
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region

SIZES = (5, 0, 4000, 700)
FIRSTS = (0, 16, 16, 4016)
NUMEL = 4800
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


def lay(codec, feedback):
    regions = [
        Region(str(i), first, size, "raw" if size < 10 else codec, 4096 * i)
        for i, (first, size) in enumerate(zip(FIRSTS, SIZES, strict=True))
    ]
    return Layout(torch.zeros(NUMEL), regions, feedback, by_parameter=True)


def numbers(rank):
    data = torch.Generator().manual_seed(rank)
    own = torch.randn(NUMEL, generator=torch.Generator().manual_seed(99))
    others = [torch.randn(size, generator=data).to(dtype) for size, dtype in zip(SIZES, DTYPES, strict=True)]
    differences = torch.zeros(NUMEL)
    for first, size, other in zip(FIRSTS, SIZES, others, strict=True):
        differences[first : first + size] = own[first : first + size].to(other.dtype).float() - other.float()
    return own, others, differences


def bytes_of(layout, algorithm, world_size):
    """Return the size of the message that is left; 0 if values are."""
    plan = dict(algorithm=algorithm, codec=layout.codec, world_size=world_size)
    return _ops.message_bytes(layout.handle, NUMEL, **plan)


def fits(algorithm, codec, into_message, world_size):
    try:
        check_names(algorithm, codec)
    except ValueError:
        return False
    return not into_message or bytes_of(lay(codec, None), algorithm, world_size) > 0


def reduce(communicator, tensor, layout, algorithm, average, into_message, **options):
    """Return the message or the values."""
    if into_message:
        nbytes = bytes_of(layout, algorithm, communicator.world_size)
        options["message"] = torch.zeros(nbytes, dtype=torch.uint8)
    communicator.run_bucket(
        tensor,
        layout.handle,
        average=average,
        algorithm=algorithm,
        codec=layout.codec,
        feeds=layout.has_feedback,
        step=3,
        **options,
    )
    return options["message"] if into_message else tensor


def as_precomputed(rank, world_size, cases, per_host):
    communicator = Communicator(ranks_per_host=per_host)
    own, others, differences = numbers(rank)
    done: list[str] = []
    for algorithm, codec, average, into_message, feeds in cases:
        if not fits(algorithm, codec, into_message, world_size):
            continue
        done.append(codec)
        kept, found = [], []
        for minus in (others, ()):
            feedback = Feedback(torch.float32, double_buffered=False) if feeds else None
            layout = lay(codec, feedback)
            tensor = own.clone() if minus else differences.clone()
            found.append(reduce(communicator, tensor, layout, algorithm, average, into_message, minus=minus))
            kept.append(None if feedback is None or not layout.has_feedback else feedback.of("2").clone())
            if into_message:
                assert torch.equal(tensor, own if minus else differences)
        what = (algorithm, codec, average, into_message, feeds)
        for first, size in zip(FIRSTS, SIZES, strict=True):
            part = slice(None) if into_message else slice(first, first + size)
            assert torch.equal(found[0][part], found[1][part]), what
        assert kept[0] is None or torch.equal(*kept), what
        assert into_message or not torch.equal(found[0], own), what
        alike = [torch.empty_like(found[0]) for _ in range(world_size)]
        dist.all_gather(alike, found[0])
        for first, size in zip(FIRSTS, SIZES, strict=True):
            part = slice(None) if into_message else slice(first, first + size)
            assert all(torch.equal(each[part], alike[0][part]) for each in alike), what
    return done


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("into_message", [False, True])
def test_a_difference_is_reduced_as_if_it_had_been_computed_before(world_size, into_message):
    cases = [
        (algorithm, codec, average, into_message, feeds)
        for algorithm in comm.ALGORITHMS
        for codec in codecs.CODECS
        for average in (False, True)
        for feeds in ((False, True) if average and codec == "int4" else (False,))
    ]
    done, *_ = run_ranks(world_size, as_precomputed, cases, 1)
    assert set(done) == set(codecs.CODECS)


def refuse(rank, world_size):
    communicator = Communicator()
    own, others, _ = numbers(0)
    layout = lay("int4", None)
    size = _ops.message_bytes(layout.handle, NUMEL, algorithm="direct", codec="int4", world_size=1)
    for options, error, match in (
        (dict(minus=others[:3]), ValueError, "minus: expected 4 tensors, got 3"),
        (dict(minus=[*others[:3], torch.zeros(699)]), ValueError, r"minus\[3\]: expected .*700"),
        (dict(minus=[*others[:3], torch.zeros(700, dtype=torch.int32)]), TypeError, r"minus\[3\]"),
        (dict(message=torch.zeros(size - 1, dtype=torch.uint8)), ValueError, f"message: expected {size} numbers"),
        (dict(message=torch.zeros(size, dtype=torch.int8)), ValueError, f"message: expected {size} numbers of uint8"),
    ):
        given = dict(average=True, algorithm="direct", codec="int4") | options
        with pytest.raises(error, match=match):
            communicator.run_bucket(own.clone(), layout.handle, **given)
    with pytest.raises(TypeError, match="tensor: expected dtype float32 where something is subtracted, got .*Half"):
        communicator.run_bucket(own.half(), layout.handle, average=True, algorithm="direct", codec="int4", minus=others)


def test_wrong_differences_and_messages_are_refused():
    run_ranks(1, refuse)


def refuse_where_nothing_can_be_subtracted(rank, world_size):
    own, others, _ = numbers(rank)
    layout = lay("raw", None)
    for per_host, algorithm in ((1, "native"), (2, "direct")):
        with pytest.raises(ValueError, match="minus"):
            Communicator(ranks_per_host=per_host).run_bucket(
                own.clone(), layout.handle, average=True, algorithm=algorithm, codec="raw", minus=others
            )


def test_native_and_two_levels_do_not_ignore_what_is_subtracted():
    run_ranks(4, refuse_where_nothing_can_be_subtracted)
