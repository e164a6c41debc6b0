"""What a profile calls for credentials: `issue_keys.py CEPH_CONF LOG SECONDS` issues new ones, which live that long."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path


def main(config: str, log: str, seconds: str) -> None:
    name = f"key{uuid.uuid4().hex}"
    create = ["key", "create", "--uid=trainer", "--key-type=s3", f"--access-key={name}", "--gen-secret"]
    made = subprocess.run(
        ["radosgw-admin", "-c", config, *create], capture_output=True, text=True, check=True, timeout=60
    )
    secret = next(key["secret_key"] for key in json.loads(made.stdout)["keys"] if key["access_key"] == name)
    end = datetime.now(UTC) + timedelta(seconds=float(seconds))
    with Path(log).open("a") as stream:
        stream.write(f"{name} {secret} {end.timestamp()}\n")
    answer = {"Version": 1, "AccessKeyId": name, "SecretAccessKey": secret, "Expiration": end.isoformat()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
