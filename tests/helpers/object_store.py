"""A local S3: moto's server in a thread of this process, with faults at the requests of other processes.

A fault happens before a request is carried out, or after that and before its answer.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest

from megatron_moe.io.object_storage import ObjectPath, _file_system
from tests.helpers import beside

LATE = 504
"""The status of an answer that comes late."""
KILL = -503
"""The status of an answer that nobody gets: the process that asked is killed."""


class Fault(NamedTuple):
    """What happens at the `number`-th request, from 0 on, and at the next ones: it is refused, or its process killed.

    what: the status, or KILL. carried_out: whether it is carried out all the same. only: a pattern, as of file names;
    the requests that fit count.
    """

    number: int = 0
    what: int = KILL
    carried_out: bool = False
    times: int = 1
    only: str = "*"


@contextmanager
def in_use(environment: dict[str, str]) -> Iterator[None]:
    """Let this process find s3fs, and the store of this environment, within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(beside.FOLDER)
        for name, value in environment.items():
            patch.setenv(name, value)
        _file_system.cache_clear()
        yield
    _file_system.cache_clear()


class ObjectStore:
    """Use it as a context manager, in which this process finds it too, and each bucket for one test."""

    def __enter__(self) -> "ObjectStore":
        self._used = ExitStack()
        self._used.enter_context(in_use({}))
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_request(self, *_: Any) -> None:
                pass

        self._s3 = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.arm()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
        }
        self._used.enter_context(in_use(self.environment))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._used.close()

    def bucket(self, name: str) -> ObjectPath:
        """A new, empty bucket, as a path with a folder in it."""
        bucket = ObjectPath(f"s3://{name}")
        bucket._call("mkdir")
        return bucket / "run"

    def arm(self, fault: Fault | None = None, pid: int = 0) -> None:
        """Count requests from here on, and let this fault happen to process `pid`."""
        self._fault: Fault | None
        self.requests: list[str]
        self.asked = 0
        self.requests, self._fitting, self._fault, self._pid = [], 0, fault, pid

    def disarm(self) -> None:
        """Let no fault happen from here on; `asked` then says how many requests there were."""
        self._fault, self.asked = None, len(self.requests)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        fault, number = self._fault, self._fitting
        if fault is None or not fnmatchcase(request, fault.only):
            return self._s3(environ, start)  # type: ignore[no-any-return]
        self._fitting += 1
        if not 0 <= number - fault.number < fault.times:
            return self._s3(environ, start)  # type: ignore[no-any-return]
        if fault.carried_out:
            list(self._s3(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault.what == KILL:
            os.kill(self._pid, signal.SIGKILL)
        if fault.what == LATE:
            time.sleep(1.0)
        start(f"{abs(fault.what)} Refused", [("Content-Length", "0")])
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
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    store.disarm()
    return status
