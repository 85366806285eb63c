"""Many requests at once: the engine that rollouts, chats and servers share."""

from .engine import Engine
from .requests import FinishReason, GenerationParams, QueueFullError, Request, Result, Stats, Update

__all__ = [
    "Engine",
    "FinishReason",
    "GenerationParams",
    "QueueFullError",
    "Request",
    "Result",
    "Stats",
    "Update",
]
