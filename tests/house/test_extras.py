"""A part of holdfast that needs a package says so when it is used, and not before."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.errors import MissingPackageError
from holdfast.extras import Door, install_command
from holdfast.policies import Latest


def make_integration(package: str, oldest: str) -> Door:
    return Door("frame", package, oldest, "frame", {"Latest": "holdfast.policies"})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a distribution called frame-of-mind, version 2.10rc1."""
    record = tmp_path / "frame_of_mind-2.10rc1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: frame-of-mind\nVersion: 2.10rc1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


def test_a_missing_package_is_an_error_at_use_that_names_the_extra() -> None:
    thing = make_integration("frame-that-is-not-there", "1.0").load("Latest")
    with pytest.raises(
        MissingPackageError, match=r"holdfast\.frame\.Latest needs frame-that-is-not-there, which is not"
    ):
        thing(3)
    with pytest.raises(MissingPackageError) as found:
        type("Own", (thing,), {})
    assert found.value.hint is not None
    assert "pip install '.[frame]' in a checkout of holdfast" in found.value.hint


@pytest.mark.parametrize(
    ("extra", "command"),
    [("orbax", "pip install 'tensorstore>=0.1.70'"), ("lightning", "pip install 'lightning>=2.5' 'torch>=2.6'")],
)
def test_the_hint_is_a_command_that_works_however_holdfast_was_installed(extra: str, command: str) -> None:
    assert install_command(extra) == command


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("oldest", "is_enough"), [("2.9", True), ("2.10", True), ("2.11", False), ("10", False)])
def test_a_package_that_is_too_old_is_an_error_with_both_versions(oldest: str, is_enough: bool) -> None:
    thing = make_integration("frame-of-mind", oldest).load("Latest")
    if is_enough:
        assert thing is Latest
    else:
        with pytest.raises(
            MissingPackageError, match=rf"needs frame-of-mind {oldest} or newer, but 2.10rc1 is installed"
        ):
            thing(3)


def test_unknown_name_of_an_integration_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'holdfast\.frame' has no attribute 'Earliest'"):
        make_integration("frame-of-mind", "1").load("Earliest")


def test_integrations_are_importable_by_their_short_names() -> None:
    """In a fresh interpreter, in which nobody has asked for them; the frameworks are not imported for that."""
    program = "import sys, holdfast\n" + "".join(
        f"import holdfast.{name} as integration\n"
        f"assert integration is holdfast.{name} is sys.modules['holdfast.{name}'] is sys.modules['{home}']\n"
        for name, home in hf._MODULES.items()
    )
    program += "assert not {'torch', 'lightning', 'transformers', 'keras', 'accelerate'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_unknown_integration_is_a_module_not_found_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"holdfast\.pytorch"):
        importlib.import_module("holdfast.pytorch")
