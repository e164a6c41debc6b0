"""What pyproject.toml cannot say: the extensions in C, the wheel's tag and examples, and the project's address.

The extensions make saves quicker. Without a C compiler everything else is installed, and Python does their work;
`holdfast doctor` says which of the two is in use.

The project's address is known where a release is built: the environment variable HOLDFAST_PROJECT_URL holds it there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
URL = os.environ.get("HOLDFAST_PROJECT_URL", "").rstrip("/")


class BuildExtensions(build_ext):
    """Builds the extensions; says what it means if that fails."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension; setuptools leaves out one that cannot be built."""
        try:
            super().build_extension(ext)
        except Exception:
            self.warn(
                f"{ext.name} cannot be built: holdfast is installed without it, and saves block training longer. "
                "A C compiler and the headers of Python are needed (Debian: build-essential python3-dev)."
            )
            raise


class BuildModules(build_py):
    """Puts the examples that `holdfast init` writes into the package; an editable install has them in the checkout."""

    def run(self) -> None:
        """Builds the package."""
        super().run()
        if not self.editable_mode:
            place = Path(self.build_lib) / "holdfast" / "cli" / "templates"
            place.mkdir(parents=True, exist_ok=True)
            for example in (ROOT / "examples").glob("train_*.py"):
                self.copy_file(str(example), str(place))


def readme() -> str:
    """README.md, with absolute links where the project's address is known: a package index has no other files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({URL}/blob/main/", text) if URL else text


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": URL,
        "Documentation": f"{URL}/tree/main/docs",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    }
    if URL
    else {},
    ext_modules=[
        Extension(
            name,
            [f"src/{name.replace('.', '/')}.c"],
            py_limited_api=True,
            optional=True,
        )
        for name in ("holdfast.save._moves", "holdfast.storage._digesting")
    ],
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildModules},
    # One wheel for all versions of Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
