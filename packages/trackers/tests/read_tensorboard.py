"""What the event files of a run hold, as TensorBoard's own reader has it."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from reading import flat

from accel_core import Bins, Table
from accel_testing import Recorded

CONFIG = "config/text_summary"


def read_events(folder: Path) -> Recorded:
    """Reads all that is shown of the runs in a folder: what a restart has replaced is not."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    runs = EventMultiplexer(size_guidance={"tensors": 0}).AddRunsFromDirectory(str(folder)).Reload()
    [run] = runs.Runs()
    kinds = {
        kind: {tag: runs.Tensors(run, tag) for tag in runs.PluginRunToTagToContent(kind).get(run, {})}
        for kind in ("scalars", "text", "images", "histograms")
    }
    texts = {
        tag: [(event.step, _array(event).item().decode()) for event in events] for tag, events in kinds["text"].items()
    }
    [(_, config), *_] = texts.pop(CONFIG)
    named = {tag.removesuffix("/text_summary"): records for tag, records in texts.items()}
    return Recorded(
        numbers={
            tag: [(event.step, _array(event).item()) for event in events] for tag, events in kinds["scalars"].items()
        },
        texts={name: records for name, records in named.items() if not _is_table(records)},
        config=flat(json.loads(config.removeprefix("~~~~json\n").removesuffix("\n~~~~"))),
        images={
            tag: [(event.step, image) for event in events for image in _images(event)]
            for tag, events in kinds["images"].items()
        },
        tables={
            name: [(step, _table(text)) for step, text in records]
            for name, records in named.items()
            if _is_table(records)
        },
        histograms={
            tag: [(event.step, _bins(event)) for event in events] for tag, events in kinds["histograms"].items()
        },
        runs=len(runs.Runs()),
    )


def _array(event: Any) -> Any:
    from tensorboard.util import tensor_util

    return tensor_util.make_ndarray(event.tensor_proto)


def _images(event: Any) -> list[torch.Tensor]:
    import numpy as np
    from PIL import Image

    width, height, *files = _array(event).tolist()
    images = [torch.from_numpy(np.array(Image.open(io.BytesIO(file)))) for file in files]
    assert [int(height), int(width)] == list(images[0].shape[:2])
    return [image if image.ndim == 3 else image[..., None] for image in images]


def _bins(event: Any) -> Bins:
    rows = _array(event).tolist()  # left edge, right edge, count
    return Bins(tuple(int(row[2]) for row in rows), (rows[0][0], *(row[1] for row in rows)), 0.0, 0.0)


def _is_table(records: list[tuple[int, str]]) -> bool:
    return all(re.fullmatch(r"\|( --- \|)+", text.partition("\n")[2].partition("\n")[0]) for _, text in records)


def _table(text: str) -> Table:
    first, _, *rest = (
        tuple(html.unescape(cell.replace("<br>", "\n")) for cell in line[2:-2].split(" | "))
        for line in text.split("\n")
    )
    return Table(first, tuple(rest))
