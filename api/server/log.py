"""One JSON object a line on standard error. What clients send is never logged, but for the path."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

logger = logging.getLogger("ramet.server")


class JsonLines(logging.Formatter):
    """The message and the fields given as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: str = "info") -> None:
    """Let ramet's and uvicorn's loggers write JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("ramet", "uvicorn"):
        one = logging.getLogger(name)
        one.handlers = [handler]
        one.setLevel(level.upper())
        one.propagate = False
    # Requests are logged by the gate, with their ids.
    logging.getLogger("uvicorn.access").disabled = True


def info(message: str, **fields: Any) -> None:
    logger.info(message, extra={"fields": fields})


def error(message: str, failure: BaseException, **fields: Any) -> None:
    """With the trace, which is for whoever runs the server only."""
    logger.error(message, exc_info=failure, extra={"fields": fields})
