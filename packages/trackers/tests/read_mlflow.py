"""What a run of MLflow holds, as its own client reads it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from reading import flat

from accel_core import Table
from accel_testing import Recorded

LARGEST = 1.7976931348623157e308  # which stands for infinity in MLflow's databases
ENDS = {"FINISHED": "finished", "FAILED": "failed"}


def read_run(tracking_uri: str, run_id: str) -> Recorded:
    """Reads all of a run: numbers, parameters, and artifacts."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri)
    run = client.get_run(run_id)
    renamed = {tag.removeprefix("name."): text for tag, text in run.data.tags.items() if tag.startswith("name.")}

    def name_of(key: str) -> str:
        return renamed.get(key, key)

    folder = Path(client.download_artifacts(run_id, ""))  # where they are, for they are on this machine
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    config = flat(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    texts = [(path, (folder / path).read_text(encoding="utf-8")) for path in files if path.parts[0] == "texts"]
    tables = [(path, _table(folder / path)) for path in files if path.parts[0] == "tables"]
    images = [(path, _image(folder / path)) for path in files if path.suffix == ".png"]
    assert {name_of(key) for key in run.data.params} == set(config)
    return Recorded(
        numbers={
            name_of(key): [(metric.step, _value(metric.value)) for metric in client.get_metric_history(run_id, key)]
            for key in run.data.metrics
        },
        texts=_by_name(texts, name_of),
        tables=_by_name(tables, name_of),
        images=_images(images, name_of),
        config=config,
        ended=ENDS.get(run.info.status),
        runs=sum(_is_of(each, run) for each in client.search_runs([run.info.experiment_id])),
    )


def _is_of(each: Any, run: Any) -> bool:
    return each.info.run_name == run.info.run_name


def _value(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) == LARGEST else value


def _by_name(found: list[tuple[Path, Any]], name_of: Any) -> dict[str, list[tuple[int, Any]]]:
    """For files under folder/NAME/STEP.ending, or STEP-2.ending."""
    records: dict[str, list[tuple[int, Any]]] = {}
    for path, content in found:
        name = name_of(path.parent.relative_to(path.parts[0]).as_posix())
        records.setdefault(name, []).append((int(path.stem.partition("-")[0]), content))
    return records


def _images(found: list[tuple[Path, torch.Tensor]], name_of: Any) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """For files under images/KEY+step+STEP+timestamp+..., where the key is a name, or name~0, name~1 and so on."""
    records: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path, image in found:
        key, _, step, *_ = path.name.split("+")
        name = re.sub(r"~\d+$", "", key).replace("~", "/")
        records.setdefault(name_of(name), []).append((int(step), image))
    return records


def _image(path: Path) -> torch.Tensor:
    import numpy as np
    from PIL import Image

    with Image.open(path) as file:
        image = torch.from_numpy(np.array(file))
    return image if image.ndim == 3 else image[..., None]


def _table(path: Path) -> Table:
    # The client's load_table looks into the database that is set for the whole process, whatever that of the client is (3.17).
    table = json.loads(path.read_text(encoding="utf-8"))
    return Table(tuple(table["columns"]), tuple(map(tuple, table["data"])))
