"""A Hugging Face Hub on loopback: what the real clients 0.36 and 2.4 need of its protocol.

``with LocalHub() as hub:`` serves repositories in memory at ``hub.endpoint`` to ``hub.token``;
``hub.requests`` is what was asked and how many bytes went each way, ``hub.fail`` makes it fail.
``python tests/helpers/local_hub.py our-org`` serves one to try things on, until Ctrl-C.
Large files always travel as git LFS. 0.36 asks the LFS batch, which never chooses xet; 2.4 uploads
through hf_xet, where it is installed, without asking: it needs ``HF_HUB_DISABLE_XET=1``.
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
import yaml

from tests.helpers.hub_repositories import Commit, File, Refusal, Repository, Sparse, is_lfs

DATE = "2026-01-01T00:00:00.000Z"


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
    call: Callable[[], None] | None = None


class LocalHub:
    """The state: repositories, the request log and the faults to come."""

    def __init__(self, organisations: tuple[str, ...] = ("our-org",)):
        self.token = "hf_localhubsecret" + "0" * 20
        self.user = "tester"
        self.namespaces = {self.user, *organisations}
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.errors: list[BaseException] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    def __enter__(self) -> "LocalHub":
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
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
        self, name: str, files: dict[str, bytes | Sparse] | None = None, **settings
    ) -> Repository:
        repository = self.repositories[name] = Repository(name, **settings)
        if files:
            repository.add_commit("refs/heads/main", files, "files")
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

    def repository(self, name: str, token: str | None, write: bool = False) -> Repository:
        """A repository that this token may read, or write; the Hub's refusals otherwise."""
        if token not in (None, self.token):
            raise Refusal(401, "Invalid credentials in Authorization header")
        mine = token == self.token and name.split("/")[0] in self.namespaces
        found = self.repositories.get(name)
        if found is None or (found.private and not mine):
            # The Hub does not say to others whether a repository exists.
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")
        if write and token is None:
            raise Refusal(401, "Invalid username or password.")
        if write and not mine:
            raise Refusal(403, f"You don't have the required permissions for {name}")
        return found


def redirect_client(endpoint: str, monkeypatch) -> None:
    """Let the client of this process, which read ``HF_ENDPOINT`` at its import, talk to another."""
    constants = huggingface_hub.constants
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    for holder in (constants, huggingface_hub.file_download):  # 0.36 has a copy of it there
        monkeypatch.setattr(holder, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


ROUTES: list[tuple[str, re.Pattern, str]] = []


def route(method: str, template: str):
    parts = {"repo": r"[^/]+/[^/]+?", "rev": "[^/]+", "path": ".+", "oid": "[0-9a-f]{64}"}
    pattern = re.sub(r"{(\w+)}", lambda m: f"(?P<{m[1]}>{parts[m[1]]})", template)

    def register(function):
        ROUTES.append((method, re.compile(pattern), function.__name__))
        return function

    return register


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *where) -> None:
        # A client that closes before it has read an answer resets the wait for its next request.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*where)


class _Handler(BaseHTTPRequestHandler):
    """Routes to methods; each takes the parts of its path and returns JSON, or replies itself."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms a request otherwise

    def do_GET(self) -> None:
        self.hub: LocalHub = self.server.hub
        self.log = Request(self.command, self.path)
        self.hub.requests.append(self.log)
        self.fault = self.hub.next_fault(self.command, self.path)
        try:
            self._answer()
        except (TimeoutError, ConnectionError):
            self.close_connection = True  # the client went away, or a fault cut it off

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _answer(self) -> None:
        if self.fault.call:
            self.fault.call()
        self.body = self._read_body()
        if self.fault.status or self.fault.answer is not None:
            answer = self.fault.answer
            if answer is None:
                answer = {"error": self.fault.message}
            return self._reply(self.fault.status or 200, answer, self.fault.headers)
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        bearer = self.headers.get("Authorization", "")
        self.token = bearer.removeprefix("Bearer ") or None
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for wanted, pattern, name in ROUTES:
                if wanted == method and (match := pattern.fullmatch(url.path)):
                    parts = {key: unquote(value) for key, value in match.groupdict().items()}
                    with self.hub.lock:
                        answer = getattr(self, name)(**parts)
                    if answer is not None:
                        self._reply(200, answer)
                    return
            raise Refusal(404, f"no such route: {self.command} {url.path}")
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self._reply(refusal.status, refusal.answer, headers)
        except ConnectionError:
            raise
        except Exception as error:  # a mistake of this server, or of the test: shown at its end
            self.hub.errors.append(error)
            self._reply(500, {"error": repr(error)})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                body += self._read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self._read(int(self.headers.get("Content-Length") or 0))

    def _read(self, size: int) -> bytes:
        limit = self.fault.cut_request
        body = self.rfile.read(size if limit is None else min(size, limit))
        self.log.received += len(body)
        if limit is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
        if len(body) < size or limit is not None:
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

    def log_message(self, *_) -> None:
        pass

    def _json(self) -> dict:
        return json.loads(self.body or b"{}")

    def _commit_of(self, repo: str, rev: str) -> tuple[Repository, Commit]:
        repository = self.hub.repository(repo, self.token)
        return repository, repository.commit_of(rev)

    # Who and which repositories

    @route("GET", "/api/whoami-v2")
    def whoami(self):
        if self.token != self.hub.token:
            raise Refusal(401, "Invalid username or password.")
        orgs = [{"name": name} for name in sorted(self.hub.namespaces - {self.hub.user})]
        return {"type": "user", "name": self.hub.user, "orgs": orgs, "auth": {}}

    @route("POST", "/api/repos/create")
    def create_repository(self):
        if self.token != self.hub.token:
            raise Refusal(401, "Invalid username or password.")
        asked = self._json()
        owner = asked.get("organization") or self.hub.user
        name = f"{owner}/{asked['name']}"
        if owner not in self.hub.namespaces:
            raise Refusal(403, f'You don\'t have the rights to create a model under "{owner}"')
        url = f"{self.hub.endpoint}/{name}"
        if name in self.hub.repositories:
            raise Refusal(409, "You already created this model repo", url=url)
        # 0.36 sends "private", 2.4 "visibility".
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.add_repository(name, private=bool(private))
        return {"url": url, "name": name}

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        front = re.match(r"---\n(.*?)\n---\n", self._json()["content"], re.DOTALL)
        if not front:
            message = "empty or missing yaml metadata in repo card"
            return {"errors": [], "warnings": [{"message": message}]}
        try:
            data = yaml.safe_load(front[1])
            problem = None if isinstance(data, dict) else "metadata must be a mapping"
            if not problem and not isinstance(data.get("license", ""), str):
                problem = '"license" must be a string'
        except yaml.YAMLError as error:
            problem = f"invalid YAML: {error}"
        if problem:
            self._reply(400, {"errors": [{"message": problem}], "warnings": []})
            return None
        return {"errors": [], "warnings": []}

    # Reading

    @route("GET", "/api/models/{repo}/revision/{rev}")
    def info(self, repo, rev):
        repository, commit = self._commit_of(repo, rev)
        siblings = []
        for path, file in sorted(commit.files.items()):
            entry = {"rfilename": path}
            if "blobs" in self.query:
                entry |= {"size": file.size, "blobId": file.oid}
                if file.lfs:
                    size = len(file.pointer)
                    entry["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": size}
            siblings.append(entry)
        return {
            "id": repo,
            "modelId": repo,
            "sha": commit.oid,
            "private": repository.private,
            "lastModified": DATE,
            "tags": [],
            "siblings": siblings,
        }

    @route("GET", "/api/models/{repo}")
    def info_of_main(self, repo):
        return self.info(repo, "main")

    def _entry(self, path: str, file: File) -> dict:
        entry = {"type": "file", "path": path, "oid": file.oid, "size": file.size}
        if file.lfs:
            size = len(file.pointer)
            entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": size}
        return entry

    @route("GET", "/api/models/{repo}/tree/{rev}/{path}")
    def tree(self, repo, rev, path):
        _, commit = self._commit_of(repo, rev)
        folder = f"{path}/" if path else ""
        files = {p: f for p, f in commit.files.items() if p.startswith(folder)}
        if path and not files:
            raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound")
        recursive = self.query.get("recursive", [""])[0].lower() in ("true", "1")
        entries = {}
        for p, file in sorted(files.items()):
            inner = p.removeprefix(folder).split("/")
            for depth in range(1, len(inner) if recursive else min(len(inner), 2)):
                parent = folder + "/".join(inner[:depth])
                oid = hashlib.sha1(parent.encode()).hexdigest()
                entries[parent] = {"type": "directory", "path": parent, "oid": oid, "size": 0}
            if recursive or len(inner) == 1:
                entries[p] = self._entry(p, file)
        return list(entries.values())

    @route("GET", "/api/models/{repo}/tree/{rev}")
    def whole_tree(self, repo, rev):
        return self.tree(repo, rev, "")

    @route("POST", "/api/models/{repo}/paths-info/{rev}")
    def paths_info(self, repo, rev):
        repository, commit = self._commit_of(repo, rev)
        if "json" in self.headers.get("Content-Type", ""):
            asked = self._json()["paths"]
        else:
            asked = parse_qs(self.body.decode())["paths"]
        entries = []
        for path in asked:
            if file := commit.files.get(path):
                entry = self._entry(path, file)
                # The Hub names it in the tree too; here that would send 2.4's downloads to xet.
                if file.lfs and repository.has_xet:
                    entry["xetHash"] = file.xet_hash
                entries.append(entry)
        return entries

    @route("GET", "/api/models/{repo}/refs")
    def references(self, repo):
        repository = self.hub.repository(repo, self.token)
        kinds = {"branches": "refs/heads/", "tags": "refs/tags/", "pullRequests": "refs/pr/"}
        answer = {"converts": []}
        for kind, prefix in kinds.items():
            answer[kind] = [
                {"name": name, "ref": prefix + name, "targetCommit": oid}
                for name, oid in repository.named(prefix).items()
            ]
        return answer

    @route("GET", "/api/models/{repo}/commits/{rev}")
    def commits(self, repo, rev):
        repository, commit = self._commit_of(repo, rev)
        listed = []
        while commit:
            entry = {"id": commit.oid, "title": commit.title, "message": "", "date": DATE}
            listed.append(entry | {"authors": [{"user": self.hub.user}]})
            commit = repository.commits.get(commit.parent)
        return listed

    @route("GET", "/{repo}/resolve/{rev}/{path}")
    def resolve(self, repo, rev, path):
        _, commit = self._commit_of(repo, rev)
        file = commit.files.get(path)
        if file is None:
            raise Refusal(404, f"Entry not found: {path}", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.oid}"', "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.sha256}"'}
        if self.command == "HEAD":
            return self._reply(200, b"", headers | {"Content-Length": str(file.size)})
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self._reply(200, file.part(0, file.size), headers)
        first, last = asked.groups()
        start = int(first) if first else file.size - int(last)
        end = min(int(last) + 1, file.size) if first and last else file.size
        if start >= file.size:
            headers["Content-Range"] = f"bytes */{file.size}"
            return self._reply(416, {"error": "Range not satisfiable"}, headers)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
        return self._reply(206, file.part(start, end), headers)

    # Writing

    def _may_commit(self, repo: str) -> Repository:
        """Everybody with a token may open a pull request; pushing takes the right to write."""
        if self.token == self.hub.token and "create_pr" in self.query:
            return self.hub.repository(repo, self.token)
        return self.hub.repository(repo, self.token, write=True)

    @route("POST", "/api/models/{repo}/preupload/{rev}")
    def preupload(self, repo, rev):
        commit = self._may_commit(repo).commit_of(rev)
        answers = []
        for asked in self._json()["files"]:
            path, there = asked["path"], commit.files.get(asked["path"])
            mode = "lfs" if is_lfs(path, Sparse(asked["size"], "")) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if there:
                answer["oid"] = there.sha256 if there.lfs else there.oid
            answers.append(answer)
        return {"files": answers}

    @route("POST", "/{repo}.git/info/lfs/objects/batch")
    def lfs_batch(self, repo):
        asked = self._json()
        # A pull request names no branch; who may open one may upload for it.
        repository = self.hub.repository(repo, self.token, write="ref" in asked)
        objects = []
        for wanted in asked["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in repository.objects:
                upload = f"{self.hub.endpoint}/lfs/{repo}/{wanted['oid']}"
                answer["actions"] = {
                    "upload": {"href": f"{upload}?X-Amz-Signature=presigned"},
                    "verify": {"href": f"{upload}/verify"},
                }
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/lfs/{repo}/{oid}")
    def lfs_upload(self, repo, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, f"these {len(self.body)} bytes are not {oid}")
        self.hub.repositories[repo].objects[oid] = self.body
        return {}

    @route("POST", "/lfs/{repo}/{oid}/verify")
    def lfs_verify(self, repo, oid):
        repository = self.hub.repository(repo, self.token)
        if oid not in repository.objects:
            raise Refusal(404, f"{oid} was not uploaded")
        return {}

    @route("POST", "/api/models/{repo}/lfs-files/duplicate")
    def lfs_duplicate(self, repo):
        asked = self._json()
        source = self.hub.repository(repo, self.token)
        target = self.hub.repository(asked["target"]["name"], self.token, write=True)
        failed = []
        for wanted in asked["files"]:
            content = source.objects.get(wanted["sha256"])
            error = None
            if content is None or File(content, True).xet_hash != wanted["xetHash"]:
                error = "no such file"
            elif source.region != target.region:
                error = f"storage regions differ: {source.region} and {target.region}"
            if error:
                failed.append({"sha256": wanted["sha256"], "error": error})
            else:
                target.objects[wanted["sha256"]] = content
        return {"success": [], "failed": failed}

    @route("POST", "/api/models/{repo}/commit/{rev}")
    def commit(self, repo, rev):
        repository = self._may_commit(repo)
        as_pull_request = "create_pr" in self.query
        ref = rev if rev.startswith("refs/pr/") else f"refs/heads/{rev}"
        if ref not in repository.refs:
            raise Refusal(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        header, *lines = [json.loads(line) for line in self.body.splitlines()]
        header, base = header["value"], repository.refs[ref]
        if parent := header.get("parentCommit"):
            if as_pull_request:
                base = repository.commit_of(parent).oid
            elif not base.startswith(parent):
                message = "A commit has happened since. Please refresh and try again."
                raise Refusal(412, message)
        changes = {}
        for line in lines:
            changes |= self._changes(repository, base, line["key"], line["value"])
        if as_pull_request:
            number = len(repository.pull_requests) + 1
            ref = f"refs/pr/{number}"
        oid = repository.add_commit(ref, changes, header["summary"], base)
        url = f"{self.hub.endpoint}/{repo}"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}"}
        if as_pull_request:
            answer["pullRequestUrl"] = f"{url}/discussions/{number}"
        return answer

    def _changes(self, repository: Repository, base: str, key: str, value: dict) -> dict:
        path, before = value["path"], repository.commits[base].files
        if key == "file":
            return {path: File(base64.b64decode(value["content"]), False)}
        if key == "lfsFile":
            if value["oid"] not in repository.objects:
                raise Refusal(400, f"{path} points at an LFS object that is not here")
            return {path: File(repository.objects[value["oid"]], True)}
        gone = [p for p in before if p == path or (key == "deletedFolder" and p.startswith(path))]
        if key not in ("deletedFile", "deletedFolder"):
            raise Refusal(400, f"unknown operation {key}")
        if not gone:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        return dict.fromkeys(gone)

    def _new_reference(self, repo: str, ref: str, rev: str):
        repository = self.hub.repository(repo, self.token, write=True)
        if ref in repository.refs:
            raise Refusal(409, f"{ref} already exists")
        repository.refs[ref] = repository.commit_of(rev).oid
        return {}

    @route("POST", "/api/models/{repo}/tag/{rev}")
    def create_tag(self, repo, rev):
        return self._new_reference(repo, f"refs/tags/{self._json()['tag']}", rev)

    @route("DELETE", "/api/models/{repo}/tag/{rev}")
    def delete_tag(self, repo, rev):
        del self.hub.repository(repo, self.token, write=True).refs[f"refs/tags/{rev}"]
        return {}

    @route("POST", "/api/models/{repo}/branch/{rev}")
    def create_branch(self, repo, rev):
        return self._new_reference(
            repo, f"refs/heads/{rev}", self._json().get("startingPoint", "main")
        )


if __name__ == "__main__":
    with LocalHub(tuple(sys.argv[1:]) or ("our-org",)) as served, suppress(KeyboardInterrupt):
        for variable, value in served.environment.items():
            print(f"export {variable}={value}", flush=True)
        threading.Event().wait()
