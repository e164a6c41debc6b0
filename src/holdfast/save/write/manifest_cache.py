"""What the committed steps of a run say of themselves, each read once: a manifest never changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.catalog import read_manifest, read_references
from holdfast.errors import DamageError, NotFoundError
from holdfast.format.manifest import Manifest
from holdfast.format.names import StepName
from holdfast.policies import Referrer
from holdfast.storage.protocol import Storage


class ManifestCache:
    """The manifests of a run, read when they are asked for. Not thread-safe: one save uses it at a time.

    What cannot be read for now, since it is damaged or gone, is asked for again the next time. Each method raises
    `StorageError` if the place fails.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._manifests: dict[StepName, Manifest] = {}
        self._references: dict[StepName, tuple[StepName, ...]] = {}

    def add(self, manifest: Manifest) -> None:
        """Notes a manifest that was just published."""
        self._manifests[manifest.name] = manifest

    def manifest(self, name: StepName) -> Manifest | None:
        """**Blocks.** A step's manifest; None if it is damaged, or that of a newer holdfast, or there is none."""
        if name not in self._manifests:
            try:
                self._manifests[name] = read_manifest(self._storage, name)
            except (DamageError, NotFoundError):
                return None
        return self._manifests[name]

    def references(self, name: StepName) -> tuple[StepName, ...]:
        """**Blocks.** The steps that a step refers to, as far as that can be read."""
        manifest = self.manifest(name)
        if manifest is not None:
            return tuple(reference.name for reference in manifest.references)
        if name not in self._references:
            try:
                self._references[name] = read_references(self._storage, name)
            except (DamageError, NotFoundError):
                return ()  # Nobody can restore it, whatever it needs.
        return self._references[name]

    def kept_with(self, name: StepName) -> frozenset[StepName]:
        """**Blocks.** All steps that have to stay as long as a step does: what it refers to, what these refer to..."""
        kept: set[StepName] = set()
        ahead = [name]
        while ahead:
            new = set(self.references(ahead.pop())) - kept
            kept |= new
            ahead += new
        return frozenset(kept)

    def referrers(self, names: Iterable[StepName]) -> list[Referrer[StepName]]:
        """**Blocks.** Those of some steps that refer to others."""
        found = ((name, self.references(name)) for name in names)
        return [Referrer(name, name.step, references) for name, references in found if references]

    def forget_all_but(self, names: Collection[StepName]) -> None:
        """Lets go of what is known of other steps."""
        self._manifests = {name: known for name, known in self._manifests.items() if name in names}
        self._references = {name: known for name, known in self._references.items() if name in names}
