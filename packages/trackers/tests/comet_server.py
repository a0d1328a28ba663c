"""A server of Comet as far as its client needs one: it says yes to everything, and keeps what it is sent."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ALREADY_EXISTS = 90999  # Comet's code for a key that is taken
NOT_FOUND = 400006
BATCH = "/clientlib/batch/logger/experiment/"
STATUS = {"is_alive_beat_duration_millis": 10000, "gpu_monitor_interval_millis": 10000}
ANSWERS: dict[str, dict[str, Any]] = {
    "/clientlib/isAlive/ver": {"version": "99.0.0"},
    "/clientlib/logger/add/run": {"runId": "a run", "project_id": "a project"},
    "/clientlib/logger/get/run": {"runId": "a run", "project_id": "a project"},
    "/clientlib/status-report/update": STATUS,
}


@dataclass
class CometServer:
    """What it knows and got.

    Args:
        url: for COMET_URL_OVERRIDE.
        known: keys of experiments that are there.
        taken: keys with which none can be opened, although it does not say so when it is asked whether they are there.
        metrics: (name, step, value) as they came.
        parameters: by name.
        files: the query of each upload, and its body.
        paths: all that were asked for.
        stop: has it go away; it may be called twice.
    """

    url: str = ""
    known: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    metrics: list[tuple[str, int, Any]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    files: list[tuple[dict[str, list[str]], bytes]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    def forget(self) -> None:
        """Everything but its address."""
        for each in (self.known, self.taken, self.metrics, self.parameters, self.files, self.paths):
            each.clear()

    def answer(self, address: str, body: bytes) -> tuple[int, dict[str, Any]]:
        path, query = urlsplit(address).path, parse_qs(urlsplit(address).query)
        self.paths.append(path)
        if path.endswith("experiment/metadata") and query["experimentKey"][0] not in self.known:
            return 400, {"sdk_error_code": NOT_FOUND, "msg": "there is no such experiment"}
        if path.endswith("add/run"):
            key = json.loads(body)["experimentKey"]
            if key in self.known | self.taken:
                return 400, {"sdk_error_code": ALREADY_EXISTS, "msg": "there is such an experiment"}
        elif path == f"{BATCH}metric":
            values = json.loads(body)["values"]
            self.metrics += [(each["metricName"], each["step"], each["metricValue"]) for each in values]
        elif path == f"{BATCH}parameter":
            sent = json.loads(body)["values"]
            self.parameters |= {each["parameterName"]: each["parameterValue"] for each in sent}
        elif path == "/clientlib/asset/upload":
            self.files.append((query, body))
        return 200, ANSWERS.get(path, {})


@contextlib.contextmanager
def comet_server() -> Iterator[CometServer]:
    """Serves at a free port of this machine."""
    known = CometServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                sent = gzip.decompress(sent)
            status, content = known.answer(self.path, sent)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        known.stop = stop
        known.url = f"http://127.0.0.1:{server.server_port}/clientlib/"
        try:
            yield known
        finally:
            stop()
