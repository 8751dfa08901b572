"""A Hugging Face Hub on loopback: what real clients, 0.36 and 2.4, ask to load, build, verify and
publish.

``python tests/helpers/local_hub.py our-org`` serves one to try things on, until Ctrl-C. It is a
server, and no stand-in for ``HfApi``, because processes and transformers ask it, too. Large files
travel as git LFS: uploads through hf_xet need ``HF_HUB_DISABLE_XET=1``.
"""

import base64
import hashlib
import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.file_download


@dataclass(frozen=True)
class Sparse:
    """A file of which only size, hash and the first bytes exist."""

    size: int
    sha256: str
    head: bytes = b""


@dataclass(frozen=True)
class File:
    """A file in a tree: its content, and whether git holds that or a pointer to LFS."""

    content: bytes | Sparse
    lfs: bool = False

    @property
    def size(self) -> int:
        return self.content.size if isinstance(self.content, Sparse) else len(self.content)

    @property
    def sha256(self) -> str:
        sparse = isinstance(self.content, Sparse)
        return self.content.sha256 if sparse else hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """git's name of the blob."""
        blob = self.content
        if self.lfs:
            version = "version https://git-lfs.github.com/spec/v1"
            blob = f"{version}\noid sha256:{self.sha256}\nsize {self.size}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    def part(self, start: int, end: int) -> bytes:
        held = self.content.head if isinstance(self.content, Sparse) else self.content
        assert end <= len(held), f"bytes {start}-{end} were read of a file that has none"
        return held[start:end]


def is_lfs(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".bin", ".model")) or size > 10**7


@dataclass
class Repository:
    """Commits in their order, the references to them, and what a commit may point at by sha256."""

    private: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes | Sparse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add_commit({".gitattributes": b""})

    @property
    def head(self) -> str:
        return self.refs["main"]

    @property
    def files(self) -> dict[str, File]:
        return self.commits[self.head]

    @property
    def tags(self) -> dict[str, str]:
        return {name: oid for name, oid in self.refs.items() if name != "main"}

    def add_commit(self, changes: dict[str, bytes | Sparse | File | None]) -> str:
        """Commit to main; ``None`` deletes a file."""
        files = dict(self.files) if self.refs else {}
        for path, content in changes.items():
            if not isinstance(content, File | None):
                content = File(content, is_lfs(path, File(content).size))
            files[path] = content
        files = {path: file for path, file in files.items() if file}
        self.objects |= {file.sha256: file.content for file in files.values() if file.lfs}
        # The number keeps two commits of the same files apart, as the date does in git.
        text = repr([len(self.commits), *((path, file.oid) for path, file in files.items())])
        self.refs["main"] = oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = files
        return oid


@dataclass
class Request:
    """What one request was, and its size; ``status`` is ``None`` where no answer was sent."""

    method: str
    path: str
    status: int | None = None
    received: int = 0
    sent: int = 0


@dataclass
class Fault:
    """What happens to requests that match; :meth:`LocalHub.fail` says what its fields do."""

    method: str
    pattern: str
    times: int = 1
    after: int = 0
    status: int | None = None
    answer: dict | list | None = None
    message: str = "the local Hub was told to fail"
    headers: dict[str, str] = field(default_factory=dict)
    cut_request: int | None = None
    cut_response: int | None = None
    call: Callable[[], object] = lambda: None


class LocalHub:
    """The state: repositories, the request log and the faults to come."""

    def __init__(self, organisations: tuple[str, ...] = ("our-org",)):
        self.token = "hf_localhubsecret" + "0" * 20
        self.organisations = organisations
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.errors: list[BaseException] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    def __enter__(self) -> "LocalHub":
        self._server = _Server(("127.0.0.1", 0), type("", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        # Polled often: every test waits for this once.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *raised) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self.errors and raised[0] is None:
            raise AssertionError(f"the local Hub was asked what it cannot do: {self.errors}")

    @property
    def environment(self) -> dict[str, str]:
        """For processes whose client is to talk to this Hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HF_HUB_DISABLE_XET": "1"}

    def redirect_client(self, monkeypatch) -> None:
        """The same for the client of this process, which read the environment at its import."""
        redirect_client(self.endpoint, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)

    def add_repository(
        self, name: str, files: dict[str, bytes | Sparse] | None = None, private: bool = False
    ) -> Repository:
        repository = self.repositories[name] = Repository(private)
        if files:
            repository.add_commit(files)
        return repository

    def fail(self, method: str, pattern: str, **fault) -> None:
        """Answer requests that match with a fault (fields of ``Fault``), ``times`` of them.

        ``after`` lets so many pass first; ``method`` may be ``*``. ``status`` answers with that,
        ``answer`` with that instead of what was asked for (200 without a ``status``);
        ``cut_request`` closes the connection after so many bytes of the body; ``cut_response`` does
        what was asked and closes after so many bytes of the answer, 0 for not even its status;
        ``call`` runs before the request is handled as usual.
        """
        self.faults.append(Fault(method, pattern, **fault))

    def asked(self, method: str, part: str = "") -> list[Request]:
        """The requests of this method whose path has this part."""
        return [r for r in self.requests if r.method == method and part in r.path]

    def next_fault(self, method: str, path: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.method in (method, "*") and re.search(fault.pattern, path):
                    fault.after -= 1
                    if fault.after < 0 and fault.times:
                        fault.times -= 1
                        return fault
        return Fault(method, path)


def redirect_client(endpoint: str, monkeypatch) -> None:
    """Let the client of this process, which read ``HF_ENDPOINT`` at its import, talk to another."""
    constants = huggingface_hub.constants
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    for holder in (constants, huggingface_hub.file_download):  # 0.36 has a copy of it there
        monkeypatch.setattr(holder, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


class Refusal(Exception):
    """An answer that is no success; ``code`` is the Hub's ``X-Error-Code``."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message, "X-Error-Code": code}


ROUTES: list[tuple[str, re.Pattern, str]] = []


def route(method: str, template: str):
    parts = {"repo": r"[^/]+/[^/]+?", "rev": "[^/]+", "path": ".*", "oid": "[0-9a-f]{64}"}
    pattern = re.sub(r"{(\w+)}", lambda m: f"(?P<{m[1]}>{parts[m[1]]})", template)

    def register(function):
        ROUTES.append((method, re.compile(pattern), function.__name__))
        return function

    return register


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *where) -> None:
        """A client that closes before it has read an answer resets the wait for its next request;
        all else is kept in ``LocalHub.errors``."""


class _Handler(BaseHTTPRequestHandler):
    """Routes to methods; each takes the parts of its path and returns JSON, or replies itself."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms a request otherwise

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.log = Request(self.command, self.path)
        self.hub.requests.append(self.log)
        self.fault = self.hub.next_fault(self.command, self.path)
        try:
            self.fault.call()
            self.body = self._read_body()
            if self.fault.status or self.fault.answer is not None:
                answer, told = self.fault.answer, {"error": self.fault.message}
                answer = told if answer is None else answer
                self._reply(self.fault.status or 200, answer, self.fault.headers)
            else:
                self._handle()
        except Refusal as refusal:
            self._reply(refusal.status, {"error": str(refusal)}, refusal.headers)
        except (TimeoutError, ConnectionError):
            self.close_connection = True  # the client went away, or a fault cut it off
        except Exception as error:  # a mistake of this server, or of the test: shown at its end
            self.hub.errors.append(error)
            self._reply(500, {"error": repr(error)})

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, name in ROUTES:
            if wanted == method and (match := pattern.fullmatch(urlsplit(self.path).path)):
                parts = {key: unquote(value) for key, value in match.groupdict("main").items()}
                with self.hub.lock:
                    answer = getattr(self, name)(**parts)
                return None if answer is None else self._reply(200, answer)
        raise Refusal(404, f"no such route: {self.command} {self.path}")

    def _read_body(self) -> bytes:
        limit = self.fault.cut_request
        size = int(self.headers.get("Content-Length") or 0)
        assert not self.headers.get("Transfer-Encoding"), "a body in chunks"
        body = self.rfile.read(size if limit is None else min(size, limit))
        self.log.received += len(body)
        if len(body) < size or limit is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("the body ended early")
        return body

    def _reply(self, status: int, answer: dict | list | bytes, headers: dict | None = None) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        kind = "application/octet-stream" if isinstance(answer, bytes) else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(data))} | (headers or {})
        limit = self.fault.cut_response
        if limit != 0:
            self.log.status = status
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:limit])
                self.log.sent += len(data[:limit])
        if limit is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _repository(self, name: str, write: bool = False) -> Repository:
        """One that the token may read, or write; the Hub's refusals otherwise."""
        if self.token not in (None, self.hub.token):
            raise Refusal(401, "Invalid credentials in Authorization header")
        mine = self.token and name.split("/")[0] in self.hub.organisations
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not mine):
            # The Hub does not say to others whether a repository exists.
            raise Refusal(404 if self.token else 401, "Repository not found", "RepoNotFound")
        if write and not mine:
            raise Refusal(403, f"You don't have the required permissions for {name}")
        return found

    def _at(self, repo: str, rev: str) -> tuple[str, dict[str, File]]:
        repository = self._repository(repo)
        oid = repository.refs.get(rev, rev)
        if oid not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return oid, repository.commits[oid]

    # Reading

    def _entry(self, path: str, file: File) -> dict:
        entry = {"type": "file", "path": path, "oid": file.oid, "size": file.size}
        entry |= {"rfilename": path, "blobId": file.oid}
        if file.lfs:
            entry["lfs"] = {"oid": file.sha256, "sha256": file.sha256, "size": file.size}
            entry["lfs"]["pointerSize"] = 130
        return entry

    @route("GET", "/api/models/{repo}(?:/revision/{rev})?")
    def info(self, repo, rev):
        oid, files = self._at(repo, rev)
        siblings = [self._entry(*item) for item in sorted(files.items())]
        private = self._repository(repo).private
        return {"id": repo, "sha": oid, "private": private, "tags": [], "siblings": siblings}

    @route("GET", "/api/models/{repo}/tree/{rev}/?{path}")
    def tree(self, repo, rev, path):
        _, files = self._at(repo, rev)
        found = [self._entry(*item) for item in sorted(files.items()) if item[0].startswith(path)]
        if not found:
            raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound")
        return found

    @route("POST", "/api/models/{repo}/paths-info/{rev}")
    def paths_info(self, repo, rev):
        _, files = self._at(repo, rev)
        # The Hub names xet's hash in the tree too; here that would send downloads to xet.
        xet = {"xetHash": "0" * 64}
        asked = [path for path in parse_qs(self.body.decode())["paths"] if path in files]
        return [self._entry(path, files[path]) | (xet if files[path].lfs else {}) for path in asked]

    @route("GET", "/{repo}/resolve/{rev}/{path}")
    def resolve(self, repo, rev, path):
        oid, files = self._at(repo, rev)
        if path not in files:
            raise Refusal(404, f"Entry not found: {path}", "EntryNotFound")
        file, start, status = files[path], 0, 200
        headers = {"X-Repo-Commit": oid, "ETag": f'"{file.oid}"', "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.sha256}"'}
        if self.command == "HEAD":
            return self._reply(200, b"", headers | {"Content-Length": str(file.size)})
        end = file.size
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(asked[1]), min(int(asked[2] or end) + 1, end)
            headers["Content-Range"], status = f"bytes {start}-{end - 1}/{file.size}", 206
        return self._reply(status, file.part(start, end), headers)

    # Writing

    @route("POST", "/api/repos/create")
    def create_repository(self):
        asked = json.loads(self.body)
        owner = asked.get("organization")
        if self.token != self.hub.token:
            raise Refusal(401, "Invalid username or password.")
        if owner not in self.hub.organisations:
            raise Refusal(403, f'You don\'t have the rights to create a model under "{owner}"')
        name = f"{owner}/{asked['name']}"
        assert name not in self.hub.repositories, f"{name} is there already"
        self.hub.add_repository(name, private=asked.get("visibility") == "private")
        return {"url": f"{self.hub.endpoint}/{name}", "name": name}

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        return {"errors": [], "warnings": []}

    @route("POST", "/api/models/{repo}/preupload/{rev}")
    def preupload(self, repo, rev):
        self._repository(repo, write=True)
        _, files = self._at(repo, rev)
        answers = []
        for asked in json.loads(self.body)["files"]:
            path, there = asked["path"], files.get(asked["path"])
            mode = "lfs" if is_lfs(path, asked["size"]) else "regular"
            answer = {"path": path, "uploadMode": mode}
            answer["oid"] = there and (there.sha256 if there.lfs else there.oid)
            answers.append(answer | {"shouldIgnore": False})
        return {"files": answers}

    @route("POST", "/{repo}.git/info/lfs/objects/batch")
    def lfs_batch(self, repo):
        repository = self._repository(repo, write=True)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in repository.objects:
                url = f"{self.hub.endpoint}/lfs/{repo}/{wanted['oid']}?X-Amz-Signature=presigned"
                wanted["actions"] = {"upload": {"href": url}}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/lfs/{repo}/{oid}")
    def lfs_upload(self, repo, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, f"these {len(self.body)} bytes are not {oid}")
        self.hub.repositories[repo].objects[oid] = self.body
        return {}

    @route("POST", "/api/models/{repo}/lfs-files/duplicate")
    def lfs_duplicate(self, repo):
        asked = json.loads(self.body)
        target = self._repository(asked["target"]["name"], write=True)
        hashes = [wanted["sha256"] for wanted in asked["files"]]
        target.objects |= {digest: self._repository(repo).objects[digest] for digest in hashes}
        return {"success": [], "failed": []}

    @route("POST", "/api/models/{repo}/commit/{rev}")
    def commit(self, repo, rev):
        repository = self._repository(repo, write=True)
        assert rev == "main", rev
        header, *lines = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit", repository.head) != repository.head:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changes: dict[str, File | None] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content = File(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                content = File(repository.objects[value["oid"]], lfs=True)
            else:
                content = {"deletedFile": None}[line["key"]]
            changes[value["path"]] = content
        oid = repository.add_commit(changes)
        url = f"{self.hub.endpoint}/{repo}/commit/{oid}"
        return {"success": True, "commitOid": oid, "commitUrl": url}

    @route("POST", "/api/models/{repo}/tag/{rev}")
    def create_tag(self, repo, rev):
        tag, refs = json.loads(self.body)["tag"], self._repository(repo, write=True).refs
        if tag in refs:
            raise Refusal(409, f"{tag} already exists")
        refs[tag] = self._at(repo, rev)[0]
        return {}


if __name__ == "__main__":
    with LocalHub(tuple(sys.argv[1:]) or ("our-org",)) as served, suppress(KeyboardInterrupt):
        for variable, value in served.environment.items():
            print(f"export {variable}={value}", flush=True)
        threading.Event().wait()
