"""Idempotency keys."""

from __future__ import annotations

import hashlib

import msgspec

__all__ = ["derive_key"]


def derive_key(nonce: str, identity: str, attempt: int, direction: str, round_: int = 0) -> str:
    """40 hex digits of SHA-256 over a JSON array of the parts, so that no two lists of parts spell the same bytes."""
    parts = msgspec.json.encode((nonce, identity, attempt, direction, round_))
    return hashlib.sha256(parts).hexdigest()[:40]
