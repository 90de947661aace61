"""Who may talk to the viewer: loopback hosts or a token, the same origin, and no framing."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolltape.store.errors import UsageError

_TOKEN = re.compile(r"[A-Za-z0-9._~-]{8,256}")

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)

#: A request that writes carries it; no form and no simple request of another site can.
WRITE_HEADER = "x-rolltape-write"

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(token: str) -> None:
    """A token must be long enough and able to stand in a cookie.

    Raises:
        UsageError: it is not.
    """
    if not _TOKEN.fullmatch(token):
        raise UsageError("bad token", hint="8 to 256 letters, digits or any of . _ ~ -")


class Guard:
    """ASGI middleware in front of everything.

    * The Host header must be one of `allowed_hosts` (any port), against DNS rebinding.
    * Only GET and HEAD exist, and PUT for the addresses in `writes`: from the same origin, with a
      header that no page of another site can send without being asked.
    * A request of another origin is refused, except to navigate to a page.
    * With a token, every request must carry it: cookie, `Authorization: Bearer`, or `?token=`
      once, which is answered by a cookie and a redirect that drops it from the address.

    Args:
        app: what is guarded.
        token: None for a server that only loopback reaches.
        allowed_hosts: host names; None is the loopback names, or any name when there is a token
            (a foreign name that was rebound to this address has no cookie).
        writes: paths that take PUT.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        allowed_hosts: Iterable[str] | None,
        writes: Iterable[str] = (),
    ) -> None:
        self.app = app
        self.writes = frozenset(writes)
        self.token = token
        self.cookie = ""
        if token is not None:
            # cookies ignore the port: two viewers on one host must not overwrite each other's
            self.cookie = f"rolltape_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        if allowed_hosts is None and token is None:
            allowed_hosts = LOOPBACK_NAMES
        self.hosts = (
            None if allowed_hosts is None else {h.strip("[]").lower() for h in allowed_hosts}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with the security headers added to the answer."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no websockets here

        begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope)
        try:
            await (answer or self.app)(scope, receive, send_guarded)
        except Exception:
            if not begun:  # else the answer of the server, which has none of the headers
                oops = _no(500, "The viewer failed; its terminal says why.")
                await oops(scope, receive, send_guarded)
            raise

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.hosts is not None and _host_name(host) not in self.hosts:
            return _no(
                421,
                f"This viewer does not answer to the host name {_host_name(host)!r}. "
                "Open the address that `rolltape view` printed.",
            )
        writes = scope["method"] == "PUT" and _path(scope) in self.writes
        if scope["method"] not in ("GET", "HEAD") and not writes:
            return PlainTextResponse(
                "The viewer is read-only.\n", status_code=405, headers={"allow": "GET, HEAD"}
            )
        if _is_cross_origin(headers, host):
            return _no(403, "Requests from another site are refused.")
        if writes and not _may_write(headers):
            return _no(403, f"To write needs the header {WRITE_HEADER}: 1, from this page.")
        return self._unauthorised(scope, headers) if self.token is not None else None

    def _unauthorised(self, scope: Scope, headers: Headers) -> Response | None:
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if "token" in query and self._matches(query["token"][-1]):
            rest = urlencode([(k, v) for k, vs in query.items() if k != "token" for v in vs])
            answer = RedirectResponse("./" + (f"?{rest}" if rest else ""), status_code=303)
            path = f"{scope.get('root_path', '')}/"
            # lax, not strict: a link from a chat must open the viewer it points to
            answer.set_cookie(
                self.cookie, str(self.token), httponly=True, samesite="lax", path=path
            )
            return answer
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._matches(given.strip()):
            return None
        if self._matches(_cookies(headers).get(self.cookie, "")):
            return None
        return _no(
            401,
            "This viewer needs a token. Open the whole address that `rolltape view` printed; "
            "it carries the token.",
            {"www-authenticate": "Bearer"},
        )

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), str(self.token).encode())


def _host_name(host: str) -> str:
    """Host header without its port: `[::1]:80` -> `::1`."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_cross_origin(headers: Headers, host: str) -> bool:
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    site = headers.get("sec-fetch-site", "none")
    if site in ("none", "same-origin"):
        return False
    # another site may link here, never load from here
    return not (
        headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") in (None, "document")
    )


def _may_write(headers: Headers) -> bool:
    # a browser always says where a PUT comes from; what is no browser says nothing
    site = headers.get("sec-fetch-site", "same-origin")
    return site == "same-origin" and headers.get(WRITE_HEADER) == "1"


def _path(scope: Scope) -> str:
    """The path below where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _cookies(headers: Headers) -> dict[str, str]:
    # by hand: http.cookies drops them all when another program on localhost set an odd one
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return {name: value for name, _, value in pairs}


def _no(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(text + "\n", status_code=status, headers=headers)
