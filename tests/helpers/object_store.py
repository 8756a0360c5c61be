"""A local S3: moto's server in a thread of this process, with faults at the requests of other processes.

A fault happens before a request is carried out, or after that and before its answer.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron_moe.io.object_storage import ObjectPath
from tests.helpers import beside

KILL = -1
"""Instead of the status of a refusal: kill the process that asks."""


class Fault(NamedTuple):
    """What happens at the `number`-th request, from 0 on, and at the next ones: it is refused, or its process killed.

    carried_out: whether it is carried out all the same. path: part of a URL; the requests that have it count.
    """

    number: int
    what: int = KILL
    carried_out: bool = False
    times: int = 1
    path: str = ""


class ObjectStore:
    """Use it as a context manager, and each bucket for one test."""

    def __init__(self) -> None:
        beside.find_them()
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_request(self, *_: Any) -> None:
                pass

        self._s3 = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._fault: Fault | None = None
        self._pid = 0
        self.requests: list[str] = []
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def __enter__(self) -> "ObjectStore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()

    def bucket(self, name: str) -> ObjectPath:
        """A new, empty bucket, as a path with a folder in it."""
        bucket = ObjectPath(f"s3://{name}")
        bucket._call("mkdir")
        return bucket / "run"

    def arm(self, fault: Fault | None = None, pid: int = 0) -> None:
        """Count requests from here on, and let this fault happen to process `pid`."""
        self.requests, self._fault, self._pid = [], fault, pid

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        fault, happens = self._fault, False
        if fault is None or fault.path in request:
            self.requests.append(request)
            happens = fault is not None and 0 <= len(self.requests) - 1 - fault.number < fault.times
        if fault is None or not happens:
            return self._s3(environ, start)  # type: ignore[no-any-return]
        if fault.carried_out:
            list(self._s3(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault.what == KILL:
            os.kill(self._pid, signal.SIGKILL)
        start(f"{max(fault.what, 500)} Refused", [("Content-Length", "0")])
        return [b""]


def in_a_fork(store: ObjectStore, work: Callable[[], Any], fault: Fault | None = None) -> int:
    """Do something in another process, to which a fault happens; its exit status, negative for a signal.

    0: it is done. 3: an OSError. 4: any other error.
    """
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        status = 4
        try:
            os.close(go)
            os.read(ready, 1)
            work()
            status = 0
        except OSError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            status = 3
        finally:
            os._exit(status)
    os.close(ready)
    store.arm(fault, child)
    os.close(go)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
