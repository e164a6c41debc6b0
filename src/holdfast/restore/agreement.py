"""How the workers of a job restore the same checkpoint, or none: before anything live is touched, and after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

import msgspec

from holdfast.cluster.peers import Failure, Peers
from holdfast.cluster.rendezvous import LEADER
from holdfast.errors import DamageError, HoldfastError, NoCheckpointError, StorageError, UsageError
from holdfast.format.digests import digest
from holdfast.format.manifest import MAX_MANIFEST_BYTES
from holdfast.format.names import StepName, parse_step_directory
from holdfast.storage.protocol import Storage

_SIGHT_SECONDS: Final = 30.0
