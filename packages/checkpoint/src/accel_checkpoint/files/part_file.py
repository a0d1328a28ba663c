"""The file of one rank in a checkpoint: tensors as safetensors, written fast, verified on reading.

Every byte of the file is under a hash, one per `BLOCK` of a tensor and one for the header, which
the description of the file (`StoredFile`) holds. What is read goes straight into the tensors that
training uses. Damage is found before the call returns; by then a damaged block may lie in them, so
that nothing may be trained or saved after such an error.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from accel_checkpoint.boxes import flat_range
from accel_checkpoint.deferred import is_deferred
from accel_checkpoint.files.disk import CHUNK, READ, Output, hash_of, is_memory, memory, new_file, open_file, read_into
from accel_checkpoint.files.stored import BLOCK, DTYPES, StoredFile, StoredTensor
from accel_checkpoint.host_copies import bits, contents
from accel_checkpoint.weights.tensor_files import header_of, in_order
from accel_core import CheckpointError
from accel_core.api.layouts import Box

_ALIGNMENT = 64  # the tensors begin at a multiple of it, so that readers can map them without a copy


def write_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Writes tensors to a new file, which is on the disk on return, and returns its description.

    They may be on any device, with any strides; only those not in contiguous CPU memory are copied,
    in parts (`host_copies`). CheckpointError is raised for what is no plain tensor, before any write.
    """
    found = {key: tensor if is_deferred(tensor) else plain(key, tensor) for key, tensor in tensors.items()}
    if "__metadata__" in found:
        raise _refusal("__metadata__", "a name that the format keeps for itself", "Give it another name")
    keys = in_order(found)
    header = header_of({key: found[key] for key in keys}, {"format": "pt"}, _ALIGNMENT)
    stored: dict[str, StoredTensor] = {}
    with new_file(path) as output:
        output.write(memoryview(header))
        for key, parts in zip(keys, contents([found[key] for key in keys]), strict=True):
            offset, tensor = output.position, found[key]
            hashes = _write(parts, output)
            dtype = str(tensor.dtype).removeprefix("torch.")
            stored[key] = StoredTensor(dtype, tuple(tensor.shape), offset, tensor.nbytes, hashes)
    return StoredFile(path.name, output.position, len(header), xxhash.xxh3_128_hexdigest(header), stored)


def plain(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without gradient history; CheckpointError unless strided memory, and that alone."""
    data = tensor.detach()
    if type(data) is not torch.Tensor:
        raise _refusal(key, f"a {type(data).__name__}", "Take its components, or save it as an Opaque entry")
    if data.layout != torch.strided or data.is_nested:
        raise _refusal(key, "nested" if data.is_nested else f"of the layout {data.layout}", "Take its components")
    if data.is_meta or (data.numel() and not data.untyped_storage().nbytes()):
        raise _refusal(key, "on the meta device" if data.is_meta else "freed memory", "Give it its data first")
    if str(data.dtype).removeprefix("torch.") not in DTYPES:
        raise _refusal(key, f"of the dtype {data.dtype}, whose scales lie elsewhere", "Take its components")
    return data


def _refusal(key: str, found: str, advice: str) -> CheckpointError:
    text = f"the files of a checkpoint hold plain, dense tensors with their data, but {key!r} is {found}. {advice}."
    return CheckpointError(text)


def _write(parts: Iterable[memoryview], output: Output) -> tuple[str, ...]:
    """Writes the bytes of a tensor. Returns the hashes of their blocks."""
    assert sys.byteorder == "little", "the format is little-endian"
    hashes, hasher, filled = [], xxhash.xxh3_128(), 0
    for data in parts:
        begin = 0
        while begin < len(data):
            chunk = data[begin : begin + min(CHUNK, BLOCK - filled)]
            hasher.update(chunk)
            output.write(chunk)
            begin += len(chunk)
            filled += len(chunk)
            if filled == BLOCK:
                hashes.append(hasher.hexdigest())
                hasher.reset()
                filled = 0
    return (*hashes, hasher.hexdigest()) if filled else tuple(hashes)


class PartReader:
    """Reads tensors, or boxes of them, from a file of `write_part`, and verifies what it returns.

    A context manager. Threads may read at once (`read_all`), each with a buffer of one `BLOCK`.
    """

    def __init__(self, path: Path, stored: StoredFile) -> None:
        self.path = path
        self.stored = stored
        self._local = threading.local()
        self._descriptor = open_file(path)
        try:
            self._check()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def tensor(self, key: str) -> torch.Tensor:
        """A new CPU tensor. Raises as `read_box`."""
        stored = self.stored.tensors[key]
        if stored.nbytes > BLOCK:  # no memory is taken for what does not even begin as it should
            self._buffered(key, stored, 0)
        with torch.inference_mode(False):
            # As bytes, for torch makes no empty tensors of some of the dtypes.
            data = torch.empty(stored.nbytes, dtype=torch.uint8)
            out = data.view(DTYPES[stored.dtype]).view(stored.shape)
        self.read_box(key, Box.whole(stored.shape), out)
        return out

    @torch.no_grad()
    def read_box(self, key: str, source: Box, out: torch.Tensor, cast: bool = False) -> None:
        """Reads a tensor's region, only its blocks, into `out` on any device; `cast`: of any dtype."""
        stored, out = self.stored.tensors[key], plain(key, out)
        fits = Box.whole(stored.shape).contains(source) and tuple(out.shape) == source.sizes
        if not fits or (out.dtype != DTYPES[stored.dtype] and not cast):
            there, here = f"{stored.dtype} {stored.shape}", f"{out.dtype} {tuple(out.shape)}"
            raise CheckpointError(f"{self.path}: {source} of {key!r}, {there}, is to be read into {here}.")
        if source.is_empty:
            return
        extent = _extent(stored.shape, source)
        if len(extent) == source.numel and out.is_contiguous() and not out.is_conj() and not out.is_neg():
            self._read_run(key, stored, extent, out.view(-1))
            torch.autograd.graph.increment_version(out)  # it has not seen what was read into its very memory
        else:
            self._read_region(key, stored, source, out)

    def _read_run(self, key: str, stored: StoredTensor, run: range, out: torch.Tensor) -> None:
        """Elements that follow each other in the file, into memory where they do so too."""
        size = stored.itemsize
        own = memory(out) if is_memory(out) and out.dtype == DTYPES[stored.dtype] else None
        for index, block in _blocks(stored, run):
            begin, end = max(block.start, run.start), min(block.stop, run.stop)
            if own is not None and len(block) == end - begin:
                self._read_block(key, stored, index, own[(begin - run.start) * size : (end - run.start) * size])
            else:
                elements = self._buffered(key, stored, index)[begin - block.start : end - block.start]
                _copy(elements, out[begin - run.start : end - run.start])

    def _read_region(self, key: str, stored: StoredTensor, source: Box, out: torch.Tensor) -> None:
        """Copies elements that are scattered over the file or the memory, block by block."""
        for index, block in _blocks(stored, _extent(stored.shape, source)):
            position = 0
            for box in flat_range(stored.shape, block.start, block.stop):
                if shared := source.intersection(box):
                    elements = self._buffered(key, stored, index)[position : position + box.numel].view(box.sizes)
                    _copy(elements[shared.relative_to(box).slices], out[shared.relative_to(source).slices])
                position += box.numel

    def _buffered(self, key: str, stored: StoredTensor, index: int) -> torch.Tensor:
        """The elements of a block, flat, in this thread's buffer; a block in it is not reread."""
        held = self._local.__dict__
        if held.get("block") != (key, index):
            if "buffer" not in held:
                with torch.inference_mode(False):
                    held["buffer"] = torch.empty(min(BLOCK, self.stored.nbytes), dtype=torch.uint8)
            held["block"] = None
            self._read_block(key, stored, index, memory(held["buffer"])[: stored.nbytes - index * BLOCK])
            held["block"] = (key, index)
        elements: torch.Tensor = held["buffer"][: min(BLOCK, stored.nbytes - index * BLOCK)]
        return elements.view(DTYPES[stored.dtype])

    def _read_block(self, key: str, stored: StoredTensor, index: int, place: memoryview) -> None:
        """Fills `place`, as long as the block, and verifies it."""
        hasher, offset = xxhash.xxh3_128(), stored.offset + index * BLOCK
        for begin in range(0, len(place), READ):
            part = place[begin : begin + READ]
            if read_into(self._descriptor, part, offset + begin, self.path) != len(part):
                raise CheckpointError(f"{self.path}: the file became shorter while it was read. {_ANOTHER}")
            hasher.update(part)
        found = hasher.hexdigest()
        if found != stored.hashes[index]:
            span = f"the bytes of {key!r} from {index * BLOCK} to {index * BLOCK + len(place) - 1}"
            raise self._damage(f"{span} have the hash {found}", stored.hashes[index])

    def _damage(self, found: str, expected: object) -> CheckpointError:
        text = f"{self.path}: {found}, and the checkpoint says {expected}: the file is damaged. {_ANOTHER}"
        return CheckpointError(text)

    def _check(self) -> None:
        found = os.fstat(self._descriptor).st_size
        if found != self.stored.nbytes:
            raise self._damage(f"the file has {found} bytes", self.stored.nbytes)
        header = hash_of(self._descriptor, self.stored.header_bytes, self.path)
        if header != self.stored.header_hash:
            raise self._damage(f"the header has the hash {header}", self.stored.header_hash)


_ANOTHER = "Load another checkpoint."


def _extent(shape: tuple[int, ...], box: Box) -> range:
    """The range from the first to the last element of a non-empty box, in row-major order."""
    first = last = 0
    for length, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        first = first * length + offset
        last = last * length + offset + size - 1
    return range(first, last + 1)


def _blocks(stored: StoredTensor, elements: range) -> Iterator[tuple[int, range]]:
    """The blocks in which elements lie: the number of each, and the elements that it has."""
    per_block = BLOCK // stored.itemsize
    total = stored.nbytes // stored.itemsize
    for index in range(elements.start // per_block, (elements.stop - 1) // per_block + 1):
        yield index, range(index * per_block, min((index + 1) * per_block, total))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.dtype == target.dtype and not target.is_conj() and not target.is_neg():
        source, target = bits(source), bits(target)
    target.copy_(source)
