"""Credentials are in nothing that a run writes, prints or passes on."""

from __future__ import annotations

import os
import pickle

import pytest
from bucket_runs import run_job

from command_line import call
from holdfast.errors import StorageError
from holdfast.storage import open_storage


def test_the_secret_is_in_nothing_that_a_run_leaves(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    said = [repr(run_job(url, 9, 7)), repr(run_job(url, 9, HOLDFAST_TRACEBACK="1"))]
    storage = open_storage(url)
    said += [repr(storage), repr(pickle.dumps(storage))]
    assert pickle.loads(pickle.dumps(storage)).list("")
    names = [entry.name for entry in storage.list("", deep=True)]
    assert any(name.endswith("manifest.json") for name in names)
    said += [repr(storage.read(name, 1 << 26)) for name in names]
    said += [call(verb, url).output for verb in ("list", "show", "verify")]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError) as caught:
        open_storage(url).list("")
    said += [f"{caught.value!r} {caught.value} {caught.value.hint}", repr(run_job(url, 9))]
    assert not [text for text in said if secret in text]
