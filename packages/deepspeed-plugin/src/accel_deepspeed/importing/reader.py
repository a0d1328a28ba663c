"""A folder of DeepSpeed's as a foreign checkpoint: fp32 masters and optimizer state by names.

Each rank's file becomes a file of the neutral checkpoint: its shards are boxes of parameters, and
tensors stay in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint import ForeignCheckpoint, ForeignOptimizer
from accel_core import CheckpointError
from accel_core.api.layouts import Alias, Elementwise, Entry, Opaque, Piece, Replicated
from accel_deepspeed.importing.optimizer_options import Options, options_of
from accel_deepspeed.importing.pickled_file import Inert, read_members, read_pickled
from accel_deepspeed.importing.rank_files import RankFiles, check_ranks, find_rank_files
from accel_deepspeed.importing.shards import (
    Shape,
    Shard,
    elementwise,
    shards_of_parts,
    shards_of_slices,
    whole_shards,
)

MODEL, OPTIMIZER = "model.0", "optimizer.0"

_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")  # of stages 1 and 2, of stage 3
_EXTRA_STATE = "_extra_state"

Part = dict[str, dict[str, Entry]]
Flat = Callable[[Shard], Mapping[str, Any]]
"""The flat tensors that a shard lies in, by key of the optimizer's state; "fp32" is the master."""


@dataclass(frozen=True)
class _Model:
    """The content of the model's files.

    Args:
        states: of each rank in stage 3, else one.
        groups: the shapes of trained parameters, for each flat group.
        is_sharded: whether frozen parameters are too, which stage 3 does.
    """

    states: list[dict[str, Any]]
    groups: list[dict[str, Shape]]
    is_sharded: bool

    @property
    def ranks(self) -> int:
        return int(self.states[0].get("dp_world_size") or 1)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}

    @property
    def frozen(self) -> dict[str, Shape]:
        """The shapes of frozen parameters of which each rank has a part."""
        shapes = self.states[0].get("frozen_param_shapes") if self.is_sharded else None
        return {name: tuple(shape) for name, shape in (shapes or {}).items()}

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters, each with the name that has the data."""
        return dict(self.states[0].get("shared_params") or {})


def open_deepspeed(folder: Path, optimizer: str | None) -> ForeignCheckpoint | None:
    """A checkpoint of `save_checkpoint`, one of its tags, or `ds_to_universal`; None for others.

    Raises:
        CheckpointError: for what cannot be imported, or is not complete.
    """
    files = find_rank_files(folder)
    if files is None:
        return None
    check_ranks(files.models[:1], 1)
    model = _model_of(files)
    if files.universal is not None:
        return _universal(files, files.universal, model, optimizer)
    check_ranks(files.optimizers, model.ranks)
    return _sharded(files, model, optimizer)


def _model_of(files: RankFiles) -> _Model:
    states = [read_members(path, "module") for path in files.models]
    if states[0].get("param_shapes") is None:
        raise CheckpointError(
            f"{files.folder} was to be imported, but it was saved without ZeRO (stage 0), and does not say which state of the optimizer "
            f"is of which parameter. Save it under stage 1; or load its 'module' and 'optimizer' by load_state_dict() in a script."
        )
    steps = {state.get("global_steps") for state in states}
    if len(steps) > 1:
        raise _mixed(files, f"the files of the model are of the steps {sorted(map(str, steps))}")
    groups = [{name: tuple(shape) for name, shape in group.items()} for group in states[0]["param_shapes"]]
    found = _Model(states, groups, is_sharded=files.models[0].name.startswith("zero_pp_rank"))
    if found.is_sharded:
        check_ranks(files.models, found.ranks)
    return found


def _sharded(files: RankFiles, model: _Model, asked: str | None) -> ForeignCheckpoint:
    states = [read_members(path, "optimizer_state_dict")["optimizer_state_dict"] for path in files.optimizers]
    masters = next((key for key in _MASTERS if key in states[0]), None)
    third = masters == _MASTERS[1]
    if masters is None or "ds_zero_partition_groups" in states[0] or not (third or "param_slice_mappings" in states[0]):
        raise CheckpointError(
            f"{files.optimizers[0]} was to be imported, but it has the shards of no known kind: {sorted(states[0])}. Load it in "
            f"DeepSpeed 0.19, without expert parallelism, and save it again."
        )
    _check_partitions(files, states)
    inner = [state["optimizer_state_dict" if third else "base_optimizer_state"] for state in states]
    if not all(isinstance(each, dict) for each in inner):
        raise CheckpointError(
            f"{files.folder} was to be imported, but it was saved with elastic_checkpoint, without the options of the optimizer. Save "
            f'it with "elastic_checkpoint": false.'
        )
    _check_steps(files, inner)
    shards = (
        shards_of_parts(model.groups, len(states))
        if third
        else shards_of_slices([state["param_slice_mappings"] for state in states], model.shapes)
    )
    options = options_of(inner[0]["param_groups"], asked, _section(model))
    steps = _steps(inner[0])

    def flat(rank: int, shard: Shard) -> Mapping[str, Any]:
        own = inner[rank]["state"].get(shard.group, {})
        return {**own, **_step_of(own, steps[shard.group], options), "fp32": states[rank][masters][shard.group]}

    parts = [partial(_part, model, shards[rank], partial(flat, rank), [rank]) for rank in range(len(states))]
    stage = "3" if third else str(_stage(states[0].get("zero_stage")))
    return _foreign(files, model, options, inner[0], parts, f"stage {stage}, a world of {len(states)}")


def _universal(files: RankFiles, folder: Path, model: _Model, asked: str | None) -> ForeignCheckpoint:
    common = read_members(folder / "optimizer_state.pt", "param_groups")
    groups = common["param_groups"]
    options = options_of(groups, asked, _section(model))
    inner = {"param_groups": groups, "state": common.get("optimizer_state_dict", {}).get("state", {})}
    steps = _steps(inner)

    def flat(shard: Shard) -> Mapping[str, Any]:
        found = {path.stem: _content(path) for path in sorted((folder / shard.name).glob("*.pt"))}
        if "fp32" not in found:
            raise CheckpointError(
                f"{folder / shard.name} was to be imported, but there is no fp32.pt in it: the conversion was not finished. Convert it again."
            )
        step = inner["state"].get(shard.group, {}).get("step")
        tensors = {
            key: value.flatten() if torch.is_tensor(value) and key != "step" else value for key, value in found.items()
        }
        own = {**({} if step is None else {"step": step}), **tensors}
        moments = {key: value for key, value in own.items() if key != "fp32"}
        return {**own, **_step_of(moments, steps[shard.group], options)}

    parts = [partial(_part, model, list(whole_shards(model.groups)), flat, range(model.ranks))]
    return _foreign(files, model, options, inner, parts, "universal")


def _foreign(
    files: RankFiles,
    model: _Model,
    options: Options,
    inner: Mapping[str, Any],
    parts: Sequence[Callable[[], Part]],
    form: str,
) -> ForeignCheckpoint:
    first = model.states[0]
    schedule = first.get("lr_scheduler")
    schedulers = [schedule] if isinstance(schedule, dict) and "last_epoch" in schedule else []  # of one of torch's
    names = _names_of_groups(model.groups, inner["param_groups"])
    groups = [
        {**group, "names": [f"0.{name}" for name in own]} for group, own in zip(options.groups, names, strict=True)
    ]
    elements = sum(math.prod(shape) for shape in model.shapes.values())
    kept = sorted(
        first.keys() & {"data_sampler", "random_ltd"} - {key for key, value in first.items() if value is None}
    )
    user = sorted(first.keys() - _ENGINE_KEYS)
    left = [*kept, *([] if schedule is None or schedulers else ["lr_scheduler (DeepSpeed's own)"]), *user]
    facts = {
        "tag": files.folder.name,
        "form": form,
        "steps": str(first.get("global_steps", "not said")),
        "model": f"{len(model.shapes)} trained tensors, {elements} elements, fp32 masters",
        "optimizer": f"{options.kind.replace(':', '.')}, {len(groups)} groups",
        "scheduler": "that of one of torch's" if schedulers else "none that could be taken",
        **({"left out": ", ".join(left)} if left else {}),
    }
    return ForeignCheckpoint(
        origin=f"DeepSpeed {first.get('ds_version', '')}".strip(),
        facts=facts,
        parts=parts,
        optimizers=[ForeignOptimizer(options.kind, groups)],
        schedulers=schedulers,
        backwards=int(first.get("global_steps") or 0),
    )


_ENGINE_KEYS = {
    "buffer_names", "data_sampler", "dp_world_size", "ds_config", "ds_version", "frozen_param_fragments", "frozen_param_shapes",
    "global_samples", "global_steps", "lr_scheduler", "module", "mp_world_size", "optimizer", "param_shapes", "random_ltd",
    "shared_params", "skipped_steps", "checkpoint_parallel_dimensions",
}  # fmt: skip


def _part(model: _Model, shards: Sequence[Shard], flat: Flat, ranks: Sequence[int]) -> Part:
    """The shards of some ranks, and with those of the first all that is not sharded."""
    own: dict[str, Entry] = {} if ranks[0] else _unsharded(model)
    own |= _frozen(model, ranks)
    moments: dict[str, Entry] = {}
    shapes = model.shapes
    for shard in shards:
        shape = shapes[shard.name]
        for key, value in flat(shard).items():
            if key == "fp32":
                own[shard.name] = _as_fp32(elementwise(shape, value, shard))
            elif torch.is_tensor(value) and value.dim() > 0:
                moments[f"0.{shard.name}/{key}"] = elementwise(shape, value, shard)
            elif shard.offset == 0 and shard.numel:
                moments[f"0.{shard.name}/{key}"] = Replicated(torch.as_tensor(value))
    return {MODEL: own, OPTIMIZER: moments}


def _unsharded(model: _Model) -> dict[str, Entry]:
    """Buffers, tied names, and below stage 3 frozen parameters. 16-bit ones become fp32."""
    found: dict[str, Entry] = {}
    known, aliases = {*model.shapes, *model.frozen}, model.aliases
    for name, value in model.states[0]["module"].items():
        if name in known:
            continue
        if name in aliases:
            found[name] = Alias(aliases[name])
        elif name.rpartition(".")[2] == _EXTRA_STATE:
            found[name] = Opaque(value, type(value).__qualname__)
        else:
            found[name] = Replicated(_widened(value))
    return found


def _frozen(model: _Model, ranks: Sequence[int]) -> dict[str, Entry]:
    """Parts of frozen parameters on some ranks in stage 3."""
    found: dict[str, Entry] = {}
    for name, shape in model.frozen.items():
        pieces: list[Piece] = []
        for rank in ranks:
            (shard,) = shards_of_parts([{name: shape}], model.ranks)[rank]
            entry = _as_fp32(elementwise(shape, model.states[rank]["frozen_param_fragments"][name].flatten(), shard))
            pieces += entry.pieces
        found[name] = Elementwise(shape, entry.dtype, tuple(pieces))
    return found


def _as_fp32(entry: Elementwise) -> Elementwise:
    pieces = tuple(piece._replace(data=_widened(piece.data)) for piece in entry.pieces)
    return Elementwise(entry.shape, _widened(torch.empty(0, dtype=entry.dtype)).dtype, pieces)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in {torch.float16, torch.bfloat16} else value


def _steps(inner: Mapping[str, Any]) -> list[Any]:
    """The steps that the options of each flat group count; None where they count none."""
    found: list[Any] = []
    for group in inner["param_groups"]:
        found += [group.get("step")] * len(group["params"])
    return found


def _step_of(own: Mapping[str, Any], counted: Any, options: Options) -> dict[str, Any]:
    """The number of steps, as torch's optimizers keep it; empty if no step is counted."""
    step = own.get("step", counted) if own else None
    if step is None:
        return {}
    return (
        {"step": torch.as_tensor(step, dtype=torch.float32).reshape(())}
        if options.kind.startswith("torch.")
        else {"step": step}
    )


def _names_of_groups(shapes: Sequence[Mapping[str, Shape]], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The trained parameters of each optimizer group, which has one flat tensor or more."""
    rest = iter(shapes)
    return [[name for _, own in zip(group["params"], rest, strict=False) for name in own] for group in groups]


def _section(model: _Model) -> Mapping[str, Any]:
    config = model.states[0].get("ds_config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _stage(value: Any) -> Any:
    return value.arguments[0] if isinstance(value, Inert) and value.arguments else value if value is not None else 1


def _check_partitions(files: RankFiles, states: Sequence[Mapping[str, Any]]) -> None:
    """Raises if fewer ranks than all share parameters: shards would be there several times."""
    counts = {count for state in states for count in _as_list(state.get("partition_count", len(states)))}
    if counts != {len(states)}:
        raise CheckpointError(
            f"{files.folder} was to be imported, but its parameters are shared out among {sorted(counts)} of {len(states)} ranks (MiCS, "
            f"sequence or expert parallelism), which cannot be. Make a universal checkpoint of it."
        )


def _check_steps(files: RankFiles, inner: Sequence[Mapping[str, Any]]) -> None:
    """Raises if the files of ranks are of different saves."""
    found = {_counted(each) for each in inner}
    if len(found) > 1:
        raise _mixed(files, f"the optimizers of ranks have done the steps {sorted(map(str, found))}")


def _counted(inner: Mapping[str, Any]) -> tuple[float, ...]:
    numbers = [state.get("step") for _, state in sorted(inner["state"].items())]
    numbers += [group.get("step") for group in inner["param_groups"]]
    return tuple(float(number) for number in numbers if number is not None)


def _mixed(files: RankFiles, found: str) -> CheckpointError:
    return CheckpointError(
        f"{files.folder} was to be imported, but {found}: files of different saves are mixed. Pass the folder of one save."
    )


def _content(path: Path) -> Any:
    """The content of a file of a universal checkpoint: a tensor, or one out of its dict."""
    found = read_pickled(path)
    return found.get("param", found.get("step")) if isinstance(found, dict) else found


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
