"""What the headers of a server's answer say: where to go on, which version, how long to wait."""

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

from convtools.errors import CheckpointError
from convtools.stores.names import tick

_MAX_LOCATION = 1 << 15
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})')


def target(url: str, location: str, where: str) -> str:
    """Where a redirect leads. Raises CheckpointError where that is no address."""
    try:
        parts = urlsplit(urljoin(url, location))
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not (location.isascii() and location.isprintable()) or len(location) > _MAX_LOCATION:
        raise CheckpointError(
            "the server redirects to what is no address",
            where=where,
            found=tick(location),
            fix="a proxy or mirror between here and the Hub is at fault",
        )
    return urljoin(url, location)


def plain(etag: str | None) -> str | None:
    """An ETag without its quotes."""
    return etag.removeprefix("W/").strip('"') if etag else None


def origin(url: str) -> tuple[str, str]:
    """(scheme, host and port) of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """How many seconds the server asks to wait, if it does."""
    if limit := _RATE_LIMIT.search(headers.get("RateLimit", "")[:1000]):
        return float(limit[1]) + 1.0
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        return parsedate_to_datetime(text).timestamp() - time.time() if text else None
    except ValueError:
        return None
