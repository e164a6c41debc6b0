"""Chooses the sources of notices that fit the machine, without sending a request."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast import preemption
from holdfast.preemption.sources.protocol import NoticeSource
from holdfast.preemption.sources.signals import Signals

_DMI: Final = Path("/sys/class/dmi/id")
_DMI_FILES: Final = ("product_name", "sys_vendor", "bios_version", "chassis_asset_tag")
_MAX_DMI_BYTES: Final = 4096

_AZURE_ASSET_TAG: Final = "7783-7084-3265-9085-8269-3286-77"
"""Machines of Azure have this tag; other machines on Hyper-V name the same vendor."""


class Surroundings(msgspec.Struct, frozen=True):
    """The machine as a process sees it; `dmi` has the firmware's texts, by file."""

    environment: Mapping[str, str]
    dmi: Mapping[str, str]
    in_main_thread: bool = True


def look_around() -> Surroundings:
    """Returns what this process can see; reads a few small files of the kernel."""
    return Surroundings(os.environ, read_dmi(_DMI), threading.current_thread() is threading.main_thread())


def read_dmi(directory: Path) -> dict[str, str]:
    """Returns the contents of the readable files of that directory."""
    found = {}
    for name in _DMI_FILES:
        try:
            with (directory / name).open("rb") as file:
                found[name] = file.read(_MAX_DMI_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            continue
    return found


def choose_sources(seen: Surroundings) -> list[NoticeSource]:
    """**Pure.** Returns the sources for `"auto"`.

    A cloud's server is queried only on a machine whose firmware names that cloud.
    """
    sources: list[NoticeSource] = []
    if seen.in_main_thread:
        in_kubernetes = "KUBERNETES_SERVICE_HOST" in seen.environment
        sources.append(preemption.Kubernetes() if in_kubernetes else Signals())
    if "SLURM_JOB_ID" in seen.environment:
        sources.append(preemption.Slurm(environment=seen.environment))
    match choose_cloud(seen.dmi):
        case "gcp":
            sources += [preemption.GCP(), preemption.GCP("maintenance-event")]
        case "aws":
            sources.append(preemption.AWS())
        case "azure":
            sources.append(preemption.Azure())
    return sources


def choose_cloud(dmi: Mapping[str, str]) -> str:
    """**Pure.** Returns the cloud of this machine: `gcp`, `aws`, `azure`, or an empty string."""
    if dmi.get("product_name") == "Google Compute Engine":
        return "gcp"
    if dmi.get("sys_vendor") == "Amazon EC2" or "amazon" in dmi.get("bios_version", "").lower():
        return "aws"
    if dmi.get("sys_vendor") == "Microsoft Corporation" and dmi.get("chassis_asset_tag") == _AZURE_ASSET_TAG:
        return "azure"
    return ""
