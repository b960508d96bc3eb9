"""A local stand-in of the hub: one repository, such as a dataset with its copy as Parquet files in a branch."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

DATASET = "talks/iwslt"
BRANCHES = {"main": "a" * 40, "refs/convert/parquet": "b" * 40}
"""Commit of each branch."""


@contextmanager
def serve_hub(
    branches: dict[str, Path], repository: str = f"datasets/{DATASET}", uploads: dict[str, bytes] | None = None
) -> Iterator[str]:
    """Serve a repository with a folder per branch; gives the value of HF_ENDPOINT.

    Args:
        repository: such as `models/ORG/NAME`.
        uploads: receives the content of what is uploaded, by name, and the request for a new model as `create`; None:
            nobody may upload.
    """
    folders = {BRANCHES[name]: folder for name, folder in branches.items()}
    api, name = f"/api/{repository}", repository.partition("/")[2]

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self, body: bytes = b"") -> None:
            path = urlsplit(self.path).path
            if self.command == "POST" and "/paths-info/" not in path:
                self.take(path, body)
                return
            if path == api:
                self.describe(BRANCHES["main"], "", body)
                return
            for start, reply in (
                (f"{api}/revision/", self.describe),
                (f"{api}/tree/", self.list_files),
                (f"{api}/paths-info/", self.find_files),
                (f"/{repository.removeprefix('models/')}/resolve/", self.send_file),
            ):
                if path.startswith(start):
                    revision, _, inner = path.removeprefix(start).partition("/")
                    commit = BRANCHES.get(unquote(revision), unquote(revision))
                    reply(commit, unquote(inner), body)
                    return
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def send_json(self, value: object) -> None:
            self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def describe(self, commit: str, inner: str, body: bytes) -> None:
            files = [path for path in folders[commit].rglob("*") if path.is_file()]
            siblings = [{"rfilename": str(path.relative_to(folders[commit]))} for path in files]
            self.send_json({"id": name, "sha": commit, "private": False, "tags": [], "siblings": siblings})

        def take(self, path: str, body: bytes) -> None:
            """Answer the requests of an upload."""
            if path == "/api/validate-yaml":
                self.send_json({"errors": [], "warnings": []})
            elif uploads is None:
                self.send(403, b"", {"X-Error-Message": "you may not write"})
            elif path == "/api/repos/create":
                uploads["create"] = body
                self.send_json({"url": f"http://{self.headers['Host']}/{name}"})
            elif path.endswith("/preupload/main"):
                named = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in named]
                self.send_json({"files": files})
            else:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        uploads[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.send_json({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/1", "commitOid": "c" * 40})

        def list_files(self, commit: str, inner: str, body: bytes) -> None:
            folder = folders[commit] / inner
            if not folder.is_dir():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            paths = sorted(folder.rglob("*")) if "recursive=true" in self.path.lower() else sorted(folder.iterdir())
            self.send_json([entry(path, folders[commit]) for path in paths])

        def find_files(self, commit: str, inner: str, body: bytes) -> None:
            asked = [folders[commit] / name for name in json.loads(body)["paths"]]
            self.send_json([entry(path, folders[commit]) for path in asked if path.exists()])

        def send_file(self, commit: str, inner: str, body: bytes) -> None:
            file = folders[commit] / inner
            if not file.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            self.send(200, file.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{inner}"'})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def entry(path: Path, root: Path) -> dict[str, object]:
    """Describe a file or folder as the hub's lists do."""
    name = str(path.relative_to(root))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}
