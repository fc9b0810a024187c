"""Random schedules of the protocol of stored runs: writers, workers, readers, services, users, evictions, outages and kills.

Each schedule is a seed. `NONET_SCHEDULES=FIRST:LAST` runs others than the default ones; a violation names the seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage import FileEntry, MountedRun, RunCopy, RunView, RunWriter
from nonet.storage.local_copy import is_content, is_large
from nonet.storage.local_folders import SERVING, make_local_folder
from nonet.storage.node_cache import make_room
from nonet.storage.run_tree import HEAD, OBJECTS, TREES, RunHead, RunTree
from tests.storage.scheduler import Actor, ActorStorage, ModelRLock, Schedule, pause, pause_at_files

ADDRESS = "s3://feed-runs/run-1"
FAILURES = (StorageError, ConfigError, OSError)
RANKS = "results/ranks.npz"
GRACE_S = 20.0  # of garbage, in writes to the storage
_FEW, _MANY = 200, 10_000


@dataclass
class Known:
    """What must hold, as an observer of all processes knows it.

    Attributes:
        acknowledged: Files whose commit has returned, without those that somebody began to remove.
        removed: Files that somebody began to remove.
        trees: All trees that a head has named, by key.
        writers: The writer before each writer, in the order of heads.
        local: By node, the writer and the files of a life that ended before all was stored.
        posts: By node, the posts that a service has acknowledged.
        voided: Writers of a run that was discarded before they heard of it.
        emptied: By writer whose folder was emptied, the number of heads that it may still write.
    """

    acknowledged: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    trees: dict[str, RunTree] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)
    local: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    posts: dict[str, list[str]] = field(default_factory=dict)
    voided: set[str] = field(default_factory=set)
    emptied: dict[str, int] = field(default_factory=dict)


class RunModel:
    """The processes of one stored run on some nodes.

    Args:
        seed: The seed of the schedule.
        root: The folder of the disks of all nodes.
    """

    def __init__(self, seed: int, root: Path):
        self.schedule, self.root, self.known = Schedule(seed), root, Known()
        self.random = self.schedule.random
        self.failures = self.random.choice([0.0, 0.0, 0.1, 0.3])
        self.writers: dict[Actor, tuple[str, RunWriter | None]] = {}
        self.threads: dict[Actor, Actor] = {}  # the background thread of each writer
        self.worker_paths: set[str] = set()  # the work folders in which workers live
        self.generations: dict[
            RunCopy, int
        ] = {}  # in which the next result of a worker is made, if that was told
        self._seen: tuple[float, int] = (0.0, 0)
        self._head: RunHead | None = None
        self._newest_ranks = -1
        self._was_discarded = False
        self.emptied_nodes: set[str] = set()
        self._n_lives = self._n_workers = self._n_files = 0

    def run(self) -> list[str]:
        """Run the schedule, and return what was violated."""
        for node in ("n0", "n1"):
            (self.root / node).mkdir()
        self.start_writer("n0")
        self.start_writer(self.random.choice(["n0", "n1"]))
        self.schedule.add("reader of n0", lambda: self.read("n0"))
        self.schedule.add("reader of n1", lambda: self.read("n1"))
        self.schedule.add("reader of n2", lambda: self.read("n2"))
        self.schedule.add("service of n0", lambda: self.serve("n0"))
        self.schedule.add("user", self.command)
        self.schedule.add("evictor of n0", lambda: self.evict("n0"))
        self.schedule.add("disturbance", self.disturb)
        self.schedule.run(self.check)
        if not self.schedule.violations:
            self.check_end()
        return self.schedule.violations

    # Processes

    def get_work_folder(self, node: str) -> Path:
        return make_local_folder("s3://feed-runs", "run-1", self.root / node)

    def open_storage(self) -> ActorStorage:
        return ActorStorage(self.schedule, self.failures)

    def start_writer(self, node: str) -> None:
        self._n_lives += 1
        number = self._n_lives
        actor = self.schedule.add(f"writer {number} on {node}", lambda: self.write(actor, node, number))
        self.writers[actor] = node, None

    def write(self, actor: Actor, node: str, number: int) -> None:
        """Open the run, change it, and close it, as a controller does."""
        copy = RunCopy(
            MountedRun(ADDRESS, str(self.get_work_folder(node))), self.open_storage(), self.schedule.locks
        )
        try:
            writer = RunWriter(
                copy, timeout_s=1e9, read_grace_s=0.0, garbage_grace_s=GRACE_S, make_lock=ModelRLock
            )
        except FAILURES:
            copy.release()
            return
        self.writers[actor] = node, writer
        life = WriterLife(self, node, copy, writer)
        life.thread = self.threads[actor] = self.schedule.add(
            f"background of writer {number}", life.commit_repeatedly
        )
        if self.random.random() < 0.15:
            life.fail_to_start()
        else:
            life.work(self.random.randrange(3, 9))
        copy.release()

    def start_worker(self, writer: RunCopy) -> RunCopy | None:
        """Start a worker of a writer on another node, where no other worker of its kind lives."""
        self._n_workers += 1
        node = f"w{self.random.randrange(self._n_workers)}"
        mounted = writer.describe_for_new_process()
        path = str(self.get_work_folder(node))
        if path in self.worker_paths:
            return None
        self.worker_paths.add(path)
        copy = RunCopy(
            MountedRun(ADDRESS, path, mounted.epoch, mounted.generation),
            self.open_storage(),
            self.schedule.locks,
        )
        self.schedule.add(f"worker {mounted.generation} on {node}", lambda: self.evaluate(copy))
        return copy

    def evaluate(self, copy: RunCopy) -> None:
        """Make a result several times, as an evaluator does."""
        try:
            copy.enter_epoch()
            for _ in range(2):
                copy.generation = self.generations.get(copy, copy.generation)
                copy.fetch_small_files()
                file = copy.path / RANKS
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(str(copy.generation))
                pause()
                copy.fetch_small_files()
                self.expect(int(file.read_text()) >= copy.generation, "a fetch replaced what a worker made")
                for _ in range(self.random.choice([0, 0, 100])):  # a worker that is suspended
                    pause()
                copy.put(file)
        except FAILURES:
            pass
        finally:
            self.worker_paths.discard(str(copy.path))
            copy.release()

    def read(self, node: str) -> None:
        """Look at the run several times, as verbs do."""
        path = self.root / node / "views/token/run-1"
        mounted = MountedRun(ADDRESS, str(path))
        try:
            view = RunView(mounted, self.open_storage(), self.schedule.locks, self.root / node)
        except FileNotFoundError:
            self.expect(node in self.emptied_nodes, "a folder vanished while a view was made")
            return
        for _ in range(3):
            before = view._read_state()[1]
            try:
                view.fetch(view.path)
                checkpoints = sorted((view.path / "checkpoints").glob("step-*"))
                if checkpoints:
                    view.fetch(checkpoints[-1])
            except FAILURES:
                if before is not None and view._read_state()[1] == before:
                    self.check_view(view, before)
                continue
            tree = view._read_state()[1]
            assert tree is not None
            self.expect(
                tree in [*self.known.trees.values(), RunTree()], "a reader saw what was no state of the run"
            )
            self.check_view(view, tree)

    def check_view(self, view: RunView, tree: RunTree) -> None:
        """Check that a view has exactly one state."""
        installed = view._read_state()[0]
        for name, entry in tree.files.items():
            if name in installed or not is_large(name):
                self.expect(is_content(view.path / name, entry), f"{name} of a view is not that of its state")
        for name in installed.keys() - tree.files.keys():
            self.expect(False, f"{name} of a view is of another state")

    def serve(self, node: str) -> None:
        """Acknowledge posted events, as a service of a finished run on this node."""
        path = self.root / node / "views/service/run-1"
        try:
            RunView(
                MountedRun(ADDRESS, str(path)), self.open_storage(), self.schedule.locks, self.root / node
            )
        except FileNotFoundError:
            self.expect(node in self.emptied_nodes, "a folder vanished while a view was made")
            return
        for number in range(4):
            if node in self.emptied_nodes:
                return
            with (path / SERVING / "events.jsonl").open("a") as file:
                file.write(f"post {number}\n")
            self.known.posts.setdefault(node, []).append(f"post {number}")
            pause()

    def evict(self, node: str) -> None:
        for _ in range(12):
            make_room(self.root / node / "another/run", self.schedule.locks, root=self.root / node, limit=0)
            pause()

    def command(self) -> None:
        """Send commands to the run."""
        storage = self.open_storage()
        for number in range(6):
            try:
                storage.put_if_absent(f"commands/{number}.asked.json", json.dumps({"id": number}).encode())
            except FAILURES:
                continue
            pause()

    def disturb(self) -> None:
        """Kill writers, start others, and empty folders, at some moments of the schedule."""
        for _ in range(self.random.randrange(1, 4)):
            for _ in range(self.random.randrange(5, 120)):
                pause()
            live = [actor for actor in self.writers if not actor.is_done]
            kind = self.random.choice(["kill", "kill", "start", "empty", "lose", "lose"])
            if kind == "kill" and live:
                actor = self.random.choice(live)
                for thread in (actor, self.threads.get(actor)):  # all threads of a process end at once
                    if thread is not None:
                        thread.dies = True
            elif kind == "empty" and live:
                actor = self.random.choice(live)
                node, writer = self.writers[actor]
                if writer is not None:
                    self.known.emptied[writer._head.writer] = 1_000  # until all is deleted
                self.known.posts[node] = []
                self.emptied_nodes.add(node)
                shutil.rmtree(self.get_work_folder(node), ignore_errors=True)
                self.known.local.pop(node, None)
                if writer is not None:
                    self.known.emptied[writer._head.writer] = 1
            elif kind == "lose" and live:
                node, _ = self.writers[self.random.choice(live)]
                for name in sorted(self.known.acknowledged)[:3]:  # by a program that deletes old files
                    (self.get_work_folder(node) / name).unlink(missing_ok=True)
            if kind in ("kill", "start"):
                self.start_writer(self.random.choice(["n0", "n1"]))

    # Invariants

    def expect(self, is_true: bool, text: str) -> None:
        if not is_true:
            self.schedule.violations.append(text)

    def check(self) -> None:
        """Check what must hold after each step of any process."""
        storage = self.schedule.storage
        seen = storage.now, len(storage.objects)
        stored = storage.objects.get(HEAD)
        if seen == self._seen or stored is None:
            return
        self._seen = seen
        head = RunHead.decode(stored.content)
        self._note_head(head)
        if not head.tree:
            return
        if head.tree not in storage.objects:
            self.expect(False, f"the head names {head.tree}, and it is gone")
            return
        tree = self.known.trees[head.tree]
        for name, entry in tree.files.items():
            for part in entry.parts:
                stored_part = storage.objects.get(part.key)
                self.expect(stored_part is not None, f"{name} names {part.key}, and it is gone")
                if stored_part is not None:
                    self.expect(len(stored_part.content) == part.size, f"{part.key} has another size")
        if missing := self.known.acknowledged - tree.files.keys() - self.known.removed:
            self.expect(False, f"acknowledged, and not in the run: {sorted(missing)}")
        self._check_answers(tree)

    def _note_head(self, head: RunHead) -> None:
        """Record a new head and its tree."""
        if self._head is not None and self._head.commit == head.commit:
            return
        if self._head is not None and self._head.writer != head.writer:
            self.known.writers[head.writer] = self._head.writer
        if (
            head.writer in self.known.emptied
            and not head.discarded
            and self._head
            and self._head.writer == head.writer
        ):
            self.known.emptied[head.writer] -= 1
            self.expect(self.known.emptied[head.writer] >= 0, "a writer went on after its folder was emptied")
        self._head = head
        if head.discarded:
            self.known.acknowledged.clear()
            self._newest_ranks = -1
            self.known.voided |= {head.writer, *self.known.writers, *self.known.writers.values()}
            self._was_discarded = (
                True  # an answer may still arrive to a command of the run that was discarded
            )
        if head.tree:
            content = self.schedule.storage.objects.get(head.tree)
            self.known.trees[head.tree] = RunTree.decode(content.content) if content else RunTree()
            self._check_ranks(self.known.trees[head.tree])

    def _check_ranks(self, tree: RunTree) -> None:
        """Check that ranks of an older process never replace those of a newer one."""
        if entry := tree.files.get(RANKS):
            part = self.schedule.storage.objects.get(entry.parts[0].key)
            ranks = int(part.content) if part else -1
            self.expect(
                ranks >= self._newest_ranks, f"ranks of {ranks} replaced those of {self._newest_ranks}"
            )
            self._newest_ranks = ranks

    def _check_answers(self, tree: RunTree) -> None:
        """Check that each answered command is in the stored journal of commands."""
        objects = self.schedule.storage.objects
        answered = {key for key in objects if key.endswith(".answer.json")}
        if not answered or self._was_discarded or self.emptied_nodes:
            return
        entry = tree.files.get("commands.jsonl")
        parts = [objects[part.key].content for part in entry.parts if part.key in objects] if entry else []
        recorded = {json.loads(line)["id"] for line in b"".join(parts).splitlines()}
        for key in answered:
            number = int(Path(key).name.partition(".")[0])
            self.expect(number in recorded, f"command {number} is answered, and its record is not stored")

    def check_end(self) -> None:
        """Check what must hold when all processes have ended and one has opened and closed the run once more."""
        for node, posts in self.known.posts.items():
            if not posts:
                continue
            file = self.get_work_folder(node) / SERVING / "events.jsonl"
            self.expect(file.exists() and file.read_text().splitlines() == posts, f"posts of {node} are lost")
        storage, copy = self.schedule.storage, None
        if HEAD not in storage.objects or RunHead.decode(storage.objects[HEAD].content).discarded:
            return
        copy = RunCopy(MountedRun(ADDRESS, str(self.get_work_folder("last"))), storage)
        writer = RunWriter(copy, read_grace_s=0.0, garbage_grace_s=0.0)
        (copy.path / "scenario.yaml").write_text("the last life")
        writer.close()
        self.check()
        head = RunHead.decode(storage.objects[HEAD].content)
        named = {*copy.get_tree().list_keys(), head.tree}
        stored = {*storage.list_objects(OBJECTS), *storage.list_objects(TREES)}
        self.expect(stored == named, f"garbage: {sorted(stored - named)}")


class WriterLife:
    """What one writer does between opening and closing the run."""

    def __init__(self, model: RunModel, node: str, copy: RunCopy, writer: RunWriter):
        self.model, self.node, self.copy, self.writer = model, node, copy, writer
        self.pending: set[str] = set()  # written, and not acknowledged yet
        self.counts: dict[RunCopy, int] = {}
        self.workers: list[RunCopy] = []
        self.cut_at = 0  # the newest generation before the ranks were deleted
        self.has_ended = False
        self.thread: Actor | None = None
        self.token = writer._head.writer
        left = model.known.local.pop(node, None)
        self.kept = left[1] if left and left[0] == model.known.writers.get(self.token) else set[str]()
        writer.collect_from(self.collect)

    def fail_to_start(self) -> None:
        """Write the first files, close, and discard the run because its input is wrong."""
        try:
            self.write("scenario.yaml", "wrong")
            self.join()
            self.writer.close()
            self.writer.discard()
        except FAILURES:
            pass
        finally:
            self.end()

    def work(self, n_operations: int) -> None:
        operations = [
            self.start_worker,
            self.add_result,
            self.save_checkpoint,
            self.prune,
            self.start_worker,
            self.take_commands,
            self.commit,
            self.cut,
        ]
        try:
            self.write("scenario.yaml", "name: x")
            for _ in range(n_operations):
                self.model.random.choice(operations)()
                self.writer.check()
            self.close()
        except FAILURES as error:
            # A writer ends because it is fenced or its folder was emptied, never because a request or a disk failed once.
            is_final = isinstance(error, StorageConflict) or self.writer._failure is not None
            head = self.model._head
            if isinstance(error, StorageConflict):
                self.model.expect(head is None or head.writer != self.token, "a writer fenced itself")
            is_final |= self.node in self.model.emptied_nodes
            self.model.expect(is_final, f"a writer ended because of {traceback.format_exc()}")
        finally:
            self.end()

    def end(self) -> None:
        """Record what only this node has, if the process was killed, and free the folder as the end of a process does."""
        self.has_ended = True
        if self.node not in self.model.emptied_nodes:
            self.model.known.local[self.node] = (self.token, {*self.pending, *self.kept})
        self.writer.close(commit=False)

    def close(self) -> None:
        self.join()
        self.writer.close()
        self.acknowledge()

    def join(self) -> None:
        """Wait until the background thread has ended, as `RunWriter.close` does."""
        self.has_ended = True
        while self.thread is not None and not self.thread.is_done:
            pause()

    def write(self, name: str, content: str) -> None:
        """Replace a file of the run; the folder may have been emptied."""
        file = self.copy.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.draft")
        draft.write_text(content)
        os.replace(draft, file)

    def collect(self) -> list[tuple[str, object]]:
        """Return what workers have stored, as `RunGroups.collect_files` does."""
        collected: list[tuple[str, object]] = []
        for worker in self.workers:
            entries = worker.list_put(self.counts.get(worker, 0))
            pause()
            self.counts[worker] = self.counts.get(worker, 0) + len(entries)
            collected += entries
        return collected

    def acknowledge(self) -> None:
        known = self.model.known
        if self.token in known.emptied or self.token in known.voided:
            return
        known.acknowledged |= self.pending
        self.pending = set()
        files = self.writer._committed.files
        lost = self.kept - files.keys() - known.removed
        self.model.expect(not lost, f"an outage and a kill on one node lost {sorted(lost)}")
        self.kept = set()

    def commit(self) -> None:
        before = self.list_made()
        if self.writer.commit_in_background() and not self.writer.describe_outage():
            self.acknowledge()
            stored, after = self.writer._committed.files.get(RANKS), self.list_made()
            is_lost = (
                before and before[-1].generation > self.cut_at and stored not in after[len(before) - 1 :]
            )
            self.model.expect(not is_lost, "the newest ranks that a worker has made are not in the run")

    def list_made(self) -> list[FileEntry]:
        """Return the ranks that workers have stored, the oldest generation first."""
        made = [entry for worker in self.workers for _, entry in worker.list_put(0)]
        return sorted(made, key=lambda entry: entry.generation)

    def cut(self) -> None:
        """Delete the ranks, as a resume does after its workers have begun."""
        with self.writer.hold():
            (self.copy.path / RANKS).unlink(missing_ok=True)
            self.writer.add_deleted(self.copy.path / RANKS, "the run was cut")
        generation = self.copy.raise_generation()
        self.cut_at = generation - 1
        self.model.generations |= dict.fromkeys(self.workers, generation)

    def commit_repeatedly(self) -> None:
        """Commit in the background until the life ends."""
        share = self.model.random.choice([0.0, 0.5, 0.95])
        while not self.has_ended and self.model.random.random() < share:
            self.writer.commit_in_background()
            pause()

    def add_result(self) -> None:
        self.model._n_files += 1
        name = f"results/{self.model._n_files}.json"
        self.write(name, f"result {self.model._n_files}")
        self.pending.add(name)

    def save_checkpoint(self) -> None:
        """Save a checkpoint as ranks and controller do, and commit it or wait."""
        model, copy = self.model, self.copy
        model._n_files += 1
        step = model._n_files
        draft, folder = (copy.path / f"checkpoints/{name}" for name in (f"tmp-{step}-ab", f"step-{step:06d}"))
        content = f"weights {step}"
        written = {"model.bin": (hashlib.sha256(content.encode()).hexdigest(), len(content))}
        (draft).mkdir(parents=True, exist_ok=True)
        (draft / "model.bin").write_text(content)
        try:
            copy.upload_written(draft, written)
        except (StorageError, OSError):
            return  # the save failed: the run would end, and be resumed
        with self.writer.hold():
            self.writer.add_written(draft, folder, written)
            os.rename(draft, folder)
            self.write(f"{copy.to_name(folder)}/manifest.json", content)
        self.pending |= {f"{copy.to_name(folder)}/{name}" for name in ("model.bin", "manifest.json")}
        self.writer.commit_or_wait()
        if not self.writer.describe_outage():
            self.acknowledge()

    def prune(self) -> None:
        """Remove the oldest checkpoint."""
        checkpoints = sorted((self.copy.path / "checkpoints").glob("step-*"))
        if not checkpoints:
            return
        name = self.copy.to_name(checkpoints[0])
        files = {f"{name}/{file}" for file in ("model.bin", "manifest.json")}
        self.model.known.removed |= files
        with self.writer.hold():
            shutil.rmtree(checkpoints[0], ignore_errors=True)
            self.writer.add_deleted(checkpoints[0], "pruned")

    def start_worker(self) -> None:
        self.commit()
        if worker := self.model.start_worker(self.copy):
            self.workers.append(worker)

    def take_commands(self) -> None:
        """Record and answer the commands that have arrived, cutting a torn line first."""
        folder, journal = self.copy.path / "commands", self.copy.path / "commands.jsonl"
        names = {file.name for file in folder.glob("*.json")} if folder.is_dir() else set[str]()
        content = journal.read_text() if journal.exists() else ""
        lines = [line for line in content.splitlines(keepends=True) if line.endswith("\n")]
        recorded = {json.loads(line)["id"] for line in lines}
        for name in sorted(names):
            number = name.partition(".")[0]
            if not name.endswith(".asked.json") or f"{number}.answer.json" in names:
                continue
            if int(number) not in recorded:
                self.copy.path.mkdir(parents=True, exist_ok=True)
                torn = "{" if self.model.random.random() < 0.3 else ""
                journal.write_text("".join(lines := [*lines, f'{{"id": {number}}}\n']) + torn)
                pause()
            self.write(f"commands/{number}.answer.json", "{}")
        self.commit()


def run_schedules(seeds: range, root: Path) -> None:
    """Run schedules, and fail with the first violation."""
    with pause_at_files(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("nonet.storage.run_writer._RETRY_PAUSE_S", 0.0)
        for seed in seeds:
            folder = root / str(seed)
            folder.mkdir()
            violations = RunModel(seed, folder).run()
            shutil.rmtree(folder, ignore_errors=True)
            assert not violations, f"seed {seed}: {violations[0]}"


def choose_seeds(default: range) -> range:
    """Return the seeds that NONET_SCHEDULES asks for, by default some."""
    first, _, last = os.environ.get("NONET_SCHEDULES", f"{default.start}:{default.stop}").partition(":")
    return range(int(first), int(last))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder, in memory if this machine has one."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="nonet-", dir=memory) as folder:
        yield Path(folder)


def test_no_schedule_loses_what_was_stored(memory_folder: Path):
    run_schedules(choose_seeds(range(_FEW)), memory_folder)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_none_of_ten_thousand_schedules_loses_what_was_stored(memory_folder: Path, half: int):
    middle = (_FEW + _MANY) // 2
    run_schedules(choose_seeds(range(middle, _MANY) if half else range(_FEW, middle)), memory_folder)
