"""Loads the model and serves it until it is told to stop: then what runs has some time to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import uvicorn

from ramet.api.server import log
from ramet.api.server.app import create_app
from ramet.api.server.auth import Keys
from ramet.api.server.settings import Settings
from ramet.api.server.state import State
from ramet.engine.async_llm import AsyncLLM

_AFTER_CANCEL_S = 5  # to send the last errors


def run(model: str, engine: dict[str, Any], settings: Settings, keys: Keys, log_level: str) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    log.set_up(log_level)
    log.info("loading", model=model)
    server = make_server(AsyncLLM(model, **engine), settings, keys)
    # uvicorn raises the signal that stopped it once more when all is done; it has been obeyed by then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()


def make_server(engine: AsyncLLM, settings: Settings, keys: Keys) -> Server:
    """A uvicorn server, not started."""
    app = create_app(engine, settings, keys)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=int(settings.shutdown_timeout) + _AFTER_CANCEL_S,
    )
    return Server(config, app.state.ramet)


class Server(uvicorn.Server):
    """Drains on shutdown: nothing new is taken, what runs may end, what has not ended then is cancelled."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self.state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("serving", url=f"http://{self.config.host}:{self.port}")

    @property
    def port(self) -> int:
        """The one that is listened on, once it is."""
        for server in self.servers:
            for listening in server.sockets:
                return int(listening.getsockname()[1])
        return self.config.port

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.state.drain()
        log.info("draining", seconds=self.state.settings.shutdown_timeout)
        cancel = asyncio.create_task(self._cancel_later())
        try:
            await super().shutdown(sockets)
        finally:
            cancel.cancel()
        log.info("stopped")

    async def _cancel_later(self) -> None:
        await asyncio.sleep(self.state.settings.shutdown_timeout)
        log.info("cancelling")
        await self.state.engine.close()
