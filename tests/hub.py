"""A model hub on this machine: repositories with revisions, as the hub's clients ask for them."""

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import parse_qsl, unquote

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
RUN = """
import os, sys
from matplotlib.figure import Figure
from normgeo.angles.measure import AngleTable
from normgeo.cli.main import main
AngleTable.plot = lambda *_: Figure()  # which takes half the time of runs this small
Figure.savefig = lambda *_, **__: None
for line in sys.stdin:
    sys.argv = ["normgeo", *line.split()]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    print("status", status, flush=True)
    print("---", file=sys.stderr, flush=True)
os._exit(0)  # to take down all that is imported takes a second
"""


def commit_of(repository, revision):
    """What a revision points to."""
    return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()


class Hub:
    """A WSGI application that serves {repository: {revision: directory of what is checked out there}}.

    A repository is a model's, ORG/NAME, or a data set's, datasets/ORG/NAME.
    """

    def __init__(self, repositories):
        self.repositories = repositories

    def __call__(self, environ, start):
        given = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, body, headers = self.answer(unquote(environ["PATH_INFO"]).lstrip("/"), given)
        if status.startswith("200") and (asked := environ.get("HTTP_RANGE")):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            status, headers = "206 Partial Content", headers | {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
            body = body[first : last + 1]
        start(status, [("Content-Length", str(len(body))), *headers.items()])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def answer(self, path, given):
        api, path = path.startswith("api/"), path.removeprefix("api/").removeprefix("models/")
        repository = next((name for name in self.repositories if f"{path}/".startswith(f"{name}/")), None)
        if repository is None:
            return refusal("RepoNotFound")
        what, _, rest = path[len(repository) + 1 :].partition("/")
        if what == "refs":
            return in_json(self.refs(repository))
        asked, _, name = rest.partition("/")
        revisions = self.repositories[repository]
        named = {name: name for name in revisions} | {commit_of(repository, name): name for name in revisions}
        revision = named.get(asked if what in ("tree", "paths-info", "resolve", "revision") else "main")
        if revision is None:
            return refusal("RevisionNotFound")
        folder = Path(revisions[revision])
        if api and what == "tree":
            return in_json(tree(folder, name)) if (folder / name).is_dir() else refusal("EntryNotFound")
        if api and what == "paths-info":
            names = [name for key, name in parse_qsl(given.decode()) if key == "paths"] or json.loads(given)["paths"]
            return in_json([file for file in tree(folder, "") if file["path"] in names])
        if api:
            files = [{"rfilename": file["path"]} for file in tree(folder, "") if file["type"] == "file"]
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
    found = sorted((folder / below).rglob("*"))
    return [
        {"path": path.relative_to(folder).as_posix(), "oid": "0" * 40}
        | ({"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size})
        for path in found
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
        yield {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(home),
            **dict.fromkeys(OFFLINE, "0"),
        }
    finally:
        server.shutdown()
        server.server_close()


def asked(environment, folder, *commands):
    """Commands in one other process: their statuses, and what each said on standard error.

    A function among them is called when those before it have ended.
    """
    command, statuses = [sys.executable, "-c", RUN], []
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env={**os.environ, **environment}, cwd=folder, stderr=errors, **options) as process,
    ):
        watch = threading.Timer(300, process.kill)
        watch.start()
        for line in commands:
            if callable(line):
                line()
                continue
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            status = next((said for said in process.stdout if said.startswith("status")), None)
            if status is None:
                break
            statuses.append(int(status.split()[1]))
        process.stdin.close()
        process.wait()
        watch.cancel()
        errors.seek(0)
        return statuses, [" ".join(said.split()) for said in errors.read().split("---")[:-1]]
