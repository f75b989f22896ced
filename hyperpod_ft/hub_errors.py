"""What is common to errors of the Hugging Face Hub's client, whichever HTTP library its version uses."""

from huggingface_hub.errors import HfHubHTTPError

# The base of all errors of huggingface_hub's HTTP library: requests in 0.x, httpx in 1.x, httpx2 in 2.x. The Hub's own
# errors derive from it, too.
HttpError: type[Exception] = [
    kind for kind in HfHubHTTPError.__mro__ if kind.__module__.partition(".")[0] not in ("huggingface_hub", "builtins")
][-1]


def status_of(error: Exception) -> int:
    """The HTTP status of the Hub's answer; 0 if there was none."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 0
