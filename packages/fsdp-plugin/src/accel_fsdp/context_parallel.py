"""Context parallelism: peers hold parts of a sequence, and attend to all of it together.

    with accelerator.maybe_context_parallel(
        buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 1]
    ):
        loss = loss_of(model(tokens, positions), labels)
        accelerator.backward(loss)

Inside the block each of the buffers holds this process's part of the sequence, and
`F.scaled_dot_product_attention` is attention of these positions to the positions of all peers.
Everything else in a transformer treats positions one by one.

**Which part.** The sequence is cut into two pieces per peer, and peer r has the r-th from the front
and the r-th from the back. Under a causal mask a position attends to those before it, so that is as
much work for each.

**How.** Every peer collects the keys and values of all, and attends with its own queries; in the
backward the gradients of keys and values are summed where they belong. That is the method of Llama
3 (https://arxiv.org/abs/2407.21783, section 3.3.2), it takes torch's own kernels on every device,
and sends what torch's default ring sends in the forward. A layer keeps the keys and values of the
whole sequence until its backward; with `activation_checkpointing=True` one layer at a time does.

**What the model has to do.** It says where its positions are: what it makes of `arange(length)`
inside would count from zero on every peer, so position ids or tables of rotary angles belong among
the buffers. It attends by `F.scaled_dot_product_attention` without a mask of its own, causal or
not. Labels are shifted before they are cut.

**Losses.** Each peer has the mean over its part, and gradients are averaged over shards and peers:
that is the gradient of the mean over the sequence if all parts count as many tokens. If they do not
(padding), `accelerator.forward_backward` sums and divides exactly.

A model that is called outside the block computes the whole sequence on every peer. That is right,
and saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from accel_core.api.component import all_gather_single, reduce_scatter_single

Attention = Callable[..., torch.Tensor]


@contextmanager
def split_sequence(
    group: dist.ProcessGroup,
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[torch.Tensor] = (),
) -> Iterator[None]:
    """Inside, buffers hold this process's part of the sequence, and attention spans all parts.

    The forward and the backward belong inside: buffers change in place at the end of the block, and
    a backward that needs one then raises. Attention is a collective over the group. What the block
    changes, the function `F.scaled_dot_product_attention` and the buffers, is as it was after it,
    also if it raises; buffers get their own memory back, not a copy.

    Args:
        group: the peers, all of which enter with the same buffers.
        buffers: tensors of any dtype that do not require gradients; the first one has the length of
            the sequence. A longer one, a table of positions, counts from its beginning.
        buffer_seq_dims: which dimension of each buffer is the sequence; as many, and in range,
            which the Accelerator checks.
        no_restore_buffers: those of the buffers that stay parts, so that the rest of their memory
            can be freed.

    Raises:
        ValueError: when entered, for buffers that cannot be cut; inside, for attention with a mask,
            or over a length that is not a part's.
        RuntimeError: when entered inside another block, and at the end if nothing attended.
    """
    peers, peer = dist.get_world_size(group), dist.get_rank(group)
    length = _checked_length(buffers, buffer_seq_dims, peers)
    kept = _checked_kept(buffers, no_restore_buffers)
    if hasattr(F.scaled_dot_product_attention, _MARK):
        raise RuntimeError(
            "maybe_context_parallel() was entered inside another block of it, so sequences would be cut twice. Leave one block "
            "before the next, and name all buffers in one."
        )
    whole = [(buffer, buffer.detach()) for buffer in buffers]
    original = F.scaled_dot_product_attention
    seen: list[bool] = []
    try:
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            _show(buffer, _part(buffer.detach(), dim, length, peers, peer))
        F.scaled_dot_product_attention = _attention(original, group, length // peers, seen)
        yield
        if not seen:
            raise RuntimeError(
                "No F.scaled_dot_product_attention ran inside maybe_context_parallel(), so positions attended to those of their own part "
                "only, if at all. Run forward and backward inside the block, with a model that attends by this function "
                "(flex_attention and kernels of other libraries are not seen)."
            )
    finally:
        F.scaled_dot_product_attention = original
        for buffer, memory in whole:
            if id(buffer) not in kept:
                _show(buffer, memory)


_MARK = "accel_context_parallel"


def _attention(original: Attention, group: dist.ProcessGroup, part: int, seen: list[bool]) -> Attention:
    """The replacement of `F.scaled_dot_product_attention` inside a block."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not seen:
            seen.append(True)
        _check_call(query, key, attn_mask, is_causal, part)
        query, key, value = _autocast(query, key, value)
        key, value = _Collected.apply(group, is_causal, key, value)  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not is_causal:
            return original(query, key, value, **options)
        return _causal(original, group, query, key, value, options)

    # torch traces a bias wrongly where `F` is not as it was, so what is compiled is what stands around attention.
    replacement: Attention = torch.compiler.disable(scaled_dot_product_attention)
    setattr(replacement, _MARK, True)
    return replacement


def _causal(
    original: Attention,
    group: dist.ProcessGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Each of the two pieces attends to the sequence up to its own end."""
    from torch.nn.attention.bias import causal_lower_right

    peers, peer = dist.get_world_size(group), dist.get_rank(group)
    outputs = []
    for piece, number in zip(query.chunk(2, -2), (peer, 2 * peers - 1 - peer), strict=True):
        rows = piece.shape[-2]
        end = (number + 1) * rows
        mask = causal_lower_right(rows, end)
        outputs.append(_biased(original, piece, key[..., :end, :], value[..., :end, :], mask, options))
    return torch.cat(outputs, -2)


def _biased(
    original: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention with one of torch's causal biases, which look their function up in `F`."""
    ours = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = original
    try:
        return original(query, key, value, attn_mask=bias, **options)
    finally:
        F.scaled_dot_product_attention = ours


class _Collected(torch.autograd.Function):
    """Keys and values of all peers, in the order of the sequence if `ordered`, else by peer."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, ordered: bool, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts of shape (…, length / peers, features) to wholes of shape (…, length, features)."""
        ctx.group, ctx.ordered, ctx.shapes = group, ordered, (key.shape, value.shape)
        sent = torch.cat([key.flatten(), value.flatten()])
        peers = dist.get_world_size(group)
        received = sent.new_empty(peers * sent.numel())
        all_gather_single(received, sent, group=group)
        keys, values = received.view(peers, -1).split([key.numel(), value.numel()], 1)
        return _joined(keys.unflatten(1, key.shape), ordered), _joined(values.unflatten(1, value.shape), ordered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[None, None, torch.Tensor, torch.Tensor]:
        """The gradients of wholes, summed over peers in float32, for this part."""
        peers, dtype = dist.get_world_size(ctx.group), keys.dtype
        wide = torch.promote_types(dtype, torch.float32)
        sent = torch.cat([_separated(whole, peers, ctx.ordered).flatten(1) for whole in (keys, values)], 1).to(wide)
        received = sent.new_empty(sent.shape[1])
        reduce_scatter_single(received, sent.flatten(), group=ctx.group)
        key_shape, value_shape = ctx.shapes
        key, value = received.to(dtype).split([key_shape.numel(), value_shape.numel()])
        return None, None, key.view(key_shape), value.view(value_shape)


def _joined(parts: torch.Tensor, ordered: bool) -> torch.Tensor:
    """(peers, …, part, features) to (…, length, features)."""
    if not ordered:
        return torch.cat(parts.unbind(), -2)
    front, back = parts.chunk(2, -2)
    return torch.cat([*front.unbind(), *back.flip(0).unbind()], -2)


def _separated(whole: torch.Tensor, peers: int, ordered: bool) -> torch.Tensor:
    """(…, length, features) to (peers, …, part, features)."""
    if not ordered:
        return torch.stack(whole.chunk(peers, -2))
    front, back = whole.chunk(2, -2)
    parts = zip(front.chunk(peers, -2), reversed(back.chunk(peers, -2)), strict=True)
    return torch.stack([torch.cat(pieces, -2) for pieces in parts])


def _part(buffer: torch.Tensor, dim: int, length: int, peers: int, peer: int) -> torch.Tensor:
    """A peer's two pieces of a sequence."""
    size = length // (2 * peers)
    pieces = [buffer.narrow(dim, number * size, size) for number in (peer, 2 * peers - 1 - peer)]
    return torch.cat(pieces, dim)


def _show(buffer: torch.Tensor, memory: torch.Tensor) -> None:
    """Makes `buffer` a view of other memory, in place, without writing to what it showed before.

    It counts as a change for autograd: a backward that needs the buffer as it was raises.
    """
    buffer.set_(memory.untyped_storage(), memory.storage_offset(), memory.size(), memory.stride())


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts the arguments of attention as autocast does, before keys and values are sent."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) if tensor.dtype is not torch.float64 else tensor for tensor in tensors)


def _checked_length(buffers: Sequence[torch.Tensor], dims: Sequence[int], peers: int) -> int:
    """The length of the sequence, if all buffers can be cut."""
    if not buffers:
        raise ValueError(
            "maybe_context_parallel() was entered without buffers, and would leave every peer with the whole sequence. Name all tensors that "
            "hold one: maybe_context_parallel(buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 1])."
        )
    for number, buffer in enumerate(buffers):
        if buffer.requires_grad:
            raise ValueError(
                f"buffers[{number}] requires gradients, and cannot be cut in place. A table of learned positions stays whole: index it "
                f"with position ids, and cut these."
            )
        if any(buffer is other for other in buffers[:number]):
            raise ValueError(
                f"buffers[{number}] is among the buffers twice, and would be cut twice. Name each tensor once."
            )
    length = buffers[0].shape[dims[0]]
    if length % (2 * peers):
        raise ValueError(
            f"buffers[0] has a sequence of {length}, which cannot be cut into two pieces for each of {peers} context-parallel "
            f"processes: {length} % (2 * {peers}) = {length % (2 * peers)}. Pad it to {length + 2 * peers - length % (2 * peers)}."
        )
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if buffer.shape[dim] < length:
            raise ValueError(
                f"buffers[{number}] has {buffer.shape[dim]} positions in dimension {dim}, but buffers[0] has {length}. Give all buffers "
                f"the length of the sequence, or check buffer_seq_dims={list(dims)}."
            )
    return length


def _checked_kept(buffers: Sequence[torch.Tensor], kept: Collection[torch.Tensor]) -> set[int]:
    chosen = {id(buffer) for buffer in kept}
    if not chosen <= {id(buffer) for buffer in buffers}:
        raise ValueError(
            "no_restore_buffers holds a tensor that is not among the buffers. Pass the same objects: buffers=[tokens, labels], "
            "no_restore_buffers={labels}."
        )
    return chosen


def _check_call(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, part: int) -> None:
    if mask is not None:
        raise ValueError(
            f"scaled_dot_product_attention() was given an attn_mask of shape {tuple(mask.shape)} inside maybe_context_parallel(), where a "
            f"process knows the mask of its own part only. Use is_causal=True, or no mask; leave padding to the loss."
        )
    if is_causal and not query.shape[-2] == key.shape[-2] == part:
        raise ValueError(
            f"Causal attention over {query.shape[-2]} queries and {key.shape[-2]} keys inside maybe_context_parallel(), where a part of the "
            f"sequence has {part} positions. Name the model's inputs among the buffers, and their sequence in buffer_seq_dims."
        )
