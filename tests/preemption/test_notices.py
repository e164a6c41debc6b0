"""Sources of notices: what each hears from real answers, errors and time-outs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
import preloaded
from holdfast.errors import UsageError
from holdfast.events import Event
from holdfast.preemption import (
    AWS,
    GCP,
    Azure,
    Demand,
    FileAppears,
    Kubernetes,
    Notice,
    NoticeSource,
    PolledSource,
    Signals,
    Slurm,
    Watcher,
)
from holdfast.preemption.sources.detect import Surroundings, choose_cloud, choose_sources, look_around, read_dmi
from holdfast.preemption.sources.local import requeue_advice
from holdfast.preemption.sources.protocol import SourcePoller
from holdfast.process.wakeup import ANSWERED, Wakeup
from metadata_server import CUT, DRIP, DRIP_HEAD, HANG, Reply, Request, serving
from patience import PATIENCE_SECONDS
from places import PROGRAMS


def heard(source: NoticeSource) -> list[Notice]:
    return list(source.look())


# Google's cloud.

GOOGLE = {"Metadata-Flavor": "Google", "Content-Type": "application/text", "Server": "Metadata Server for VM"}


class Google:
    """Answers as the metadata server does: values with an ETag, and long polls."""

    def __init__(self) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()
        self.waited_for = threading.Event()
        self.most_seconds = 30.0

    def set(self, attribute: str, value: str) -> None:
        with self.changed:
            self.values[attribute] = value
            self.changed.notify_all()

    def __call__(self, request: Request) -> Reply:
        if request.headers.get("Metadata-Flavor") != "Google":
            return Reply(403, "<!DOCTYPE html><html lang=en><title>Error 403 (Forbidden)!!1</title>")
        path, _, query = request.path.partition("?")
        prefix = "/computeMetadata/v1/instance/"
        attribute = path.removeprefix(prefix)
        if not path.startswith(prefix) or attribute not in self.values:
            return Reply(404, "<!DOCTYPE html><html lang=en><title>Error 404 (Not Found)!!1</title>", GOOGLE)
        options = dict(option.split("=") for option in query.split("&") if option)
        with self.changed:
            if options.get("wait_for_change") == "true":
                self.waited_for.set()
                most_seconds = min(float(options["timeout_sec"]), self.most_seconds)
                self.changed.wait_for(lambda: self.etag(attribute) != options.get("last_etag"), most_seconds)
            return Reply(200, self.values[attribute], {**GOOGLE, "ETag": self.etag(attribute)})

    def etag(self, attribute: str) -> str:
        return f"{hash(self.values[attribute]) & 0xFFFFFFFF:08x}"


def test_gcp_waits_for_the_preemption() -> None:
    google = Google()
    with serving(google) as cloud:
        source = GCP(base_url=cloud.url, wait_seconds=30)
        assert heard(source) == []
        found: list[Notice] = []
        listening = threading.Thread(target=lambda: found.extend(source.look()))
        listening.start()
        assert google.waited_for.wait(20)
        google.set("preempted", "TRUE")
        listening.join(20)
        assert [(notice.demand, notice.left_seconds) for notice in found] == [(Demand.LEAVE_BY, 30.0)]
        assert "wait_for_change=true&timeout_sec=30&last_etag=" in cloud.requests[1].path
        google.most_seconds = 1
        assert heard(source) == [], "it says so once"


@pytest.mark.parametrize(
    ("value", "demand", "left"),
    [
        ("TERMINATE_ON_HOST_MAINTENANCE", Demand.LEAVE_BY, 3600.0),
        ("MIGRATE_ON_HOST_MAINTENANCE", Demand.SAVE, None),
    ],
)
def test_gcp_hears_of_maintenance(value: str, demand: Demand, left: float | None) -> None:
    google = Google()
    with serving(google) as cloud:
        source = GCP("maintenance-event", base_url=cloud.url, left_seconds=3600, wait_seconds=1)
        assert heard(source) == []
        google.set("maintenance-event", value)
        assert [(notice.demand, notice.left_seconds) for notice in source.look()] == [(demand, left)]
        google.set("maintenance-event", "NONE")
        assert heard(source) == []


def test_gcp_takes_no_other_server_for_googles() -> None:
    missing = "answered 200: 'TRUE', without the header 'Metadata-Flavor: Google'"
    with serving(lambda request: Reply(200, "TRUE")) as cloud, pytest.raises(OSError, match=missing):
        GCP(base_url=cloud.url).look()


def test_gcp_does_not_storm_a_server_that_cannot_wait() -> None:
    with serving(lambda request: Reply(200, "FALSE", {**GOOGLE, "ETag": "0"})) as cloud:
        source = GCP(base_url=cloud.url)
        heard(source)
        assert source.interval_seconds == 0.0
        heard(source)
        assert source.interval_seconds == 1.0


@pytest.mark.parametrize(
    ("etag", "sent"), [("a b\tc", "a%20b%09c"), ("\xe9", "%E9"), ("a&b#c%", "a%26b%23c%25"), ('"4f"', "%224f%22")]
)
def test_gcp_sends_any_etag_back_as_it_was(etag: str, sent: str) -> None:
    replies = [Reply(200, "FALSE", {**GOOGLE, "ETag": etag}), Reply(200, "TRUE", {**GOOGLE, "ETag": "2"})]
    with serving(lambda request: replies.pop(0)) as cloud:
        source = GCP(base_url=cloud.url)
        assert heard(source) == []
        assert [notice.demand for notice in source.look()] == [Demand.LEAVE_BY]
        assert cloud.requests[1].path.endswith(f"&last_etag={sent}")


def test_gcp_sends_no_etag_after_a_failure() -> None:
    def answer(request: Request) -> Reply:
        if "last_etag" in request.path:
            return Reply(400, "no such etag")
        return Reply(200, "TRUE" if len(cloud.requests) > 1 else "FALSE", {**GOOGLE, "ETag": "1"})

    with serving(answer) as cloud:
        source = GCP(base_url=cloud.url)
        assert heard(source) == []
        with pytest.raises(OSError, match="answered 400"):
            source.look()
        assert [notice.demand for notice in source.look()] == [Demand.LEAVE_BY]


# Amazon's cloud.


class Amazon:
    """Answers as the metadata service does when it demands a session token."""

    def __init__(self) -> None:
        self.token = "AQAEAFKn9vJ"
        self.records: dict[str, str] = {}
        self.odd: dict[str, Reply] = {}

    def __call__(self, request: Request) -> Reply:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if odd := self.odd.get(request.path):
            return odd
        if request.path == "/latest/api/token":
            if request.method != "PUT" or not 1 <= int(headers["x-aws-ec2-metadata-token-ttl-seconds"]) <= 21600:
                return Reply(400)
            return Reply(200, self.token, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": "21600", "Server": "EC2ws"})
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return Reply(401, "", {"Server": "EC2ws"})
        record = self.records.get(request.path)
        return Reply(404, NOT_FOUND) if record is None else Reply(200, record, {"Server": "EC2ws"})


NOT_FOUND = """<?xml version="1.0" encoding="iso-8859-1"?>
<html><head><title>404 - Not Found</title></head><body><h1>404 - Not Found</h1></body></html>
"""
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def utc(seconds_ahead: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds_ahead)


def test_aws_hears_that_a_spot_instance_is_taken_away() -> None:
    amazon = Amazon()
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url)
        assert heard(source) == []
        amazon.records[ACTION] = json.dumps({"action": "terminate", "time": f"{utc(120):%Y-%m-%dT%H:%M:%SZ}"})
        (notice,) = source.look()
        assert notice.demand is Demand.LEAVE_BY
        assert notice.left_seconds is not None
        assert 60 < notice.left_seconds <= 121
        assert heard(source) == [], "it says so once"


def test_aws_rebalance_and_hibernation_save_and_do_not_stop() -> None:
    amazon = Amazon()
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url)
        amazon.records[REBALANCE] = '{"noticeTime": "2020-10-27T08:22:00Z"}'
        assert [notice.demand for notice in source.look()] == [Demand.SAVE]
        amazon.records[ACTION] = '{"action": "hibernate", "time": "2020-10-27T08:22:00Z"}'
        assert [notice.demand for notice in source.look()] == [Demand.SAVE]
        assert heard(source) == []


def test_aws_gets_a_new_token_when_the_old_one_is_refused() -> None:
    amazon = Amazon()
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url)
        heard(source)
        amazon.token = "another"
        amazon.records[ACTION] = '{"action": "stop", "time": "not a time"}'
        (notice,) = source.look()
        assert (notice.demand, notice.left_seconds) == (Demand.LEAVE_BY, 120.0)
        assert [request.method for request in cloud.requests].count("PUT") == 2


TOKEN = "/latest/api/token"
STOP = '{"action": "stop", "time": "not a time"}'
ODD_REPLIES = [Reply(500, "no"), Reply(200, "no JSON"), Reply(200, "[" * 100_000), Reply(CUT, "{"), Reply(HANG)]


@pytest.mark.parametrize("odd", ODD_REPLIES)
def test_aws_advice_that_fails_holds_up_no_notice(odd: Reply) -> None:
    amazon = Amazon()
    amazon.odd[REBALANCE] = odd
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url, timeout_seconds=0.3)
        assert heard(source) == []
        amazon.records[ACTION] = STOP
        assert [notice.demand for notice in source.look()] == [Demand.LEAVE_BY]
        assert heard(source) == []
        amazon.odd.clear()
        amazon.records[REBALANCE] = "{}"
        assert [notice.demand for notice in source.look()] == [Demand.SAVE]


@pytest.mark.parametrize("odd", ODD_REPLIES)
def test_aws_an_action_that_cannot_be_read_is_an_error(odd: Reply) -> None:
    amazon = Amazon()
    amazon.odd[ACTION] = odd
    amazon.records[REBALANCE] = "{}"
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url, timeout_seconds=0.3)
        for _ in range(2):
            with pytest.raises(OSError, match=r"answer|Incomplete"):
                source.look()
        amazon.odd.clear()
        assert [notice.demand for notice in source.look()] == [Demand.SAVE]


def test_aws_what_was_heard_does_not_wait_for_the_other_answer() -> None:
    amazon = Amazon()
    amazon.odd[REBALANCE] = Reply(HANG)
    amazon.records[ACTION] = STOP
    with serving(amazon) as cloud:
        assert [notice.demand for notice in AWS(base_url=cloud.url).look()] == [Demand.LEAVE_BY]
        assert asked(cloud.requests, REBALANCE) == 0


def asked(requests: list[Request], path: str) -> int:
    return [request.path for request in requests].count(path)


def test_aws_a_server_that_fails_altogether_raises_each_time() -> None:
    with serving(lambda request: Reply(500)) as cloud:
        source = AWS(base_url=cloud.url)
        for _ in range(3):
            with pytest.raises(OSError, match="answered 500"):
                source.look()


@pytest.mark.parametrize("token", ["<html>\nbad\n</html>", "\u2603", "", " ", "a b", "x" * 5000, "<html></html>"])
def test_aws_keeps_no_token_that_is_none(token: str) -> None:
    amazon = Amazon()
    amazon.odd[TOKEN] = Reply(200, token)
    amazon.records[ACTION] = STOP
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url)
        with pytest.raises(OSError, match="answered"):
            source.look()
        amazon.odd.clear()
        assert [notice.demand for notice in source.look()] == [Demand.LEAVE_BY]


@pytest.mark.parametrize("status", [400, 403, 500, CUT])
def test_aws_forgets_a_token_that_may_be_at_fault(status: int) -> None:
    amazon = Amazon()

    def answer(request: Request) -> Reply:
        reply = amazon(request)
        return Reply(status) if reply.status == 401 else reply

    with serving(answer) as cloud:
        source = AWS(base_url=cloud.url)
        assert heard(source) == []
        amazon.token = "another"
        amazon.records[ACTION] = STOP
        with pytest.raises(OSError, match=r"answer|Incomplete"):
            source.look()
        assert [notice.demand for _ in range(2) for notice in source.look()] == [Demand.LEAVE_BY]


@pytest.mark.parametrize("record", ["{}", '{"action": null}', '{"action": ["stop"]}', '{"error": "try later"}'])
def test_aws_record_without_an_action_causes_no_notice(record: str) -> None:
    amazon = Amazon()
    amazon.records[ACTION] = record
    with serving(amazon) as cloud:
        source = AWS(base_url=cloud.url)
        if record == "{}":
            assert heard(source) == []
            return
        with pytest.raises(OSError, match="names no action"):
            source.look()


@pytest.mark.parametrize("when", ["soon", 5, None, [1], "9999-12-31T23:59:59-23:59"])
def test_aws_notice_with_an_odd_time_is_obeyed(when: object) -> None:
    amazon = Amazon()
    amazon.records[ACTION] = json.dumps({"action": "terminate", "time": when})
    with serving(amazon) as cloud:
        assert [notice.demand for notice in AWS(base_url=cloud.url).look()] == [Demand.LEAVE_BY]


# Microsoft's cloud.


class Microsoft:
    """Answers as the scheduled events do."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.name = "scaleset_7"
        self.started: list[Any] = []

    def __call__(self, request: Request) -> Reply:
        if request.headers.get("Metadata") != "true":
            return Reply(400, '{"error": "Bad request. Required metadata header not specified"}')
        if request.path.startswith("/metadata/instance/compute/name?"):
            return Reply(200, self.name, {"Content-Type": "text/plain; charset=utf-8"})
        if request.path != "/metadata/scheduledevents?api-version=2020-07-01":
            return Reply(404, '{"error": "Not found"}')
        if request.method == "POST":
            self.started += json.loads(request.body)["StartRequests"]
            return Reply(200)
        return Reply(200, json.dumps({"DocumentIncarnation": 3, "Events": self.events}))


def scheduled(kind: str, machines: list[str], **fields: Any) -> dict[str, Any]:
    return {
        "EventId": f"602d9444-d2cd-49c7-8624-{kind}-{machines[0]}",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": machines,
        "NotBefore": format_datetime(utc(30), usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **fields,
    }


def test_azure_hears_what_concerns_this_machine() -> None:
    microsoft = Microsoft()
    with serving(microsoft) as cloud:
        source = Azure(base_url=cloud.url)
        microsoft.events = [scheduled("Preempt", ["scaleset_8"])]
        assert heard(source) == []
        microsoft.events += [scheduled("Preempt", ["scaleset_7", "scaleset_9"]), scheduled("Freeze", ["scaleset_7"])]
        preempt, freeze = source.look()
        assert preempt.demand is Demand.LEAVE_BY
        assert preempt.left_seconds is not None
        assert preempt.left_seconds <= 31
        assert freeze.demand is Demand.SAVE
        assert heard(source) == []
        source.note_leaving()
        assert microsoft.started == [], "nothing is acknowledged unless that is asked for"


def test_azure_acknowledges_what_ends_this_machine_if_asked_to() -> None:
    microsoft = Microsoft()
    with serving(microsoft) as cloud:
        source = Azure(base_url=cloud.url, acknowledge=True, machine="here")
        microsoft.events = [scheduled("Preempt", ["here"]), scheduled("Freeze", ["here"]), scheduled("Reboot", ["x"])]
        heard(source)
        source.note_leaving()
        assert microsoft.started == [{"EventId": microsoft.events[0]["EventId"]}]


@pytest.mark.parametrize(
    ("kind", "status", "not_before", "left"),
    [("Terminate", "Started", "", 0.0), ("Preempt", "Scheduled", "", 30.0), ("Reboot", "Scheduled", "soon", 30.0)],
)
def test_azure_without_a_time(kind: str, status: str, not_before: str, left: float) -> None:
    microsoft = Microsoft()
    microsoft.events = [scheduled(kind, ["scaleset_7"], EventStatus=status, NotBefore=not_before)]
    with serving(microsoft) as cloud:
        assert [notice.left_seconds for notice in Azure(base_url=cloud.url).look()] == [left]


def test_azure_hears_again_of_an_event_that_begins_early_or_is_moved() -> None:
    microsoft = Microsoft()
    later = scheduled("Reboot", ["SCALESET_7"], NotBefore=format_datetime(utc(900), usegmt=True))
    freeze = scheduled("Freeze", ["scaleset_7"])
    with serving(microsoft) as cloud:
        source = Azure(base_url=cloud.url, acknowledge=True)
        microsoft.events = [later, freeze]
        assert len(heard(source)) == 2, "names of machines are the same in capitals"
        assert heard(source) == []
        microsoft.events = [{**later, "NotBefore": format_datetime(utc(60), usegmt=True)}, freeze]
        (moved,) = source.look()
        assert moved.left_seconds is not None
        assert moved.left_seconds <= 61
        microsoft.events = [{**later, "EventStatus": "Started", "NotBefore": ""}, {**freeze, "EventStatus": "Started"}]
        assert [notice.left_seconds for notice in source.look()] == [0.0], "what was saved for is no reason to save"
        source.note_leaving()
        assert microsoft.started == [{"EventId": later["EventId"]}]


MALFORMED = [
    {"EventId": "b", "EventType": "Preempt", "Resources": 5},
    {"EventId": "b", "EventType": "Preempt", "Resources": "vm12"},
    {"EventId": "b", "EventType": "Preempt", "Resources": [["vm1"]]},
    {"EventId": "b", "EventType": "Preempt"},
    {"EventId": ["b"], "EventType": "Preempt", "Resources": ["vm1"]},
    {"EventId": "b", "EventType": {}, "Resources": ["vm1"]},
    5,
    None,
]


@pytest.mark.parametrize("malformed", MALFORMED)
@pytest.mark.parametrize("place", [0, 1])
def test_azure_a_malformed_event_hides_no_other(malformed: object, place: int) -> None:
    microsoft = Microsoft()
    microsoft.events = [scheduled("Preempt", ["vm1"])]
    microsoft.events.insert(place, malformed)
    with serving(microsoft) as cloud:
        source = Azure(base_url=cloud.url, machine="vm1")
        assert [notice.demand for notice in source.look()] == [Demand.LEAVE_BY]
        assert heard(source) == []
        microsoft.events.append(scheduled("Freeze", ["vm1"]))
        assert [notice.demand for notice in source.look()] == [Demand.SAVE]


@pytest.mark.parametrize("name", ["", "<html>busy</html>", "try again", "x" * 5000, "null", "[1]", "\ufffd"])
def test_azure_asks_again_for_a_name_that_is_none(name: str) -> None:
    microsoft = Microsoft()
    microsoft.name = name
    microsoft.events = [scheduled("Preempt", ["vm1"])]
    with serving(microsoft) as cloud:
        source = Azure(base_url=cloud.url)
        with pytest.raises(OSError, match="answered 200"):
            source.look()
        microsoft.name = "vm1"
        assert [notice.demand for notice in source.look()] == [Demand.LEAVE_BY]


@pytest.mark.parametrize("not_before", ["Mon, 99 Xxx 99999 99:99:99 GMT", 12, ["x"], {"a": 1}])
def test_azure_notice_with_an_odd_time_is_obeyed(not_before: object) -> None:
    microsoft = Microsoft()
    microsoft.events = [scheduled("Preempt", ["vm1"], NotBefore=not_before, EventStatus=7)]
    with serving(microsoft) as cloud:
        (notice,) = Azure(base_url=cloud.url, machine="vm1").look()
        assert (notice.demand, notice.left_seconds) == (Demand.LEAVE_BY, 30.0)


# What servers do wrong.

CLOUDS: list[Callable[..., Any]] = [GCP, AWS, Azure]


@pytest.mark.parametrize("make", CLOUDS)
@pytest.mark.parametrize("reply", [Reply(500, "no"), Reply(200, "[1, 2"), Reply(CUT, '{"a": 1'), Reply(200, "[]")])
def test_malformed_metadata_answer_is_an_error(make: Callable[..., Any], reply: Reply) -> None:
    with serving(lambda request: reply) as cloud, pytest.raises(OSError, match=r"answer|Incomplete"):
        make(base_url=cloud.url).look()


@pytest.mark.parametrize("make", CLOUDS)
def test_silence_is_an_error_in_time(make: Callable[..., Any]) -> None:
    with serving(lambda request: Reply(HANG)) as cloud, pytest.raises(TimeoutError, match=r"within 0.2 s"):
        make(base_url=cloud.url, timeout_seconds=0.2).look()


def test_a_long_poll_has_its_own_time() -> None:
    replies = [Reply(200, "FALSE", {**GOOGLE, "ETag": "1"}), Reply(HANG)]
    with serving(lambda request: replies.pop(0)) as cloud:
        source = GCP(base_url=cloud.url, wait_seconds=0.5, timeout_seconds=0.25)
        assert heard(source) == []
        with pytest.raises(TimeoutError, match=r"within 0.75 s"):
            source.look()


@pytest.mark.parametrize("make", CLOUDS)
@pytest.mark.parametrize("status", [HANG, DRIP, DRIP_HEAD])
def test_a_look_ends_when_the_source_is_closed(make: Callable[..., Any], status: int) -> None:
    with serving(lambda request: Reply(status)) as cloud:
        source = make(base_url=cloud.url, timeout_seconds=600)
        failures: list[BaseException] = []

        def look() -> None:
            try:
                source.look()
            except OSError as error:
                failures.append(error)

        looking = threading.Thread(target=look)
        looking.start()
        end_at = time.monotonic() + 20
        while not cloud.requests and time.monotonic() < end_at:
            pass
        source.close()
        looking.join(20)
        assert failures
        with pytest.raises(OSError, match="closed"):
            source.look()


@pytest.mark.parametrize("make", CLOUDS)
@pytest.mark.parametrize("url", ["https://a", "a", "http://", "http://a:b", "http://a?x=1"])
def test_wrong_urls_are_refused(make: Callable[..., Any], url: str) -> None:
    with pytest.raises(UsageError, match="URL"):
        make(base_url=url)
    with pytest.raises(UsageError):
        make(timeout_seconds=0)


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(Amazon()) as cloud:
        assert heard(AWS(base_url=cloud.url)) == []


# Slurm.


def test_slurm_tells_once_that_the_end_is_near() -> None:
    environment = {"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": str(int(time.time()) + 1000)}
    assert heard(Slurm(environment=environment)) == []
    soon = {"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": repr(time.time() + 0.2)}
    source = Slurm(environment=soon)
    assert heard(source) == [], "half of a short limit is for training"
    while not (notices := list(source.look())):
        pass
    (notice,) = notices
    assert notice.demand is Demand.LEAVE_BY
    assert notice.left_seconds is not None
    assert notice.left_seconds <= 0.1
    assert "scontrol requeue 77" in notice.advice
    assert heard(source) == []


@pytest.mark.parametrize("text", ["", "0", "never", "inf", "1700000000"])
def test_slurm_without_a_limit(text: str) -> None:
    """The last one has passed: an earlier job left the variable in the shell."""
    assert heard(Slurm(environment={"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": text})) == []


def test_the_advice_names_the_task_of_an_array() -> None:
    array = {"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "4"}
    assert "scontrol requeue 70_4" in requeue_advice(array)
    assert requeue_advice({}) == ""


# A file, a function.


def test_a_file_that_appears(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    source = FileAppears(path)
    assert heard(source) == []
    path.touch()
    (notice,) = source.look()
    assert (notice.demand, notice.text) == (Demand.LEAVE, f"{path} appeared")
    assert heard(source) == []
    assert heard(FileAppears(path)) == [], "one that was there before says nothing"
    os.utime(path, (1, 1))
    assert len(heard(source)) == 1, "but one that is touched again does"
    path.unlink()
    assert heard(source) == []
    path.touch()
    assert len(heard(source)) == 1


def test_a_function_of_the_users() -> None:
    answers: list[Any] = [False, True, True, None, Notice(source="mine", text="go", demand=Demand.SAVE)]
    source = Watcher(lambda: answers.pop(0))
    assert [[notice.demand for notice in source.look()] for _ in range(5)] == [
        [],
        [Demand.LEAVE],
        [],
        [],
        [Demand.SAVE],
    ]
    with pytest.raises(UsageError):
        Watcher("no function")  # type: ignore[arg-type]


async def later() -> bool:
    return False


def one_by_one() -> Iterator[bool]:
    yield False


class Later:
    async def __call__(self) -> bool:
        return False


@pytest.mark.parametrize("function", [later, one_by_one, partial(later), Later()])
def test_function_that_would_not_run_when_called_is_refused(function: Any) -> None:
    for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
        with pytest.raises(UsageError, match=f"{name}=.* would not run it"):
            hf.TerminationConfig(**{name: function})
    with pytest.raises(TypeError, match="always true"):
        Watcher(lambda: function()).look()  # noqa: PLW0108  Nothing shows what it returns.


# All at once.


class Faulty(PolledSource):
    """Fails, and then speaks."""

    name = "faulty"
    interval_seconds = 0.001

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.looks = 0

    def look(self) -> Iterable[Notice]:
        self.looks += 1
        if self.looks <= self.failures:
            raise SystemExit(3) if self.looks == 1 else ZeroDivisionError("no")
        return (Notice(source=self.name, text=f"look {self.looks}"),)


def test_a_notice_whose_time_is_not_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="left_seconds must be a number of seconds, got nan"):
        Notice(source="mine", text="go", demand=Demand.LEAVE_BY, left_seconds=float("nan"))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"left_seconds": "30"}, "left_seconds must be a number of seconds, got '30'"),
        ({"left_seconds": True}, "left_seconds must be a number of seconds, got True"),
        ({"left_seconds": 3j}, "left_seconds must be a number of seconds, got 3j"),
        ({"demand": "leave"}, "demand must be a Demand, got 'leave'"),
        ({"demand": 3}, "demand must be a Demand, got 3"),
        ({"text": None}, "text must be text, got None"),
        ({"source": 7}, "source must be text, got 7"),
    ],
)
def test_a_notice_of_the_wrong_kind_is_refused_where_it_is_made(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match) as refused:
        Notice(**{"source": "mine", "text": "go", **wrong})
    assert refused.value.hint


@pytest.mark.parametrize(("given", "left"), [(-3, 0.0), (np.float32(2.5), 2.5), (Fraction(1, 2), 0.5), (7, 7.0)])
def test_time_of_notice_is_any_real_number_and_at_least_zero(given: Any, left: float) -> None:
    notice = Notice(source="mine", text="go", demand=Demand.LEAVE_BY, left_seconds=given)
    assert (notice.left_seconds, type(notice.left_seconds)) == (left, float)


@pytest.mark.parametrize("seconds", ["1", float("nan"), float("inf"), 0, -1, None, True])
@pytest.mark.parametrize("make", [AWS, Azure, partial(FileAppears, "x"), partial(Watcher, lambda: None)])
def test_interval_that_is_not_a_time_is_refused(make: Callable[..., Any], seconds: Any) -> None:
    with pytest.raises(UsageError, match="interval_seconds"):
        make(interval_seconds=seconds)


@pytest.mark.parametrize("seconds", ["1", float("nan"), -1])
def test_own_source_with_odd_interval_is_warned_of_and_asked_again(seconds: Any) -> None:
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    events: list[Event] = []

    def hear(notice: Notice) -> bool:
        notices.put(notice)
        return True

    source = Faulty(0)
    source.interval_seconds = seconds
    poller = SourcePoller([source], hear, events.append, pause_seconds=0.01)
    poller.open()
    try:
        assert [notices.get(timeout=PATIENCE_SECONDS).text for _ in range(3)] == ["look 1", "look 2", "look 3"]
    finally:
        poller.close()
    assert len(events) == 1


def test_a_source_that_raises_is_asked_again_and_takes_no_other_down() -> None:
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    events: list[Event] = []

    def hear(notice: Notice) -> bool:
        notices.put(notice)
        return True

    faulty, other = Faulty(3), Faulty(0)
    other.name = "other"
    poller = SourcePoller([faulty, other], hear, events.append, pause_seconds=0.01)
    poller.open()
    try:
        found: set[tuple[str, str]] = set()
        end_at = time.monotonic() + 20
        # The other one speaks all the time; of this one it is warned before it says anything.
        while ("faulty", "look 4") not in found and time.monotonic() < end_at:
            notice = notices.get(timeout=20)
            found.add((notice.source, notice.text))
    finally:
        poller.close()
    assert [str(event) for event in events] == [
        "faulty cannot be queried for notices; it will be tried again: SystemExit: 3"
    ]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-notices")]


class OddError(BaseException):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (SystemExit(1), "SystemExit: 1"),
        (OddError(), "OddError"),
    ],
)
def test_a_function_that_raises_anything_is_called_again(failure: BaseException, said: str) -> None:
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    events: list[Event] = []
    failures = [failure, failure]

    def function() -> bool:
        if failures:
            raise failures.pop()
        return True

    def hear(notice: Notice) -> bool:
        notices.put(notice)
        return True

    poller = SourcePoller([Watcher(function)], hear, events.append, pause_seconds=0.01)
    poller.open()
    try:
        assert notices.get(timeout=PATIENCE_SECONDS).source == "watcher"
    finally:
        poller.close()
    assert [str(event) for event in events] == [
        f"watcher cannot be queried for notices; it will be tried again: {said}"
    ]


def test_the_protocol_is_that_of_every_source() -> None:
    for source in (Signals(), Kubernetes(), Slurm(), GCP(), AWS(), Azure(), FileAppears("x"), Watcher(lambda: None)):
        assert isinstance(source, NoticeSource)


# Which are chosen.


def names(environment: dict[str, str], dmi: dict[str, str], *, in_main_thread: bool = True) -> list[str]:
    return [source.name for source in choose_sources(Surroundings(environment, dmi, in_main_thread))]


def test_auto_chooses_sources_by_environment() -> None:
    assert names({}, {}) == ["signal"]
    assert names({}, {}, in_main_thread=False) == []
    assert names({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}) == ["kubernetes"]
    assert names({"SLURM_JOB_ID": "3"}, {}) == ["signal", "slurm"]
    assert names({}, {"product_name": "Google Compute Engine"}) == ["signal", "gcp preempted", "gcp maintenance-event"]
    assert names({}, {"sys_vendor": "Amazon EC2"}) == ["signal", "aws"]
    assert names({}, {"bios_version": "4.11.amazon"}) == ["signal", "aws"]


def test_hyper_v_alone_is_not_azure() -> None:
    machine = {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}
    assert choose_cloud(machine) == ""
    assert choose_cloud({**machine, "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}) == "azure"


def test_looking_around_reads_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    (tmp_path / "bios_version").mkdir()
    assert read_dmi(tmp_path) == {"product_name": "Google Compute Engine"}
    assert look_around().in_main_thread


# Signals.


@pytest.mark.parametrize("numbers", [(0,), (9999,), (signal.SIGKILL,), (signal.SIGSTOP,)])
def test_signals_that_are_none_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        Signals(*numbers)


@pytest.mark.parametrize("seconds", [0, -1])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(UsageError):
        Kubernetes(seconds)
    with pytest.raises(UsageError):
        Slurm(seconds)


def test_signals_are_heard_in_the_main_thread_only() -> None:
    failures: list[UsageError] = []

    def open_there() -> None:
        try:
            Signals().open(lambda notice: True)
        except UsageError as error:
            failures.append(error)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    (failure,) = failures
    assert "main thread" in str(failure)


def test_handlers_are_chained_and_put_back() -> None:
    calls: list[object] = []

    def note(what: object) -> bool:
        calls.append(what)
        return True

    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append("mine"))
    try:
        source = Signals(signal.SIGUSR1)
        source.open(lambda notice: note(notice.insists))
        other = Signals(signal.SIGUSR1)
        other.open(lambda notice: note("other"))
        signal.raise_signal(signal.SIGUSR1)
        assert calls == ["other", True, "mine"]
        source.close()
        signal.raise_signal(signal.SIGUSR1)
        assert calls[3:] == ["other", "mine"], "one that is closed first only passes on"
        other.close()
        source.close()
        signal.raise_signal(signal.SIGUSR1)
        assert calls[5:] == ["mine"]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_handler_that_a_closed_source_left_is_replaced() -> None:
    """It is Python's, so it can be put back; only one that Python does not know must stay."""
    first, second = Signals(signal.SIGUSR1), Signals(signal.SIGUSR1)
    heard: list[Notice] = []

    def note(notice: Notice) -> bool:
        heard.append(notice)
        return True

    try:
        first.open(lambda notice: True)
        thread = threading.Thread(target=first.close)  # No thread but the main one can put the handler back.
        thread.start()
        thread.join(PATIENCE_SECONDS)
        second.open(note)
        assert second.foreign == ()
        signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 1
        second.close()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Runs one of `programs/signal_sources.py`."""
    command: list[str | Path] = [sys.executable, PROGRAMS / "signal_sources.py", program]
    return preloaded.run(command, capture_output=True, text=True, timeout=120)


def test_a_signal_that_is_not_taken_has_its_own_effect() -> None:
    ended = run("declines_the_third")
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "alive\n" * 3)


def test_an_ignored_signal_stays_ignored_and_kubernetes_knows_the_time() -> None:
    ended = run("ignores_one")
    assert ended.stdout.splitlines() == [
        "SIGTERM 12.0 False",
        "SIGINT None True",
        "SIGUSR2 None False",
        "True 0",
    ]


def test_a_forked_child_is_left_alone() -> None:
    ended = run("forks")
    assert ended.stdout.split() == ["15", "[]", "[]"], ended.stderr


def test_a_pool_ends_its_workers_at_any_moment() -> None:
    """A handler of Python's would not run in a worker that blocks in a lock right after the signal has come."""
    program = """if True:
        import multiprocessing, os, signal, threading

        from holdfast.preemption.sources.signals import Signals

        def end() -> None:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(9)

        source = Signals()
        source.open(lambda notice: True)
        guard = threading.Timer(60, end)
        guard.start()
        for _ in range(100):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                pool.map(abs, range(4))
        guard.cancel()
        print("ended", signal.getsignal(signal.SIGTERM) == source._handle)
    """
    ended = preloaded.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "ended True\n"), ended.stderr


def test_a_forked_child_has_the_handler_that_its_program_had_set() -> None:
    program = """if True:
        import os, signal

        from holdfast.preemption.sources.signals import Signals

        def own(number, frame):
            pass

        def listen(number, frame):
            above(number, frame)

        for before in (signal.SIG_DFL, signal.SIG_IGN, own):
            signal.signal(signal.SIGTERM, before)
            first, second = Signals(), Signals(signal.SIGTERM)
            first.open(lambda notice: True)
            second.open(lambda notice: True)
            if not (child := os.fork()):
                os._exit(signal.getsignal(signal.SIGTERM) is before)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            second.close()
            first.close()
        # What a program puts before holdfast's handler stays, and calls that one.
        first = Signals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        first.open(lambda notice: True)
        above = signal.signal(signal.SIGTERM, listen)
        if not (child := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    ended = preloaded.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["1", "1", "1", "-15"], ended.stderr


def test_a_child_ended_as_soon_as_it_is_forked_rings_for_itself_alone() -> None:
    program = """if True:
        import os
        import signal

        # Before anything of holdfast has run in the child.
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))

        from holdfast.preemption.sources.signals import Signals
        from holdfast.process.wakeup import Wakeup

        Signals().open(lambda notice: True)
        bell = Wakeup()
        bell.take_signals()
        if not (child := os.fork()):
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bell.listen(0.2))
        print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == ["-15 []", "[]"], ended.stderr


# The bell.


def test_a_signal_rings_while_the_main_thread_is_busy() -> None:
    ended = run("hangs_in_foreign_code")
    assert ended.stdout == "[15]\n", ended.stderr


def test_the_bell_passes_signals_on_and_puts_back_what_was_there() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        assert signal.set_wakeup_fd(writer) == -1
        bell = Wakeup()
        bell.take_signals()
        signal.raise_signal(signal.SIGUSR1)
        assert bell.listen(20) == [signal.SIGUSR1]
        assert os.read(reader, 10) == bytes([signal.SIGUSR1])
        bell.ring()
        assert bell.listen(20) == []
        bell.close()
        bell.ring()
        assert signal.set_wakeup_fd(-1) == writer
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.close(reader)
        os.close(writer)


@pytest.fixture
def plain_wakeup() -> Iterator[None]:
    """Nobody is told of signals before the test, nor after it."""
    before = signal.set_wakeup_fd(-1)
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: Wakeup.answer())
    yield
    signal.signal(signal.SIGUSR1, handler)
    signal.set_wakeup_fd(before)


class Pipe:
    """Somebody else who is told of signals."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        self.before = signal.set_wakeup_fd(self.writer)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


def make_bells(count: int) -> list[Wakeup]:
    bells = [Wakeup() for _ in range(count)]
    for bell in bells:
        bell.take_signals()
    return bells


@pytest.mark.usefixtures("plain_wakeup")
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_bells_are_closed_in_any_order_and_those_that_are_left_ring(order: tuple[int, ...]) -> None:
    bells = make_bells(3)
    left = dict(enumerate(bells))
    for number in order:
        left.pop(number).close()
        # What takes the numbers of the descriptors that have been closed.
        with contextlib.ExitStack() as others:
            for _ in range(20):
                for end in os.pipe():
                    os.set_blocking(end, False)
                    others.callback(os.close, end)
            signal.raise_signal(signal.SIGUSR1)
            for bell in reversed(left.values()):
                assert bell.listen(20) == [signal.SIGUSR1, ANSWERED]
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.usefixtures("plain_wakeup")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_bell_does_not_put_back_what_was_closed_meanwhile(is_replaced: bool) -> None:
    below = make_bells(1)[0]
    pipe = Pipe()
    bell = make_bells(1)[0]
    signal.raise_signal(signal.SIGUSR1)
    assert bell.listen(20) == [signal.SIGUSR1, ANSWERED]
    assert os.read(pipe.reader, 10) == bytes([signal.SIGUSR1])
    pipe.close()
    ends = os.pipe()
    if is_replaced:
        os.set_blocking(ends[0], False)
        os.set_blocking(ends[1], False)
        assert {*ends} == {pipe.reader, pipe.writer}
    signal.raise_signal(signal.SIGUSR1)
    assert bell.listen(20) == [signal.SIGUSR1, ANSWERED]
    bell.close()
    signal.raise_signal(signal.SIGUSR1)
    assert below.listen(20) == [signal.SIGUSR1, ANSWERED] * 3
    below.close()
    assert signal.set_wakeup_fd(-1) == -1
    if is_replaced:
        with pytest.raises(BlockingIOError):
            os.read(ends[0], 10)
    for end in ends:
        os.close(end)


@pytest.mark.usefixtures("plain_wakeup")
def test_bell_closed_under_a_later_owner_can_be_put_back() -> None:
    bell = make_bells(1)[0]
    pipe = Pipe()
    bell.close()
    signal.raise_signal(signal.SIGUSR1)
    assert os.read(pipe.reader, 10) == bytes([signal.SIGUSR1])
    assert signal.set_wakeup_fd(pipe.before) == pipe.writer
    pipe.close()
    signal.raise_signal(signal.SIGUSR1)
    above = make_bells(1)[0]
    above.close()
    assert signal.set_wakeup_fd(-1) == pipe.before


@pytest.mark.usefixtures("plain_wakeup")
def test_a_bell_is_closed_in_another_thread() -> None:
    bell = make_bells(1)[0]
    thread = threading.Thread(target=bell.close)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    with contextlib.closing(make_bells(1)[0]) as above:
        signal.raise_signal(signal.SIGUSR1)
        assert above.listen(20) == [signal.SIGUSR1, ANSWERED]
