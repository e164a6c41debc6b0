"""Loads the parts of holdfast that need another package, or gives a clear error if it is missing or too old."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, NamedTuple

from holdfast.errors import MissingPackageError


class Door(NamedTuple):
    """A module of holdfast for one framework, such as `holdfast.lightning`. Using it imports that framework.

    Attributes:
        name: Its name under `holdfast`.
        package: The distribution that it needs.
        oldest: The oldest supported version of that.
        extra: The extra of holdfast that installs it.
        homes: By public name, the module that defines it.
    """

    name: str
    package: str
    oldest: str
    extra: str
    homes: Mapping[str, str]

    def load(self, name: str) -> Any:
        """Returns the object with that name, or a stand-in if the framework is missing or too old.

        Raises:
            AttributeError: If there is no such name.
        """
        if name not in self.homes:
            raise AttributeError(f"module 'holdfast.{self.name}' has no attribute {name!r}")
        problem = _find_problem(self.package, self.oldest)
        if problem:
            return stand_in(f"{self.name}.{name}", problem, self.extra)
        return getattr(import_module(self.homes[name]), name)


@cache
def stand_in(name: str, problem: str, extra: str) -> type:
    """Returns a stand-in class for a name whose package is missing, so that `help` and `import *` work.

    Using it raises `MissingPackageError`: calling it, and deriving a class from it.

    Args:
        name: The name under `holdfast`.
        problem: The problem with the package, such as "torch, which is not installed".
        extra: The extra of holdfast that installs the package.
    """

    def refuse(*_: object, **__: object) -> None:
        raise MissingPackageError(
            f"holdfast.{name} needs {problem}",
            hint=f"Install it: {install_command(extra)}",
        )

    members = {"__new__": refuse, "__init_subclass__": refuse, "__module__": "holdfast", "__doc__": f"Needs {problem}."}
    return type(name.rpartition(".")[2], (), members)


def install_command(extra: str) -> str:
    """Returns the command that installs what an extra of holdfast brings, however holdfast itself was installed."""
    try:
        lines = requires("holdfast") or []
    except PackageNotFoundError:
        lines = []
    wanted = (line.partition(";") for line in lines)
    names = [f"'{name.strip()}'" for name, _, marker in wanted if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return f"pip install {' '.join(names)}" if names else f"pip install '.[{extra}]' in a checkout of holdfast"


def _find_problem(package: str, oldest: str) -> str:
    """Returns the problem with a package; "" if it is installed and new enough. Does not import it."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package}, which is not installed"
    return "" if _numbers(found) >= _numbers(oldest) else f"{package} {oldest} or newer, but {found} is installed"


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
