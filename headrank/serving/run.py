"""The process: one socket, one uvicorn, and a SIGTERM that drains before it stops."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headrank.errors import InputError
from headrank.serving.app import build_app
from headrank.serving.engine import RerankerEngine
from headrank.serving.problems import place_of
from headrank.serving.settings import ServeSettings
from headrank.serving.state import ServerState

_log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or SIGINT lets the server finish what it took; the second one stops it at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        state.on_failure = self.stop_now

    def stop_now(self) -> None:
        """Leave the main loop."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; remembers the loop for the signal handler."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by Python's signal machinery, outside the loop's own order."""
        if self._loop is None or self._draining is not None or self.should_exit:
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = self._draining or asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        _log.info("stopping: new requests get 503, those that were taken are finished")
        if not await self.state.drain():
            _log.warning("stopped after %g seconds with requests unanswered", self.state.settings.drain_seconds)
        self.should_exit = True


def bind(settings: ServeSettings) -> socket.socket:
    """The listening socket; a port that is taken is an InputError before the model is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"`host` {settings.host} `port` {settings.port}: {error.strerror or error}; choose another"
        ) from error
    # bound here and not by uvicorn: a port that is taken is said before minutes of loading
    listener.set_inheritable(True)
    return listener


class WithoutTexts(logging.Filter):
    """Log records of unhandled errors keep type and place; their messages may quote a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the traceback."""
        if record.exc_info and record.exc_info[1] is not None:
            record.msg, record.args = "a bug in the server: %s", (place_of(record.exc_info[1]),)
            record.exc_info = record.exc_text = None
        return True


def load_and_quiet(settings: ServeSettings) -> RerankerEngine:
    """The engine; from then on nothing of the method's own warnings, which quote queries, reaches the log."""
    engine = RerankerEngine.load(settings)
    logging.getLogger("headrank.reranking").setLevel(logging.ERROR)
    return engine


def quiet_uvicorn() -> None:
    """Its warnings and errors only, and those without texts."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.WARNING)
    logger.addFilter(WithoutTexts())
    logging.getLogger("asyncio").addFilter(WithoutTexts())


def serve(settings: ServeSettings) -> None:
    """Run until told to stop; a model that cannot be loaded is the caller's error."""
    app: FastAPI = build_app(settings, load_and_quiet)
    state: ServerState = app.state.server
    with bind(settings) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        quiet_uvicorn()
        _log.info("listening on http://%s:%d, loading %s", shown, port, settings.name)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_keep_alive=60, timeout_graceful_shutdown=5, ws="none"
        )
        DrainingServer(config, state).run(sockets=[listener])
    state.raise_failure()
