"""A server that takes what `wandb sync` sends: W&B's own program reads a run's file, and this keeps what it found."""

import contextlib
import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

KEY = "0" * 40  # an API key, by its length


class Synced(NamedTuple):
    """What `wandb sync` read of a run: its id, the lines of its history, and the files beside it."""

    name: str
    history: list[dict[str, Any]]
    files: dict[str, bytes]


class Server(http.server.ThreadingHTTPServer):
    """Answers the calls of W&B's program, wandb-core, as W&B's own server does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.found = Synced("", [], {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer_query(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            self.found = self.found._replace(name=given["name"])
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
            run = {"id": "r", "name": given["name"], "displayName": "run", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if "RunResumeStatus" in query:
            return {"model": {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}, "bucket": None}}
        assert "createRunFiles" in query, query
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}

    def take_lines(self, files: dict[str, Any]) -> None:
        """Lines of the run's files, from an offset on."""
        if said := files.get("wandb-history.jsonl"):
            assert said["offset"] == len(self.found.history)
            self.found.history.extend(map(json.loads, said["content"]))


class Handler(http.server.BaseHTTPRequestHandler):
    """One call."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # wandb-core has ended
            super().handle()

    def body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        content = self.body()
        if self.path == "/graphql":
            asked = json.loads(content)
            self.answer({"data": self.server.answer_query(asked["query"], asked["variables"])})
        else:
            if self.path.endswith("/file_stream"):
                self.server.take_lines(json.loads(content).get("files") or {})
            self.answer({"exitcode": None, "limits": {}})

    def do_PUT(self) -> None:
        self.server.found.files[self.path.removeprefix("/upload/")] = self.body()
        self.answer({})


def synced(folder: Path) -> Synced:
    """What `wandb sync` sends of the folder of one run that was not online."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "wandb", "sync", "--yes", str(folder)],
                env=os.environ | own,
                cwd=folder.parent,
                capture_output=True,
                text=True,
                timeout=120,
            )
        finally:
            server.shutdown()
            thread.join()
    assert done.returncode == 0 and "Finished syncing" in done.stderr, done.stderr
    return server.found
