"""Which web pages may send requests. Browsers send them for any page to any address, also to the user's own machine,
and name the page's origin. Clients that are no browsers name none.

With API keys a page needs one like everyone else. Without, this is what keeps pages from a router that listens on a
user's machine.
"""

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.operations import names_this_host

_ANY = "*"
_OWN_SITES = ("same-origin", "none")
_SAFE_METHODS = ("GET", "HEAD")


def check_page(method: str, fields: Mapping[str, str], origins: Iterable[str]) -> None:
    """Refuse a request to a router without keys that a browser sends for another site's page.

    A page's own origin is only trusted at localhost or an address: any other name may be another site's, whose owner
    has let it point to this machine (DNS rebinding).

    Args:
        method: of the request.
        fields: its headers.
        origins: the origins of other pages that may send requests; `*`: all.

    Raises:
        LockstepError: ORIGIN_NOT_ALLOWED.
    """
    origin = fields.get("origin")
    if origin is None:
        # A link or an image of another site: it changes nothing, and no page can read the answer.
        if method in _SAFE_METHODS or fields.get("sec-fetch-site", _OWN_SITES[0]) in _OWN_SITES or _ANY in origins:
            return
        raise not_allowed()
    host = fields.get("host", "")
    if is_listed(origin, origins) or (is_own(origin, host) and names_this_host(host)):
        return
    raise not_allowed()


def is_own(origin: str, host: str) -> bool:
    """Whether a page comes from the host that its request goes to."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def is_listed(origin: str, origins: Iterable[str]) -> bool:
    """Whether an origin is one of those, or all are."""
    return any(allowed in (_ANY, origin) for allowed in origins)


def not_allowed() -> LockstepError:
    """The error for a page that may not send requests."""
    sentence = "web pages of this origin may not send requests to this router; see websocket_origins"
    return LockstepError(ErrorCode.ORIGIN_NOT_ALLOWED, sentence, field="Origin")
