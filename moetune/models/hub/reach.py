"""Check, within three seconds, whether the Hugging Face hub can be reached. Its clients retry for most of a minute."""

import socket
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

SECONDS = 3.0
"""Time limit of the check, in seconds."""
UNREACHABLE = "the hub cannot be reached, and not all of it was downloaded before."


def how_to_get(hub_id: str) -> str:
    """Return advice, for a message, on a repository that cannot be downloaded: log in, or download it elsewhere."""
    return (
        f"Where the model asks for access: hf auth login. Without network here: hf download {hub_id} elsewhere, and "
        "give the folder."
    )


def hub_is_reachable() -> bool:
    """Return whether a connection to the hub can be opened within `SECONDS`.

    The result is False in huggingface_hub's offline mode, and True without a check if an HTTPS proxy is configured.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().get("https"):
        return True
    address, answered = urlsplit(constants.ENDPOINT), list[bool]()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((address.hostname or "", address.port or 443), SECONDS):
            answered.append(True)

    thread = Thread(target=connect, daemon=True)  # a thread, because the lookup of a host name has no time limit
    thread.start()
    thread.join(SECONDS)
    return bool(answered)
