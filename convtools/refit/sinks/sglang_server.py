"""An SGLang server as it is asked: what it is, where it stands, and the calls of a weight update.

SGLang has no owner, token or lease for an update. What it has is a text, the weight version, which
everyone may read: while an update of ours is under way it names the update and its owner, so that the next
trainer knows what it finds, and whoever reads it does not take a mix for a version.
"""

import hashlib
import json
import re
import time
from dataclasses import dataclass
from typing import Any

from convtools.errors import capped, tick
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.protocol import CLEAN, POISONED
from convtools.refit.sinks.sglang_http import HttpClient
from convtools.refit.sinks.sglang_staging import is_alive

TESTED = ("0.5.23",)
"""Versions of SGLang that this was tested with."""
MAX_CHECKSUMS = 256 << 20
"""Bytes of the longest list of digests."""
MAX_RANKS = 64

_MARK = re.compile(
    r"^convtools (updating|poisoned) (\d{1,19}) to (\d{1,19}) by ([0-9a-f]{12}) until (\d{1,12})$"
)
_QUANTISING = ("quantization", "modelopt_quant", "torchao_config", "quantize_and_serve", "rl_quant_profile")


@dataclass(frozen=True, slots=True)
class Mark:
    """The weight version of a server: a trainer's step, or that an update did not end."""

    state: str
    """clean, updating or poisoned."""
    base: int
    """The version that is served, or that was before the update."""
    version: int
    """The version that it becomes."""
    owner: str = ""
    """Whose update it is."""
    until: int = 0
    """When its lease is over, in seconds since 1970."""

    @property
    def text(self) -> str:
        """As it is written."""
        if self.state == CLEAN:
            return str(self.version)
        return f"convtools {self.state} {self.base} to {self.version} by {self.owner} until {self.until}"

    def is_held(self) -> bool:
        """Whether a trainer that lives has an update under way, and its lease is not over."""
        return self.state not in (CLEAN, POISONED) and time.time() < self.until and is_alive(self.owner)


def read_mark(text: object) -> Mark:
    """What a weight version says. Raises RefitError where it is none of ours.

    >>> read_mark("7").version, read_mark("default").version
    (7, 0)
    >>> read_mark("convtools poisoned 7 to 8 by 0123456789ab until 0").base
    7
    """
    if text == "default":  # what SGLang calls the weights that it started with
        return Mark(CLEAN, 0, 0)
    if isinstance(text, str) and (found := _MARK.match(text)):
        return Mark(found[1], int(found[2]), int(found[3]), found[4], int(found[5]))
    if isinstance(text, str) and re.fullmatch("[0-9]{1,18}", text):
        return Mark(CLEAN, int(text), int(text))
    raise RefitError(
        "the server's weight version is no step of a trainer",
        expected='a number, or "default"', found=repr(text)[:80],
        fix="start it with --weight-version 0, or POST /update_weight_version",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is."""

    version: str
    """Of SGLang."""
    tp: int
    incarnation: str
    """Another one after every start."""
    rounds: bool
    """Whether it keeps F32 tensors in 16 bits, but for a few."""
    draft: bool
    """Whether a draft model is served beside the model."""


class SGLangServer:
    """The calls; each raises PeerError where it is not answered in time, or not with success."""

    def __init__(self, client: HttpClient, timeout: float) -> None:
        self.client, self._timeout = client, timeout

    def info(self, *, tp: int | None, untested: bool) -> ServerInfo:
        """Raises RefitError for a server that cannot be refitted, before anything is sent."""
        found = self.server_info()
        version, ranks = found.get("version"), found.get("tp_size")
        if not isinstance(version, str) or type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
            raise PeerError("this is no SGLang server", found=capped(list(found)[:5]) or "an empty object")
        problems = []
        if version not in TESTED and not untested:
            problems.append(f"it is SGLang {version}, not tested ({', '.join(TESTED)}); see `untested`")
        if tp is not None and tp != ranks:
            problems.append(f"it has {ranks} TP ranks, not {tp}")
        for key, name in (("dp_size", "data-parallel replicas"), ("nnodes", "nodes"), ("pp_size", "stages")):
            if found.get(key, 1) != 1:
                problems.append(f"{found[key]} {name}: SGLang takes tensors for one only")
        for key in _QUANTISING:
            if found.get(key) not in (None, False, "", {}):
                problems.append(f"{key} is {tick(found[key])}: a quantised server's weights are not replaced")
        if found.get("weight_cache_mode", "off") != "off":
            problems.append("its weights are shared with other servers (--weight-cache-mode)")
        if found.get("disaggregation_mode") not in (None, "null"):
            problems.append("it serves one half of a request only (--disaggregation-mode)")
        if problems:
            raise RefitError(f"{tick(str(self.client.base))} cannot be refitted", found=capped(problems))
        # Start times, which two starts do not share to the microsecond.
        start = json.dumps([found.get("startup_time"), found.get("launch_command")], sort_keys=True)
        rounds = found.get("dtype") not in ("float32", "float")
        draft = found.get("speculative_draft_model_path") is not None
        return ServerInfo(version, ranks, hashlib.sha256(start.encode()).hexdigest()[:16], rounds, draft)

    def server_info(self) -> dict[str, Any]:
        """What GET /server_info answers. Raises PeerError, which says where it is another kind of server."""
        try:
            return self.client.get("/server_info", self._timeout)
        except PeerError as error:
            if "failed with status 40" not in error.what and "is no JSON object" not in error.what:
                raise
            raise PeerError(
                f"{self.client.base} is no SGLang server", found=error.what,
                fix="give http://host:port, which asks the server what it is",
            ) from None  # fmt: skip

    def mark(self) -> Mark:
        """What its weight version says. Raises RefitError where it is none of ours."""
        return read_mark(self.client.get("/model_info", self._timeout).get("weight_version"))

    def set_mark(self, mark: Mark) -> None:
        """Change the weight version, and nothing else."""
        self._call("/update_weight_version", {"new_version": mark.text, "abort_all_requests": False})

    def quiet(self, policy: str, drain: float) -> bool:
        """No token is generated from here on; gives whether that opened the update.

        drain: opening it waits until the requests in flight have ended, and lets no other begin; those that
        slip in before the pause are kept. abort: they end at once. keep: they are taken out between two
        tokens, with what they have said, and computed anew by the new weights.
        """
        is_open = policy == "drain" and self._begin(drain)
        if policy == "abort":
            self._call("/pause_generation", {"mode": "abort"}, "status", drain)
        self.pause()
        return is_open

    def pause(self) -> None:
        """Also after the other ways: only what is paused like this flushes its caches while requests wait."""
        self._call("/pause_generation", {"mode": "retract"}, "status")

    def open(self) -> None:
        """Open the update in which SGLang loads weights; one that a dead trainer left is ended first."""
        if not self._begin(self._timeout):
            self.end()
            if not self._begin(self._timeout):
                raise PeerError("the server's weight update was opened by another, again and again")

    def resume(self) -> None:
        """Generate again."""
        self._call("/continue_generation", {"torch_empty_cache": False}, "status")

    def end(self) -> None:
        """Close the update."""
        self._call("/end_weight_update", {})

    def load(self, payloads: list[str], *, flush: bool = False, version: str | None = None) -> None:
        """Load a bucket, one payload a rank."""
        body = {
            "serialized_named_tensors": payloads, "load_format": "flattened_bucket",
            "flush_cache": flush, "abort_all_requests": False, "weight_version": version,
        }  # fmt: skip
        self._call("/update_weights_from_tensor", body)

    def checksums(self) -> list[dict[str, str]]:
        """Digests of its own parameters, by rank."""
        body = {"action": "checksum"}
        found = self.client.post("/weights_checker", body, self._timeout, MAX_CHECKSUMS).get("ranks")
        if not isinstance(found, list) or not 1 <= len(found) <= MAX_RANKS:
            raise PeerError("the server gives no digests of its weights")
        out = []
        for rank in found:
            values: Any = rank.get("checksums") if isinstance(rank, dict) else None
            if not isinstance(values, dict) or not values:
                raise PeerError("the server gives no digests of its weights")
            if any(
                not isinstance(v, str) or len(v) > 128 or not 0 < len(k) <= 1024 for k, v in values.items()
            ):
                raise PeerError("the server's digests are not of the form that SGLang gives")
            out.append(values)
        return out

    def _begin(self, timeout: float) -> bool:
        """Whether it was not open already."""
        try:
            self._call("/begin_weight_update", {"selector": "all"}, timeout=timeout)
        except PeerError as error:
            if "already open" in error.what:
                return False
            raise
        return True

    def _call(self, path: str, body: object, key: str = "success", timeout: float | None = None) -> None:
        found = self.client.post(path, body, self._timeout if timeout is None else timeout)
        if found.get(key) not in (True, "ok"):
            raise PeerError(f"{path} did not succeed: {str(found.get('message'))[:300]}")
