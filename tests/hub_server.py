"""A stand-in for the Hugging Face hub on loopback (there is no network here): repositories in memory, asked by the
real huggingface_hub.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

REVISION = "0123456789abcdef0123456789abcdef01234567"
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/[^/]+/(?P<name>.+)")
_MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>.*))?")


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub(ThreadingHTTPServer):
    """Repositories as {name: {file: bytes}}."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}

    @property
    def address(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), status, Content_Type="application/json")

    def _missing(self, code: str) -> None:
        self._answer(b"", 404, X_Error_Code=code)

    def do_GET(self) -> None:
        """A file, or what a repository holds."""
        path = unquote(self.path.partition("?")[0])
        if match := _FILE.fullmatch(path):
            files = self.server.repositories.get(match["repo"])
            content = (files or {}).get(match["name"])
            if content is None:
                self._missing("RepoNotFound" if files is None else "EntryNotFound")
                return
            self._answer(content, X_Repo_Commit=REVISION, ETag=f'"{_oid(content)}"')
        elif (match := _MODEL.fullmatch(path)) and match["repo"] in self.server.repositories:
            files = self.server.repositories[match["repo"]]
            if (match["what"] or "").startswith("tree/"):
                sizes = {name: len(content) for name, content in sorted(files.items())}
                self._json(
                    [
                        {"type": "file", "path": name, "size": size, "oid": _oid(files[name])}
                        for name, size in sizes.items()
                    ]
                )
            else:
                self._json(
                    {"id": match["repo"], "sha": REVISION, "siblings": [{"rfilename": name} for name in sorted(files)]}
                )
        else:
            self._missing("RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A new repository, how files are to be sent, a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(self.path.partition("?")[0])
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.repositories.setdefault(repo, {})
            self._json({"url": f"{self.server.address}/{repo}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif (match := _MODEL.fullmatch(path)) and (match["what"] or "").startswith("preupload"):
            files = [
                {"path": item["path"], "uploadMode": "regular", "shouldIgnore": False}
                for item in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif match and (match["what"] or "").startswith("commit"):
            for line in body.splitlines():
                row = json.loads(line)
                if row["key"] == "file":
                    self.server.repositories[match["repo"]][row["value"]["path"]] = base64.b64decode(
                        row["value"]["content"]
                    )
            self._json({"commitUrl": f"{self.server.address}/{match['repo']}/commit/{REVISION}", "commitOid": REVISION})
        else:
            self._missing("RepoNotFound")


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
