"""Structured logs: with `log_format: json`, every record of `outrider` is a line of JSON.

A record with `extra={"request_id": ...}` keeps it as a field. The edge then also writes a line per
completion. Outputs are never logged, prompts only on request (`access.log_prompts`).
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, Literal

from ...engine.outputs import Assembler
from ...scheduler.types import Request

LogFormat = Literal["text", "json"]
ROOT = "outrider"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_completions = logging.getLogger("outrider.completions")
_prompts = logging.getLogger("outrider.prompts")
_prompts.setLevel(logging.INFO)  # whoever asks for prompts gets them, whatever else is logged
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, message, and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _KNOWN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(log_format: LogFormat) -> None:
    """Sets up this process's logger of `outrider`; for `text`, only where it has no handler."""
    logger = logging.getLogger(ROOT)
    if log_format == "text":
        if not logger.hasHandlers():
            plain = logging.StreamHandler(sys.stderr)
            plain.setFormatter(logging.Formatter(_TEXT))
            logger.addHandler(plain)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def log_prompt(request: Request, holder: str, text: str) -> None:
    """One record of a prompt; `holder` is the name of the key that sent it."""
    fields = {"request_id": request.id}
    _prompts.info("request %s of %r: %r", request.id, holder, text, extra=fields)


def log_completion(request: Request, output: Assembler, reason: str, elapsed_s: float) -> None:
    """One record of a completion that has ended: numbers, and neither prompt nor text."""
    if not _completions.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": request.id,
        "finish_reason": reason,
        "elapsed_s": round(elapsed_s, 6),
        "num_prompt_tokens": len(request.prompt),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": len(output.token_ids),
        "speculation": asdict(output.speculation),
    }
    _completions.info("completion ended: %s", reason, extra=fields)
