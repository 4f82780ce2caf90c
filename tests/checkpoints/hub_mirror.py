"""A small server of a hub's HTTP API over one directory: descriptions of repositories, their trees, their files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"


class Mirror:
    """Serves `directory` as `org/model` (anybody), and as `org/gated` to who has TOKEN."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.downloaded: list[str] = []
        self.requests = 0
        self.url = ""
        self.commits = [COMMIT]  # the last one is the newest
        self.says_sizes = True

    def answer(self, path: str, method: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.requests += 1
        api = path.startswith("/api/models/")
        org, name, *rest = path.removeprefix("/api/models/" if api else "/").split("/")
        if (org, name) not in (("org", "model"), ("org", "gated")):
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if name == "gated" and token != f"Bearer {TOKEN}":
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b""
        if not api:
            return self._file("/".join(rest[2:]), rest[1], method)
        kind, revision = rest[0], rest[1]
        if revision not in ("main", "v1", *self.commits):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, b""
        files = sorted(path for path in self.directory.rglob("*") if path.is_file())
        entries = [
            {"type": "file", "path": str(file.relative_to(self.directory)), "size": file.stat().st_size, "oid": _oid(file)}  # noqa: E501
            for file in files
        ]  # fmt: skip
        sizes = [{"size": entry["size"]} if self.says_sizes else {} for entry in entries]
        siblings = [{"rfilename": entry["path"], **size} for entry, size in zip(entries, sizes, strict=True)]
        commit = revision if revision in self.commits else self.commits[-1]
        body = entries if kind == "tree" else {"id": f"{org}/{name}", "sha": commit, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _file(self, name: str, revision: str, method: str) -> tuple[int, dict[str, str], bytes]:
        file = self.directory / name
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
        if method == "GET":
            self.downloaded.append(name)
        commit = revision if revision in self.commits else self.commits[-1]
        return 200, {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, file.read_bytes()


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def served(directory: Path) -> Iterator[Mirror]:
    """A mirror on a free port."""
    mirror = Mirror(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            status, headers, body = mirror.answer(path, self.command, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        mirror.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield mirror
        finally:
            server.shutdown()
            thread.join()
