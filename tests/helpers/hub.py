"""A stand-in for the Hugging Face Hub: folders as repositories, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """What the stand-in serves, and what it was asked for.

    Args:
        repositories: folders by `org/name`.
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.cut_after: int | None = None  # bytes of a file's body; once
        self.status: int | None = None  # of every answer
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None  # of a file's body
        self.asked: list[tuple[str, str, str | None]] = []  # method, path, range
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers["Range"]))
        time.sleep(self.hub.delay_s)
        if self.hub.status is not None:
            self._send(self.hub.status, b"")
        elif found := _API.fullmatch(path):
            self._repository(found[1], found[2], found[3])
        elif found := _FILE.fullmatch(path):
            self._file(found[1], found[2], found[3])
        else:
            self._send(404, b"")

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _known(self, repo: str, revision: str) -> Path | None:
        folder = self.hub.repositories.get(repo)
        if folder is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return folder

    def _repository(self, repo: str, kind: str | None, revision: str | None) -> None:
        folder = self._known(repo, revision or "main")
        if folder is None:
            return
        files = sorted(each for each in folder.iterdir() if each.is_file())
        if kind == "tree":
            content: Any = [
                {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": COMMIT}
                for each in files
            ]
        else:
            siblings = [{"rfilename": each.name} for each in files]
            content = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False}
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        folder = self._known(repo, revision)
        if folder is None:
            return
        file = folder / name
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        body = file.read_bytes()
        tag = hashlib.sha256(body).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, status = 0, 200
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            begin, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        self._send(status, body[begin:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after
        if cut is not None and len(body) > cut:
            self.hub.cut_after = None
            self.wfile.write(body[:cut])
            self.close_connection = True
            return
        step = len(body) if self.hub.bytes_per_s is None else 2**16
        with suppress(ConnectionError):  # the client has given up
            for begin in range(0, len(body), max(1, step)):
                self.wfile.write(body[begin : begin + step])
                if self.hub.bytes_per_s is not None:
                    time.sleep(step / self.hub.bytes_per_s)


@contextmanager
def serving(repositories: dict[str, Path]) -> Iterator[Hub]:
    """A stand-in on a port of its own, until the block ends."""
    hub = Hub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
