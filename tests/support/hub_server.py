"""A small server of the protocol of a model hub."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of one folder as those of one model, or data set ("datasets/owner/tiny")."""

    def __init__(self, folder: Path, name: str = "owner/tiny") -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.name = name
        self.folder = folder
        self.asked: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        name = self.server.name
        listed = name if name.startswith("datasets/") else f"models/{name}"
        if self.path.startswith(f"/api/{listed}/revision/"):
            body = json.dumps({"id": "owner/tiny", "sha": COMMIT}).encode()
        elif self.path.startswith((f"/api/{listed}/tree/{COMMIT}", f"/api/{listed}/tree/main")):
            files = [
                (file.name, file.stat().st_size) for file in sorted(self.server.folder.iterdir())
            ]
            body = json.dumps(
                [{"type": "file", "path": n, "size": s, "oid": n} for n, s in files]
            ).encode()
        elif self.path.startswith(f"/{name}/resolve/{COMMIT}/"):
            body = (self.server.folder / self.path.rpartition("/")[2]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
