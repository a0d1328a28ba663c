"""Help from docstrings: what a component is, and what each of its options does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def option_help(factory: Callable[..., Any], option: str) -> str:
    """The text on an option in the `Args:` of a constructor or its class, in one line; or empty."""
    return _documented(factory).get(option, "")


def summary(factory: Callable[..., Any]) -> str:
    """The first line of a component's docstring; empty if it has none."""
    return opening(factory).partition("\n")[0].strip()


def opening(factory: Callable[..., Any]) -> str:
    """The first paragraph of a component's docstring; empty if it has none."""
    # What a class inherits says what its base is, and `inspect.getdoc` would take it.
    text = inspect.cleandoc(factory.__doc__ or "")
    return text.partition("\n\n")[0]


@cache
def _documented(factory: Callable[..., Any]) -> Mapping[str, str]:
    """The options that docstrings describe: those of the class first, then those of its bases."""
    from docstring_parser import DocstringStyle, parse

    found: dict[str, str] = {}
    for text in _docstrings(factory):
        for parameter in parse(text, style=DocstringStyle.GOOGLE).params:
            about = _for_options(" ".join((parameter.description or "").split()))
            for name in parameter.arg_name.split(","):
                found.setdefault(name.strip(), about)
    return found


def _for_options(about: str) -> str:
    """Rewrites the text on a Python argument as that on an option: None is "not given".

    Which variable is asked, and a default that is a plain value, stand beside each option, so the
    text need not name them. What follows "; in Python also" is an object, which nobody can type.
    """
    about = re.sub(r"; in Python also [^.]*", "", about)
    about = re.sub(
        r" Not given: (?:the environment variable )?ACCELERATE_\w+, else (?:False|none|1|\"no\")\.", "", about
    )
    about = re.sub(r"Not given: ACCELERATE_\w+, else ", "Not given: ", about)
    return re.sub(r"(^|[.;] )None: ", lambda found: f"{found[1].replace(';', '.')}Not given: ", about)


def _docstrings(factory: Callable[..., Any]) -> list[str]:
    if not isinstance(factory, type):
        return [factory.__doc__ or ""]
    classes = [kind for kind in factory.__mro__ if kind is not object]
    return [each.__doc__ or "" for kind in classes for each in (kind, vars(kind).get("__init__")) if each is not None]
