"""Who may ask a server: programs on this machine, or whoever has its API key."""

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from hyperpod_ft.errors import UserError
from hyperpod_ft.serving.http.openai_api import HttpError

API_KEY = "HYPERPOD_FT_API_KEY"  # the environment variable


def refuse_open(host: str, api_key: str | None) -> None:
    """Raise UserError when others could reach a server on `host`, and no key keeps them out."""
    if not is_loopback(host) and not api_key:
        raise UserError(
            f"--host {host}: anyone who reaches this machine could ask the model",
            f"set {API_KEY} to a secret of your choice, which clients then send as their API key",
        )


def check_key(api_key: str | None, authorization: str) -> None:
    """Raise HttpError (401) unless the header `authorization`, as http.server decodes it, has the key."""
    expected = f"Bearer {api_key}".encode()
    if api_key and not hmac.compare_digest(authorization.encode("latin-1"), expected):
        raise HttpError(401, f"wrong or missing API key: send the server's {API_KEY}", "invalid_api_key")


def check_site(loopback: bool, host: str, origin: str) -> None:
    """Raise HttpError (403) for what a page of another site sends from the user's browser, (400) for malformed headers.

    `host` and `origin` are headers; `loopback`: the server listens on this machine only.
    """
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
        site = urlsplit(origin).netloc
    except ValueError as error:  # brackets without an address in them
        raise HttpError(400, f"Host {host}, Origin {origin or '-'}: {error}") from error
    # a name that resolves to this machine would make a foreign page one of this server's own
    if loopback and not is_loopback(name):
        raise HttpError(403, f"Host {host}: this server is only for localhost")
    if origin and site != host:
        raise HttpError(403, f"Origin {origin}: this server answers only its own page")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
