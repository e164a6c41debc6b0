"""Converts live objects to named leaves, and back."""

from holdfast.format.codecs import register_codec, register_type
from holdfast.state.capture import capture_objects, check_capture
from holdfast.state.capture_cache import CaptureCache
from holdfast.state.data.sampler import ResumableSampler
from holdfast.state.leaves import ArraySpec, Captured, Differences, Target
from holdfast.state.match.matching import Matching, match_objects
from holdfast.state.registry import check_objects, list_shared
from holdfast.state.rng import RNG
from holdfast.state.sharding import PerWorker, Shard

__all__ = [
    "RNG",
    "ArraySpec",
    "CaptureCache",
    "Captured",
    "Differences",
    "Matching",
    "PerWorker",
    "ResumableSampler",
    "Shard",
    "Target",
    "capture_objects",
    "check_capture",
    "check_objects",
    "list_shared",
    "match_objects",
    "register_codec",
    "register_type",
]
