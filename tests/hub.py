"""A model hub on this machine: repositories with revisions, as the hub's clients ask for them."""

import contextlib
import hashlib
import json
import logging
import threading
from pathlib import Path
from urllib.parse import unquote


def commit_of(repository, revision):
    """What a revision points to."""
    return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()


class Hub:
    """A WSGI application that serves {repository: {revision: directory of what is checked out there}}."""

    def __init__(self, repositories):
        self.repositories = repositories

    def __call__(self, environ, start):
        status, body, headers = self.answer(unquote(environ["PATH_INFO"]).lstrip("/"))
        start(status, [("Content-Length", str(len(body))), *headers.items()])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def answer(self, path):
        api, path = path.startswith("api/models/"), path.removeprefix("api/models/")
        repository = next((name for name in self.repositories if f"{path}/".startswith(f"{name}/")), None)
        if repository is None:
            return refusal("RepoNotFound")
        what, _, rest = path[len(repository) + 1 :].partition("/")
        if what == "refs":
            return in_json(self.refs(repository))
        given, _, name = rest.partition("/")
        revisions = self.repositories[repository]
        named = {name: name for name in revisions} | {commit_of(repository, name): name for name in revisions}
        revision = named.get(given if what in ("tree", "resolve", "revision") else "main")
        if revision is None:
            return refusal("RevisionNotFound")
        folder = Path(revisions[revision])
        if api and what == "tree":
            return in_json(tree(folder, name)) if (folder / name).is_dir() else refusal("EntryNotFound")
        if api:
            files = [{"rfilename": file["path"]} for file in tree(folder, "")]
            return in_json({"id": repository, "sha": commit_of(repository, revision), "siblings": files})
        if not (folder / name).is_file():
            return refusal("EntryNotFound")
        body = (folder / name).read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        return "200 OK", body, {"ETag": etag, "X-Repo-Commit": commit_of(repository, revision)}

    def refs(self, repository):
        found = {"branches": [], "tags": [], "converts": []}
        for name in self.repositories[repository]:
            kind, place = ("tags", "tags") if name.startswith("v") else ("branches", "heads")
            ref = {"name": name, "ref": f"refs/{place}/{name}", "targetCommit": commit_of(repository, name)}
            found[kind].append(ref)
        return found


def tree(folder, below):
    files = sorted(path for path in (folder / below).rglob("*") if path.is_file())
    return [
        {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "oid": "0" * 40}
        for path in files
    ]


def in_json(what):
    return "200 OK", json.dumps(what).encode(), {"Content-Type": "application/json"}


def refusal(code):
    return "404 Not Found", b"{}", {"X-Error-Code": code, "X-Error-Message": code}


@contextlib.contextmanager
def served(repositories, home):
    """The hub; gives the environment variables of a process that is to ask it, and keeps what it has below `home`."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, Hub(repositories), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    finally:
        server.shutdown()
        server.server_close()
