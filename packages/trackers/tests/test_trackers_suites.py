"""The conformance suite: what `accel-trackers` brings without a service passes it. Services have files of their own."""

from __future__ import annotations

import json

from pngs import decoded

from accel_core.testing import Recorded, TrackerSuite, Written
from accel_trackers.jsonl import CONFIG, read


class TestJSONL(TrackerSuite):
    tracker = "jsonl"

    def read(self, written: Written) -> Recorded:
        found = {kind: {} for kind in ("numbers", "texts", "images", "tables", "histograms")}

        def add(kind, name, step, value):
            found[kind].setdefault(name, []).append((step, value))

        for record in read(written.run.directory):
            for name, value in record.get("values", {}).items():
                add("texts" if isinstance(value, str) else "numbers", name, record["step"], value)
            for name, paths in record.get("images", {}).items():
                for path in paths:
                    add("images", name, record["step"], decoded(path.read_bytes()))
            for kind in ("tables", "histograms"):
                for name, value in record.get(kind, {}).items():
                    add(kind, name, record["step"], value)
        config = json.loads((written.run.directory / CONFIG).read_text(encoding="utf-8"))
        return Recorded(**found, config=dict(leaves(config)))


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
