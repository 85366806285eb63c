"""Many requests at once: the engine that rollouts, chats and servers share."""

from .requests import FinishReason, GenerationParams, QueueFullError, Request, Result, Stats, Update

__all__ = ["FinishReason", "GenerationParams", "QueueFullError", "Request", "Result", "Stats", "Update"]
