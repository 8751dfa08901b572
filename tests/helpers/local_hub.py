"""A Hugging Face Hub on loopback: what real clients, 0.36 and 2.4, ask to load, build, verify and
publish.

``python tests/helpers/local_hub.py`` serves one to try things on, until Ctrl-C. It is a server, and
no stand-in for ``HfApi``, because processes and transformers ask it, too. Large files travel as git
LFS: uploads through hf_xet need ``HF_HUB_DISABLE_XET=1``.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.file_download
from huggingface_hub.utils.sha import git_hash

Answer = dict | list | bytes


@dataclass(frozen=True)
class File:
    """A file in a tree: its content, and whether git holds that or a pointer to LFS."""

    content: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """git's name of the blob, which is a pointer to a file of LFS."""
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
        if self.lfs:
            return git_hash(pointer.format(self.sha256, len(self.content)).encode())
        return git_hash(self.content)

    def entry(self, path: str) -> dict:
        """Return the Hub's JSON for this file."""
        names, size = {"path": path, "rfilename": path}, len(self.content)
        fields = names | {"type": "file", "oid": self.oid, "blobId": self.oid, "size": size}
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": size, "pointerSize": 130}
        return fields | ({"lfs": lfs} if self.lfs else {})


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".model"))


@dataclass
class Repository:
    """Commits in their order, the references to them, and what a commit may point at by sha256."""

    private: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)

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

    def add_commit(self, changes: dict[str, bytes | None]) -> str:
        """Commit to main; ``None`` deletes a file."""
        files = dict(self.files) if self.refs else {}
        for path, content in changes.items():
            files.pop(path, None)
            if content is not None:
                files[path] = File(content, is_lfs(path))
        self.objects |= {file.sha256: file.content for file in files.values() if file.lfs}
        # The number keeps two commits of the same files apart, as the date does in git.
        text = repr([len(self.commits), *((path, file.oid) for path, file in files.items())])
        self.refs["main"] = oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = files
        return oid


@dataclass
class Request:
    """A request, and its size; ``status`` is ``None`` if no answer was sent."""

    method: str
    path: str
    status: int | None = None
    received: int = 0
    sent: int = 0


@dataclass
class Fault:
    """What happens to requests that match: ``times`` of them, after ``after`` that pass.

    ``status`` answers with that, ``answer`` with that instead of what was asked for (200 without a
    ``status``); ``cut_request`` closes the connection after so many bytes of the body;
    ``cut_response`` does what was asked and closes after so many bytes of the answer, 0 for not
    even its status; ``call`` runs before the request is handled as usual.
    """

    method: str  # or "*"
    pattern: str
    times: int = 1
    after: int = 0
    status: int | None = None
    answer: Answer | None = None
    message: str = "the local Hub was told to fail"
    headers: dict[str, str] = field(default_factory=dict)
    cut_request: int | None = None
    cut_response: int | None = None
    call: Callable[[], object] = lambda: None


class LocalHub:
    """The state: repositories, the request log and the faults to come. Its token may do all."""

    def __init__(self) -> None:
        self.token = "hf_localhubsecret" + "0" * 20
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.errors: list[BaseException] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

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
        """Return the environment for processes whose client talks to this Hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HF_HUB_DISABLE_XET": "1"}

    def add_repository(
        self, name: str, files: dict[str, bytes] | None = None, private: bool = False
    ) -> Repository:
        repository = self.repositories[name] = Repository(private)
        if files:
            repository.add_commit(files)
        return repository

    def fail(self, method: str, pattern: str, **fault) -> None:
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
    """Redirect the client of this process, which read the environment at its import."""
    constants = huggingface_hub.constants
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for holder in (constants, huggingface_hub.file_download):  # 0.36 has a copy of it there
        monkeypatch.setattr(holder, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


class Refusal(Exception):
    """An answer that is no success; ``code`` is the Hub's ``X-Error-Code``."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message, "X-Error-Code": code}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *where) -> None:
        """Clients go away, and faults cut them off; all else is kept in ``LocalHub.errors``."""


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms a request otherwise

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.log = Request(self.command, self.path)
        fault = Fault(self.command, self.path, status=404)
        # Once a day a client asks for a list of its own, whatever it is used for.
        if self.path != "/api/agent-harnesses":
            self.hub.requests.append(self.log)
            fault = self.hub.next_fault(self.command, self.path)
        self.fault = fault
        fault.call()
        self.body = self._read_body()
        self.status, self.own_headers = fault.status or 200, dict(fault.headers)
        answer: Answer | None = fault.answer
        try:
            if fault.status and answer is None:
                answer = {"error": fault.message}
            elif answer is None:
                answer = self._handle()
        except Refusal as refusal:
            self.status, self.own_headers = refusal.status, refusal.headers
            answer = {"error": str(refusal)}
        except Exception as error:  # a mistake of this server, or of the test: shown at its end
            self.hub.errors.append(error)
            self.status, answer = 500, {"error": repr(error)}
        self._reply(answer)

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self) -> bytes:
        limit = self.fault.cut_request
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size if limit is None else min(size, limit))
        self.log.received += len(body)
        if len(body) < size or limit is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("the body ended early")
        return body

    def _reply(self, answer: Answer) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        kind = "application/octet-stream" if isinstance(answer, bytes) else "application/json"
        limit = self.fault.cut_response
        if limit != 0:
            self.log.status = self.status
            self.send_response(self.status)
            headers = {"Content-Type": kind, "Content-Length": str(len(data))} | self.own_headers
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
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", self.hub.token) or (write and not token):
            raise Refusal(401, "Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not token):
            # The Hub does not say to others whether a repository exists.
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")
        return repository

    def _handle(self) -> Answer:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        method = "GET" if self.command == "HEAD" else self.command
        if parts == ["api", "validate-yaml"]:
            return {"errors": [], "warnings": []}
        if parts == ["api", "repos", "create"]:
            request = json.loads(self.body)
            name = f"{request['organization']}/{request['name']}"
            assert name not in self.hub.repositories, f"{name} is there already"
            self.hub.add_repository(name, private=request.get("visibility") == "private")
            return {"url": f"{self.hub.endpoint}/{name}", "name": name}
        parts = parts[1:] if parts[0] == "datasets" else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in ("api/models", "api/datasets"):
            name, rest = "/".join(parts[2:4]), parts[4:]
        name = name.removesuffix(".git")
        if method == "GET" or rest[0] in ("paths-info", "lfs-files"):
            return self._read(method, name, rest, self._repository(name))
        if method == "PUT":  # to a signed address, without the token
            return self._write(method, name, rest, self.hub.repositories[name])
        return self._write(method, name, rest, self._repository(name, write=True))

    def _read(self, method: str, name: str, rest: list[str], repository: Repository) -> Answer:
        match method, rest:
            case "GET", [] | ["revision", _]:
                oid, files = self._at(repository, rest[1] if rest else "main")
                siblings = [file.entry(path) for path, file in sorted(files.items())]
                fields = {"id": name, "sha": oid, "private": repository.private, "tags": []}
                return fields | {"siblings": siblings}
            case "GET", ["tree", revision, *folder]:
                _, files = self._at(repository, revision)
                under = "/".join(folder)
                paths = [path for path in sorted(files) if path.startswith(under)]
                if not paths:
                    raise Refusal(404, f"{under} does not exist on {revision}", "EntryNotFound")
                return [files[path].entry(path) for path in paths]
            case "GET", ["resolve", revision, *path]:
                return self._resolve(*self._at(repository, revision), "/".join(path))
            case "POST", ["paths-info", revision]:
                _, files = self._at(repository, revision)
                paths = [path for path in parse_qs(self.body.decode())["paths"] if path in files]
                # The Hub names xet's hash in the tree too; that would send downloads to xet.
                xet = {"xetHash": "0" * 64}
                return [files[p].entry(p) | (xet if files[p].lfs else {}) for p in paths]
            case "POST", ["lfs-files", "duplicate"]:
                request = json.loads(self.body)
                target = self._repository(request["target"]["name"], write=True)
                hashes = [file["sha256"] for file in request["files"]]
                target.objects |= {digest: repository.objects[digest] for digest in hashes}
                return {"success": [], "failed": []}
        raise Refusal(404, f"no such route: {self.command} {self.path}")

    def _write(self, method: str, name: str, rest: list[str], repository: Repository) -> Answer:
        match method, rest:
            case "POST", ["preupload", revision]:
                _, files = self._at(repository, revision)
                paths = [file["path"] for file in json.loads(self.body)["files"]]
                return {"files": [self._preupload(path, files.get(path)) for path in paths]}
            case "POST", ["info", "lfs", "objects", "batch"]:
                objects = json.loads(self.body)["objects"]
                for wanted in objects:
                    if wanted["oid"] not in repository.objects:
                        url = f"{self.hub.endpoint}/{name}/lfs/{wanted['oid']}"
                        signed = f"{url}?X-Amz-Signature=presigned"
                        wanted["actions"] = {"upload": {"href": signed}}
                return {"transfer": "basic", "objects": objects}
            case "PUT", ["lfs", oid]:
                if hashlib.sha256(self.body).hexdigest() != oid:
                    raise Refusal(400, f"these {len(self.body)} bytes are not {oid}")
                repository.objects[oid] = self.body
                return {}
            case "POST", ["commit", "main"]:
                oid = self._commit(repository)
                url = f"{self.hub.endpoint}/{name}/commit/{oid}"
                return {"success": True, "commitOid": oid, "commitUrl": url}
            case "POST", ["tag", revision]:
                tag = json.loads(self.body)["tag"]
                if tag in repository.refs:
                    raise Refusal(409, f"{tag} already exists")
                repository.refs[tag], _ = self._at(repository, revision)
                return {}
        raise Refusal(404, f"no such route: {self.command} {self.path}")

    def _at(self, repository: Repository, revision: str) -> tuple[str, dict[str, File]]:
        oid = repository.refs.get(revision, revision)
        if oid not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repository.commits[oid]

    def _resolve(self, commit: str, files: dict[str, File], path: str) -> bytes:
        if path not in files:
            raise Refusal(404, f"Entry not found: {path}", "EntryNotFound")
        file, size = files[path], len(files[path].content)
        self.own_headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'}
        if file.lfs:
            self.own_headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{file.sha256}"'}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or size) + 1, size)
            self.status, self.own_headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
            return file.content[start:end]
        return file.content

    def _preupload(self, path: str, present: File | None) -> dict:
        answer = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular"}
        answer["oid"] = present and (present.sha256 if present.lfs else present.oid)
        return answer | {"shouldIgnore": False}

    def _commit(self, repository: Repository) -> str:
        header, *lines = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit", repository.head) != repository.head:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changes: dict[str, bytes | None] = {}
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    changes[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    changes[value["path"]] = repository.objects[value["oid"]]
                case "deletedFile":
                    changes[value["path"]] = None
        return repository.add_commit(changes)


if __name__ == "__main__":
    with LocalHub() as served, suppress(KeyboardInterrupt):
        for variable, value in served.environment.items():
            print(f"export {variable}={value}", flush=True)
        threading.Event().wait()
