"""One vLLM server, seen over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_madrl.rollouts.vllm_base import Continuation, Job

CHANGING = "changing"
"""The version of weights of which some may be new and some old."""

UNCHANGED = "default"
"""The version that vLLM gives to the weights it has started with."""

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class UnavailableError(Exception):
    """A server did not do what it was asked: it is dead, starting, or lost its weights. It may be asked again."""


class Server:
    """A vLLM server in development mode (``VLLM_SERVER_DEV_MODE=1``) that serves tokens (``--tokens-only``).

    Its weights carry a version, which a restarted server does not have: no completion of other weights is taken
    for one of the policy.

    Args:
        url: for example ``http://node3:8000``.
        timeout: seconds until an unanswered request counts as failed.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout

    def revive(self) -> None:
        """Start the server again if that is ours to do."""

    def stop(self) -> None:
        """End the server if that is ours to do."""

    def weight_version(self) -> str:
        """The version given by :meth:`changing_weights`; ``UNCHANGED`` after a start."""
        return str(self.call("/weight_info", timeout=min(self.timeout, 30.0))["weight_version"])

    def number_of_workers(self) -> int:
        """Processes that hold a share of the weights, or all of them."""
        return int(self.call("/get_world_size")["world_size"])

    @contextmanager
    def changing_weights(self, version: str) -> Iterator[None]:
        """In here the weights become those of ``version``; nothing that was computed with the former is used again."""
        self.call("/update_weight_version", {"new_version": CHANGING})
        yield
        if not self.call("/reset_prefix_cache?reset_running_requests=true", {})["success"]:
            raise UnavailableError("it kept its prefix cache, which belongs to other weights")
        self.call("/update_weight_version", {"new_version": version})

    def call_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of every worker."""
        self.call("/collective_rpc", {"method": method, "kwargs": arguments})

    def complete(self, job: Job, sampling: dict[str, Any], version: str) -> list[Continuation]:
        """The continuations of a job under the weights of that version.

        Raises:
            UnavailableError: the server failed, or its weights were others at any of the tokens.
            ValueError: the server cut a completion before its limit.
        """
        answer = self.call("/inference/v1/generate", {"token_ids": job.ids, "sampling_params": sampling})
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        for choice in choices:
            versions = {span["version"] for span in choice["weight_versions"] or ()}
            if versions != {version} or choice["finish_reason"] not in ("stop", "length"):
                raise UnavailableError(
                    f"it answered {choice['finish_reason']!r} with weights {sorted(versions)}, not {version!r}"
                )
            if choice["finish_reason"] == "length" and len(choice["token_ids"]) < job.max_tokens:
                raise ValueError(
                    f"server {self.url}: expected room for prompt + length limit = {len(job.ids)} + {job.max_tokens} "
                    f"tokens, got a completion cut at {len(choice['token_ids'])}; it needs a larger --max-model-len"
                )
        return [
            Continuation(choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]])
            for choice in choices
        ]

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The JSON answer to a GET, or to a POST of ``body``.

        Raises:
            UnavailableError: there was no answer, or a server error.
            ValueError: the server refused the request: asking again would not help.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with DIRECT.open(request, timeout=timeout or self.timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            reason = f"{path} gave status {error.code}: {error.read().decode(errors='replace')[:500]}"
            if error.code < 500:
                raise ValueError(f"server {self.url}: {reason}") from error
            raise UnavailableError(reason) from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise UnavailableError(f"{path}: {error!r}") from error
