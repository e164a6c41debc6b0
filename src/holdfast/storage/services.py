"""Opens a bucket: its URL, the options that a URL cannot say, and the credentials as people have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from holdfast.errors import MissingPackageError, UsageError
from holdfast.extras import install_command
from holdfast.storage.objects import ObjectStorage

_EXAMPLES: Final = {"s3": "s3://bucket/run", "gs": "gs://bucket/run", "az": "az://container/run"}
_CLASSES: Final = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}

_FIRST_RETRY_SECONDS: Final = {"s3": 15, "gs": 4, "az": 15}
"""For so long the first request is repeated; each of the places where Google's client looks for credentials, too."""
_RETRY_SECONDS: Final = 180
"""For so long any other is. A save that has failed by then is made again at the next step that is due."""
_BELIEVED: Final = timedelta(minutes=5, seconds=15)
"""So long credentials of boto3 count as valid for obstore, which asks again 5 minutes before that: every 15 seconds.
Only boto3 knows when they expire. It renews them 10 minutes before that, and asking it costs little.
"""
_BACKOFF: Final = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
_REQUEST_SECONDS: Final = 60
_CONNECT_SECONDS: Final = 10


class BucketOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a bucket that its URL cannot say.

    Attributes:
        endpoint: The address of the service, if it is not the cloud's own: `https://minio.example:9000`.
        region: The region of an S3 bucket.
        path_style: True if the bucket is part of the path and not of the host's name; None for what the client does.
        account: The storage account of an Azure container.
        kms_key: The key with which S3 encrypts what is written (SSE-KMS).
        ca_file: The certificates of a private authority, as one PEM file.
        proxy: The address of a proxy.
        anonymous: True to send no credentials, for a public bucket that is only read.
    """

    endpoint: str = ""
    region: str = ""
    path_style: bool | None = None
    account: str = ""
    kms_key: str = ""
    ca_file: str | os.PathLike[str] = ""
    proxy: str = ""
    anonymous: bool = False


class _BucketPlace(NamedTuple):
    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def open_bucket(url: str, **options: Any) -> ObjectStorage:
    """Returns the storage at the URL of a bucket; nothing is read or written yet.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        options: Those of `BucketOptions`.

    Raises:
        UsageError: If the URL or an option is malformed.
        MissingPackageError: If obstore is not installed.
    """
    place = _split(url)
    chosen = _check_options(place, options)
    try:
        import obstore.store
    except ImportError as error:
        raise MissingPackageError(
            f"{url!r} needs obstore, which is not installed", hint=f"Install it: {install_command('objects')}"
        ) from error
    config = {"s3": _say_s3, "gs": _say_gcs, "az": _say_azure}[place.scheme](chosen)
    try:
        first, patient = (
            getattr(obstore.store, _CLASSES[place.scheme])(
                place.bucket,
                prefix=place.prefix or None,
                client_options=_client_options(chosen, config.get("endpoint") or config.get("base_url", "")),
                retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=seconds), "backoff": _BACKOFF},
                **({"skip_signature": True} if chosen.anonymous else {}),
                **config,
            )
            for seconds in (_FIRST_RETRY_SECONDS[place.scheme], _RETRY_SECONDS)
        )
    except (ValueError, OSError, obstore.exceptions.BaseError) as error:
        text = str(error).partition("Debug source")[0].strip()
        raise UsageError(
            f"{place.url} cannot be opened: {text}", hint="check the options and the credentials"
        ) from None
    return ObjectStorage(place.url, first, patient, partial(open_bucket, url, **options))


def _split(url: str) -> _BucketPlace:
    parts = urlsplit(url)
    prefix = unquote(parts.path).strip("/")
    names_one = all(part not in ("", ".", "..") for part in prefix.split("/")) if prefix else True
    if not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc or not names_one:
        # What is before @ may be a secret.
        raise UsageError(
            f"{parts.scheme}://... is not the URL of a bucket",
            hint=f"write {_EXAMPLES[parts.scheme]}; credentials and options do not belong in it",
        )
    return _BucketPlace(parts.scheme, parts.netloc, prefix)


def _check_options(place: _BucketPlace, options: Mapping[str, Any]) -> BucketOptions:
    try:
        chosen = BucketOptions(**options)
    except TypeError as error:
        known = ", ".join(BucketOptions.__struct_fields__)
        raise UsageError(f"{place.url}: {error}", hint=f"The options of a bucket are {known}.") from None
    s3_only = [name for name in ("region", "path_style", "kms_key") if options.get(name) not in (None, "")]
    if s3_only and place.scheme != "s3":
        raise UsageError(f"{place.url}: {s3_only[0]} is an option of S3 only", hint="Leave it out.")
    if chosen.account and place.scheme != "az":
        raise UsageError(f"{place.url}: account is an option of Azure only", hint="Leave it out.")
    return chosen


def _say_s3(options: BucketOptions) -> dict[str, Any]:
    environment = os.environ
    config: dict[str, Any] = {}
    if endpoint := options.endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"):
        config["endpoint"] = endpoint
    if region := options.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        config["region"] = region
    if options.path_style is not None:
        config["virtual_hosted_style_request"] = not options.path_style
    if options.kms_key:
        config |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": options.kms_key}
    if not options.anonymous and not environment.get("AWS_ACCESS_KEY_ID"):
        provider = config["credential_provider"] = _find_session()
        if provider is not None and "region" in config:
            # The client takes one region only.
            provider.config.pop("region", None)
    return config


def _say_gcs(options: BucketOptions) -> dict[str, Any]:
    return {"base_url": options.endpoint} if options.endpoint else {}


def _say_azure(options: BucketOptions) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if endpoint := options.endpoint or os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT"):
        config["endpoint"] = endpoint
    return config | ({"account_name": options.account} if options.account else {})


def _find_session() -> Any:
    """Returns what asks boto3 for credentials, which knows profiles and SSO; None without boto3, or if it has none."""
    try:
        import boto3.session
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = boto3.session.Session()
        return Boto3CredentialProvider(session, ttl=_BELIEVED) if session.get_credentials() is not None else None
    except ImportError:
        if profile := os.environ.get("AWS_PROFILE"):
            raise UsageError(
                f"AWS_PROFILE is {profile}, and profiles are read by boto3, which is not installed",
                hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
            ) from None
        return None


def _client_options(options: BucketOptions, endpoint: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
    }
    if endpoint.startswith("http://"):
        found["allow_http"] = True
    if options.ca_file:
        found["root_certificate"] = Path(options.ca_file).read_bytes()
    if options.proxy:
        found["proxy_url"] = options.proxy
    return found
