"""A server on loopback that answers as the Hugging Face Hub does, as far as huggingface_hub 2.4 asks.

Two hosts: the Hub, and the storage that it sends clients to with links that are signed and expire. All
is in memory. It counts what it sends, and fails on request: see `Fault`. Xet is said to be not there.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

TOKEN = "hf_test"
USER = "someone"
LARGE = (".safetensors", ".bin", ".model")
"""Files with such endings are stored as large files: the Hub redirects to storage for them."""


@dataclass
class Fault:
    """Something that goes wrong with requests of which the path has `path` in it, `times` times."""

    kind: str
    """`status`, `cut`, `range`, `length`, `whole`, `etag`, `linked-etag` or `encoding`."""
    path: str
    times: int = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0
    """`cut`: bytes of the body that are sent."""
    method: str = "GET"
    skip: int = 0
    """So many such requests are served first."""
    storage: bool = False
    """Whether it is the storage that fails, not the Hub."""
    hits: int = 0


@dataclass
class Repo:
    """One repository: its commits, oldest first."""

    private: bool = False
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        seed = f"{len(self.commits)}{sorted((n, hashlib.sha1(b).hexdigest()) for n, b in files.items())}"
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits.append((sha, dict(files)))
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> tuple[str, dict[str, bytes]] | None:
        sha = self.branches.get(revision, revision)
        return next(((s, f) for s, f in self.commits if s == sha), None)


class Hub:
    """The state of both servers, and what was asked of them."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by sha256."""
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: dict[str, int] = {}
        """Bytes of bodies that were sent, by name of file."""
        self.role = "write"
        self.orgs: list[str] = ["org"]
        self.lifetime = 3600.0
        """Seconds that a signed link lives."""
        self.lock = threading.Lock()
        self.url = self.storage_url = ""

    def add(self, repo_id: str, files: dict[str, bytes], **options: Any) -> str:
        """A repository, or one more commit of it; its commit."""
        with self.lock:
            repo = self.repos.setdefault(repo_id, Repo(**options))
            for name, data in files.items():
                if name.endswith(LARGE):
                    self.stored[hashlib.sha256(data).hexdigest()] = data
            return repo.commit(files)

    def env(self, home: object, **more: str) -> dict[str, str]:
        """What a client's environment needs to talk to this server, and to no other."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,127.0.0.2",
        } | more

    def fault(self, storage: bool, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.storage == storage and fault.method == method and fault.path in path:
                    fault.hits += 1
                    if fault.skip < fault.hits <= fault.skip + fault.times:
                        return fault
        return None

    def count(self, name: str, nbytes: int) -> None:
        with self.lock:
            self.sent[name] = self.sent.get(name, 0) + nbytes

    def paths(self, method: str = "GET") -> list[str]:
        with self.lock:
            return [unquote(path) for m, path, _ in self.requests if m == method]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep connections open

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has seen enough closes the connection: no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving() -> Iterator[Hub]:
    """A running Hub."""
    hub = Hub()
    # Two hosts, for that is how clients tell whom to show the token.
    servers = [_Server((host, 0), _handler(hub, host == "127.0.0.2")) for host in ("127.0.0.1", "127.0.0.2")]
    hub.url, hub.storage_url = (f"http://{s.server_address[0]}:{s.server_address[1]}" for s in servers)
    threads = [
        threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True) for s in servers
    ]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def point_at(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Empty the server, and let the huggingface_hub of this process talk to it, with an empty cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    for known in (hub.repos, hub.stored, hub.faults, hub.requests, hub.sent):
        known.clear()
    hub.lifetime, hub.role = 3600.0, "write"
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,127.0.0.2")


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_oid(data)


def _handler(hub: Hub, storage: bool) -> type[BaseHTTPRequestHandler]:
    class Bound(_Handler):
        pass

    Bound.hub, Bound.storage = hub, storage
    return Bound


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    storage: bool
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        self.body = self._read_body()
        self.head = method == "HEAD"
        hub = self.hub
        with hub.lock:
            hub.requests.append((method, self.path, {k.lower(): v for k, v in self.headers.items()}))
        self.fault = hub.fault(self.storage, method, unquote(self.path))
        if self.fault and self.fault.kind == "status":
            return self._answer(self.fault.status, {"error": "made to fail"}, self.fault.headers)
        if self.fault and self.fault.kind == "cut" and method in ("PUT", "POST"):
            self.close_connection = True
            return None
        parts = urlsplit(self.path)
        path, query = parts.path, parse_qs(parts.query)
        if self.storage:
            return self._store(method, path, query)
        asked = f"{'GET' if self.head else method} {path}"
        for pattern, serve in _ROUTES:
            if match := re.fullmatch(pattern, asked):
                return getattr(self, serve)(query, *map(unquote, match.groups()))
        return self._answer(404, {"error": "no such page"})

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not self.head:
            self.wfile.write(data)

    # --- who may do what

    def _repo(self, repo_id: str) -> Repo | None:
        """The repository; None after an answer that it is not there for this client."""
        repo = self.hub.repos.get(repo_id)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            self._answer(
                401 if not known else 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
            return None
        return repo

    def _may_write(self) -> bool:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.hub.role == "read":
            self._answer(
                403, {"error": "You don't have the rights"}, {"X-Error-Message": "You don't have the rights"}
            )
        else:
            return True
        return False

    # --- reading

    def whoami(self, query: dict[str, list[str]]) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        role = {"displayName": "test", "role": self.hub.role}
        orgs = [{"name": name, "type": "org", "roleInOrg": "write"} for name in self.hub.orgs]
        return self._answer(
            200,
            {
                "type": "user",
                "name": USER,
                "orgs": orgs,
                "auth": {"type": "access_token", "accessToken": role},
            },
        )

    def info(self, query: dict[str, list[str]], repo_id: str, revision: str = "main") -> None:
        repo = self._repo(repo_id)
        if repo is None:
            return None
        found = repo.files(revision)
        if found is None and repo.commits:
            return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        sha, files = found or ("0" * 40, {})
        siblings: list[dict[str, Any]] = []
        for name, data in sorted(files.items()):
            one: dict[str, Any] = {"rfilename": name}
            if "blobs" in query:
                one |= {"size": len(data), "blobId": git_oid(data)}
                if name.endswith(LARGE):
                    one["lfs"] = {"sha256": etag(name, data), "size": len(data), "pointerSize": 134}
            siblings.append(one)
        value = {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": sha, "private": repo.private,
                 "gated": "manual" if repo.gated else False, "tags": [], "downloads": 0, "likes": 0,
                 "cardData": repo.card, "siblings": siblings}  # fmt: skip
        return self._answer(200, value)

    def resolve(self, query: dict[str, list[str]], repo_id: str, revision: str, name: str) -> None:
        repo = self._repo(repo_id)
        if repo is None:
            return None
        if repo.gated:
            return self._answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        found = repo.files(revision)
        if found is None:
            return self._answer(404, {"error": "no rev"}, {"X-Error-Code": "RevisionNotFound"})
        sha, files = found
        if name not in files:
            return self._answer(
                404, {"error": "no file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            )
        data = files[name]
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if not name.endswith(LARGE):
            return self._bytes(name, data, headers | {"ETag": f'"{git_oid(data)}"'})
        oid = etag(name, data)
        linked = "0" * 64 if self.fault and self.fault.kind == "linked-etag" else oid
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{linked}"'}
        until = time.time() + self.hub.lifetime
        location = f"{self.hub.storage_url}/files/{oid}?name={quote(name)}&until={until}&Signature=abc"
        self.send_response(302)
        for key, text in {**headers, "Location": location, "Content-Length": "0"}.items():
            self.send_header(key, text)
        return self.end_headers()

    def _bytes(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        """`data`, or the range of it that was asked for; or something else, if that is the fault."""
        fault = self.fault
        kind = fault.kind if fault else ""
        start, end, size = 0, len(data), len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status = 200
        if asked and kind != "whole":
            start, end = int(asked[1]), min(int(asked[2] or size - 1) + 1, size)
            if start >= size:
                return self._answer(416, {"error": "range"}, {"Content-Range": f"bytes */{size}"})
            status = 206
            moved = 1 if kind == "range" else 0
            headers = headers | {"Content-Range": f"bytes {start + moved}-{end - 1 + moved}/{size}"}
        if kind == "etag":
            headers = headers | {"ETag": '"another"'}
        if kind == "encoding":
            headers = headers | {"Content-Encoding": "gzip"}
        body = data[start:end]
        if kind == "length":
            body = body[: len(body) // 2]
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.head:
            return
        if kind == "cut" and fault:
            body = body[: fault.after]
        self.hub.count(name, len(body))
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if kind == "cut":
            self.wfile.flush()
            self.close_connection = True

    # --- storage

    def _store(self, method: str, path: str, query: dict[str, list[str]]) -> None:
        oid = path.rpartition("/")[2]
        if "Authorization" in self.headers:
            return self._answer(400, {"error": "storage must never see a token"})
        if method == "PUT":
            if hashlib.sha256(self.body).hexdigest() != oid:
                return self._answer(400, {"error": "not the announced content"})
            self.hub.stored[oid] = self.body
            return self._answer(200, {}, {"ETag": f'"{oid}"'})
        if float(query["until"][0]) < time.time():
            return self._answer(403, {"error": "expired"})
        headers = {"ETag": f'"{oid[:32]}"', "Accept-Ranges": "bytes"}
        return self._bytes(query["name"][0], self.hub.stored[oid], headers)

    # --- writing

    def create(self, query: dict[str, list[str]]) -> None:
        if not self._may_write():
            return None
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        if repo_id.split("/")[0] not in (USER, *self.hub.orgs):
            return self._answer(403, {"error": "no rights"}, {"X-Error-Message": "no rights"})
        if repo_id in self.hub.repos:
            return self._answer(
                409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}
            )
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.repos[repo_id] = Repo(private=private)
        self.hub.repos[repo_id].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return self._answer(200, {"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def branch(self, query: dict[str, list[str]], repo_id: str, name: str) -> None:
        repo = self._repo(repo_id)
        if repo is None or not self._may_write():
            return None
        if name in repo.branches:
            return self._answer(409, {"error": "Reference already exists"})
        repo.branches[name] = repo.branches["main"]
        return self._answer(200, {})

    def validate_yaml(self, query: dict[str, list[str]]) -> None:
        if not json.loads(self.body)["content"].startswith("---\n"):
            return self._answer(400, {"errors": [{"message": "no metadata"}], "warnings": []})
        return self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, query: dict[str, list[str]], repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id)
        if repo is None or not self._may_write():
            return None
        there = (repo.files(revision) or ("", {}))[1]
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": etag(f["path"], there[f["path"]]) if f["path"] in there else None,
            }
            for f in json.loads(self.body)["files"]
        ]
        return self._answer(200, {"files": files})

    def lfs_batch(self, query: dict[str, list[str]], repo_id: str) -> None:
        if self._repo(repo_id) is None or not self._may_write():
            return None
        objects = []
        for one in json.loads(self.body)["objects"]:
            if one["oid"] not in self.hub.stored:
                one["actions"] = {"upload": {"href": f"{self.hub.storage_url}/files/{one['oid']}"}}
            objects.append(one)
        return self._answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, query: dict[str, list[str]], repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id)
        if repo is None or not self._may_write():
            return None
        files = dict((repo.files(revision) or ("", {}))[1])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    return self._answer(400, {"error": f"{value['path']} was not uploaded"})
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = repo.commit(files, revision)
        return self._answer(200, {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "commitOid": sha})


_ID = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    (r"GET /api/whoami-v2", "whoami"),
    (rf"GET /api/models/{_ID}", "info"),
    (rf"GET /api/models/{_ID}/revision/([^/]+)", "info"),
    (rf"GET /{_ID}/resolve/([^/]+)/(.+)", "resolve"),
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate_yaml"),
    (rf"POST /api/models/{_ID}/branch/([^/]+)", "branch"),
    (rf"POST /api/models/{_ID}/preupload/([^/]+)", "preupload"),
    (rf"POST /{_ID}\.git/info/lfs/objects/batch", "lfs_batch"),
    (rf"POST /api/models/{_ID}/commit/([^/]+)", "commit"),
)
