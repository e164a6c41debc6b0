"""The managers of a job's checkpoints, one commit per epoch for all nodes, and the metadata handlers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, runtime_checkable

from holdfast.catalog import StoredRun
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS
from holdfast.errors import (
    DamageError,
    HoldfastError,
    MismatchError,
    NoCheckpointError,
    NoWholeCheckpointError,
    SaveFailedError,
    StorageError,
    UsageError,
)
from holdfast.events import Committed, Event, Failed, Fanout, NodesTimed, PassedOver, Retained, Sink, Warned
from holdfast.events.sinks import LoggingSink
from holdfast.format.names import StepName
from holdfast.jobs.node_store import (
    NODES_NOTE,
    LoadOrder,
    NodeDurations,
    NodeStore,
    NodeStoreOptions,
    Saving,
    data_path,
    find_place,
    read_places,
    stored_nodes,
)
from holdfast.jobs.session import Session
from holdfast.numbers import check_whole
from holdfast.options import check_step, check_switches, check_timeout
from holdfast.policies import All, RetentionPolicy, read_keep
from holdfast.restore.verify import open_step
from holdfast.save.run_writer import RunWriter
from holdfast.state import Differences
from holdfast.storage import Storage, open_storage

SAVE: Final = "checkpoint_save"
LOAD: Final = "checkpoint_load"
PARTIAL_LOAD: Final = "checkpoint_partial_load"


@runtime_checkable
class MetadataHandler(Protocol):
    """Keeps a record of checkpoints outside of them, for example in a team's database.

    One process of a job calls it, from the thread that drives the job.
    """

    def set_params(self, directory: str, node_names: Sequence[str]) -> None:
        """Called at the beginning of a run with the directory of the checkpoints and their nodes."""
        ...

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Returns the epoch from which the job resumes.

        Args:
            user_epoch: The epoch that the user asked for, or None.

        Returns:
            That epoch, or another one. None to start from the beginning: existing epochs are not used, with a warning.
            If the user asked for one, None is an error.
        """
        ...

    def write(self, epoch: int) -> None:
        """Called for each saved epoch, as soon as it is committed for all nodes."""
        ...

    def report(self, action: str, stats: NodeDurations) -> None:
        """Called with the times that each node took.

        Args:
            action: `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.
            stats: The times.
        """
        ...

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Returns True if checkpoints can be written and read now, or that of an epoch can be read."""
        ...


class ManifestMetadataHandler:
    """The default metadata handler: the manifests of the checkpoints are the record.

    Attributes:
        reports: For each action, the times of each report, in order.
    """

    def __init__(self, directory: str | os.PathLike[str] | Storage | None = None) -> None:
        """Stores the settings; reads nothing yet.

        Args:
            directory: The directory of the checkpoints; None to take it from `set_params`.
        """
        self.reports: dict[str, list[NodeDurations]] = {}
        self._storage = open_storage(directory) if directory is not None else None

    def set_params(self, directory: str, node_names: Sequence[str]) -> None:
        """Stores the directory of the checkpoints, unless it is already known."""
        if self._storage is None:
            self._storage = open_storage(directory)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """**Blocks.** Returns the epoch that the user asked for; else the newest committed one."""
        if user_epoch is not None:
            return user_epoch
        newest = StoredRun(self._place()).look().newest
        return newest.step if newest is not None else None

    def write(self, epoch: int) -> None:
        """**Blocks.** Checks that the epoch is committed: its manifest is the record.

        Raises:
            NoCheckpointError: If it is not.
        """
        StoredRun(self._place()).look().find(epoch)

    def report(self, action: str, stats: NodeDurations) -> None:
        """Stores the times."""
        self.reports.setdefault(action, []).append(stats)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """**Blocks.** Returns True if the storage can be read, and the records of an epoch are whole."""
        try:
            catalog = StoredRun(self._place()).look()
            if epoch is not None:
                name = catalog.find(epoch)
                open_step(self._place(), name.directory, name)
        except (NoCheckpointError, DamageError, StorageError):
            return False
        return True

    def _place(self) -> Storage:
        if self._storage is None:
            raise UsageError(
                "the handler does not know the directory of the checkpoints", hint="Call set_params first."
            )
        return self._storage


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load.

    Attributes:
        epoch: The epoch that the nodes now have.
        metadata: The metadata that was saved with it.
        new_nodes: Nodes that the checkpoint does not contain; they were only created.
    """

    epoch: int
    metadata: Mapping[str, Any]
    new_nodes: tuple[str, ...] = ()


class MultiNodeCheckpointManager:
    """Saves the workspaces of all nodes of a job in one commit per epoch, and restores them.

    An epoch is saved for all nodes or for none. A `JobRunner` drives it; it may be used for several runs in turn.

    Attributes:
        background: True if the next epoch begins while the previous one is still being written.
        storage: The storage of the checkpoints.
        url: Its URL.
        timeout_seconds: The deadline of each wait.
        metadata_handler: Keeps the record, and receives the times.
        nodes: The nodes whose state is saved; none before `init`.
        committed: The epoch whose save was begun last, once it is committed; else None.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        keep: RetentionPolicy | int | str | None = None,
        metadata_handler: MetadataHandler | None = None,
        begin_anew: bool = False,
        take_over_nodes: bool = False,
        strict: bool = True,
        background: bool = False,
        sinks: Iterable[Sink] = (),
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        threads: int = 6,
    ) -> None:
        """Stores the settings; reads nothing yet.

        Args:
            directory: A directory that all nodes see, a URL, or an open storage.
            keep: Which epochs to keep; None for all.
            metadata_handler: Keeps a record of the checkpoints elsewhere, and chooses the epoch to resume from; None to
                use the checkpoints themselves.
            begin_anew: True to start each run from the beginning, regardless of existing checkpoints.
            take_over_nodes: True to resume from a checkpoint of other nodes: nodes of the same name get their state,
                new ones run the init tasks, and the state of the others is not used.
            strict: False to restore everything that fits, if the job's objects have changed since the save.
            background: True to begin the next epoch as soon as the state is copied. The result of the save is then
                known when the next one begins, or at the end.
            sinks: Functions that are called with each event.
            timeout_seconds: The deadline of each wait.
            threads: The number of threads that write, and read, in each process.

        Raises:
            UsageError: If an argument is wrong.
        """
        kept = read_keep(keep) or All()
        check_timeout(timeout_seconds)
        check_whole("threads", threads, 1)
        check_switches(begin_anew=begin_anew, take_over_nodes=take_over_nodes, strict=strict, background=background)
        if metadata_handler is not None and not isinstance(metadata_handler, MetadataHandler):
            raise UsageError(
                f"expected a metadata handler, got {metadata_handler!r}",
                hint="It needs set_params, last_epoch, write, report and cp_accessible.",
            )
        self.background = background
        self.storage = open_storage(directory)
        if self.storage.traits.has_tiers:
            raise UsageError("an epoch job has no tiers", hint="Pass one directory, or the URL of a bucket.")
        self.url = self.storage.url
        self.timeout_seconds = timeout_seconds
        self.metadata_handler: MetadataHandler = metadata_handler or ManifestMetadataHandler(self.storage)
        self.nodes: tuple[str, ...] = ()
        self.committed: int | None = None
        self._take_over_nodes = take_over_nodes
        self._strict = strict
        self._emit = Fanout([LoggingSink(), *sinks])
        sinks = (self._note, *sinks)
        self._options = NodeStoreOptions(self.storage, kept, begin_anew, timeout_seconds, threads, sinks)
        self._begins_anew = begin_anew
        self._session: Session | None = None
        self._store: NodeStore | None = None
        # The epoch that was saved or loaded last, for as long as the session is the same.
        self._stands_at: int | None = None

    def is_ready_for(self, session: Session, nodes: Sequence[str]) -> bool:
        """Returns True if `init` was called with exactly these, and nothing has been closed since."""
        return self._store is not None and self._session is session and self.nodes == tuple(nodes)

    def init(self, session: Session, nodes: Sequence[str], *, goes_on: bool = False) -> None:
        """**Blocks.** Prepares a run; completes what the manager did for an earlier one.

        Args:
            session: The session of the nodes.
            nodes: The nodes whose state is saved.
            goes_on: True if this is the same run as before, with replaced nodes: nothing is started over.

        Raises:
            UsageError: If the nodes differ from those before, and `take_over_nodes` is not set.
            SaveFailedError: If the last save of the previous run failed and the failure was not reported yet.
            StorageError: If the storage fails.
        """
        if self.nodes and set(nodes) != set(self.nodes) and not self._take_over_nodes:
            raise UsageError(
                f"this manager has saved the nodes {', '.join(self.nodes)}, but got {', '.join(nodes)}",
                hint="Create one manager for each set of nodes, or pass take_over_nodes=True.",
            )
        self.close()
        if session is not self._session:
            self._stands_at = None
        self._session = session
        self.nodes = tuple(nodes)
        self._begins_anew = self._options.begin_anew and not goes_on
        self._store = session.open_store(self.nodes, replace(self._options, begin_anew=self._begins_anew))
        if session.is_master:
            self.metadata_handler.set_params(self.url, self.nodes)

    def choose_epoch(self, user_epoch: int | None = None) -> int | None:
        """**Blocks.** Returns the epoch from which a run resumes; None if it starts from the beginning.

        If the metadata handler says to start from the beginning, existing epochs are not used, as with `begin_anew`.
        The log has a warning then.

        Raises:
            NoCheckpointError: If that epoch was not saved; the hint names the existing ones.
            NoWholeCheckpointError: If epochs were saved, but none can be used any more.
            UsageError: If an epoch was requested although the manager has `begin_anew`, or the metadata handler says
                so; or if workers ask for different ones.
        """
        session = self._ready()[0]
        beginnings = session.share("the start of a run", [user_epoch, self._begins_anew])
        if any(beginning != beginnings[0] for beginning in beginnings):
            begun = (
                f"{node} from {'the beginning' if anew else 'the newest epoch' if epoch is None else f'epoch {epoch}'}"
                for node, (epoch, anew) in zip(session.nodes, beginnings, strict=True)
            )
            raise UsageError(
                f"the workers start differently: {', '.join(begun)}",
                hint="Pass the same resume_from_epoch and begin_anew on all workers.",
            )
        if self._begins_anew:
            if user_epoch is not None:
                raise UsageError(f"resuming from epoch {user_epoch} contradicts begin_anew=True")
            return None
        asked = None if user_epoch is None else check_step(user_epoch)
        found = self.metadata_handler.last_epoch(asked) if session.is_master else None
        left = [] if found is not None or not session.is_master else self.epochs()
        epoch, left = session.share("the epoch to resume from", [found, list(left)])[0]
        if epoch is None:
            if asked is not None:
                raise UsageError(
                    f"epoch {asked} was requested, but the metadata handler says to start from the beginning",
                    hint="Its last_epoch(user_epoch) must return the requested epoch, or another one.",
                )
            StoredRun(self.storage).check_nothing_lost()
            if left:
                listed = ", ".join(map(str, left))
                self._warn(f"the metadata handler says to start from the beginning: epochs {listed} are not used")
                # Later saves are independent of the existing ones.
                self.close()
                self._begins_anew = True
                self._store = session.open_store(self.nodes, replace(self._options, begin_anew=True))
            return None
        name = self._find(check_step(epoch))
        if user_epoch is None and session.is_master:
            for lost in StoredRun(self.storage).find_lost(StoredRun(self.storage).look()):
                if lost > name:
                    path = lost.manifest_path
                    missing = f"{path} is missing"
                    self._emit(PassedOver(step=lost.step, generation=lost.generation, file=path, error=missing))
        return name.step

    def load(self, epoch: int, *, or_older: bool = False) -> Loaded:
        """**Blocks.** Loads an epoch into all nodes; every byte is checked.

        Args:
            epoch: The epoch.
            or_older: True to fall back to an older epoch if it is damaged.

        Raises:
            NoCheckpointError: If it was not saved.
            NoWholeCheckpointError: If it is damaged, and with `or_older` all others are too.
            MismatchError: If it was saved by other nodes, or does not fit their objects.
            StorageError: If the storage fails.
        """
        newest = self._find(check_step(epoch))
        older = [name for name in StoredRun(self.storage).look().living if name < newest] if or_older else []
        damages: list[DamageError] = []
        for name in (newest, *reversed(older)):
            try:
                return self._load(name, epoch)
            except NoWholeCheckpointError as error:
                damages += error.damages
                # Of data files the restore itself tells.
                for one in (damage for damage in error.damages if not damage.path.endswith(".safetensors")):
                    self._emit(PassedOver(step=name.step, generation=name.generation, file=one.path, error=one.message))
        listed = "\n".join(f"  {damage.message}" for damage in damages)
        raise NoWholeCheckpointError(
            f"{self.url}: epoch {epoch} is damaged{', and so is every older one' if or_older else ''}:\n{listed}",
            damages=tuple(damages),
            hint="`holdfast verify` shows the extent; restore another copy, or start over (begin_anew=True).",
        )

    def begin_save(self, epoch: int, metadata: Mapping[str, Any] | None = None) -> Saving:
        """Copies the state of all nodes and returns; `finish_save` waits for the rest.

        Raises:
            SaveFailedError: If the metadata handler says that checkpoints cannot be written now.
            UnsupportedValueError: If a workspace contains a value that cannot be stored.
        """
        session, store = self._ready()
        is_accessible = session.is_master and self._is_accessible()
        if not session.share(f"whether epoch {epoch} is saved", is_accessible)[0]:
            reason = "the metadata handler says that checkpoints cannot be written now"
            self._emit(Failed(stage="save", error=reason, step=epoch, save_lost=True))
            raise SaveFailedError(f"epoch {epoch} was not saved: {reason}", step=epoch)
        self.committed = None
        return store.save(check_step(epoch), {NODES_NOTE: list(self.nodes), **(metadata or {})})

    def finish_save(self, epoch: int, saving: Saving) -> None:
        """**Blocks.** Waits until an epoch is committed for all nodes, and records it.

        Raises:
            SaveFailedError: If it failed: then no node has it.
            DeadlineError: If it does not end in time.
        """
        durations = saving.wait()
        self._stands_at = epoch
        if self._ready()[0].is_master:
            self._tell("writing it", epoch, lambda: self.metadata_handler.write(epoch))
        self._report(SAVE, epoch, durations)

    def load_blobs(self, names: str | Iterable[str], epoch: int) -> dict[str, tuple[str, ...]]:
        """**Blocks.** Loads single values of an epoch, each into the workspace of its node.

        Args:
            names: The values; those of that name on all nodes.
            epoch: The epoch.

        Returns:
            For each node, the names of its loaded values.

        Raises:
            UsageError: If no node has a value of some name; nothing was loaded.
            NoCheckpointError: If the epoch was not saved.
            NoWholeCheckpointError: If it is damaged.
            MismatchError: If a value does not fit the existing one.
            StorageError: If the storage fails.
        """
        _, store = self._ready()
        wanted = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
        name = self._find(check_step(epoch))
        places = read_places(self.storage, name)
        stored = {place.node: place.names for place in places if place.node in self.nodes}
        wrong = [one for one in wanted if not any(one in known for known in stored.values())]
        if wrong or not wanted:
            known = ", ".join(dict.fromkeys(one for known in stored.values() for one in known))
            raise UsageError(
                f"no node has a value {', '.join(map(repr, wrong)) or 'without a name'} in epoch {epoch}",
                hint=f"The names are {known or 'none'}.",
            )
        found = {node: tuple(one for one in wanted if one in known) for node, known in stored.items()}
        found = {node: taken for node, taken in found.items() if taken}
        durations = store.load(LoadOrder(name, found, tuple(place.node for place in places)))
        self._report(PARTIAL_LOAD, epoch, durations)
        return found

    def epochs(self) -> tuple[int, ...]:
        """**Blocks.** Returns the epochs that can be resumed from, oldest first."""
        return tuple(name.step for name in StoredRun(self.storage).look().living)

    def get_ckpt_db_name(self, node: str, epoch: int) -> str | None:
        """**Blocks.** Returns the path of the data file with the state of a node; None for an unknown node.

        Raises:
            NoCheckpointError: If the epoch was not saved.
            DamageError: If its manifest is damaged.
            NoWholeCheckpointError: If its records are damaged.
            StorageError: If the storage fails.
        """
        name = self._find(check_step(epoch))
        stored = stored_nodes(self.storage, name)
        if node not in stored:
            return None
        return f"{self.url}/{data_path(name, find_place(self.storage, name, node, stored))}"

    def tidy(self) -> None:
        """**Blocks.** At the end of a job, removes the epochs that its policy does not keep.

        While a job runs, the epoch that it resumed from is kept regardless of the policy, because it is known to be
        good; and a kill between a commit and the removal after it leaves one epoch more, or half of one. A finished job
        needs none of these. An error here is only a warning. Nothing is removed if a newer job now saves there.
        """
        if self._session is None or not self._session.is_master:
            return
        begun_at = time.monotonic()
        try:
            newest = StoredRun(self.storage).look().newest
            if newest is None:
                return
            line = RunWriter(self.storage, self._options.keep, reuse_space=False)
            # As the one that has saved last: what it, and those before it, left unfinished is swept as well.
            line.follow(newest.generation, newest)
            cleaning = line.clean(newest, {newest: "the newest"})
        except Exception as error:  # noqa: BLE001  A policy of the user's own may raise anything.
            reason = error.message if isinstance(error, HoldfastError) else repr(error)
            self._emit(Warned(text=f"{self.url}: the job has finished, but old epochs are not removed: {reason}"))
            return
        for problem in cleaning.problems:
            self._emit(Warned(text=f"{self.url}: an old epoch could not be removed: {problem.message}"))
        if cleaning.removed:
            kept = {name.step: cleaning.kept[name] for name in sorted(cleaning.kept)}
            removed = tuple(name.step for name in cleaning.removed)
            self._emit(Retained(kept=kept, removed=removed, background_seconds=time.monotonic() - begun_at))

    def close(self) -> None:
        """**Blocks.** Waits for the save in progress, and ends all threads; a second call does nothing.

        Raises:
            SaveFailedError: If a save failed and the failure was not reported yet.
        """
        if self._store is not None:
            self._store.close()
            self._store = None

    def _ready(self) -> tuple[Session, NodeStore]:
        if self._session is None or self._store is None:
            raise UsageError("the manager has no nodes yet", hint="Call init first, as JobRunner does.")
        return self._session, self._store

    def _find(self, epoch: int) -> StepName:
        catalog = StoredRun(self.storage).look()
        try:
            return catalog.find(epoch)
        except NoWholeCheckpointError:
            raise
        except NoCheckpointError:
            StoredRun(self.storage).check_nothing_lost()
            known = ", ".join(map(str, sorted({name.step for name in catalog.committed}))) or "none"
            text, hint = f"epoch {epoch} was not saved in {self.url}", f"Epochs that exist: {known}."
            raise NoCheckpointError(text, hint=hint) from None

    def _load(self, name: StepName, epoch: int) -> Loaded:
        _, store = self._ready()
        try:
            stored = stored_nodes(self.storage, name)
            metadata = StoredRun(self.storage).step(name).manifest().metadata
        except DamageError as damage:
            raise NoWholeCheckpointError(damage.message, damages=(damage,)) from damage
        new, gone = self._compare_nodes(name, stored)
        here = {node: None for node in self.nodes if node not in new}
        keep_added = self._stands_at == epoch == name.step
        durations = store.load(LoadOrder(name, here, tuple(stored), keep_added, self._strict))
        store.go_on_from(name.step)
        self._stands_at = name.step
        if gone or new:
            self._warn(f"the job's nodes differ from those of epoch {name.step}: {gone} missing, {new} new")
        self._report(LOAD, name.step, durations)
        return Loaded(name.step, metadata, tuple(new))

    def _compare_nodes(self, name: StepName, stored: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the job's nodes that a checkpoint lacks, and the checkpoint's nodes that the job lacks."""
        gone = [node for node in stored if node not in self.nodes]
        new = [node for node in self.nodes if node not in stored]
        if (gone or new) and not self._take_over_nodes:
            raise MismatchError(
                f"epoch {name.step} of {self.url} was saved by the nodes {', '.join(stored)}, but the job has "
                f"{', '.join(self.nodes)}; nothing was changed",
                differences=Differences(missing=new, extra=gone),
                hint="Run the job on the same nodes, or pass take_over_nodes=True.",
            )
        return new, gone

    def _is_accessible(self) -> bool:
        try:
            return bool(self.metadata_handler.cp_accessible(None))
        except Exception as error:  # noqa: BLE001  The handler is the user's, and may raise anything.
            self._warn(f"the metadata handler failed in cp_accessible: {error!r}")
            return False

    def _report(self, action: str, epoch: int, durations: NodeDurations) -> None:
        node_seconds = dict(durations.node_seconds)
        self._emit(NodesTimed(action=action, epoch=epoch, node_seconds=node_seconds, slowest=durations.slowest))
        if self._ready()[0].is_master:
            self._tell("reporting its times", epoch, lambda: self.metadata_handler.report(action, durations))

    def _tell(self, what: str, epoch: int, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  The checkpoint is committed, even if the user's handler fails.
            self._warn(f"epoch {epoch} is saved, but the metadata handler failed while {what}: {error!r}")

    def _note(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.committed = event.step

    def _warn(self, text: str) -> None:
        self._emit(Warned(text=text))


class NodeCheckpointManager(MultiNodeCheckpointManager):
    """A `MultiNodeCheckpointManager` for a job that saves the state of one node only; a second node is refused."""

    def init(self, session: Session, nodes: Sequence[str], *, goes_on: bool = False) -> None:
        """**Blocks.** Like `MultiNodeCheckpointManager.init`.

        Raises:
            UsageError: If there is more than one node.
        """
        if len(nodes) != 1:
            raise UsageError(
                f"this manager saves the state of one node, got {', '.join(nodes)}",
                hint="Use a MultiNodeCheckpointManager, or pass one name in nodes_to_checkpoint.",
            )
        super().init(session, nodes, goes_on=goes_on)
