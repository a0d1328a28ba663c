"""Secrets in what is printed or recorded: hidden under names of keys, tokens, passwords, ….

Numbers are hidden only where a name ends so, and truth values never: `max_tokens` is an option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "(hidden)"
"""The text that replaces a secret."""

_SAYS = re.compile(r"secret|passw|passphrase|credential|authoriz|(?:key|token|auth|jwt|cookie|pass|pwd)s?(?![a-z])")
_ENDS = re.compile(r"(?:secret|password|passwd|passphrase|credentials?|key|token|pass|pwd)$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def masked(name: object, value: Any) -> Any:
    """A value to be shown, hidden if its name says it is secret, else without secrets inside."""
    plain = _CAMEL.sub("_", str(name)).lower()
    if _SAYS.search(plain) and value is not None and not isinstance(value, (bool, float)):
        is_number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
        if not is_number or _ENDS.search(plain):
            return HIDDEN
    return without_secrets(value)


def without_secrets(content: Any) -> Any:
    """The data with values under secret names hidden at every depth, and logins in addresses."""
    if isinstance(content, Mapping):
        return {key: masked(key, value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_secrets(value) for value in content]
    return _LOGIN.sub(HIDDEN, content) if isinstance(content, str) else content


def masked_words(words: Iterable[str]) -> list[str]:
    """A command line without the values of `--api-key=…`, `--api-key …`, `service.api_key=…`."""
    shown, flag = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        if flag and not word.startswith("-"):
            shown.append(str(masked(flag, word)))
        else:
            shown.append(f"{name}={masked(name, value)}" if equals else str(without_secrets(word)))
        flag = word if word.startswith("-") and not equals else ""
    return shown
