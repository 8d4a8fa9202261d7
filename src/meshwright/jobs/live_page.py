"""The page of a running job, served on this machine alone.

A browser on this machine may be told by any page it shows to ask this server under a name of that page's own (DNS rebinding), and
would let that page read the answer. So requests are answered only where they ask for this machine by a name of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.jobs.metric_lines import MetricLines
from meshwright.jobs.runs import has_ended, rank_states, read_run
from meshwright.report.live_view import Live
from meshwright.report.page import page
from meshwright.training.folder import RunFolder
from meshwright.training.settings import Settings

ADDRESS = "127.0.0.1"
NAMES = ("localhost", ADDRESS, "[::1]")
"""By which this machine may be asked, with any port: one that is forwarded has another number elsewhere."""


@contextmanager
def served_page(folder: RunFolder, port: int, every: float) -> Iterator[str]:
    """Serve a run folder's page while the context lasts; gives its address."""
    try:
        server = ThreadingHTTPServer((ADDRESS, port), _handler(folder, every))
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}: choose another, or 0 for any that is free") from error
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(folder: RunFolder, every: float) -> type[BaseHTTPRequestHandler]:
    lines = MetricLines(folder.metrics)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not is_for_this_machine(self.headers.get_all("Host", [])):
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST, explain=f"ask for one of {', '.join(NAMES)}")
                return
            if self.path.split("?")[0] != "/":
                self.send_error(404)
                return
            code, text = _answer(folder, every, lines)
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8" if code == 200 else "text/plain; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with suppress(ConnectionError):  # who asked has gone meanwhile
                self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not news."""

    return Handler


def is_for_this_machine(hosts: list[str]) -> bool:
    """hosts: the values of all Host headers of a request; there must be one."""
    if len(hosts) != 1:
        return False
    name, colon, port = hosts[0].strip().lower().partition("]:" if "]" in hosts[0] else ":")
    name += "]" if colon == "]:" else ""
    return name in NAMES and (not colon or (port.isascii() and port.isdigit()))


def _answer(folder: RunFolder, every: float, lines: MetricLines) -> tuple[int, str]:
    """The page as it is now. A file that is being written may be refused for a moment: the page asks again."""
    try:
        live = None if has_ended(folder) else _live(folder, every)  # asked first: it may end while it is read
        run = read_run(str(folder.path), is_live=True, lines=lines)
    except MeshwrightError as error:
        return 503, str(error)
    return 200, page([run], run.name, live)


def _live(folder: RunFolder, every: float) -> Live:
    return Live(every, tuple(rank_states(folder)), Settings.load(folder.settings).steps, time.time())
