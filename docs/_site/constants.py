"""Shows a named constant of holdfast by its value: `15.0`, not `LIVENESS_SECONDS`."""

from typing import Any

import griffe


class ConstantDefaults(griffe.Extension):
    """Replaces names of constants in signatures once all modules are loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visits all functions of a package."""
        self._visit(pkg)

    def _visit(self, thing: griffe.Object) -> None:
        for member in thing.members.values():
            if member.is_alias:
                continue
            if isinstance(member, griffe.Function):
                for parameter in member.parameters:
                    parameter.default = self._resolve(parameter.default, member)
            elif isinstance(member, (griffe.Module, griffe.Class)):
                self._visit(member)

    def _resolve(self, default: Any, scope: griffe.Object) -> Any:
        if not isinstance(default, griffe.ExprName):
            return default
        try:
            found = scope.modules_collection[scope.resolve(default.name)]
        except (KeyError, griffe.NameResolutionError, griffe.AliasResolutionError):
            return default
        if found.is_alias:
            found = found.final_target
        if isinstance(found, griffe.Attribute) and found.value is not None:
            return self._resolve(found.value, found.module)
        return default
