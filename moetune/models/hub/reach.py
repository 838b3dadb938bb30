"""Whether the hub answers, known within seconds: its clients try again and again for most of a minute."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

SECONDS = 3.0
UNREACHABLE = "the hub cannot be reached, and not all of it was downloaded before."


def how_to_get(hub_id: str) -> str:
    """What a user can do about a repository that the hub does not give."""
    return (
        f"Where the model asks for access: hf auth login. Without network here: hf download {hub_id} elsewhere, and "
        "give the folder."
    )


def hub_is_reachable() -> bool:
    """Whether a connection to the hub can be opened; behind a proxy it is taken to be."""
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().get("https"):
        return True
    address, answered = urlsplit(constants.ENDPOINT), list[bool]()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((address.hostname or "", address.port or 443), SECONDS):
            answered.append(True)

    thread = Thread(target=connect, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(SECONDS)
    return bool(answered)
