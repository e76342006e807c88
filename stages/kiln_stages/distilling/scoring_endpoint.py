"""A teacher behind an OpenAI-compatible server that returns prompt logprobs with token ids, as vLLM does.

The one module that opens a socket: to the server that the user named, and to no other; redirects and proxies are not
followed. The key goes into the request's header and nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.files import read_bounded
from kiln_cli.text import printable
from kiln_stages.distilling.candidates import Scored, scored
from kiln_stages.distilling.identity import (
    FINGERPRINT_PREFIX,
    SERVED_PROTOCOL,
    IdentityFault,
    TeacherIdentity,
    parse_manifest,
)
from kiln_stages.distilling.registry import Endpoint

Send = Literal["ids", "text"]
RETRIED = frozenset((429, 500, 502, 503, 504))
PAUSES = (1.0, 3.0, 9.0)  # seconds before each further try
KEY_LIMIT = 64 * 1024
BYTES_A_CANDIDATE = 512  # generous: an id, a logprob, a rank and the token's text
LEAST_BYTES = 16 * 1024 * 1024  # what any answer may have


class Server:
    """HTTP to one server: one connection a request, a few tries where it is busy or away.

    ``timeout``: seconds without a byte. Raises KilnError KLN220 for a url or key that cannot be used.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = check_url(url)
        self._host, self._secure = parts.netloc, parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._url, self._key, self._timeout = url, key, timeout
        self._given_up = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()

    def give_up(self) -> None:
        """Ends every request that is under way: who waits for its answer gets an error at once."""
        self._given_up.set()
        for connection in tuple(self._open):
            with contextlib.suppress(OSError):  # it may just have ended by itself
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, limit: int = LEAST_BYTES) -> dict[str, Any]:
        """The JSON object that the server answers with, of at most ``limit`` bytes; POST where there is a body.

        Raises KilnError KLN404 where it does not answer or keeps failing, KLN220 where it refuses, redirects, or
        answers with anything else. Error texts of the server are shown without the key.
        """
        for pause in (*PAUSES, None):
            try:
                status, data = self._send(path, body, limit)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                detail = f"{type(error).__name__}: {error}"
            else:
                if status == http.client.OK:
                    return self._object(path, data)
                detail = f"HTTP status {status}: {data[:1000].decode('utf-8', 'replace')}"
                if status not in RETRIED:
                    raise self._refused(path, detail)
            if pause is None or self._given_up.wait(pause):
                break
        raise KilnError(
            "KLN404",
            f"no answer from {self._url}{path} in {1 + len(PAUSES)} tries: {self._shown(detail)}",
            hint="see that the server runs; what was scored so far is kept, and the same command goes on from there",
        )

    def _send(self, path: str, body: Mapping[str, Any] | None, limit: int) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=self._timeout)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._open.add(connection)
        try:
            connection.connect()
            if self._given_up.is_set():  # meanwhile, when there was no socket to shut down
                raise ConnectionAbortedError("given up")
            data = None if body is None else msgspec.json.encode(body)
            connection.request("GET" if body is None else "POST", self._path + path, data, headers)
            response = connection.getresponse()
            answer = response.read(limit + 1)
        finally:
            self._open.discard(connection)
            connection.close()
        if len(answer) > limit:
            raise self._refused(path, f"the answer has more than {limit} bytes")
        return response.status, answer

    def _object(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)  # not the contract for rows: servers write -Infinity, which is looked at later
        except ValueError as error:
            raise self._refused(path, f"the answer is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise self._refused(path, "the answer is no JSON object")
        return value

    def _refused(self, path: str, detail: str) -> KilnError:
        return KilnError(
            "KLN220",
            f"{self._url}{path}: {self._shown(detail)}",
            hint="name the server's own address with --endpoint, and the key with --key-env or --key-file",
        )

    def _shown(self, text: str) -> str:
        """Foreign text without the key, which a server may send back."""
        return printable(text.replace(self._key, "[key]") if self._key else text, 400)


class EndpointScorer:
    """Scores rows through a server's ``/v1/completions``.

    ``send``: the row's ids, or its text for the server to encode. ``requests``: rows that are under way at a time.
    """

    def __init__(
        self, identity: TeacherIdentity, server: Server, *, top_k: int, send: Send = "ids", requests: int = 1
    ) -> None:
        self._identity, self._server = identity, server
        self._top_k, self._send = top_k, send
        self.parallel = requests

    def give_up(self) -> None:
        self._server.give_up()

    def score(self, text: str, input_ids: list[int], targets: list[int]) -> list[Scored]:
        """Each target's candidates as the server gives them.

        Raises RowFault: ``reencoded_ids`` where the server scored other tokens, ``prompt_logprobs_mismatch`` where its
        list does not fit the row, and those of ``candidates.scored``; KilnError KLN220 where the answer is of another
        model or shape, and as :meth:`Server.ask` does.
        """
        limit = LEAST_BYTES + BYTES_A_CANDIDATE * len(input_ids) * (self._top_k + 2)
        answer = self._server.ask("/v1/completions", self._request(text, input_ids), limit)
        require_same_teacher(answer, self._identity)
        choice = _first_choice(answer)
        _require_ids(choice.get("prompt_token_ids"), input_ids, given=self._send == "ids")
        positions = _positions(choice.get("prompt_logprobs"), input_ids)
        return [self._position(positions[q], input_ids[q], q, at) for at, q in enumerate(targets)]

    def _request(self, text: str, input_ids: list[int]) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self._identity.served_model_id,
            "prompt": input_ids if self._send == "ids" else text,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._top_k,
            "return_token_ids": True,
        }
        return request | ({} if self._send == "ids" else {"add_special_tokens": False})

    def _position(self, entry: dict[int, dict[str, Any]], chosen: int, q: int, at: int) -> Scored:
        """Of K candidates and the prompt's own token, which is one more where it is not among them."""
        if len(entry) <= self._top_k:
            _require_ranks(entry, q, self._top_k)
        scores = ((number, _logprob(score.get("logprob"))) for number, score in entry.items())
        try:
            return scored(scores, chosen, at, self._top_k, self._identity.vocab_size)
        except RowFault as fault:
            raise RowFault(fault.reason, f"position {q} of the row: {fault.detail}", fault.pointer) from fault


def identity_of(server: Server, alias: str) -> TeacherIdentity:
    """What a server says the teacher of this alias is: ``off_policy_manifest`` in its ``/v1/teachers``.

    Raises KilnError KLN220 where it names no such teacher or the manifest is not canonical, KLN404 as ``Server.ask``.
    """
    listed = server.ask("/v1/teachers").get("teachers")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    manifests = {
        spec.get("alias"): entry.get("off_policy_manifest")
        for entry in entries
        if isinstance(spec := entry.get("spec"), dict)
    }
    if not isinstance(manifest := manifests.get(alias), str):
        known = ", ".join(sorted(printable(name) for name in manifests if isinstance(name, str))) or "none"
        raise KilnError(
            "KLN220",
            f"the server has no teacher {printable(alias)!r} with a manifest; it has: {known}",
            hint="give the identity in a file with --identity",
        )
    try:
        return require_served(parse_manifest(manifest.encode("utf-8")))
    except (IdentityFault, UnicodeEncodeError) as fault:
        raise KilnError("KLN220", f"the server's manifest: {fault}", hint="this is a fault of the server") from None


def require_served(identity: TeacherIdentity) -> TeacherIdentity:
    """Raises KilnError KLN220 for the identity of a teacher that is not served."""
    if identity.protocol != SERVED_PROTOCOL:
        raise KilnError(
            "KLN220",
            f"the identity has protocol {printable(identity.protocol)}, a served teacher has {SERVED_PROTOCOL}",
            hint="register a local model with --model",
        )
    return identity


def require_same_teacher(answer: Mapping[str, Any], identity: TeacherIdentity) -> None:
    """An answer must name the model that was asked, and the pinned identity where it brings one at all.

    Raises KilnError KLN220 with both values.
    """
    pairs = [("model", answer.get("model"), identity.served_model_id)]
    fingerprint = answer.get("system_fingerprint")
    if isinstance(fingerprint, str) and fingerprint.startswith(FINGERPRINT_PREFIX):
        pairs.append(("system_fingerprint", fingerprint, identity.fingerprint()))
    for name, found, expected in pairs:
        if found != expected:
            raise KilnError(
                "KLN220",
                f"the answer's {name} is {printable(found, 400)}, the alias is pinned to {printable(expected, 400)}",
                hint="register the teacher that the server has now; its scores are of another one",
            )


def check_url(url: str) -> urllib.parse.SplitResult:
    """Raises KilnError KLN220 where the text is no plain http(s) address. A password in it would be written down."""
    try:
        parts = urllib.parse.urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        sound = sound and not parts.query and not parts.fragment and url.isascii() and url.isprintable()
    except ValueError:
        sound = False
    if sound and "@" not in parts.netloc:
        return parts
    why = "has a user or password in it" if sound else "is no http address"
    shown = printable(url.rpartition("@")[2] if "@" in url else url)
    raise KilnError(
        "KLN220", f"the endpoint (…{shown}) {why}", hint="http://host:port, and the key with --key-env or --key-file"
    )


def read_key(endpoint: Endpoint, key_file: Path | None) -> str | None:
    """The key that the entry names; None where it names none. Raises KilnError KLN220, never with the key in it."""
    if endpoint.key_env is not None:
        where, key = f"environment variable {endpoint.key_env}", os.environ.get(endpoint.key_env, "")
    elif key_file is not None:
        where, key = str(key_file), read_bounded(key_file, KEY_LIMIT).decode("utf-8", "replace").strip()
    else:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise KilnError(
            "KLN220",
            f"{printable(where)} holds no key: it is empty, or has characters that no key has",
            hint="set it, or register the teacher with another --key-env or --key-file",
        )
    return key


def _first_choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _shape("choices is no list of objects")
    first: dict[str, Any] = choices[0]
    return first


def _require_ids(found: Any, input_ids: list[int], *, given: bool) -> None:
    """The ids that the server scored, as it tells them. Where it was given ids it need not: see :func:`_positions`."""
    if found is None and given:
        return
    if not isinstance(found, list):
        raise _shape("prompt_token_ids is missing, so nothing shows which tokens the server made of the text")
    if found == input_ids:
        return
    pairs = enumerate(zip(found, input_ids, strict=False))
    at = next((at for at, (left, right) in pairs if left != right), min(len(found), len(input_ids)))
    left, right = (str(ids[at]) if at < len(ids) else "none" for ids in (found, input_ids))
    detail = (
        f"the server scored other tokens: position {at} is {printable(left)} there and {right} here "
        f"({len(found):,} and {counted(len(input_ids), 'token', 'tokens')})"
    )
    raise RowFault("reencoded_ids", detail)


def _positions(found: Any, input_ids: list[int]) -> list[dict[int, dict[str, Any]]]:
    """Scores by token id of each position; none for the first, which nothing predicts."""
    if not isinstance(found, list):
        raise _shape("choices[0].prompt_logprobs is missing: the server must return the logprobs of the prompt")
    if len(found) != len(input_ids):
        entries, tokens = counted(len(found), "entry", "entries"), counted(len(input_ids), "token", "tokens")
        raise RowFault("prompt_logprobs_mismatch", f"{entries} for {tokens}")
    positions: list[dict[int, dict[str, Any]]] = [{}]
    for q, entry in enumerate(found):
        if (entry is None) != (q == 0):
            what = "is null" if entry is None else "has scores, and nothing predicts it"
            raise RowFault("prompt_logprobs_mismatch", f"entry {q} {what}: the list is out of step with the tokens")
        if entry is None:
            continue
        scores = _scores(entry, q)
        if input_ids[q] not in scores:  # servers score the prompt's own token, wherever it ranks
            raise RowFault(
                "reencoded_ids", f"the server scored another token at position {q}, here it is {input_ids[q]}"
            )
        positions.append(scores)
    return positions


def _scores(entry: Any, q: int) -> dict[int, dict[str, Any]]:
    if not isinstance(entry, dict):
        raise _shape(f"prompt_logprobs[{q}] is no object")
    found = {}
    for name, score in entry.items():
        if not name.isdecimal() or str(int(name)) != name or not isinstance(score, dict):
            raise _shape(f"prompt_logprobs[{q}] has {printable(name)!r}, expected token ids with their scores")
        found[int(name)] = score
    return found


def _require_ranks(entry: dict[int, dict[str, Any]], q: int, top_k: int) -> None:
    """Where the prompt's own token is no extra one, all must be among the K best, if the server ranks them."""
    for number, score in entry.items():
        rank = score.get("rank")
        if isinstance(rank, int) and rank > top_k:
            detail = f"position {q} of the row: token {number} has rank {rank}, so one of the best {top_k} is missing"
            raise RowFault("too_few_candidates", detail)


def _logprob(value: Any) -> float:
    """A number as it is; NaN for whatever else a server writes, which no row takes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shape(detail: str) -> KilnError:
    return KilnError(
        "KLN220",
        f"the server's answer cannot be used: {detail}",
        hint="a server with vLLM's completions and prompt_logprobs is expected",
    )
