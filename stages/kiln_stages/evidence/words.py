"""What the words of a verdict mean, and what no verdict says: ``kiln verify-receipt --explain``."""

from __future__ import annotations

STATUSES = {
    "holds": "what the receipt says is what the files give",
    "fails": "it is not; both values are shown",
    "not checkable here": "a file that it needs is not here; --require-all makes that a failure",
    "not checked": "no digest can tell; --deep derives it again from the rows",
}
VERDICTS = {
    "consistent": "no part was changed without the others; whoever can write all files can make all of them agree",
    "authentic": "consistent, and signed by a key of the list that --allowed-signers names",
    "does not verify": "a claim fails",
}
NOT_PROMISED = (
    "disks that lie about what they have flushed, and network mounts that are not POSIX file systems",
    "an attacker who is root, or the same user, while a run is going on",
    "plugins that you chose to install: they run as kiln does",
    "equal bits on another model of GPU or CPU, another driver, or another release of torch. A checkpoint is bound to "
    "these",
    "who made a receipt that is not signed",
)


def explanation() -> str:
    """All of it as text."""
    lines = ["Each claim:"]
    lines += [f"  {word}: {meaning}" for word, meaning in STATUSES.items()]
    lines += ["The verdict:"]
    lines += [f"  {word}: {meaning}" for word, meaning in VERDICTS.items()]
    lines += ["Kiln does not promise anything about:"]
    return "\n".join([*lines, *(f"  - {text}" for text in NOT_PROMISED)])
