"""What is common to errors of the Hugging Face Hub's client, whichever HTTP library its version uses.

Callers have imported huggingface_hub; this module, which every command may import, has not.
"""


def http_error() -> type[Exception]:
    """The base of all errors of huggingface_hub's HTTP library: requests in 0.x, httpx in 1.x, httpx2 in 2.x.

    The Hub's own errors derive from it, too.
    """
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    kinds = HfHubHTTPError.__mro__
    base: type[Exception] = [
        kind for kind in kinds if kind.__module__.partition(".")[0] not in ("huggingface_hub", "builtins")
    ][-1]
    return base


def status_of(error: Exception) -> int:
    """The HTTP status of the Hub's answer; 0 if there was none."""
    return getattr(getattr(error, "response", None), "status_code", 0)
