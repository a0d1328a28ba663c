"""Python objects sent between ranks, pickled; errors: see `accel_core.collectives.operations`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accel_core.collectives.reduce_gather import channel_of, check_source, refuse
from accel_core.processes.channel import Channel, Letter, Spec, from_bytes, to_bytes
from accel_core.processes.mismatch_report import describe
from accel_core.processes.watch.collective_scope import collective

if TYPE_CHECKING:
    from accel_core.processes.world import World

SMALL_OBJECT = 1 << 20  # bytes: more `broadcast_object` sends in a second collective, from the source only

T = TypeVar("T")


def gather_objects(objects: Sequence[Any], world: World, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Concatenates the ranks' lists in rank order: `accel_core.gather_object`. A collective."""
    channel = channel_of(world, group)
    if not isinstance(objects, (list, tuple)):
        text = f"gather_object({type(objects).__name__}): expected a list or a tuple, whose items are concatenated. Pass [value] for one item per rank."
        refuse(channel, TypeError(text))
    if channel is None:
        return objects if isinstance(objects, list) else list(objects)
    content, unsure = _pickled(channel, objects)
    letter = _letter_of_bytes(channel, "gather_object", "", len(content), unsure)
    _, parts, doubts = channel.exchange(letter, [torch.tensor([len(content)]), from_bytes(content), _NOTHING])

    def joined() -> list[Any]:
        return [item for rank, part in enumerate(parts) for item in _unpickled("gather_object", rank, part)]

    return _confirmed(channel, "gather_object", joined) if any(map(len, doubts)) else joined()


def broadcast_object(obj: Any, world: World, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The object of the rank `source` of the group; on the source `obj` itself. A collective."""
    channel = channel_of(world, group)
    call = f"broadcast_object(source={source!r})"
    check_source(channel, call, source)
    return obj if channel is None else _broadcast_object(channel, call, "", obj, source)


def broadcast_object_list(objects: MutableSequence[Any], world: World, source: int = 0) -> list[Any]:
    """Replaces the items of lists by one rank's: `accel_core.broadcast_object_list`. Collective."""
    channel = channel_of(world, None)
    call = f"broadcast_object_list(from_process={source!r})"
    check_source(channel, call, source)
    if not isinstance(objects, list):
        text = f"broadcast_object_list({type(objects).__name__}): expected a list, whose items are replaced. Pass one of the same length on every rank, such as [None]."
        refuse(channel, TypeError(text))
    if channel is not None:
        objects[:] = _broadcast_object(channel, call, f"a list of {len(objects)}", list(objects), source)
    return objects


def _broadcast_object(channel: Channel, call: str, structure: str, obj: Any, source: int) -> Any:
    content, unsure = _pickled(channel, obj) if channel.rank == source else (bytearray(), False)
    sent = content if len(content) <= SMALL_OBJECT else bytearray()
    letter = _letter_of_bytes(channel, call, structure, len(sent), unsure)
    lengths, parts, doubts = channel.exchange(letter, [torch.tensor([len(content)]), from_bytes(sent), _NOTHING])
    part, length, unsure = parts[source], int(lengths[source]), len(doubts[source]) > 0
    if length > SMALL_OBJECT:
        part = from_bytes(content or bytearray(length)).to(channel.message_device)
        with collective(f"{call.partition('(')[0]}()"):
            dist.broadcast(part, group=channel.group, group_src=source)

    def received() -> Any:
        return obj if channel.rank == source else _unpickled(call, source, part)

    return _confirmed(channel, call, received) if unsure else received()


def _letter_of_bytes(channel: Channel, call: str, structure: str, count: int, unsure: bool) -> Letter:
    """A letter of three tensors: the number of bytes, the bytes, and an empty row if unsure."""
    specs: list[Spec] = [(torch.int64, ()), (torch.uint8, ()), (torch.uint8, (0,))]
    key = (call, structure, count, unsure)
    return channel.letter(key, lambda: describe(call, structure), specs, [1, count, int(unsure)])


def _confirmed(channel: Channel, call: str, receive: Callable[[], T]) -> T:
    """The result of `receive`; if it raises on one rank, all raise. A collective."""
    try:
        received = receive()
    except pickle.UnpicklingError as error:
        channel.refuse(error)
    channel.exchange(channel.letter((call, "received"), lambda: describe(call, "received")), ())
    return received


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
# Packages that are the same on every rank: what consists of their classes alone unpickles on all ranks, or on none.
_EVERYWHERE = ("accel_core", "builtins", "collections", "copyreg", "torch")
# Of other dtypes, such as float8, torch writes pickles that it cannot read.
_TYPED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}


class _Pickler(pickle.Pickler):
    """Puts tensors on the CPU first: a device's index means another device to another rank."""

    unsure = False  # whether it has met a class or function that another rank may lack

    def reducer_override(self, obj: Any) -> Any:
        """Called for every object of no simple built-in type, every class and every function."""
        module = str(getattr(obj, "__module__", None) or type(obj).__module__)
        if module.partition(".")[0] not in _EVERYWHERE:
            self.unsure = True
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not (obj.dtype in _TYPED or obj.is_quantized):
            held = obj.detach().cpu().contiguous()
            return _from_bytes, (held.view(-1).view(torch.uint8), obj.dtype, tuple(obj.shape), obj.requires_grad)
        return NotImplemented if obj.device.type == "cpu" else obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _from_bytes(content: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return content.view(dtype).view(shape).requires_grad_(requires_grad)


def _pickled(channel: Channel, obj: Any) -> tuple[bytearray, bool]:
    """The pickle of an object, and whether others may fail to read it. Refuses on errors."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(obj)
    except Exception as error:  # noqa: BLE001  (whatever an object's own methods raise; the other ranks are waiting)
        channel.refuse(error)
    return bytearray(stream.getbuffer()), pickler.unsure


def _unpickled(call: str, source: int, content: torch.Tensor) -> Any:
    """The object in a tensor of bytes that the rank `source` sent. Raises `UnpicklingError`."""
    try:
        return pickle.loads(to_bytes(content))  # noqa: S301  (from another rank's memory, never from a file)
    except Exception as error:
        raise pickle.UnpicklingError(
            f"{call}: what rank {source} sent cannot be unpickled here: {type(error).__name__}: {error}. Send plain "
            f"data and tensors, or objects of a class that stands in a module which every rank can import."
        ) from error
