"""Refusals of the command line, of files and of rules."""

from collections.abc import Callable

import pytest

from megatron_moe.config.errors import ConfigError


def refused(call: Callable[[], object], *texts: str, lines: int = 1) -> str:
    """Return the message, of so many lines and with all these texts, with which a call is refused."""
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert message.count("\n") + 1 == lines and [text for text in texts if text not in message] == [], message
    return message
