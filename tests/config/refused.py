"""Refusals of the command line, of files and of rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_moe.config.errors import ConfigError


def refused(call: Callable[[], object], *texts: str) -> str:
    """Return the message, one line with all these texts, with which a call is refused."""
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and [text for text in texts if text not in message] == [], message
    return message
